-- fragment: partitions
-- Ready jobs under limits. Each partition of a queue is a sorted set with all scores 0: its members sort themselves.
-- A partition with jobs has a start tag in its queue, is throttled until an instant, or full until a running job ends.
-- A script gathers what its jobs release, and writes it once.
local SEPARATOR = '\31'
local MAX_FULL_LISTED = 100 -- full partitions of a queue that keep their start tags

local function start_tags_key(queue)
    return PREFIX .. 'start_tags:' .. queue
end

local function throttled_key(queue)
    return PREFIX .. 'throttled:' .. queue
end

local function full_key(queue)
    return PREFIX .. 'full:' .. queue
end

local function idle_start_tags_key(queue)
    return PREFIX .. 'idle_start_tags:' .. queue
end

local function partition_key(queue, partition)
    return PREFIX .. 'partition:' .. queue .. SEPARATOR .. partition
end

-- Parses the field `partition` of a job: the names of its buckets and, unless all weights are 1, a line break and the
-- weights as JSON. Weights that another program corrupted count as 1.
local function parse_partition(partition_field)
    local partition, text = string.match(partition_field, '^([^\n]*)\n(.*)$')
    if not partition then
        return partition_field, nil
    end
    local readable, weights = pcall(cjson.decode, text)
    local _, number = string.gsub(partition, SEPARATOR, '')
    if not readable or type(weights) ~= 'table' or #weights ~= number + 1 then
        return partition, nil
    end
    for _, weight in ipairs(weights) do
        if type(weight) ~= 'number' or weight < 1 or weight % 1 ~= 0 then
            return partition, nil
        end
    end
    return partition, weights
end

local SORT_KEY_LENGTH = 28 -- characters of a member before its id
local TWO_POW_32 = 4294967296

-- A member: rank, `run_at` and submission in hexadecimal digits, then the id. With a UUID it has 64 bytes, so
-- small sets keep their compact encoding.
local function member_of(priority, run_at, seq, id)
    local rank = 1000000 - math.max(-1000000, math.min(1000000, to_number(priority)))
    run_at, seq = math.max(0, math.min(2 ^ 52 - 1, math.floor(run_at))), seq % 2 ^ 36
    return string.format('%06x%05x%08x%x%08x', rank, math.floor(run_at / TWO_POW_32), run_at % TWO_POW_32,
        math.floor(seq / TWO_POW_32), seq % TWO_POW_32) .. id
end

