-- fragment: partitions
-- Ready jobs under limits. Each partition of a queue has a sorted set of them, all scores 0, so its members are in their own
-- order; the partitions of a queue that have any are in its turns, parked until an instant, or wait for a running job to end.
-- What running jobs release of their buckets is gathered, and written once a script.
local SEPARATOR = '\31'
local KEPT = 100 -- partitions without room that keep their places in the turns of their queue; others wait beside them

local function turns_of(queue)
    return P .. 'turns:' .. queue
end

local function parked_of(queue)
    return P .. 'parked:' .. queue
end

local function waiting_of(queue)
    return P .. 'waiting:' .. queue
end

local function spent_of(queue)
    return P .. 'spent:' .. queue
end

local function partition_of(queue, partition)
    return P .. 'partition:' .. queue .. SEPARATOR .. partition
end

-- A job's partition and its weights in the buckets, of its field: the names of the buckets and, where not all weights are 1, a line
-- break and these. Nil for the weights where all are 1, or another program spoiled them.
local function split_field(field)
    local partition, text = string.match(field, '^([^\n]*)\n(.*)$')
    if not partition then
        return field, nil
    end
    local readable, weights = pcall(cjson.decode, text)
    local _, number_of = string.gsub(partition, SEPARATOR, '')
    if not readable or type(weights) ~= 'table' or #weights ~= number_of + 1 then
        return partition, nil
    end
    for _, weight in ipairs(weights) do
        if type(weight) ~= 'number' or weight < 1 or weight % 1 ~= 0 then
            return partition, nil
        end
    end
    return partition, weights
end

local PLACE = 28 -- characters of a member before its id
local WORD = 4294967296

-- A member: rank, eligible time and submission in hexadecimal digits, then the id. With a UUID it has 64 bytes: a set of few
-- members stays compact.
local function member_of(level, due, seq, id)
    local rank = 1000000 - math.max(-1000000, math.min(1000000, number(level)))
    due, seq = math.max(0, math.min(2 ^ 52 - 1, math.floor(due))), seq % 2 ^ 36
    return string.format('%06x%05x%08x%x%08x', rank, math.floor(due / WORD), due % WORD, math.floor(seq / WORD), seq % WORD) .. id
end

