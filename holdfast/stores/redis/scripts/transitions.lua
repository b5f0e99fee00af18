-- fragment: moving
-- For scripts that move jobs from one structure to another: `moving().promote(…)`. Mostly a claim or a settlement does not,
-- and functions are made anew at each call of a script; so these are made when the first of them is wanted.
local function make_moving()
    -- A job taken out of the middle of a ready list leaves its id there, a tombstone: the script that meets it removes it. Of an id
    -- that stands there twice the tombstone comes first, since a job never becomes ready for an earlier time than before. The id
    -- of a job that was deleted may come again, in another list.
    local function tombstone_of(list, id)
        return string.sub(list, #READY + 1) .. ' ' .. id
    end

    local function haunt(list, id)
        ours('HINCRBY', P .. 'tombstones', tombstone_of(list, id), 1)
    end

    local function clear_tombstone(list, id)
        local tombstone = tombstone_of(list, id)
        local left = ours('HGET', P .. 'tombstones', tombstone)
        if not left then
            return false
        end
        if number(left) <= 1 then
            call('HDEL', P .. 'tombstones', tombstone)
        else
            call('HINCRBY', P .. 'tombstones', tombstone, -1)
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

    -- The first in a ready list that is no tombstone: the job of a tombstone may stand far behind it. Others are passed in `displace`.
    local function head_of(list)
        local id = call('LINDEX', list, 0)
        for _ = 1, MOST do
            if not id or not clear_tombstone(list, id) then
                break
            end
            call('LPOP', list)
            id = call('LINDEX', list, 0)
        end
        return id
    end

    local function push(list, side, group)
        local ids = {}
        for n = 1, #group do
            ids[n] = group[side == 'RPUSH' and n or #group + 1 - n][3]
        end
        for n = 1, #ids, 1000 do
            ours(side, list, unpack(ids, n, math.min(n + 999, #ids)))
        end
    end

    local reach = REACH -- how many ids one script looks at to put its groups among them, however many lists they are for

    -- Takes what stands beyond the group off one end of the list, into the group. An id that was pushed by hand has no
    -- place of its own: what it stands behind, it stays behind.
    local function displace(list, group, at_tail)
        local edge, taken, over = group[at_tail and 1 or #group], 0, false
        while not over and reach > 0 do
            local size = math.min(reach, 100)
            local first = at_tail and -taken - size or taken
            local ids = ours('LRANGE', list, first, first + size - 1)
            reach, over = reach - #ids, #ids < size
            for n = 1, #ids do
                local id = ids[at_tail and #ids + 1 - n or n]
                local tombstone = not at_tail and clear_tombstone(list, id)
                local place = not tombstone and standing(id)
                if place and (at_tail and before(edge, place) or not at_tail and before(place, edge)) then
                    group[#group + 1] = place
                elseif not tombstone and (place or call('EXISTS', JOB .. id) == 1) then
                    over = true
                    break
                elseif at_tail then
                    clear_tombstone(list, id)
                end
                taken = taken + 1
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
        ours('ZADD', P .. 'queues', 0, queue)
        if level ~= '0' then
            ours('ZADD', levels_of(queue), -number(level), level)
        end
        local length = ours('LLEN', list)
        local tail = length > 0 and standing(call('LINDEX', list, -1))
        if length == 0 or tail and not before(group[1], tail) then
            return push(list, 'RPUSH', group)
        end
        local head = standing(head_of(list))
        if head and before(group[#group], head) then
            return push(list, 'LPUSH', group)
        end
        local middle = standing(call('LINDEX', list, math.floor(length / 2)))
        local at_tail = length <= REACH or not middle or before(middle, group[1])
        displace(list, group, at_tail)
        push(list, at_tail and 'RPUSH' or 'LPUSH', group)
    end

    local function schedule(queue, run_at, id)
        ours('ZADD', schedule_of(queue), int(run_at), id)
        rescheduled[queue] = true
    end

    -- Ready jobs gathered by a script, to be placed together.
    local waiting = {}

    local function ready(known, run_at, seq, id, lost_leases, field)
        if tier_of(lost_leases) == 2 then
            ours('ZADD', quarantine_of(known.queue), int(run_at), id)
            ours('ZADD', P .. 'queues', 0, known.queue)
            if field then
                ours('ZADD', P .. 'limited', 0, known.queue)
            end
            return
        elseif field then
            return partitions().add(known.queue, (split_field(field)), member_of(known.level, run_at, seq, id))
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
        if ready_partitions then
            ready_partitions.place()
        end
    end

    local function withdraw_ready(id, known)
        local field = field_of(id, known)
        local v = field and read(id, 'dueTime', 'seq')
        if v then
            partitions().remove(known.queue, (split_field(field)), member_of(known.level, number(v[1]), number(v[2]), id))
        else
            haunt(ready_of(known.queue, known.level), id)
        end
    end

    -- Takes a job that is about to change out of where it waits for that.
    local function withdraw(id, known, state, lost_leases)
        if state == 'queued' and tier_of(lost_leases) == 2 then
            ours('ZREM', quarantine_of(known.queue), id)
        elseif state == 'queued' then
            withdraw_ready(id, known)
        elseif state == 'scheduled' or state == 'failed' then
            ours('ZREM', schedule_of(known.queue), id)
            rescheduled[known.queue] = true
        elseif state == 'dead' or state == 'cancelled' then
            ours('ZREM', P .. 'ended:' .. state, id)
        end
    end

    -- Makes due jobs of a queue ready, the longest due first; how many.
    local function promote(queue, most)
        local ids = ours('ZRANGEBYSCORE', schedule_of(queue), '-inf', NOW, 'LIMIT', 0, most)
        if #ids == 0 then
            return 0
        end
        ours('ZREM', schedule_of(queue), unpack(ids))
        rescheduled[queue] = true
        local promoted = 0
        for _, id in ipairs(ids) do
            local v = read(id, 'state', 'kind', 'dueTime', 'seq', 'lost_leases')
            local known = v and kind_of(v[2] or '')
            if known and (v[1] == 'scheduled' or v[1] == 'failed') then
                call('HSET', JOB .. id, 'state', 'queued')
                count(known.queue, v[1], -1)
                count(known.queue, 'queued', 1)
                ready(known, number(v[3]), number(v[4]), id, number(v[5]), field_of(id, known))
                promoted = promoted + 1
            elseif not known and v and call('EXISTS', JOB .. id) == 1 then
                ready({ queue = queue, level = '0' }, now, 0, id, 0) -- put there by hand: the claim makes it a job
            elseif not known then
                met('orphans')
            end
        end
        place_ready()
        return promoted
    end

    local has_expiries -- asked once a script
    local function drop_expiry(id)
        if has_expiries == nil then
            has_expiries = call('EXISTS', P .. 'expiry') == 1
        end
        if has_expiries then
            ours('ZREM', P .. 'expiry', id)
        end
    end

    -- Forgets a job that has left every structure. Its key outlives it where its lifetime does and `keys_live`.
    local function forget(id, seq, key, keys_live)
        local keys = key and more_keys(id) or {}
        if key then
            keys[#keys + 1] = key
        end
        call('DEL', JOB .. id, P .. 'attempts:' .. id, P .. 'lines:' .. id)
        drop_expiry(id)
        local index = index_of(seq)
        ours('HDEL', index, int(seq))
        if call('EXISTS', index) == 0 then
            ours('ZREM', P .. 'chunks', int(math.floor(seq / INDEXED)))
        end
        for _, each in ipairs(keys) do
            local keep_until, owner = string.match(ours('HGET', P .. 'keys', each) or '', '^(%d+) (.*)$')
            if owner == id and keys_live and number(keep_until) > now then
                ours('ZADD', P .. 'outlived', keep_until, each)
            elseif owner == id then
                call('HDEL', P .. 'keys', each)
            end
        end
    end

    return {
        clear_tombstone = clear_tombstone,
        before = before,
        schedule = schedule,
        ready = ready,
        place_ready = place_ready,
        withdraw = withdraw,
        promote = promote,
        forget = forget,
    }
end

local moves
local function moving()
    moves = moves or make_moving()
    return moves
end

-- fragment: expiring
-- Jobs that end by themselves unless a worker has taken them by an instant: id and kind of those that ended.
local expired = {}
local EXPIRABLE = { queued = true, scheduled = true, failed = true, waiting = true }

local function expire(id, state, kind)
    call('HDEL', JOB .. id, 'lost_leases')
    call('HSET', JOB .. id, 'state', 'cancelled', 'reason', 'expired', 'endTime', NOW)
    call('HSETNX', JOB .. id, 'error', 'expired: no worker began it in time')
    ours('ZADD', P .. 'ended:cancelled', NOW, id)
    count(kind_of(kind).queue, state, -1)
    count(kind_of(kind).queue, 'cancelled', 1)
    count_waiting(field_of(id, kind_of(kind)), -1)
    endings[#endings + 1] = id
    expired[#expired + 1], expired[#expired + 2] = id, kind
end

-- Whether a job that waits has an instant that has come, and no worker has taken it.
local function is_overdue(id)
    local v = read(id, 'expiresAt', 'pickupTime')
    return v and v[1] and not v[2] and number(v[1]) <= now
end

-- Looks at jobs whose instant has come, and ends those that wait; how many it looked at.
local function expire_overdue(most)
    local ids = ours('ZRANGEBYSCORE', P .. 'expiry', '-inf', NOW, 'LIMIT', 0, most)
    if #ids == 0 then
        return 0
    end
    even_if_full()
    for _, id in ipairs(ids) do
        local v = read(id, 'state', 'kind', 'lost_leases')
        local known = v and kind_of(v[2] or '')
        if known and EXPIRABLE[v[1]] and is_overdue(id) then
            moving().withdraw(id, known, v[1], number(v[3]))
            expire(id, v[1], v[2])
        end
    end
    ours('ZREM', P .. 'expiry', unpack(ids))
    return #ids
end

-- fragment: taking
-- What the two scripts that claim have in common. ARGV: 3 worker, 4 lease in microseconds, 5 what by-hand jobs run.
local worker, until_ = ARGV[3], int(now + tonumber(ARGV[4]))
local taken, leases, leased, started = {}, {}, 0, {}

local FIELDS = {
    'state', 'kind', 'claims', 'attempts', 'lost_leases', 'dueTime', 'created', 'payload', 'options', 'seq', 'pickupTime',
    'partition',
}

-- A hash that was written by hand becomes a job: what it does not say is made up.
local function adopt(id, queue)
    local v = read(id, 'payload', 'task', 'dueTime')
    local task = v and (v[2] or ARGV[5] ~= '' and ARGV[5])
    if not task or not v[1] then
        met('orphans')
        return nil
    end
    local seq = number(ours('GET', P .. 'seq')) + 1
    call('SET', P .. 'seq', int(seq))
    local due = number(v[3]) > 0 and number(v[3]) <= now and string.match(v[3], '^%d+$') and v[3] or NOW
    call('HSET', JOB .. id, 'state', 'queued', 'kind', '0 5 ' .. queue .. '\n' .. task, 'dueTime', due, 'created', NOW, 'seq', seq)
    ours('HSET', index_of(seq), seq, id)
    ours('ZADD', P .. 'chunks', math.floor(seq / INDEXED), math.floor(seq / INDEXED))
    count(queue, 'queued', 1)
    return read(id, unpack(FIELDS))
end

-- Whether one more attempt is the last that a job may have; `most` of its kind is nil where there is no limit.
local function is_last(known, v)
    return known.most and number(v[4] or claims_of(v[3], v[11])) + 1 >= known.most
end

local function lease(id, kind, state)
    leased = leased + 1
    leases[2 * leased - 1], leases[2 * leased] = until_, id
    if state == 'queued' then
        started[kind] = (started[kind] or 0) + 1
    else
        local known = kind_of(kind)
        count(known.queue, state, -1)
        count(known.queue, 'running', 1)
    end
end

-- Answers what a claim delivers of a job: id, kind, payload and eligible time; where there is more to say, also when it was
-- created, options, claims, attempts and lost_leases. What was never claimed before needs neither its claims nor its attempts
-- written: that it was picked up says that there is one of each.
local function take_first(id, state, kind, payload, due, created, options)
    call('HSET', JOB .. id, 'state', 'running', 'worker', worker, 'pickupTime', NOW)
    payload = joined(id, 'payload', payload)
    lease(id, kind, state)
    if created or options then
        taken[leased] = { id, kind, payload, due, created, joined(id, 'options', options), '1', '1', false }
    else
        taken[leased] = { id, kind, payload, due }
    end
end

local function take(id, v)
    if not v[3] and not v[11] then
        return take_first(id, v[1], v[2], v[8], v[6], v[7], v[9])
    end
    local before_now = claims_of(v[3], v[11])
    local claims, attempts = int(number(before_now) + 1), int(number(v[4] or before_now) + 1)
    call('HSET', JOB .. id, 'state', 'running', 'claims', claims, 'attempts', attempts, 'worker', worker, 'pickupTime', NOW)
    lease(id, v[2], v[1])
    local payload, options = joined(id, 'payload', v[8]), joined(id, 'options', v[9])
    taken[leased] = { id, v[2], payload, v[6], v[7], options, claims, attempts, v[5] }
end

local function paused_queues()
    local paused = {}
    for _, queue in ipairs(ours('SMEMBERS', P .. 'paused')) do
        paused[queue] = true
    end
    return paused
end

-- Makes due jobs of the queues that are wanted ready; how many. Only for scripts with `moving`.
local function make_due_ready(queues, named, star)
    local promoted = 0
    if star then
        queues = ours('ZRANGEBYSCORE', P .. 'due', '-inf', NOW, 'LIMIT', 0, MOST)
        if call('EXISTS', SCHEDULE) == 1 then
            queues[#queues + 1] = 'default' -- a job may have been put there by hand
        end
    end
    for _, queue in ipairs(queues) do
        if (star or named[queue] > 0) and promoted < MOST then
            promoted = promoted + moving().promote(queue, MOST - promoted)
        end
    end
    note_due()
    return promoted
end

local function guarded_queues() -- those with a limit of their own
    local guarded = {}
    for _, queue in ipairs(ours('SMEMBERS', P .. 'guarded')) do
        guarded[queue] = true
    end
    return guarded
end

local function lease_taken()
    if leased > 0 then
        ours('ZADD', LEASES, unpack(leases))
    end
    for kind, number_of in pairs(started) do
        local known = kind_of(kind)
        count(known.queue, 'queued', -number_of)
        count(known.queue, 'running', number_of)
    end
end
