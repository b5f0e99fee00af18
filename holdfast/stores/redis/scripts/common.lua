-- What every script begins with. KEYS: prefix, schedule, ready, leases, job. ARGV[1]: microseconds since 1970, or "" for
-- the server's clock; ARGV[2]: who calls, so that it need not listen to itself. No value of a job is ever looked into.
--
-- A script that fails in the middle is not rolled back. So each one reads with `read`, which survives a key of another
-- type, and moves such a key out of the way (`ensure`) before it writes there. A full Redis refuses a script at its first
-- write, if that one may need memory: `even_if_full` makes the first write one that never does.
local P, SCHEDULE, READY, LEASES, JOB = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local call, unpack = redis.call, unpack
local CHUNK, PIECES = 64, 8 -- a hash is small as long as none of its values is longer than 64 bytes
local INDEXED = 64 -- jobs per piece of the index
local REACH = 2000 -- how far from an end of a ready list its order is kept exactly
local MOST = 200 -- jobs one script handles

local now
if ARGV[1] ~= '' then
    now = tonumber(ARGV[1])
else
    local t = call('TIME')
    now = t[1] * 1000000 + t[2]
end

local function int(n) -- tostring() would round it
    return string.format('%.0f', n)
end

local NOW = int(now)

local function number(text)
    return tonumber(text or 0) or 0
end

local function even_if_full()
    call('DEL', P .. 'nothing')
end

-- ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────
local checked, odd = {}, { orphans = 0, foreign = 0 }

local function ensure(key, kind)
    if not checked[key] then
        checked[key] = true
        local found = call('TYPE', key).ok
        if found ~= 'none' and found ~= kind then
            call('RENAME', key, key .. ':foreign:' .. NOW)
            odd.foreign = odd.foreign + 1
        end
    end
    return key
end

local function schedule_of(queue)
    return ensure(queue == 'default' and SCHEDULE or SCHEDULE .. ':' .. queue, 'zset')
end

local function ready_of(queue, level)
    local key = level == '0' and READY or READY .. '@' .. level
    return ensure(queue == 'default' and key or key .. ':' .. queue, 'list')
end

local function levels_of(queue)
    return ensure(P .. 'levels:' .. queue, 'zset')
end

local function quarantine_of(queue)
    return ensure(P .. 'quarantine:' .. queue, 'zset')
end

local function index_of(seq)
    return P .. 'index:' .. int(math.floor(seq / INDEXED))
end

-- ── one job ─────────────────────────────────────────────────────────────────────────────────────────────────────
local function read(id, ...)
    local found = redis.pcall('HMGET', JOB .. id, ...)
    return not found.err and found or nil
end

local kinds = {}

local function kind_of(kind) -- what never changes of a job: "priority max_attempts queue\ntask"
    local known = kinds[kind]
    if not known then
        local level, queue = string.match(kind or '', '^(-?%d+) %S+ (.-)\n')
        known = level and { level = level, queue = queue } or false
        kinds[kind] = known
    end
    return known
end