local function make_partitions()
    local placed = {} -- by queue and partition: score and member of each job

    local function add(queue, partition, member)
        local names = placed[queue] or {}
        placed[queue] = names
        local entries = names[partition] or {}
        names[partition] = entries
        entries[#entries + 1] = 0
        entries[#entries + 1] = member
    end

    -- Partitions take turns again: none before the virtual time, nor before its own turn.
    local function return_to_turns(queue, names)
        local virtual = number(ours('HGET', P .. 'virtual', queue))
        local spent = call('EXISTS', spent_of(queue)) == 1 and ours('ZMSCORE', spent_of(queue), unpack(names)) or {}
        local entries = {}
        for n, name in ipairs(names) do
            entries[2 * n - 1], entries[2 * n] = math.max(virtual, number(spent[n])), name
        end
        ours('ZADD', turns_of(queue), unpack(entries))
        if #spent > 0 then
            call('ZREM', spent_of(queue), unpack(names))
        end
    end

    local function join_turns(queue, names)
        local turns = ours('ZMSCORE', turns_of(queue), unpack(names))
        local parked = call('EXISTS', parked_of(queue)) == 1 and ours('ZMSCORE', parked_of(queue), unpack(names)) or {}
        local waiting = call('EXISTS', waiting_of(queue)) == 1 and ours('ZMSCORE', waiting_of(queue), unpack(names)) or {}
        local new = {}
        for n, name in ipairs(names) do
            if not turns[n] and not parked[n] and not waiting[n] then
                new[#new + 1] = name
            end
        end
        if #new > 0 then
            ours('ZADD', P .. 'limited', 0, queue)
            return_to_turns(queue, new)
        end
    end

    local function place()
        for queue, partitions in pairs(placed) do
            local names = {}
            for name, entries in pairs(partitions) do
                for n = 1, #entries, 1000 do
                    ours('ZADD', partition_of(queue, name), unpack(entries, n, math.min(n + 999, #entries)))
                end
                names[#names + 1] = name
            end
            for n = 1, #names, MOST do
                join_turns(queue, { unpack(names, n, math.min(n + MOST - 1, #names)) })
            end
        end
        placed = {}
    end

    -- A queue without partitions has no turns to remember; whether it is one.
    local function forget_turns(queue)
        if call('EXISTS', turns_of(queue), parked_of(queue), waiting_of(queue)) > 0 then
            return false
        end
        call('DEL', spent_of(queue))
        ours('HDEL', P .. 'virtual', queue)
        if call('EXISTS', quarantine_of(queue)) == 0 then
            ours('ZREM', P .. 'limited', queue)
        end
        return true
    end

    local function remove(queue, partition, member)
        local key = partition_of(queue, partition)
        ours('ZREM', key, member)
        if call('EXISTS', key) == 0 then
            ours('ZREM', turns_of(queue), partition)
            ours('ZREM', parked_of(queue), partition)
            ours('ZREM', waiting_of(queue), partition)
            forget_turns(queue)
        end
    end

    local function return_due(queue, key, most)
        local due = ours('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', 0, most)
        if #due > 0 then
            call('ZREM', key, unpack(due))
            return_to_turns(queue, due)
        end
    end

    -- Partitions whose instant has come take turns again, and some that wait where the turns have become few. How many have
    -- turns then.
    local function unpark(queue)
        if call('EXISTS', parked_of(queue), waiting_of(queue)) > 0 then
            return_due(queue, parked_of(queue), MOST)
            return_due(queue, waiting_of(queue), KEPT / 2)
            local first = ours('ZCARD', turns_of(queue)) < KEPT and ours('ZRANGE', waiting_of(queue), 0, KEPT - 1) or {}
            if #first > 0 then
                call('ZREM', waiting_of(queue), unpack(first))
                return_to_turns(queue, first)
            end
        end
        return ours('ZCARD', turns_of(queue))
    end

    return {
        add = add,
        place = place,
        forget_turns = forget_turns,
        remove = remove,
        return_to_turns = return_to_turns,
        unpark = unpark,
    }
end

local ready_partitions
local function partitions()
    ready_partitions = ready_partitions or make_partitions()
    return ready_partitions
end

local left -- by queue, what running jobs have left: their field, how often

local function release(queue, field)
    left = left or {}
    local fields = left[queue] or {}
    left[queue] = fields
    fields[field] = (fields[field] or 0) + 1
end

local function occupy(field) -- room of a running job in its buckets
    local partition, weights = split_field(field)
    local n = 0
    for bucket in string.gmatch(partition, '[^\31]+') do
        n = n + 1
        ours('HINCRBY', P .. 'used', bucket, weights and weights[n] or 1)
    end
end

local function subtract_released()
    local released, partitions_left, names, kept, gone = {}, {}, {}, {}, {}
    for queue, fields in pairs(left) do
        local of_queue = {}
        partitions_left[queue] = of_queue
        for field, times in pairs(fields) do
            if not string.find(field, '[\31\n]') then -- one bucket, and a weight of 1
                released[field] = (released[field] or 0) + times
                of_queue[#of_queue + 1] = field
            else
                local partition, weights = split_field(field)
                local n = 0
                for bucket in string.gmatch(partition, '[^\31]+') do
                    n = n + 1
                    released[bucket] = (released[bucket] or 0) + times * (weights and weights[n] or 1)
                end
                of_queue[#of_queue + 1] = partition
            end
        end
    end
    for bucket in pairs(released) do
        names[#names + 1] = bucket
    end
    for first = 1, #names, 1000 do
        local used = ours('HMGET', P .. 'used', unpack(names, first, math.min(first + 999, #names)))
        for n, weight in ipairs(used) do
            local bucket = names[first + n - 1]
            local rest = number(weight) - released[bucket]
            if rest > 0 then
                kept[#kept + 1] = bucket
                kept[#kept + 1] = rest
            elseif weight then
                gone[#gone + 1] = bucket
            end
        end
    end
    for first = 1, #kept, 1000 do
        call('HSET', P .. 'used', unpack(kept, first, math.min(first + 999, #kept)))
    end
    for first = 1, #gone, 1000 do
        call('HDEL', P .. 'used', unpack(gone, first, math.min(first + 999, #gone)))
    end
    return partitions_left
end

-- Gives the room of jobs that run no more back, and wakes workers. A partition that waited for it has its turn.
local function write_released()
    if not left then
        return
    end
    for queue, names in pairs(subtract_released()) do
        if call('EXISTS', waiting_of(queue)) == 1 then
            local scores, found = ours('ZMSCORE', waiting_of(queue), unpack(names)), {}
            for n, name in ipairs(names) do
                found[#found + 1] = scores[n] and name or nil
            end
            if #found > 0 then
                call('ZREM', waiting_of(queue), unpack(found))
                partitions().return_to_turns(queue, found)
            end
        end
    end
    for _, queue in ipairs(ours('ZRANGE', P .. 'limited', 0, 99)) do
        tell('news', 'queue:' .. queue)
    end
    left = nil
end

-- fragment: admission
-- Decides which jobs may start now, as `core.limits.Admission` does: room by what is used, tokens by GCRA, pauses.
local limits_read = {}

local function limit_of(name) -- false where there is none of this name
    local known = limits_read[name]
    if known ~= nil then
        return known
    end
    local text = string.match(ours('HGET', P .. 'limits', name) or '', '^%d+ (.*)$')
    local readable, document = pcall(cjson.decode, text or '')
    limits_read[name] = false
    if readable and type(document) == 'table' then
        local values = type(document.values) == 'table' and document.values or {}
        local rate, period = tonumber(values.rate), tonumber(values.period_us) or 1000000
        local interval = rate and (period - period % rate) / rate + (period % rate > 0 and 1 or 0)
        limits_read[name] = {
            concurrency = tonumber(values.concurrency),
            interval = interval,
            burst = tonumber(values.burst) or 1,
            shares = type(values.shares) == 'table' and next(values.shares) and values.shares or nil,
            queue = not document.by and document.queue, -- of whose partitions each passes through its bucket
        }
    end
    return limits_read[name]
end

-- When a bucket is full again after giving tokens, and the first instant at which it can give them.
local function after_taking(limit, refilled_at, tokens)
    local after = math.max(refilled_at, now) + math.min(tokens, limit.burst) * limit.interval
    return after, after - limit.burst * limit.interval
end

local buckets = {}
local has_used, has_states = call('EXISTS', P .. 'used') == 1, call('EXISTS', P .. 'buckets') == 1

-- A bucket whose limit had another rate or burst when it was written keeps its tokens, at most the new burst.
local function keep_tokens(bucket, old_interval, old_burst)
    local limit = bucket.limit
    local most = limit and limit.interval and limit.burst * limit.interval
    if not most or bucket.refilled_at <= now or old_interval == limit.interval and old_burst == limit.burst then
        return
    end
    local old_most = old_interval and old_burst * old_interval or most
    local earned = math.floor(math.max(0, old_most - (bucket.refilled_at - now)) * (limit.interval / (old_interval or limit.interval)))
    bucket.refilled_at, bucket.has_given = now + most - math.min(most, earned), true
end

local function read_buckets(names)
    local used = has_used and ours('HMGET', P .. 'used', unpack(names)) or {}
    local states = has_states and ours('HMGET', P .. 'buckets', unpack(names)) or {}
    for n, name in ipairs(names) do
        local bucket = {
            name = name, limit = limit_of(string.match(name, '^[^=]*')), used = number(used[n]), refilled_at = 0, paused = 0,
            reserved = 0,
        }
        if states[n] then
            local refilled_at, paused, interval, burst = string.match(states[n], '^(%d+) (%d+) ?(%d*) ?(%d*)$')
            bucket.refilled_at, bucket.paused = number(refilled_at), number(paused)
            keep_tokens(bucket, tonumber(interval), tonumber(burst))
        end
        buckets[name] = bucket
    end
end

local function read_buckets_of(names) -- of partitions
    local unknown, seen = {}, {}
    local function note(name)
        if not buckets[name] and not seen[name] then
            seen[name] = true
            unknown[#unknown + 1] = name
        end
    end
    for _, partition in ipairs(names) do
        if string.find(partition, SEPARATOR, 1, true) then
            for name in string.gmatch(partition, '[^\31]+') do
                note(name)
            end
        else
            note(partition)
        end
    end
    for n = 1, #unknown, 1000 do
        read_buckets({ unpack(unknown, n, math.min(n + 999, #unknown)) })
    end
end

local function buckets_of(partition)
    if buckets[partition] then -- its only one
        return { buckets[partition] }
    end
    local found = {}
    for name in string.gmatch(partition, '[^\31]+') do
        found[#found + 1] = buckets[name]
    end
    return found
end

local function share_of(found)
    for _, bucket in ipairs(found) do
        local value = bucket.limit and bucket.limit.shares and string.match(bucket.name, '=(.*)$')
        local share = value and tonumber(bucket.limit.shares[value])
        if share then
            return share
        end
    end
    return 1
end

-- When tokens and pauses of a bucket let a job of this weight start, and whether it lacks room. What is reserved counts as taken.
local function look_into(bucket, weight)
    local limit, free_at, full = bucket.limit, bucket.paused, false
    if limit and limit.interval then
        local refilled_at = math.max(bucket.refilled_at, now) + math.min(bucket.reserved, limit.burst) * limit.interval
        local _, first = after_taking(limit, refilled_at, weight)
        free_at = math.max(free_at, first)
    end
    if limit and limit.concurrency then
        full = bucket.used + bucket.reserved + math.min(weight, limit.concurrency) > limit.concurrency
    end
    return free_at, full
end

-- Nil where each of the buckets has room for a job now; else the instant at which they may have, 0 for "when a job ends"; and
-- the bucket that is in the way.
local function obstacle(found, weights)
    local free_at, full, why = now, nil, nil
    for n, bucket in ipairs(found) do
        local first, is_full = look_into(bucket, weights and weights[n] or 1)
        if first > free_at then
            free_at, why = first, bucket
        end
        full = full or is_full and bucket
    end
    if free_at > now then
        return free_at, why
    end
    return full and 0, full
end

-- Reserves the weights of a job that only they are in the way of: in the buckets of its keys until it fits them, then in all.
-- Returns true if it lacks tokens of a key.
local function reserve(found, weights)
    local of_keys, tokens_of_keys = false, false
    for n, bucket in ipairs(found) do
        local free_at, full = look_into(bucket, weights[n])
        bucket.is_keyed = string.find(bucket.name, '=', 1, true) ~= nil
        tokens_of_keys = tokens_of_keys or bucket.is_keyed and free_at > now
        of_keys = of_keys or tokens_of_keys or bucket.is_keyed and full
    end
    for n, bucket in ipairs(found) do
        if weights[n] > 1 and (bucket.is_keyed or not of_keys) then
            bucket.reserved = bucket.reserved + weights[n]
        end
    end
    return tokens_of_keys
end

local function admit(found, weights)
    for n, bucket in ipairs(found) do
        local weight = weights and weights[n] or 1
        bucket.used, bucket.is_taken = bucket.used + weight, true
        if bucket.limit and bucket.limit.interval then
            bucket.refilled_at, bucket.has_given = after_taking(bucket.limit, bucket.refilled_at, weight), true
        end
    end
end

local function write_admitted()
    local used, states, refills = {}, {}, {}
    for name, bucket in pairs(buckets) do
        if bucket.is_taken then
            used[#used + 1] = name
            used[#used + 1] = bucket.used
        end
        if bucket.has_given then
            states[#states + 1] = name
            local limit = bucket.limit
            local rule = limit and limit.interval and ' ' .. int(limit.interval) .. ' ' .. int(limit.burst) or ''
            states[#states + 1] = int(bucket.refilled_at) .. ' ' .. int(bucket.paused) .. rule
            refills[#refills + 1] = math.max(bucket.refilled_at, bucket.paused)
            refills[#refills + 1] = name
        end
    end
    for n = 1, #used, 1000 do
        ours('HSET', P .. 'used', unpack(used, n, math.min(n + 999, #used)))
    end
    for n = 1, #states, 1000 do
        ours('HSET', P .. 'buckets', unpack(states, n, math.min(n + 999, #states)))
        ours('ZADD', P .. 'refills', unpack(refills, n, math.min(n + 999, #refills)))
    end
end

-- name: claim_limited (partitions, moving, expiring, taking, admission)
-- Claims ready jobs under limits, which start at once; the partitions of a queue take turns. ARGV: 6 limit, 7 "1" to take one
-- quarantined job alone, 8 "1" to make due jobs ready first, 9 slots of every other queue or "", 10 the queue served last, then
-- queue and slots of each that is named, in the order of their turn.
-- Answers jobs, promoted, microseconds until a partition may have room or -1, quarantined, lease end, served, what to do: 0
-- that was all, 1 there was more to look through, 2 more may be due; id and kind of jobs that have expired.
even_if_full()
local limit, alone = tonumber(ARGV[6]), ARGV[7] == '1'
local star, served = tonumber(ARGV[9]), ARGV[10]
local TURN, LOOKED, RECHECK, MOST_KEPT = 1000000, 300, 1000000, 20
local kept = 0 -- partitions that lack tokens of a key for a heavy job and keep their turns
local due, quarantined, more = nil, 0, 0
local looks, reads = LOOKED, limit + 2 * MOST -- at partitions without room; at jobs
local named, turn = {}, {}
for n = 11, #ARGV, 2 do
    named[ARGV[n]] = tonumber(ARGV[n + 1])
    turn[#turn + 1] = ARGV[n]
end
local paused = call('EXISTS', P .. 'paused') == 1 and paused_queues() or {}
local overdue = call('EXISTS', P .. 'expiry') == 1 and expire_overdue(MOST) == MOST -- there may be more, which are not to be taken

local function note_room_at(instant)
    due = due and math.min(due, instant) or instant
end

-- ── partitions by the start of their next job: in a list as they were loaded, and in a heap those that were served ──
local loaded, next_loaded, heap, pushed = {}, 1, {}, 0

local function is_before(one, other)
    return one.start < other.start or one.start == other.start and one.order < other.order
end

local function push(entry)
    pushed = pushed + 1
    entry.order = pushed
    local n = #heap + 1
    while n > 1 do
        local parent = math.floor(n / 2)
        if not is_before(entry, heap[parent]) then
            break
        end
        heap[n], n = heap[parent], parent
    end
    heap[n] = entry
end

local function pop()
    local top, last = heap[1], table.remove(heap)
    if #heap > 0 then
        local n = 1
        while 2 * n <= #heap do
            local child = 2 * n
            if child < #heap and is_before(heap[child + 1], heap[child]) then
                child = child + 1
            end
            if not is_before(heap[child], last) then
                break
            end
            heap[n], n = heap[child], child
        end
        heap[n] = last
    end
    return top
end

local function first_start() -- nil for none
    local fresh, again = loaded[next_loaded], heap[1]
    return fresh and again and math.min(fresh.start, again.start) or fresh and fresh.start or again and again.start
end

local function next_entry()
    local fresh, again = loaded[next_loaded], heap[1]
    if fresh and not (again and again.start < fresh.start) then
        next_loaded = next_loaded + 1
        return fresh
    end
    return again and pop()
end

-- ── one partition ───────────────────────────────────────────────────────────────────────────────────────────────
-- An entry: its jobs before `base` + `at` have left it. `fate`: "moved" to a later start, "empty", "parked" until an instant,
-- "waits" for a running job; nil where nothing has changed.
local NONE = {}

local function entry_of(walk, name, score)
    return {
        partition = name, key = walk.prefix .. name, start = math.max(walk.began, score), order = 0, buckets = buckets_of(name),
        page = NONE, base = 0, at = 1, size = walk.size, fate = nil,
    }
end

local function fetch(entry)
    entry.base = entry.base + #entry.page
    entry.page = ours('ZRANGE', entry.key, entry.base, entry.base + entry.size - 1)
    entry.at = 1
    entry.size = #entry.page == entry.size and math.min(MOST, 4 * entry.size) or 0 -- 0: that was the rest
end

-- A job that was never claimed and whose id was minted, which is the rule: its fields and weights, or nil.
local function new_job(id, queue, partition)
    local v = redis.pcall('HMGET', JOB .. id, 'state', 'kind', 'pickupTime', 'dueTime', 'created', 'payload', 'options', 'claims', 'partition')
    local known = v[1] == 'queued' and not v[3] and not v[8] and kind_of(v[2])
    if not known or not known.is_limited or known.queue ~= queue then -- a key of another type has no first field either
        return nil
    elseif v[9] == partition then
        return v
    end
    local named, weights = split_field(v[9] or '')
    return named == partition and v or nil, weights
end

-- Any other job: nil for one that does not stand here.
local function other_job(id, queue, partition)
    local v = read(id, unpack(FIELDS))
    local known = v and kind_of(v[2] or '')
    local named, weights = split_field(known and known.is_limited and v[12] or '')
    if not known then
        met('orphans')
    elseif v[1] ~= 'queued' or named ~= partition or known.queue ~= queue then
        return nil
    elseif tier_of(v[5]) == 2 then
        ours('ZADD', quarantine_of(queue), v[6], id)
    elseif overdue and is_overdue(id) then
        expire(id, v[1], v[2])
        ours('ZREM', P .. 'expiry', id)
    else
        return v, weights
    end
end

-- The first job of a partition: "new" or "other", id, fields and weights; or "none", or "enough" where this script has read as many
-- jobs as it may.
local function first_job(queue, entry)
    while reads > 0 do
        if entry.at > #entry.page then
            if entry.size == 0 then
                return 'none'
            end
            fetch(entry)
        end
        local member = entry.page[entry.at]
        if member then
            local id = string.sub(member, PLACE + 1)
            reads = reads - 1
            local v, weights
            if not overdue then
                v, weights = new_job(id, queue, entry.partition)
                if v then
                    return 'new', id, v, weights
                end
            end
            v, weights = other_job(id, queue, entry.partition)
            if v then
                return 'other', id, v, weights
            end
            entry.at = entry.at + 1
        end
    end
    return 'enough'
end

-- ── the partitions of a queue ───────────────────────────────────────────────────────────────────────────────────
local function load_turns(walk)
    local size = math.max(20, math.min(100, walk.room))
    local page, names = ours('ZRANGE', turns_of(walk.queue), walk.offset, walk.offset + size - 1, 'WITHSCORES'), {}
    for n = 1, #page, 2 do
        names[#names + 1] = page[n]
    end
    walk.offset, walk.is_whole = walk.offset + #names, #names < size
    read_buckets_of(names)
    for n, name in ipairs(names) do
        walk.last = number(page[2 * n])
        loaded[#loaded + 1] = entry_of(walk, name, walk.last)
    end
end

-- A partition without room: it is parked, or passed by. Beyond some of them those wait beside the turns: the end of a running
-- job of theirs brings them back, or they look again after a while.
local function pass_by(walk, entry, instant, bucket)
    if instant > 0 then
        entry.fate, entry.until_ = 'parked', instant
    else
        walk.passed = walk.passed + 1
        entry.fate = walk.passed > KEPT and 'waits' or entry.fate
    end
    local blocks_all = bucket.limit and bucket.limit.queue == walk.queue
    walk.is_over = blocks_all and obstacle({ bucket }) ~= nil
    if walk.is_over and instant > 0 then
        note_room_at(instant)
    end
end

-- The weights of a job are in its way: its partition keeps its turn. Where no other partition takes of its bucket it is parked.
local function wait_in_turn(entry, instant, weights)
    if reserve(entry.buckets, weights) and #entry.buckets > 1 then
        kept = kept + 1
    end
    if instant > 0 and (#entry.buckets == 1 or kept > MOST_KEPT) then
        entry.fate, entry.until_ = 'parked', instant
    elseif instant > 0 then
        note_room_at(instant)
    end
end

local function serve_next(walk)
    local entry = next_entry()
    if not entry then
        walk.is_over = true
        return
    elseif entry.order == 0 then
        walk.met[#walk.met + 1] = entry
    end
    local instant, bucket = obstacle(entry.buckets)
    local what, id, v, weights
    if not instant then
        what, id, v, weights = first_job(walk.queue, entry)
        local heavy = weights and obstacle(entry.buckets, weights)
        if heavy then
            looks = looks - 1
            return wait_in_turn(entry, heavy, weights)
        end
    end
    if instant then
        looks = looks - 1
        return pass_by(walk, entry, instant, bucket)
    elseif what == 'none' then
        entry.fate = 'empty'
        return
    elseif what == 'enough' then
        more, walk.is_over = math.max(more, 1), true
        return
    elseif what == 'new' then
        take_first(id, 'queued', v[2], v[6], v[4], v[5], v[7])
    else
        take(id, v)
    end
    admit(entry.buckets, weights)
    count_waiting(entry.partition, -1)
    walk.room, walk.virtual = walk.room - 1, entry.start
    entry.start, entry.at, entry.fate = entry.start + math.floor(TURN / share_of(entry.buckets)), entry.at + 1, 'moved'
    instant, bucket = obstacle(entry.buckets)
    if instant then
        return pass_by(walk, entry, instant, bucket)
    end
    push(entry)
end

local function append(list, score, name)
    local n = #list
    list[n + 1], list[n + 2] = score, name
end

local function in_pieces(command, key, list)
    for n = 1, #list, 1000 do
        ours(command, key, unpack(list, n, math.min(n + 999, #list)))
    end
end

local function write_turns(walk)
    local queue, turns, gone, parked, waiting, spent = walk.queue, {}, {}, {}, {}, {}
    for _, entry in ipairs(walk.met) do
        local left_it, fate = entry.base + entry.at - 1, entry.fate
        if left_it > 0 then
            ours('ZREMRANGEBYRANK', entry.key, 0, left_it - 1)
            if entry.at > #entry.page and (entry.size == 0 or call('EXISTS', entry.key) == 0) then
                fate = 'empty'
            end
        end
        if fate == 'moved' then
            append(turns, entry.start, entry.partition)
        elseif fate then
            gone[#gone + 1] = entry.partition
            if entry.start > walk.virtual then
                append(spent, entry.start, entry.partition)
            end
            if fate == 'parked' then
                append(parked, entry.until_, entry.partition)
            elseif fate == 'waits' then
                append(waiting, now + RECHECK, entry.partition)
            end
        end
    end
    in_pieces('ZADD', turns_of(queue), turns)
    in_pieces('ZREM', turns_of(queue), gone)
    in_pieces('ZADD', parked_of(queue), parked)
    in_pieces('ZADD', waiting_of(queue), waiting)
    in_pieces('ZADD', spent_of(queue), spent)
    if not partitions().forget_turns(queue) and walk.virtual > walk.began then
        ours('HSET', P .. 'virtual', queue, int(walk.virtual))
        ours('ZREMRANGEBYSCORE', spent_of(queue), '-inf', int(walk.virtual))
    end
end

local function serve(queue, slots)
    local number_of = math.max(1, partitions().unpark(queue))
    local virtual = number(ours('HGET', P .. 'virtual', queue))
    local walk = {
        queue = queue, virtual = virtual, began = virtual, room = math.min(slots, limit - leased), offset = 0, last = -1, passed = 0,
        met = {}, prefix = partition_of(queue, ''),
    }
    walk.size = math.max(2, math.ceil(walk.room / number_of)) -- jobs of a partition that are read at first
    loaded, next_loaded, heap = {}, 1, {}
    while walk.room > 0 and looks > 0 and not walk.is_over do
        local start = not walk.is_whole and first_start()
        if not walk.is_whole and (not start or start > math.max(walk.began, walk.last)) then
            load_turns(walk)
        else
            serve_next(walk)
        end
    end
    if looks <= 0 then
        more = math.max(more, 1)
    end
    write_turns(walk)
    local parked = ours('ZRANGE', parked_of(queue), 0, 0, 'WITHSCORES')[2]
    if parked then
        note_room_at(tonumber(parked))
    end
    local waits = ours('ZRANGE', waiting_of(queue), 0, 0, 'WITHSCORES')[2]
    if waits then -- of many that wait, each claim looks at some
        note_room_at(math.max(tonumber(waits), now + RECHECK / 10))
    end
end

-- ── quarantined jobs ────────────────────────────────────────────────────────────────────────────────────────────
local function serve_quarantined(queue)
    local found, names = {}, {}
    for _, id in ipairs(ours('ZRANGE', quarantine_of(queue), 0, MOST - 1)) do
        local v = read(id, unpack(FIELDS))
        local known = v and kind_of(v[2] or '')
        if known and v[1] == 'queued' and known.is_limited and v[12] and not (overdue and is_overdue(id)) then
            found[#found + 1] = { member_of(known.level, number(v[6]), number(v[10]), id), id, v }
            names[#names + 1] = split_field(v[12])
        end
    end
    table.sort(found, function(one, other)
        return one[1] < other[1]
    end)
    read_buckets_of(names)
    for _, each in ipairs(found) do
        local partition, weights = split_field(each[3][12])
        local of_job = buckets_of(partition)
        local instant = obstacle(of_job, weights)
        if not instant then
            call('ZREM', quarantine_of(queue), each[2])
            partitions().forget_turns(queue)
            take(each[2], each[3])
            count_waiting(partition, -1)
            return admit(of_job, weights)
        elseif instant > 0 then
            note_room_at(instant)
        end
    end
end

local function serve_queue(queue, slots)
    served = queue
    if call('EXISTS', quarantine_of(queue)) == 1 then
        quarantined = 1
    end
    if alone then
        serve_quarantined(queue)
    else
        serve(queue, slots)
    end
end

local function is_full()
    return leased >= (alone and 1 or limit) or reads <= 0 or looks <= 0
end

local promoted = 0
if ARGV[8] == '1' and (not star or call('EXISTS', P .. 'due', SCHEDULE) > 0) then
    promoted = make_due_ready(turn, named, star)
    more = promoted == MOST and 2 or 0
end
for _, queue in ipairs(turn) do
    if named[queue] > 0 and not paused[queue] and not is_full() and ours('ZSCORE', P .. 'limited', queue) then
        serve_queue(queue, named[queue])
    end
end
for _, range in ipairs(star and { { '(' .. served, '+' }, { '-', '[' .. served } } or {}) do
    for _, queue in ipairs(is_full() and {} or ours('ZRANGEBYLEX', P .. 'limited', range[1], range[2], 'LIMIT', 0, 1000)) do
        if not paused[queue] and not named[queue] and not is_full() then
            serve_queue(queue, star)
        end
    end
end
lease_taken()
write_admitted()
finish()
return { taken, promoted, due and int(math.max(0, due - now)) or '-1', quarantined, until_, served, more, expired }

-- fragment: documents
-- The queue whose claims obey the limit of a document, if any.
local function queue_in(text)
    local readable, document = pcall(cjson.decode, string.match(text or '', '^%d+ (.*)$') or '')
    if not readable or type(document) ~= 'table' then
        return nil
    end
    local values = type(document.values) == 'table' and document.values or {}
    return (document.by or values.concurrency or values.rate) and document.queue or nil -- one that only bounds its depth is none
end

-- fragment: basis
-- What the partition of a job is computed from: the limits, as a number that changes with each write of one, and queue, task and
-- payload of the job. A caller says what it has read, and a script that writes the partition compares.
local AGAIN = 'again' -- the answer where something has changed: nothing was written

local function limits_version(limits)
    local sum = 0
    for _, text in ipairs(limits or ours('HVALS', P .. 'limits')) do
        sum = (sum + number(string.match(text, '^(%d+)'))) % 2 ^ 52
    end
    return int(sum)
end

local function basis_of(id) -- and kind and payload; nil for what is no job
    local v = read(id, 'kind', 'payload')
    local kind = v and v[1] and string.match(v[1], '^%S+ %S+ (.-\n.-)\n?$')
    if kind then
        local payload = joined(id, 'payload', v[2] or '')
        return redis.sha1hex(kind .. '\n' .. payload), v[1], payload
    end
end

local function has_basis(id, basis) -- "": it was read when there were no limits
    return basis == '' or (basis_of(id) or '-') == basis
end

-- name: partition_facts (basis)
-- Facts of the jobs from ARGV[3] on: {kind, payload, basis} of each, nil for what is no job; none without limits. Then the limits,
-- and their version.
local facts, limits = {}, ours('HVALS', P .. 'limits')
for n = 3, #limits > 0 and #ARGV or 0 do
    local basis, kind, payload = basis_of(ARGV[n])
    facts[#facts + 1] = basis and { kind, payload, basis } or false
end
finish()
return { facts, limits, limits_version(limits) }

-- name: unassigned (partitions, moving, taking, documents)
-- Ids of ready jobs of a queue with limits that have no partition, up to MOST. ARGV: 6 queue, 7 "1" for quarantined ones.
even_if_full()
local queue, found = ARGV[6], {}

local function is_limited()
    for _, text in ipairs(ours('HVALS', P .. 'limits')) do
        if queue_in(text) == queue then
            return true
        end
    end
    return false
end

local function look_at(id)
    local v = read(id, unpack(FIELDS))
    if v and not v[2] then
        v = adopt(id, queue)
    end
    local known = v and kind_of(v[2] or '')
    if known and v[1] == 'queued' and not (known.is_limited and v[12]) then
        found[#found + 1] = id
    end
end

if is_limited() then
    local lists, levels = {}, ours('ZRANGE', levels_of(queue), 0, -1, 'WITHSCORES')
    for n = 1, #levels, 2 do
        lists[#lists + 1] = { tonumber(levels[n + 1]), ready_of(queue, levels[n]) }
    end
    lists[#lists + 1] = { 0, ready_of(queue, '0') }
    table.sort(lists, function(one, other)
        return one[1] < other[1]
    end)
    for _, list in ipairs(ARGV[7] == '1' and {} or lists) do
        for _, id in ipairs(#found < MOST and ours('LRANGE', list[2], 0, MOST - #found - 1) or {}) do
            look_at(id)
        end
    end
    for _, id in ipairs(ARGV[7] == '1' and ours('ZRANGE', quarantine_of(queue), 0, MOST - 1) or {}) do
        look_at(id)
    end
else
    ours('SREM', P .. 'guarded', queue)
end
finish()
return found

-- name: assign (partitions, moving, taking, basis)
-- Gives jobs that have not ended their partitions. ARGV: 6 a queue whose ready lists are to lose the jobs at their heads that
-- have one, or "", 7 version of the limits; then id, basis and partition of each job as its field has it, "" for none. Answers how
-- many changed, or AGAIN; those that have another basis are as they were, and counted second.
if limits_version() ~= ARGV[7] then
    return AGAIN
end
even_if_full()
local queue, changed, left_out = ARGV[6], 0, 0
local OPEN = { queued = true, scheduled = true, failed = true, waiting = true, running = true }

local function assign(id, basis, field)
    local v = read(id, 'state', 'kind', 'lost_leases', 'dueTime', 'seq')
    local known = v and kind_of(v[2] or '')
    local old = known and field_of(id, known)
    if not known or not OPEN[v[1]] then
        return
    elseif not has_basis(id, basis) then
        left_out = left_out + 1
        return
    elseif (old or '') == field then
        return
    end
    if v[1] ~= 'running' then
        count_waiting(old, -1)
        count_waiting(field ~= '' and field or nil, 1)
    end
    if v[1] == 'queued' and (old or queue == '' or tier_of(v[3]) == 2) then -- else it leaves its list below
        moving().withdraw(id, known, v[1], number(v[3]))
    end
    local new = field ~= '' and field or nil
    set_field(id, v[2], new)
    if v[1] == 'queued' then
        moving().ready(known, number(v[4]), number(v[5]), id, number(v[3]), new)
    elseif v[1] == 'running' then
        if old then
            release(known.queue, old)
        end
        if new then
            occupy(new)
        end
    end
    tell('news', 'queue:' .. known.queue)
    changed = changed + 1
end

-- Whether an id at the head of a ready list is to leave it.
local function leaves(id, list)
    if moving().clear_tombstone(list, id) then
        return true
    end
    local v = read(id, unpack(FIELDS))
    if v and not v[2] then
        v = adopt(id, queue)
    end
    local known = v and kind_of(v[2] or '')
    if not known then
        return true
    end
    local by_hand = (v[1] == 'scheduled' or v[1] == 'failed') and not ours('ZSCORE', schedule_of(known.queue), id)
    if by_hand then
        call('HSET', JOB .. id, 'state', 'queued')
        count(known.queue, v[1], -1)
        count(known.queue, 'queued', 1)
    elseif v[1] ~= 'queued' then
        return true
    end
    local field = field_of(id, known)
    if field or known.queue ~= queue or tier_of(v[5]) == 2 then
        moving().ready(known, number(v[6]), number(v[10]), id, number(v[5]), field)
        return true
    end
    return false
end

local function clear_head(list)
    local passed = 0
    for _, id in ipairs(ours('LRANGE', list, 0, 2 * MOST - 1)) do
        if not leaves(id, list) then
            break
        end
        passed = passed + 1
    end
    if passed > 0 then
        call('LTRIM', list, passed, -1)
    end
end

for n = 8, #ARGV, 3 do
    assign(ARGV[n], ARGV[n + 1], ARGV[n + 2])
end
if queue ~= '' then
    for _, level in ipairs(ours('ZRANGE', levels_of(queue), 0, -1)) do
        clear_head(ready_of(queue, level))
        if call('EXISTS', ready_of(queue, level)) == 0 then
            call('ZREM', levels_of(queue), level)
        end
    end
    clear_head(ready_of(queue, '0'))
end
moving().place_ready()
write_released()
finish()
return { changed, left_out }

-- name: write_limit (documents)
-- Replaces, adds or removes a limit if it has the expected revision. ARGV: 3 name, 4 expected revision, 5 document, "" to
-- remove it. Answers its revision, or "" and nothing was changed.
local before = ours('HGET', P .. 'limits', ARGV[3])
local stands = string.match(before or '0', '^(%d+)')
if stands ~= ARGV[4] then
    return ''
end
local revision = stands == '0' and NOW or int(tonumber(stands) + 1)
local after = ARGV[5] ~= '' and revision .. ' ' .. ARGV[5] or nil
if after then
    call('HSET', P .. 'limits', ARGV[3], after)
else
    call('HDEL', P .. 'limits', ARGV[3])
end
local old, new = queue_in(before), queue_in(after)
if new then
    ours('SADD', P .. 'guarded', new)
end
if old and old ~= new then
    local is_guarded = false
    for _, text in ipairs(call('HVALS', P .. 'limits')) do
        is_guarded = is_guarded or queue_in(text) == old
    end
    if not is_guarded then
        ours('SREM', P .. 'guarded', old)
    end
    tell('news', 'queue:' .. old)
end
finish()
return revision

-- name: free_parked
-- A limit has changed: what is parked in the queues with jobs under limits behind ARGV[3] looks again. Answers the last of ARGV[4]
-- queues, "" after all.
local queues = ours('ZRANGEBYLEX', P .. 'limited', '(' .. ARGV[3], '+', 'LIMIT', 0, ARGV[4])
for _, queue in ipairs(queues) do
    for _, key in ipairs({ P .. 'parked:' .. queue, P .. 'waiting:' .. queue }) do
        if call('EXISTS', key) == 1 then
            ours('ZREMRANGEBYSCORE', key, '+inf', '-inf') -- moves a key of another type out of the way
            call('ZUNIONSTORE', key, 1, key, 'WEIGHTS', 0)
        end
    end
    tell('news', 'queue:' .. queue)
end
finish()
return #queues == tonumber(ARGV[4]) and queues[#queues] or ''

-- name: bucket_use (admission)
-- Use of the buckets from ARGV[3] on: used and the instant at which each may let a job of weight 1 start, 0 for now.
local uses = {}
for n = 3, #ARGV do
    if not buckets[ARGV[n]] then
        read_buckets({ ARGV[n] })
    end
    local bucket = buckets[ARGV[n]]
    local free_at = bucket.paused
    if bucket.limit and bucket.limit.interval then
        local _, first = after_taking(bucket.limit, bucket.refilled_at, 1)
        free_at = math.max(free_at, first)
    end
    uses[#uses + 1] = { int(bucket.used), free_at > now and int(free_at) or '0' }
end
finish()
return uses

-- name: take_tokens (admission)
-- Takes tokens of a bucket. ARGV: 3 bucket, 4 how many. Answers 0, or microseconds until they can be taken.
read_buckets({ ARGV[3] })
local bucket = buckets[ARGV[3]]
local has_rate = bucket.limit and bucket.limit.interval
local after, first = 0, 0
if has_rate then
    after, first = after_taking(bucket.limit, bucket.refilled_at, tonumber(ARGV[4]))
end
first = math.max(first, bucket.paused, now)
if has_rate and first == now then
    bucket.refilled_at, bucket.has_given = after, true
end
write_admitted()
finish()
return int(first - now)

-- name: pause_buckets (admission)
-- Admits no job through the buckets from ARGV[4] on for ARGV[3] microseconds; a later end of an earlier pause stays.
local until_ = now + tonumber(ARGV[3])
for n = 4, #ARGV do
    read_buckets({ ARGV[n] })
    local bucket = buckets[ARGV[n]]
    if until_ > bucket.paused then
        bucket.paused, bucket.has_given = until_, true
    end
end
write_admitted()
finish()
return 0

-- name: limited_ids (partitions)
-- Ids of ready jobs under limits in the queue ARGV[3], up to ARGV[4], of its first partitions.
local found, most = {}, tonumber(ARGV[4])
for _, key in ipairs({ turns_of(ARGV[3]), parked_of(ARGV[3]), waiting_of(ARGV[3]) }) do
    for _, name in ipairs(#found < most and ours('ZRANGE', key, 0, most - #found - 1) or {}) do
        for _, member in ipairs(#found < most and ours('ZRANGE', partition_of(ARGV[3], name), 0, most - #found - 1) or {}) do
            found[#found + 1] = string.sub(member, PLACE + 1)
        end
    end
end
finish()
return found