local function make_partitions()
    local pending_members = {} -- by queue and partition: score and member of each job

    local function add_member(queue, partition, member)
        local names = pending_members[queue] or {}
        pending_members[queue] = names
        local entries = names[partition] or {}
        names[partition] = entries
        entries[#entries + 1] = 0
        entries[#entries + 1] = member
    end

    -- Gives partitions start tags: none before the virtual time, nor before its own earlier one.
    local function add_start_tags(queue, names)
        local virtual_time = to_number(safe_call('HGET', PREFIX .. 'virtual', queue))
        local idle_start_tags = call('EXISTS', idle_start_tags_key(queue)) == 1
            and safe_call('ZMSCORE', idle_start_tags_key(queue), unpack(names)) or {}
        local entries = {}
        for n, name in ipairs(names) do
            entries[2 * n - 1], entries[2 * n] = math.max(virtual_time, to_number(idle_start_tags[n])), name
        end
        safe_call('ZADD', start_tags_key(queue), unpack(entries))
        call('ZREM', idle_start_tags_key(queue), unpack(names))
    end

    local function join_partitions(queue, names)
        local start_tags = safe_call('ZMSCORE', start_tags_key(queue), unpack(names))
        local throttled = call('EXISTS', throttled_key(queue)) == 1
            and safe_call('ZMSCORE', throttled_key(queue), unpack(names)) or {}
        local full = call('EXISTS', full_key(queue)) == 1
            and safe_call('ZMSCORE', full_key(queue), unpack(names)) or {}
        local joining = {}
        for n, name in ipairs(names) do
            if not start_tags[n] and not throttled[n] and not full[n] then
                joining[#joining + 1] = name
            end
        end
        if #joining > 0 then
            safe_call('ZADD', PREFIX .. 'partitioned_queues', 0, queue)
            add_start_tags(queue, joining)
        end
    end

    local function write_members()
        for queue, partitions in pairs(pending_members) do
            local names = {}
            for name, entries in pairs(partitions) do
                for n = 1, #entries, 1000 do
                    safe_call('ZADD', partition_key(queue, name), unpack(entries, n, math.min(n + 999, #entries)))
                end
                names[#names + 1] = name
            end
            for n = 1, #names, MAX_PER_SCRIPT do
                join_partitions(queue, { unpack(names, n, math.min(n + MAX_PER_SCRIPT - 1, #names)) })
            end
        end
        pending_members = {}
    end

    -- Deletes the start tags of a queue without partitions; true if it has none.
    local function delete_unused_start_tags(queue)
        if call('EXISTS', start_tags_key(queue), throttled_key(queue), full_key(queue)) > 0 then
            return false
        end
        call('DEL', idle_start_tags_key(queue))
        safe_call('HDEL', PREFIX .. 'virtual', queue)
        if call('EXISTS', quarantine_key(queue)) == 0 then
            safe_call('ZREM', PREFIX .. 'partitioned_queues', queue)
        end
        return true
    end

    -- A member that this script has added, and not yet written.
    local function drop_pending_member(queue, partition, member)
        local names = pending_members[queue] or {}
        local entries = names[partition] or {}
        for n = #entries, 2, -2 do
            if entries[n] == member then
                table.remove(entries, n)
                table.remove(entries, n - 1)
            end
        end
        if #entries == 0 then
            names[partition] = nil
        end
    end

    local function remove_member(queue, partition, member)
        drop_pending_member(queue, partition, member)
        local key = partition_key(queue, partition)
        safe_call('ZREM', key, member)
        if call('EXISTS', key) == 0 then
            safe_call('ZREM', start_tags_key(queue), partition)
            safe_call('ZREM', throttled_key(queue), partition)
            safe_call('ZREM', full_key(queue), partition)
            delete_unused_start_tags(queue)
        end
    end

    local function return_due(queue, key, max_partitions)
        local due = safe_call('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', 0, max_partitions)
        if #due > 0 then
            call('ZREM', key, unpack(due))
            add_start_tags(queue, due)
        end
    end

    -- Gives start tags to throttled partitions whose instant has come, and to full ones if few have them. Returns how
    -- many partitions have one.
    local function return_unblocked(queue)
        if call('EXISTS', throttled_key(queue), full_key(queue)) > 0 then
            return_due(queue, throttled_key(queue), MAX_PER_SCRIPT)
            return_due(queue, full_key(queue), MAX_FULL_LISTED / 2)
            local first = safe_call('ZCARD', start_tags_key(queue)) < MAX_FULL_LISTED
                and safe_call('ZRANGE', full_key(queue), 0, MAX_FULL_LISTED - 1) or {}
            if #first > 0 then
                call('ZREM', full_key(queue), unpack(first))
                add_start_tags(queue, first)
            end
        end
        return safe_call('ZCARD', start_tags_key(queue))
    end

    return {
        add_member = add_member,
        write_members = write_members,
        delete_unused_start_tags = delete_unused_start_tags,
        remove_member = remove_member,
        add_start_tags = add_start_tags,
        return_unblocked = return_unblocked,
    }
end

local loaded_partitions
local function partitions()
    loaded_partitions = loaded_partitions or make_partitions()
    return loaded_partitions
end

local released -- queue → field `partition` → number of ended runs

local function release(queue, partition_field)
    released = released or {}
    local fields = released[queue] or {}
    released[queue] = fields
    fields[partition_field] = (fields[partition_field] or 0) + 1
end

local function use_buckets(partition_field) -- of a running job
    local partition, weights = parse_partition(partition_field)
    local n = 0
    for bucket in string.gmatch(partition, '[^\31]+') do
        n = n + 1
        safe_call('HINCRBY', PREFIX .. 'used', bucket, weights and weights[n] or 1)
    end
end

local function subtract_released()
    local use_changes, released_partitions = {}, {}
    for queue, fields in pairs(released) do
        local of_queue = {}
        released_partitions[queue] = of_queue
        for partition_field, times in pairs(fields) do
            if not string.find(partition_field, '[\31\n]') then -- one bucket, and a weight of 1
                use_changes[partition_field] = (use_changes[partition_field] or 0) - times
                of_queue[#of_queue + 1] = partition_field
            else
                local partition, weights = parse_partition(partition_field)
                local n = 0
                for bucket in string.gmatch(partition, '[^\31]+') do
                    n = n + 1
                    use_changes[bucket] = (use_changes[bucket] or 0) - times * (weights and weights[n] or 1)
                end
                of_queue[#of_queue + 1] = partition
            end
        end
    end
    add_to_fields(PREFIX .. 'used', use_changes)
    return released_partitions
end

-- Writes what ended runs have released, notifies workers, and gives full partitions start tags.
local function write_released()
    if not released then
        return
    end
    for queue, names in pairs(subtract_released()) do
        if call('EXISTS', full_key(queue)) == 1 then
            local scores, found = safe_call('ZMSCORE', full_key(queue), unpack(names)), {}
            for n, name in ipairs(names) do
                found[#found + 1] = scores[n] and name or nil
            end
            if #found > 0 then
                call('ZREM', full_key(queue), unpack(found))
                partitions().add_start_tags(queue, found)
            end
        end
    end
    local queues = safe_call('ZRANGE', PREFIX .. 'partitioned_queues', 0, 100)
    for _, queue in ipairs(#queues > 100 and { '*' } or queues) do
        notify('ready_jobs', 'queue:' .. queue)
    end
    released = nil
end

-- fragment: admission
-- Finds jobs that may start now, by the rules of `core.limits.Admission`: concurrency by use, tokens by GCRA, pauses.
local limits_cache = {}

local function limit_of(name) -- false for an unknown name
    local cached = limits_cache[name]
    if cached ~= nil then
        return cached
    end
    local text = string.match(safe_call('HGET', PREFIX .. 'limits', name) or '', '^%d+ (.*)$')
    local _, document = pcall(cjson.decode, text or '') -- or an error, a text
    limits_cache[name] = false
    if type(document) == 'table' then
        local values = type(document.values) == 'table' and document.values or {}
        local rate, period = tonumber(values.rate), tonumber(values.period_us) or 1000000
        local interval = rate and (period - period % rate) / rate + (period % rate > 0 and 1 or 0)
        limits_cache[name] = {
            concurrency = tonumber(values.concurrency),
            interval = interval,
            burst = tonumber(values.burst) or 1,
            shares = type(values.shares) == 'table' and next(values.shares) and values.shares or nil,
            queue = not document.by and document.queue, -- its bucket is in each partition of this queue
        }
    end
    return limits_cache[name]
end

-- Returns when all tokens are back (GCRA's TAT) once these are given, and when they can be given at the earliest.
local function after_taking(limit, full_at, tokens)
    local after = math.max(full_at, now) + math.min(tokens, limit.burst) * limit.interval
    return after, after - limit.burst * limit.interval
end

local buckets = {}
local has_used, has_states = call('EXISTS', PREFIX .. 'used') == 1, call('EXISTS', PREFIX .. 'buckets') == 1

-- A bucket keeps its tokens, at most the new burst, if the rate or burst of its limit has changed.
local function keep_tokens(bucket, old_interval, old_burst)
    local limit = bucket.limit
    local max_us = limit and limit.interval and limit.burst * limit.interval
    if not max_us or bucket.full_at <= now or old_interval == limit.interval and old_burst == limit.burst then
        return
    end
    local old_max_us = old_interval and old_burst * old_interval or max_us
    local earned = math.floor(
        math.max(0, old_max_us - (bucket.full_at - now)) * (limit.interval / (old_interval or limit.interval)))
    bucket.full_at, bucket.is_state_changed = now + max_us - math.min(max_us, earned), true
end

local function read_buckets(names)
    local used = has_used and safe_call('HMGET', PREFIX .. 'used', unpack(names)) or {}
    local states = has_states and safe_call('HMGET', PREFIX .. 'buckets', unpack(names)) or {}
    for n, name in ipairs(names) do
        local bucket = {
            name = name, limit = limit_of(string.match(name, '^[^=]*')),
            used = to_number(used[n]), full_at = 0, paused = 0, reserved = 0,
        }
        if states[n] then
            local full_at, paused, interval, burst = string.match(states[n], '^(%d+) (%d+) ?(%d*) ?(%d*)$')
            bucket.full_at, bucket.paused = to_number(full_at), to_number(paused)
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
    if buckets[partition] then -- of one bucket
        return { buckets[partition] }
    end
    local job_buckets = {}
    for name in string.gmatch(partition, '[^\31]+') do
        job_buckets[#job_buckets + 1] = buckets[name]
    end
    return job_buckets
end

local function share_of(job_buckets)
    for _, bucket in ipairs(job_buckets) do
        local value = bucket.limit and bucket.limit.shares and string.match(bucket.name, '=(.*)$')
        local share = value and tonumber(bucket.limit.shares[value])
        if share then
            return share
        end
    end
    return 1
end

-- Returns when tokens and pauses admit a job of this weight, and true if concurrency does not. Reserved weight counts.
local function check_bucket(bucket, weight)
    local limit, free_at = bucket.limit, bucket.paused
    if not limit then
        return free_at, false
    end
    if limit.interval then
        local full_at = math.max(bucket.full_at, now) + math.min(bucket.reserved, limit.burst) * limit.interval
        local _, first = after_taking(limit, full_at, weight)
        free_at = math.max(free_at, first)
    end
    local concurrency = limit.concurrency
    return free_at, concurrency and bucket.used + bucket.reserved + math.min(weight, concurrency) > concurrency
end

-- Returns nil or false if all buckets admit a job now; else the instant to wait for, 0 for the end of a running job, and the bucket.
local function find_blocking_bucket(job_buckets, weights)
    local free_at, lacking_bucket, blocking = now, nil, nil
    for n = 1, #job_buckets do
        local bucket = job_buckets[n]
        local first, lacks_slots = check_bucket(bucket, weights and weights[n] or 1)
        if first > free_at then
            free_at, blocking = first, bucket
        end
        lacking_bucket = lacking_bucket or lacks_slots and bucket
    end
    if free_at > now then
        return free_at, blocking
    end
    return lacking_bucket and 0, lacking_bucket
end

-- Reserves the weights that alone block a job, in the buckets of its keys first. Returns true if it lacks tokens of a
-- key, and true if it lacks slots of one.
local function reserve(job_buckets, weights)
    local lacks_key_tokens, lacks_key_slots = false, false
    for n, bucket in ipairs(job_buckets) do
        local free_at, lacks_slots = check_bucket(bucket, weights[n])
        bucket.is_keyed = string.find(bucket.name, '=', 1, true) ~= nil
        lacks_key_tokens = lacks_key_tokens or bucket.is_keyed and free_at > now
        lacks_key_slots = lacks_key_slots or bucket.is_keyed and lacks_slots
    end
    for n, bucket in ipairs(job_buckets) do
        if weights[n] > 1 and (bucket.is_keyed or not (lacks_key_tokens or lacks_key_slots)) then
            bucket.reserved = bucket.reserved + weights[n]
        end
    end
    return lacks_key_tokens, lacks_key_slots
end

local function consume(job_buckets, weights)
    for n, bucket in ipairs(job_buckets) do
        local weight = weights and weights[n] or 1
        bucket.used, bucket.is_use_changed = bucket.used + weight, true
        if bucket.limit and bucket.limit.interval then
            bucket.full_at, bucket.is_state_changed = after_taking(bucket.limit, bucket.full_at, weight), true
        end
    end
end

local function write_admitted()
    local used, states, refills = {}, {}, {}
    for name, bucket in pairs(buckets) do
        if bucket.is_use_changed then
            used[#used + 1] = name
            used[#used + 1] = bucket.used
        end
        if bucket.is_state_changed then
            states[#states + 1] = name
            local limit = bucket.limit
            local rate_text = limit and limit.interval and ' ' .. int(limit.interval) .. ' ' .. int(limit.burst) or ''
            states[#states + 1] = int(bucket.full_at) .. ' ' .. int(bucket.paused) .. rate_text
            refills[#refills + 1] = math.max(bucket.full_at, bucket.paused)
            refills[#refills + 1] = name
        end
    end
    for n = 1, #used, 1000 do
        safe_call('HSET', PREFIX .. 'used', unpack(used, n, math.min(n + 999, #used)))
    end
    for n = 1, #states, 1000 do
        safe_call('HSET', PREFIX .. 'buckets', unpack(states, n, math.min(n + 999, #states)))
        safe_call('ZADD', PREFIX .. 'refills', unpack(refills, n, math.min(n + 999, #refills)))
    end
end

-- name: claim_limited (partitions, transitions, waits, expiry, claim_common, admission)
-- Claims ready jobs under limits, which start at once, by start tags. ARGV: 6 max_jobs, 7 "1": one quarantined job
-- alone, 8 "1": make due jobs ready first, and claim none while more may be due, 9 slots of unlisted queues or "", 10 the
-- unlisted queue served last, then name and slots of each named queue, in order of service.
-- Returns jobs; promoted; microseconds until a partition may be unblocked or -1; quarantined; lease end; unlisted queue
-- served last; its status; named queue served last, or ""; id and spec of expired jobs.
allow_when_full()
local max_jobs, isolated = tonumber(ARGV[6]), ARGV[7] == '1'
local wildcard_slots, last_served = tonumber(ARGV[9]), ARGV[10]
local START_TAG_STEP, MAX_BLOCKED, RECHECK_US, MAX_KEPT_START_TAGS = 1000000, 300, 1000000, 20
local MAX_QUARANTINED = 50 * MAX_PER_SCRIPT -- jobs that are looked at, mostly for no more than their partition
local kept_start_tags = 0 -- partitions that lack tokens of a key for a heavy job and keep their start tags
local next_free_at, quarantined, status = nil, 0, DONE
local leaves_fewer = false -- the next script finds fewer blocked partitions, or jobs, before those it has not examined
local blocked_left, reads_left = MAX_BLOCKED, max_jobs + 2 * MAX_PER_SCRIPT -- partitions that may block; jobs that may be read
local queue_slots, queue_order = {}, {}
for n = 11, #ARGV, 2 do
    queue_slots[ARGV[n]] = tonumber(ARGV[n + 1])
    queue_order[#queue_order + 1] = ARGV[n]
end
local paused = call('EXISTS', PREFIX .. 'paused') == 1 and paused_queues() or {}
local may_hold_expired = call('EXISTS', PREFIX .. 'expiry') == 1 and end_expired(MAX_PER_SCRIPT) == MAX_PER_SCRIPT

local function note_free_at(instant)
    next_free_at = next_free_at and math.min(next_free_at, instant) or instant
end

-- ── partitions by start tag: `loaded_entries` in stored order, `heap` for those that were served ──
local loaded_entries, next_loaded, heap, push_count = {}, 1, {}, 0

local function is_before(one, other)
    return one.start_tag < other.start_tag or one.start_tag == other.start_tag and one.order < other.order
end

local function heap_push(entry)
    push_count = push_count + 1
    entry.order = push_count
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

local function heap_pop()
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

local function first_start_tag() -- nil for none
    local next_fresh, next_served = loaded_entries[next_loaded], heap[1]
    return next_fresh and next_served and math.min(next_fresh.start_tag, next_served.start_tag)
        or next_fresh and next_fresh.start_tag or next_served and next_served.start_tag
end

local function next_entry()
    local next_fresh, next_served = loaded_entries[next_loaded], heap[1]
    if next_fresh and not (next_served and next_served.start_tag < next_fresh.start_tag) then
        next_loaded = next_loaded + 1
        return next_fresh
    end
    return next_served and heap_pop()
end

-- ── one partition ───────────────────────────────────────────────────────────────────────────────────────────────
-- An entry: jobs before `page_start` + `index` have left it. `outcome`: "moved" to a later start tag, "empty", "throttled"
-- until an instant, "full" until a running job ends; nil if unchanged.
local EMPTY_PAGE = {}

local function entry_of(round, name, score)
    return {
        partition = name, key = round.prefix .. name, start_tag = math.max(round.first_virtual_time, score), order = 0,
        buckets = buckets_of(name), page = EMPTY_PAGE, page_start = 0, index = 1, size = round.size, outcome = nil,
    }
end

local function load_page(entry)
    entry.page_start = entry.page_start + #entry.page
    entry.page = safe_call('ZRANGE', entry.key, entry.page_start, entry.page_start + entry.size - 1)
    entry.index = 1
    entry.size = #entry.page == entry.size and math.min(MAX_PER_SCRIPT, 4 * entry.size) or 0 -- 0: the last page
end

-- Fast path, for most jobs: one that was never claimed and whose id the store generated. Returns it and its weights.
local function new_job(id, queue, partition)
    local state, spec_text, started_at, run_at, created, payload, options, claims, partition_field =
        unpack(redis.pcall('HMGET', JOB .. id, 'state', 'spec', 'pickupTime', 'dueTime', 'created', 'payload',
        'options', 'claims', 'partition'))
    local spec = state == 'queued' and not started_at and not claims and parse_spec(spec_text)
    if not spec or not spec.is_limited or spec.queue ~= queue then
        return nil
    end
    local job_partition, weights = partition_field, nil
    if partition_field ~= partition then
        job_partition, weights = parse_partition(partition_field or '')
    end
    if job_partition ~= partition then
        return nil
    end
    return { id = id, spec_text = spec_text, run_at = run_at, created = created, payload = payload, options = options }, weights
end

-- Any other job; nil for a stale member.
local function other_job(id, queue, partition)
    local job = read_job(id)
    local spec = job and parse_spec(job.spec_text or '')
    local job_partition, weights = parse_partition(spec and spec.is_limited and job.partition_field or '')
    if not spec then
        count_anomaly('orphans')
    elseif job.state ~= 'queued' or job_partition ~= partition or spec.queue ~= queue then
        return nil
    elseif tier_of(job.lost_leases) == 2 then
        safe_call('ZADD', quarantine_key(queue), job.run_at, id)
    elseif may_hold_expired and is_expired(id) then
        expire(id, job.state, job.spec_text)
        safe_call('ZREM', PREFIX .. 'expiry', id)
    else
        return job, weights
    end
end

-- The first job of a partition: "new" or "other", the job and its weights; "none"; "enough" if no more may be read.
local function first_job(queue, entry)
    while reads_left > 0 do
        if entry.index > #entry.page then
            if entry.size == 0 then
                return 'none'
            end
            load_page(entry)
        end
        local member = entry.page[entry.index]
        if member then
            local id = string.sub(member, SORT_KEY_LENGTH + 1)
            reads_left = reads_left - 1
            local job, weights
            if not may_hold_expired then
                job, weights = new_job(id, queue, entry.partition)
                if job then
                    return 'new', job, weights
                end
            end
            job, weights = other_job(id, queue, entry.partition)
            if job then
                return 'other', job, weights
            end
            entry.index = entry.index + 1
        end
    end
    return 'enough'
end

-- ── the partitions of a queue ───────────────────────────────────────────────────────────────────────────────────
local function load_start_tags(round)
    local size = math.max(20, math.min(100, round.jobs_left))
    local page, names = safe_call('ZRANGE', start_tags_key(round.queue), round.offset, round.offset + size - 1,
        'WITHSCORES'), {}
    for n = 1, #page, 2 do
        names[#names + 1] = page[n]
    end
    round.offset, round.is_last_page = round.offset + #names, #names < size
    read_buckets_of(names)
    for n, name in ipairs(names) do
        round.last_start_tag = to_number(page[2 * n])
        loaded_entries[#loaded_entries + 1] = entry_of(round, name, round.last_start_tag)
    end
end

-- Beyond MAX_FULL_LISTED a partition without a free slot waits beside the start_tags until one of its running jobs ends,
-- or RECHECK_US is over.
local function note_full(round, entry)
    round.blocked_count = round.blocked_count + 1
    entry.outcome = round.blocked_count > MAX_FULL_LISTED and 'full' or entry.outcome
end

-- Throttles or passes over a blocked partition.
local function pass_over(round, entry, instant, bucket)
    if instant > 0 then
        entry.outcome, entry.throttled_until = 'throttled', instant
    else
        note_full(round, entry)
    end
    local blocks_all = bucket.limit and bucket.limit.queue == round.queue
    round.is_done = blocks_all and find_blocking_bucket({ bucket }) ~= nil
    if round.is_done and instant > 0 then
        note_free_at(instant)
    end
end

-- A partition blocked by the weights of its first job keeps its start tag; it is throttled if it shares no bucket. If it
-- lacks slots of its key, it counts as full: else many such keys would use up what a script examines.
local function keep_start_tag(round, entry, instant, weights)
    local lacks_key_tokens, lacks_key_slots = reserve(entry.buckets, weights)
    if lacks_key_tokens and #entry.buckets > 1 then
        kept_start_tags = kept_start_tags + 1
    end
    if instant > 0 and (#entry.buckets == 1 or kept_start_tags > MAX_KEPT_START_TAGS) then
        entry.outcome, entry.throttled_until = 'throttled', instant
        return
    elseif lacks_key_slots then
        note_full(round, entry)
    end
    if instant > 0 and entry.outcome ~= 'full' then
        note_free_at(instant)
    end
end

local function serve_next(round)
    local entry = next_entry()
    if not entry then
        round.is_done = true
        return
    elseif entry.order == 0 then
        round.visited[#round.visited + 1] = entry
    end
    local instant, bucket = find_blocking_bucket(entry.buckets)
    local source, job, weights
    if not instant then
        source, job, weights = first_job(round.queue, entry)
        local weights_free_at = weights and find_blocking_bucket(entry.buckets, weights)
        if weights_free_at then
            blocked_left = blocked_left - 1
            return keep_start_tag(round, entry, weights_free_at, weights)
        end
    end
    if instant then
        blocked_left = blocked_left - 1
        return pass_over(round, entry, instant, bucket)
    elseif source == 'none' then
        entry.outcome = 'empty'
        return
    elseif source == 'enough' then
        status, round.is_done, leaves_fewer = math.max(status, MORE_TO_EXAMINE), true, true
        return
    elseif source == 'new' then
        write_first_claim(job.id, 'queued', job.spec_text, job.payload, job.run_at, job.created, job.options)
    else
        claim_job(job)
    end
    consume(entry.buckets, weights)
    count_unstarted(entry.partition, -1)
    round.jobs_left, round.virtual_time = round.jobs_left - 1, entry.start_tag
    entry.start_tag, entry.index, entry.outcome = entry.start_tag + math.floor(START_TAG_STEP / share_of(entry.buckets)),
        entry.index + 1, 'moved'
    instant, bucket = find_blocking_bucket(entry.buckets)
    if instant then
        return pass_over(round, entry, instant, bucket)
    end
    heap_push(entry)
end

local function append(list, score, name)
    local n = #list
    list[n + 1], list[n + 2] = score, name
end

local function call_in_parts(command, key, list)
    for n = 1, #list, 1000 do
        safe_call(command, key, unpack(list, n, math.min(n + 999, #list)))
    end
end

local function write_start_tags(round)
    local queue, start_tags, removed_start_tags, throttled, full, idle_start_tags = round.queue, {}, {}, {}, {}, {}
    for _, entry in ipairs(round.visited) do
        local removed, outcome = entry.page_start + entry.index - 1, entry.outcome
        if removed > 0 then
            safe_call('ZREMRANGEBYRANK', entry.key, 0, removed - 1)
            if entry.index > #entry.page and (entry.size == 0 or call('EXISTS', entry.key) == 0) then
                outcome = 'empty'
            end
        end
        if outcome == 'moved' then
            append(start_tags, entry.start_tag, entry.partition)
        elseif outcome then
            removed_start_tags[#removed_start_tags + 1] = entry.partition
            leaves_fewer = true
            if entry.start_tag > round.virtual_time then
                append(idle_start_tags, entry.start_tag, entry.partition)
            end
            if outcome == 'throttled' then
                append(throttled, entry.throttled_until, entry.partition)
            elseif outcome == 'full' then
                append(full, now + RECHECK_US, entry.partition)
            end
        end
    end
    call_in_parts('ZADD', start_tags_key(queue), start_tags)
    call_in_parts('ZREM', start_tags_key(queue), removed_start_tags)
    call_in_parts('ZADD', throttled_key(queue), throttled)
    call_in_parts('ZADD', full_key(queue), full)
    call_in_parts('ZADD', idle_start_tags_key(queue), idle_start_tags)
    if not partitions().delete_unused_start_tags(queue) and round.virtual_time > round.first_virtual_time then
        safe_call('HSET', PREFIX .. 'virtual', queue, int(round.virtual_time))
        safe_call('ZREMRANGEBYSCORE', idle_start_tags_key(queue), '-inf', int(round.virtual_time))
    end
end

local function serve(queue, slots)
    local number = math.max(1, partitions().return_unblocked(queue))
    local virtual_time = to_number(safe_call('HGET', PREFIX .. 'virtual', queue))
    local round = {
        queue = queue, virtual_time = virtual_time, first_virtual_time = virtual_time,
        jobs_left = math.min(slots, max_jobs - claimed_count), offset = 0, last_start_tag = -1, blocked_count = 0, visited = {},
        prefix = partition_key(queue, ''),
    }
    round.size = math.max(2, math.ceil(round.jobs_left / number)) -- jobs of a partition that are read at first
    loaded_entries, next_loaded, heap = {}, 1, {}
    while round.jobs_left > 0 and blocked_left > 0 and not round.is_done do
        local start_tag = not round.is_last_page and first_start_tag()
        if not round.is_last_page and (not start_tag or start_tag > math.max(round.first_virtual_time, round.last_start_tag)) then
            load_start_tags(round)
        else
            serve_next(round)
        end
    end
    if blocked_left <= 0 then
        status = math.max(status, MORE_TO_EXAMINE)
    end
    write_start_tags(round)
    local throttled = safe_call('ZRANGE', throttled_key(queue), 0, 0, 'WITHSCORES')[2]
    if throttled then
        note_free_at(tonumber(throttled))
    end
    local next_full = safe_call('ZRANGE', full_key(queue), 0, 0, 'WITHSCORES')[2]
    if next_full then -- each claim examines some of them
        note_free_at(math.max(tonumber(next_full), now + RECHECK_US / 10))
    end
end

-- ── quarantined jobs ────────────────────────────────────────────────────────────────────────────────────────────
local function is_full()
    return status == MORE_DUE or claimed_count >= (isolated and 1 or max_jobs) or reads_left <= 0 or blocked_left <= 0
end

-- Jobs of one page in the order of claims, without those of blocked partitions.
local function load_quarantined(ids, blocked)
    local found, names = {}, {}
    for _, id in ipairs(ids) do
        local job = not blocked[read_fields(id, 'partition') or ''] and read_job(id)
        local spec = job and parse_spec(job.spec_text or '')
        if spec and job.state == 'queued' and spec.is_limited and job.partition_field
            and not (may_hold_expired and is_expired(id)) then
            job.member = member_of(spec.priority, to_number(job.run_at), to_number(job.seq), id)
            found[#found + 1] = job
            names[#names + 1] = parse_partition(job.partition_field)
        end
    end
    table.sort(found, function(one, other)
        return one.member < other.member
    end)
    read_buckets_of(names)
    return found
end

-- Claims the job, or notes that its partition is blocked.
local function claim_quarantined(queue, job, blocked)
    local partition, weights = parse_partition(job.partition_field)
    local job_buckets = buckets_of(partition)
    local instant = find_blocking_bucket(job_buckets, weights)
    if not instant then
        call('ZREM', quarantine_key(queue), job.id)
        partitions().delete_unused_start_tags(queue)
        claim_job(job)
        count_unstarted(partition, -1)
        consume(job_buckets, weights)
        return
    elseif instant > 0 then
        note_free_at(instant)
    end
    blocked[job.partition_field] = true
    blocked_left = blocked_left - 1
end

local function serve_quarantined(queue)
    local blocked, offset, ids = {}, 0, nil
    repeat
        ids = safe_call('ZRANGE', quarantine_key(queue), offset, offset + MAX_PER_SCRIPT - 1)
        for _, job in ipairs(load_quarantined(ids, blocked)) do
            if not blocked[job.partition_field] then
                claim_quarantined(queue, job, blocked)
            end
            if is_full() then
                return
            end
        end
        offset = offset + MAX_PER_SCRIPT
    until #ids < MAX_PER_SCRIPT or offset >= MAX_QUARANTINED
end

local function serve_queue(queue, slots)
    if call('EXISTS', quarantine_key(queue)) == 1 then
        quarantined = 1
    end
    if isolated then
        serve_quarantined(queue)
    else
        serve(queue, slots)
    end
end

local promoted = 0
if ARGV[8] == '1' and (not wildcard_slots or call('EXISTS', PREFIX .. 'due', SCHEDULE) > 0) then
    promoted = make_due_ready(queue_order, queue_slots, wildcard_slots)
    status = promoted == MAX_PER_SCRIPT and MORE_DUE or DONE
end
local last_named = ''
for _, queue in ipairs(queue_order) do
    if queue_slots[queue] > 0 and not paused[queue] and not is_full()
        and safe_call('ZSCORE', PREFIX .. 'partitioned_queues', queue) then
        last_named = queue
        serve_queue(queue, queue_slots[queue])
    end
end
blocked_left = MAX_BLOCKED -- however many partitions of named queues are blocked, unlisted queues are served
local function is_done()
    return is_full() or not wildcard_slots or wildcard_slots <= 0
end
each_queue(PREFIX .. 'partitioned_queues', last_served, is_done, function(queue)
    if not paused[queue] and not queue_slots[queue] and not is_done() then
        local claimed_before = claimed_count
        last_served = queue
        serve_queue(queue, wildcard_slots)
        wildcard_slots = wildcard_slots - claimed_count + claimed_before
        return true
    end
end)
if claimed_count == 0 and status ~= DONE then
    note_free_at((status == MORE_DUE or leaves_fewer) and now or now + RECHECK_US / 10)
end
write_leases()
write_admitted()
finish()
return {
    claimed, promoted, next_free_at and int(math.max(0, next_free_at - now)) or '-1', quarantined, lease_until,
    last_served, status, last_named, expired,
}

-- fragment: limit_documents
-- The queue whose claims a limit's document bounds; nil for none, or a bound of the depth alone.
local function limited_queue_of(text)
    local readable, document = pcall(cjson.decode, string.match(text or '', '^%d+ (.*)$') or '')
    if not readable or type(document) ~= 'table' then
        return nil
    end
    local values = type(document.values) == 'table' and document.values or {}
    return (document.by or values.concurrency or values.rate) and document.queue or nil
end

-- fragment: fingerprint
-- Optimistic check of partitions that a client has computed from the limits, and the queue, task and payload of a job:
-- the script that writes them compares the version of the limits and the fingerprint of the job.
local CONFLICT = 'conflict' -- reply if something has changed: nothing was written

local function limits_version(limits)
    local sum = 0
    for _, text in ipairs(limits or safe_call('HVALS', PREFIX .. 'limits')) do
        sum = (sum + to_number(string.match(text, '^(%d+)'))) % 2 ^ 52
    end
    return int(sum)
end

local function fingerprint_of(id) -- and spec and payload; nil for no job
    local spec_text, payload = read_fields(id, 'spec', 'payload')
    local queue_and_task = spec_text and string.match(spec_text, '^%S+ %S+ (.-\n.-)\n?$')
    if queue_and_task then
        payload = join_pieces(id, 'payload', payload or '')
        return redis.sha1hex(queue_and_task .. '\n' .. payload), spec_text, payload
    end
end

local function has_fingerprint(id, fingerprint) -- "": read when there were no limits
    return fingerprint == '' or (fingerprint_of(id) or '-') == fingerprint
end

-- name: partition_facts (fingerprint)
-- {spec, payload, fingerprint} of each job from ARGV[3] on, nil for no job. Then the limits, and their version.
local facts, limits = {}, safe_call('HVALS', PREFIX .. 'limits')
for n = 3, #limits > 0 and #ARGV or 0 do
    local fingerprint, spec_text, payload = fingerprint_of(ARGV[n])
    facts[#facts + 1] = fingerprint and { spec_text, payload, fingerprint } or false
end
finish()
return { facts, limits, limits_version(limits) }

-- name: find_unassigned (partitions, transitions, claim_common, limit_documents)
-- Ids of ready jobs without a partition in a queue with limits, up to MAX_PER_SCRIPT. ARGV: 6 queue, 7 "1": quarantined.
allow_when_full()
local queue, found = ARGV[6], {}

local function has_limits()
    for _, text in ipairs(safe_call('HVALS', PREFIX .. 'limits')) do
        if limited_queue_of(text) == queue then
            return true
        end
    end
    return false
end

local function check_id(id)
    local job = read_job(id)
    if job and not job.spec_text then
        job = import_manual_job(id, queue)
    end
    local spec = job and parse_spec(job.spec_text or '')
    if spec and job.state == 'queued' and not (spec.is_limited and job.partition_field) then
        found[#found + 1] = id
    end
end

if has_limits() then
    local lists, priorities = {}, safe_call('ZRANGE', priorities_key(queue), 0, -1, 'WITHSCORES')
    for n = 1, #priorities, 2 do
        lists[#lists + 1] = { tonumber(priorities[n + 1]), ready_key(queue, priorities[n]) }
    end
    lists[#lists + 1] = { 0, ready_key(queue, '0') }
    table.sort(lists, function(one, other)
        return one[1] < other[1]
    end)
    for _, list in ipairs(ARGV[7] == '1' and {} or lists) do
        for _, id in ipairs(#found < MAX_PER_SCRIPT and safe_call('LRANGE', list[2], 0, MAX_PER_SCRIPT - #found - 1) or {}) do
            check_id(id)
        end
    end
    for _, id in ipairs(ARGV[7] == '1' and safe_call('ZRANGE', quarantine_key(queue), 0, MAX_PER_SCRIPT - 1) or {}) do
        check_id(id)
    end
else
    safe_call('SREM', PREFIX .. 'queues_with_limits', queue)
end
finish()
return found

-- name: assign (partitions, transitions, claim_common, fingerprint)
-- Assigns partitions to jobs that have not ended. ARGV: 6 queue whose ready lists lose the jobs at their heads that
-- have one, or "", 7 version of the limits; then id, fingerprint and field `partition` of each job, "" for none.
-- Returns the number of changed jobs and the number with another fingerprint, which are unchanged; or CONFLICT.
if limits_version() ~= ARGV[7] then
    return CONFLICT
end
allow_when_full()
local queue, changed, stale = ARGV[6], 0, 0

local function assign(id, fingerprint, partition_field)
    local state, spec_text, lost_leases, run_at, seq = read_fields(id, 'state', 'spec', 'lost_leases', 'dueTime', 'seq')
    local spec = parse_spec(spec_text or '')
    local old_field = spec and partition_field_of(id, spec)
    if not spec or not (NOT_STARTED[state] or state == 'running') then
        return
    elseif not has_fingerprint(id, fingerprint) then
        stale = stale + 1
        return
    elseif (old_field or '') == partition_field then
        return
    end
    if state ~= 'running' then
        count_unstarted(old_field, -1)
        count_unstarted(partition_field ~= '' and partition_field or nil, 1)
    end
    if state == 'queued' and (old_field or queue == '' or tier_of(lost_leases) == 2) then -- else by `clear_head`
        transitions().dequeue(id, spec, state, to_number(lost_leases))
    end
    local new_field = partition_field ~= '' and partition_field or nil
    set_partition_field(id, spec_text, new_field)
    if state == 'queued' then
        transitions().add_ready(spec, to_number(run_at), to_number(seq), id, to_number(lost_leases), new_field)
    elseif state == 'running' then
        if old_field then
            release(spec.queue, old_field)
        end
        if new_field then
            use_buckets(new_field)
        end
    end
    notify('ready_jobs', 'queue:' .. spec.queue)
    changed = changed + 1
end

-- True if an id must leave the head of a ready list.
local function should_leave(id, list)
    if transitions().clear_tombstone(list, id) then
        return true
    end
    local job = read_job(id)
    if job and not job.spec_text then
        job = import_manual_job(id, queue)
    end
    local spec = job and parse_spec(job.spec_text or '')
    if not spec then
        return true
    end
    local is_manual = (job.state == 'scheduled' or job.state == 'failed')
        and not safe_call('ZSCORE', schedule_key(spec.queue), id)
    if is_manual then
        call('HSET', JOB .. id, 'state', 'queued')
        count(spec.queue, job.state, -1)
        count(spec.queue, 'queued', 1)
    elseif job.state ~= 'queued' then
        return true
    end
    local partition_field = partition_field_of(id, spec)
    if partition_field or spec.queue ~= queue or tier_of(job.lost_leases) == 2 then
        transitions().add_ready(spec, to_number(job.run_at), to_number(job.seq), id, to_number(job.lost_leases),
            partition_field)
        return true
    end
    return false
end

local function clear_head(list)
    local removed = 0
    for _, id in ipairs(safe_call('LRANGE', list, 0, 2 * MAX_PER_SCRIPT - 1)) do
        if not should_leave(id, list) then
            break
        end
        removed = removed + 1
    end
    if removed > 0 then
        call('LTRIM', list, removed, -1)
        invalidate_repair()
    end
end

for n = 8, #ARGV, 3 do
    assign(ARGV[n], ARGV[n + 1], ARGV[n + 2])
end
if queue ~= '' then
    for _, priority in ipairs(safe_call('ZRANGE', priorities_key(queue), 0, -1)) do
        clear_head(ready_key(queue, priority))
        if call('EXISTS', ready_key(queue, priority)) == 0 then
            call('ZREM', priorities_key(queue), priority)
        end
    end
    clear_head(ready_key(queue, '0'))
end
transitions().write_ready()
write_released()
if changed > 0 then
    invalidate_repair()
end
finish()
return { changed, stale }

-- name: write_limit (answers, limit_documents)
-- Replaces, adds or removes a limit if it has the expected revision. ARGV: 4 name, 5 expected revision, -1 for any, 6
-- document, "" to remove it. Returns its revision, or "" if nothing was changed.
local old_text = safe_call('HGET', PREFIX .. 'limits', ARGV[4])
local current_revision = string.match(old_text or '', '^(%d+)') or '0'
if ARGV[5] ~= current_revision and ARGV[5] ~= '-1' then
    return ''
end
local revision = current_revision == '0' and NOW or int(tonumber(current_revision) + 1)
local new_text = ARGV[6] ~= '' and revision .. ' ' .. ARGV[6] or nil
if new_text then
    call('HSET', PREFIX .. 'limits', ARGV[4], new_text)
else
    call('HDEL', PREFIX .. 'limits', ARGV[4])
end
local old_queue, new_queue = limited_queue_of(old_text), limited_queue_of(new_text)
if new_queue then
    safe_call('SADD', PREFIX .. 'queues_with_limits', new_queue)
end
if old_queue and old_queue ~= new_queue then
    local has_other_limit = false
    for _, text in ipairs(call('HVALS', PREFIX .. 'limits')) do
        has_other_limit = has_other_limit or limited_queue_of(text) == old_queue
    end
    if not has_other_limit then
        safe_call('SREM', PREFIX .. 'queues_with_limits', old_queue)
    end
    notify('ready_jobs', 'queue:' .. old_queue)
end
invalidate_repair()
keep_answer(revision)
finish()
return revision

-- name: unblock_all_partitions
-- Gives start tags to throttled and full partitions of ARGV[4] queues behind ARGV[3]. Returns the last queue, "" after
-- all.
local queues = safe_call('ZRANGEBYLEX', PREFIX .. 'partitioned_queues', '(' .. ARGV[3], '+', 'LIMIT', 0, ARGV[4])
for _, queue in ipairs(queues) do
    for _, key in ipairs({ PREFIX .. 'throttled:' .. queue, PREFIX .. 'full:' .. queue }) do
        if call('EXISTS', key) == 1 then
            safe_call('ZREMRANGEBYSCORE', key, '+inf', '-inf') -- renames a key of another type
            call('ZUNIONSTORE', key, 1, key, 'WEIGHTS', 0)
        end
    end
    notify('ready_jobs', 'queue:' .. queue)
end
finish()
return #queues == tonumber(ARGV[4]) and queues[#queues] or ''

-- name: clamp_buckets (admission)
-- The buckets from ARGV[3] on keep their tokens after a change of their limit, at most the new burst.
read_buckets({ unpack(ARGV, 3) })
write_admitted()
invalidate_repair()
finish()
return 0

-- name: bucket_use (admission)
-- Use of the buckets from ARGV[3] on. Returns the clock, and of each what is used, when it is full, its pause's end.
local uses = { int(now) }
for n = 3, #ARGV do
    if not buckets[ARGV[n]] then
        read_buckets({ ARGV[n] })
    end
    local bucket = buckets[ARGV[n]]
    uses[#uses + 1] = { int(bucket.used), int(bucket.full_at), int(bucket.paused) }
end
finish()
return uses

-- name: take_tokens (admission)
-- Takes tokens of a bucket. ARGV: 3 bucket, 4 number. Returns 0, or microseconds until they are available. Sent again
-- as its answer was lost, it takes them again: the bucket gives too few once, never too many.
allow_when_full()
read_buckets({ ARGV[3] })
local bucket = buckets[ARGV[3]]
local has_rate = bucket.limit and bucket.limit.interval
local after, first = 0, 0
if has_rate then
    after, first = after_taking(bucket.limit, bucket.full_at, tonumber(ARGV[4]))
end
first = math.max(first, bucket.paused, now)
if has_rate and first == now then
    bucket.full_at, bucket.is_state_changed = after, true
    invalidate_repair()
end
write_admitted()
finish()
return int(first - now)

-- name: pause_buckets (admission)
-- Pauses the buckets from ARGV[4] on for ARGV[3] microseconds; a pause that ends later stays. 0 ends every pause.
allow_when_full()
local pause_until = now + tonumber(ARGV[3])
for n = 4, #ARGV do
    read_buckets({ ARGV[n] })
    local bucket = buckets[ARGV[n]]
    if pause_until > bucket.paused or ARGV[3] == '0' then
        bucket.paused, bucket.is_state_changed = pause_until, true
    end
end
write_admitted()
invalidate_repair()
finish()
return 0

-- name: limited_ids (partitions)
-- Ids of ready jobs under limits in the queue ARGV[3], up to ARGV[4], of its first partitions.
local found, max_ids = {}, tonumber(ARGV[4])
for _, key in ipairs({ start_tags_key(ARGV[3]), throttled_key(ARGV[3]), full_key(ARGV[3]) }) do
    for _, name in ipairs(safe_call('ZRANGE', key, 0, max_ids - 1)) do
        for _, member in ipairs(#found < max_ids
            and safe_call('ZRANGE', partition_key(ARGV[3], name), 0, max_ids - #found - 1) or {}) do
            found[#found + 1] = string.sub(member, SORT_KEY_LENGTH + 1)
        end
    end
end
finish()
return found