local function pieces(fields, field, text, whole) -- a text as fields of a hash, none longer than CHUNK
    if whole or #text <= CHUNK or #text > CHUNK * PIECES then
        fields[#fields + 1] = field
        fields[#fields + 1] = text
        return
    end
    for n = 0, math.floor((#text - 1) / CHUNK) do
        fields[#fields + 1] = n == 0 and field or field .. n
        fields[#fields + 1] = string.sub(text, n * CHUNK + 1, (n + 1) * CHUNK)
    end
end

local function joined(id, field, first) -- the text that `pieces` took apart
    if first and #first == CHUNK then
        local rest = call('HMGET', JOB .. id, field .. 1, field .. 2, field .. 3, field .. 4, field .. 5, field .. 6, field .. 7)
        for n = 1, #rest do
            if not rest[n] then
                break
            end
            first = first .. rest[n]
        end
    end
    return first
end

local function drop(id, field)
    call('HDEL', JOB .. id, field, field .. 1, field .. 2, field .. 3, field .. 4, field .. 5, field .. 6, field .. 7)
end

-- ── what is told and counted at the end ─────────────────────────────────────────────────────────────────────────
local tally, topics, endings, rescheduled = {}, {}, {}, {}

local function count(queue, state, by)
    local field = state .. ':' .. queue
    tally[field] = (tally[field] or 0) + by
end

local function tell(topic)
    topics[topic] = true
end

local function finish()
    for queue in pairs(rescheduled) do
        local first = call('ZRANGE', schedule_of(queue), 0, 0, 'WITHSCORES')
        if first[1] then
            call('ZADD', ensure(P .. 'due', 'zset'), first[2], queue)
        else
            call('ZREM', ensure(P .. 'due', 'zset'), queue)
        end
    end
    for field, by in pairs(tally) do
        if by ~= 0 and call('HINCRBY', ensure(P .. 'counts', 'hash'), field, by) == 0 then
            call('HDEL', P .. 'counts', field)
        end
    end
    for what, number_of in pairs(odd) do
        if number_of > 0 then
            call('HINCRBY', ensure(P .. 'meta', 'hash'), what, number_of)
        end
    end
    local news = { ARGV[2] }
    for topic in pairs(topics) do
        news[#news + 1] = topic
    end
    if #news > 1 then
        call('PUBLISH', P .. 'news', table.concat(news, '\n'))
    end
    if #endings > 0 then
        call('PUBLISH', P .. 'ended', ARGV[2] .. '\n' .. table.concat(endings, '\n'))
    end
end

-- ── where jobs wait ─────────────────────────────────────────────────────────────────────────────────────────────
-- A job taken out of the middle of a ready list leaves its id there, a ghost: whoever meets it lays it to rest. Of an id
-- that stands there twice the ghost comes first, since a job never becomes ready for an earlier time than before.
local function haunt(id)
    call('HINCRBY', ensure(P .. 'ghosts', 'hash'), id, 1)
end

local function laid_to_rest(id)
    local left = call('HGET', ensure(P .. 'ghosts', 'hash'), id)
    if not left then
        return false
    end
    if number(left) <= 1 then
        call('HDEL', P .. 'ghosts', id)
    else
        call('HINCRBY', P .. 'ghosts', id, -1)
    end
    return true
end

local function before(a, b)
    return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
end

local function standing(id) -- a ready job's place: eligible time, then submission
    local v = id and read(id, 'dueTime', 'seq')
    return v and v[1] and { number(v[1]), number(v[2]), id }
end

local function push(list, side, group)
    local ids = {}
    for n = 1, #group do
        ids[n] = group[side == 'RPUSH' and n or #group + 1 - n][3]
    end
    for n = 1, #ids, 1000 do
        call(side, list, unpack(ids, n, math.min(n + 999, #ids)))
    end
end

-- Takes what stands beyond the group off one end of the list, into the group.
local function displace(list, group, at_tail)
    local ids = call('LRANGE', list, at_tail and -REACH or 0, at_tail and -1 or REACH - 1)
    local edge, taken = group[at_tail and 1 or #group], 0
    for n = 1, #ids do
        local place = standing(ids[at_tail and #ids + 1 - n or n])
        if place and not (at_tail and before(edge, place) or not at_tail and before(place, edge)) then
            break
        end
        taken = n
        if place then
            group[#group + 1] = place
        else
            laid_to_rest(ids[at_tail and #ids + 1 - n or n])
        end
    end
    if at_tail then
        call('LTRIM', list, 0, -taken - 1)
    else
        call('LTRIM', list, taken, -1)
    end
    table.sort(group, before)
end

-- Puts jobs, {eligible time, submission, id} each, where they belong in a ready list.
local function place(queue, level, group)
    local list = ready_of(queue, level)
    table.sort(group, before)
    call('ZADD', ensure(P .. 'queues', 'zset'), 0, queue)
    if level ~= '0' then
        call('ZADD', levels_of(queue), -number(level), level)
    end
    local length = call('LLEN', list)
    local tail = length > 0 and standing(call('LINDEX', list, -1))
    if length == 0 or tail and not before(group[1], tail) then
        return push(list, 'RPUSH', group)
    end
    local head = standing(call('LINDEX', list, 0))
    if head and before(group[#group], head) then
        return push(list, 'LPUSH', group)
    end
    local middle = standing(call('LINDEX', list, math.floor(length / 2)))
    local at_tail = length <= REACH or not middle or before(middle, group[1])
    displace(list, group, at_tail)
    push(list, at_tail and 'RPUSH' or 'LPUSH', group)
end

local function schedule(queue, run_at, id)
    call('ZADD', schedule_of(queue), int(run_at), id)
    rescheduled[queue] = true
end

-- Ready jobs gathered by a script, to be placed together.
local waiting = {}

local function ready(known, run_at, seq, id, losses)
    if losses >= 2 then
        call('ZADD', quarantine_of(known.queue), int(run_at), id)
        call('ZADD', ensure(P .. 'queues', 'zset'), 0, known.queue)
        return
    end
    local levels = waiting[known.queue] or {}
    waiting[known.queue] = levels
    local group = levels[known.level] or {}
    levels[known.level] = group
    group[#group + 1] = { run_at, seq, id }
end

local function place_ready()
    for queue, levels in pairs(waiting) do
        for level, group in pairs(levels) do
            place(queue, level, group)
        end
    end
    waiting = {}
end

-- Takes a job that is about to change out of where it waits for that.
local function withdraw(id, known, state, losses)
    if state == 'queued' and losses >= 2 then
        call('ZREM', quarantine_of(known.queue), id)
    elseif state == 'queued' then
        haunt(id)
    elseif state == 'scheduled' or state == 'failed' then
        call('ZREM', schedule_of(known.queue), id)
        rescheduled[known.queue] = true
    elseif state == 'dead' or state == 'cancelled' then
        call('ZREM', ensure(P .. 'ended:' .. state, 'zset'), id)
    end
end

-- Makes due jobs of a queue ready, the longest due first; how many.
local function promote(queue, most)
    local ids = call('ZRANGEBYSCORE', schedule_of(queue), '-inf', NOW, 'LIMIT', 0, most)
    if #ids == 0 then
        return 0
    end
    call('ZREM', schedule_of(queue), unpack(ids))
    rescheduled[queue] = true
    local promoted = 0
    for _, id in ipairs(ids) do
        local v = read(id, 'state', 'kind', 'dueTime', 'seq', 'losses')
        local known = v and kind_of(v[2] or '')
        if known and (v[1] == 'scheduled' or v[1] == 'failed') then
            call('HSET', JOB .. id, 'state', 'queued')
            count(known.queue, v[1], -1)
            count(known.queue, 'queued', 1)
            ready(known, number(v[3]), number(v[4]), id, number(v[5]))
            promoted = promoted + 1
        elseif not known and v and call('EXISTS', JOB .. id) == 1 then
            ready({ queue = queue, level = '0' }, now, 0, id, 0) -- put there by hand: whoever claims it makes it a job
        elseif not known then
            odd.orphans = odd.orphans + 1
        end
    end
    place_ready()
    return promoted
end

-- Forgets a job that has left every structure. Its key outlives it where its lifetime does and `keys_live`.
local function forget(id, seq, key, keys_live)
    call('DEL', JOB .. id, P .. 'attempts:' .. id)
    local index = ensure(index_of(seq), 'hash')
    call('HDEL', index, int(seq))
    if call('EXISTS', index) == 0 then
        call('ZREM', ensure(P .. 'chunks', 'zset'), int(math.floor(seq / INDEXED)))
    end
    local held = key and call('HGET', ensure(P .. 'keys', 'hash'), key)
    if held then
        local keep_until, owner = string.match(held, '^(%d+) (.*)$')
        if owner == id and keys_live and number(keep_until) > now then
            call('ZADD', ensure(P .. 'outlived', 'zset'), keep_until, key)
        elseif owner == id then
            call('HDEL', P .. 'keys', key)
        end
    end
end
