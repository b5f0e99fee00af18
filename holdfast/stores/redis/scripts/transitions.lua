-- fragment: transitions
local NOT_STARTED = { queued = true, scheduled = true, failed = true, waiting = true }

-- Moves of jobs between structures: `transitions().promote(…)`. Built at first use: most claims and settlements need
-- none, and a script builds its functions anew at each call.
local function make_transitions()
    -- A job taken from the middle of a ready list leaves its id there as a tombstone; the next reader of the list
    -- removes it. If an id stands twice, the tombstone comes first: a job never becomes ready for an earlier time. The
    -- id of a deleted job may return in another list.
    local function tombstone_name(list, id)
        return string.sub(list, #READY + 1) .. ' ' .. id
    end

    local function add_tombstone(list, id)
        safe_call('HINCRBY', PREFIX .. 'tombstones', tombstone_name(list, id), 1)
    end

    local function clear_tombstone(list, id)
        local tombstone = tombstone_name(list, id)
        local left = safe_call('HGET', PREFIX .. 'tombstones', tombstone)
        if not left then
            return false
        end
        if to_number(left) <= 1 then
            call('HDEL', PREFIX .. 'tombstones', tombstone)
        else
            call('HINCRBY', PREFIX .. 'tombstones', tombstone, -1)
        end
        return true
    end

    local function is_before(a, b)
        return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
    end

    local function position_of(id) -- of a ready job: `run_at`, then submission
        if not id then
            return nil
        end
        local run_at, seq = read_fields(id, 'dueTime', 'seq')
        return run_at and { to_number(run_at), to_number(seq), id }
    end

    -- The first id that is no tombstone: only its job has the position of the list's head.
    local function first_live(list)
        local id = call('LINDEX', list, 0)
        for _ = 1, MAX_PER_SCRIPT do
            if not id or not clear_tombstone(list, id) then
                break
            end
            call('LPOP', list)
            id = call('LINDEX', list, 0)
        end
        return id
    end

    local function push_ids(list, side, group)
        local ids = {}
        for n = 1, #group do
            ids[n] = group[side == 'RPUSH' and n or #group + 1 - n][3]
        end
        for n = 1, #ids, 1000 do
            safe_call(side, list, unpack(ids, n, math.min(n + 999, #ids)))
        end
    end

    local merges_left = MERGE_WINDOW -- for all lists of a script

    -- Moves ids that belong behind the edge of the group from one end of the list into the group. An id pushed by hand
    -- has no position: it stays behind its neighbour.
    local function merge_from_end(list, group, at_tail)
        local edge, removed, is_done = group[at_tail and 1 or #group], 0, false
        while not is_done and merges_left > 0 do
            local size = math.min(merges_left, 100)
            local first = at_tail and -removed - size or removed
            local ids = safe_call('LRANGE', list, first, first + size - 1)
            merges_left, is_done = merges_left - #ids, #ids < size
            for n = 1, #ids do
                local id = ids[at_tail and #ids + 1 - n or n]
                local tombstone = not at_tail and clear_tombstone(list, id)
                local position = not tombstone and position_of(id)
                if position and (at_tail and is_before(edge, position)
                    or not at_tail and is_before(position, edge)) then
                    group[#group + 1] = position
                elseif not tombstone and (position or call('EXISTS', JOB .. id) == 1) then
                    is_done = true
                    break
                elseif at_tail then
                    clear_tombstone(list, id)
                end
                removed = removed + 1
            end
        end
        if at_tail then
            call('LTRIM', list, 0, -removed - 1)
        else
            call('LTRIM', list, removed, -1)
        end
        table.sort(group, is_before)
    end

    -- Inserts jobs, {`run_at`, submission, id} each, into a ready list in order.
    local function insert_sorted(queue, priority, group)
        local list = ready_key(queue, priority)
        table.sort(group, is_before)
        safe_call('ZADD', PREFIX .. 'queues', 0, queue)
        if priority ~= '0' then
            safe_call('ZADD', priorities_key(queue), -to_number(priority), priority)
        end
        local length = safe_call('LLEN', list)
        local tail = length > 0 and position_of(call('LINDEX', list, -1))
        if length == 0 or tail and not is_before(group[1], tail) then
            return push_ids(list, 'RPUSH', group)
        end
        local head = position_of(first_live(list))
        if head and is_before(group[#group], head) then
            return push_ids(list, 'LPUSH', group)
        end
        local middle = position_of(call('LINDEX', list, math.floor(length / 2)))
        local at_tail = not middle or is_before(middle, group[1])
        merge_from_end(list, group, at_tail)
        push_ids(list, at_tail and 'RPUSH' or 'LPUSH', group)
    end

    local function schedule(queue, run_at, id)
        safe_call('ZADD', schedule_key(queue), int(run_at), id)
        rescheduled_queues[queue] = true
    end

    -- Ready jobs of this script, inserted together.
    local pending_ready = {}

    local function add_ready(spec, run_at, seq, id, lost_leases, partition_field)
        if tier_of(lost_leases) == 2 then
            safe_call('ZADD', quarantine_key(spec.queue), int(run_at), id)
            safe_call('ZADD', PREFIX .. 'queues', 0, spec.queue)
            if partition_field then
                safe_call('ZADD', PREFIX .. 'partitioned_queues', 0, spec.queue)
            end
            return
        elseif partition_field then
            return partitions().add_member(spec.queue, (parse_partition(partition_field)),
                member_of(spec.priority, run_at, seq, id))
        end
        local by_priority = pending_ready[spec.queue] or {}
        pending_ready[spec.queue] = by_priority
        local group = by_priority[spec.priority] or {}
        by_priority[spec.priority] = group
        group[#group + 1] = { run_at, seq, id }
    end

    local function write_ready()
        for queue, by_priority in pairs(pending_ready) do
            for priority, group in pairs(by_priority) do
                insert_sorted(queue, priority, group)
            end
        end
        pending_ready = {}
        if loaded_partitions then
            loaded_partitions.write_members()
        end
    end

    local function dequeue_ready(id, spec)
        local partition_field = partition_field_of(id, spec)
        if partition_field then
            local run_at, seq = read_fields(id, 'dueTime', 'seq')
            partitions().remove_member(spec.queue, (parse_partition(partition_field)),
                member_of(spec.priority, to_number(run_at), to_number(seq), id))
        else
            add_tombstone(ready_key(spec.queue, spec.priority), id)
        end
    end

    -- Removes a job from the structure of its state, before it changes state.
    local function dequeue(id, spec, state, lost_leases)
        if state == 'queued' and tier_of(lost_leases) == 2 then
            safe_call('ZREM', quarantine_key(spec.queue), id)
        elseif state == 'queued' then
            dequeue_ready(id, spec)
        elseif state == 'scheduled' or state == 'failed' or state == 'waiting' then
            safe_call('ZREM', schedule_key(spec.queue), id)
            rescheduled_queues[spec.queue] = true
        elseif state == 'dead' or state == 'cancelled' then
            safe_call('ZREM', PREFIX .. 'ended:' .. state, id)
            safe_call('ZREM', PREFIX .. 'kept:' .. state, id)
        elseif state == 'succeeded' then
            safe_call('ZREM', PREFIX .. 'kept:succeeded', id)
        end
    end

    -- Makes due jobs of a queue ready, the longest due first; returns their number.
    local function promote(queue, max_jobs)
        local ids = safe_call('ZRANGEBYSCORE', schedule_key(queue), '-inf', NOW, 'LIMIT', 0, max_jobs)
        if #ids == 0 then
            return 0
        end
        safe_call('ZREM', schedule_key(queue), unpack(ids))
        rescheduled_queues[queue] = true
        local promoted = 0
        for _, id in ipairs(ids) do
            local state, spec_text, run_at, seq, lost_leases =
                read_fields(id, 'state', 'spec', 'dueTime', 'seq', 'lost_leases')
            local spec = parse_spec(spec_text or '')
            if spec and (state == 'scheduled' or state == 'failed' or state == 'waiting') then
                call('HSET', JOB .. id, 'state', 'queued')
                if state == 'waiting' then
                    call('HDEL', JOB .. id, 'reason')
                end
                count(spec.queue, state, -1)
                count(spec.queue, 'queued', 1)
                add_ready(spec, to_number(run_at), to_number(seq), id, to_number(lost_leases),
                    partition_field_of(id, spec))
                promoted = promoted + 1
            elseif not spec and state ~= nil and call('EXISTS', JOB .. id) == 1 then
                add_ready({ queue = queue, priority = '0' }, now, 0, id, 0) -- written by hand: the claim completes it
            elseif not spec then
                count_anomaly('orphans')
            end
        end
        write_ready()
        return promoted
    end

    local has_expiries -- read once per script
    local function remove_expiry(id)
        if has_expiries == nil then
            has_expiries = call('EXISTS', PREFIX .. 'expiry') == 1
        end
        if has_expiries then
            safe_call('ZREM', PREFIX .. 'expiry', id)
        end
    end

    -- Deletes what a job waited for (`waits`), and the waits of others for it (`hasDependents`): its fields of these names.
    local function forget_waits(id, waits, has_dependents)
        if waits then
            for _, other in ipairs(safe_call('HKEYS', PREFIX .. 'dependencies:' .. id)) do
                safe_call('ZREM', PREFIX .. 'dependents:' .. other, id)
            end
            local topic = safe_call('HGET', PREFIX .. 'receiver:' .. id, 'topic')
            if topic then
                safe_call('ZREM', PREFIX .. 'receivers:' .. topic, id)
            end
            call('DEL', PREFIX .. 'dependencies:' .. id, PREFIX .. 'receiver:' .. id)
        end
        if has_dependents then
            call('UNLINK', PREFIX .. 'dependents:' .. id) -- many, maybe; the waiters keep their dependencies on it
        end
    end

    -- Deletes a job that has left every structure. With `keep_live_keys` its keys live until their lifetime ends.
    local function delete_job(id, seq, key, keep_live_keys, waits, has_dependents)
        forget_waits(id, waits, has_dependents)
        local keys = key and extra_keys(id) or {}
        if key then
            keys[#keys + 1] = key
        end
        call('DEL', JOB .. id, PREFIX .. 'attempts:' .. id, PREFIX .. 'lines:' .. id, PREFIX .. 'steps:' .. id)
        remove_expiry(id)
        local index = index_key(seq)
        safe_call('HDEL', index, int(seq))
        if call('EXISTS', index) == 0 then
            safe_call('ZREM', PREFIX .. 'chunks', int(math.floor(seq / INDEX_CHUNK)))
        end
        for _, each in ipairs(keys) do
            local keep_until, holder = string.match(safe_call('HGET', PREFIX .. 'keys', each) or '', '^(%d+) (.*)$')
            if holder == id and keep_live_keys and to_number(keep_until) > now then
                safe_call('ZADD', PREFIX .. 'outlived', keep_until, each)
            elseif holder == id then
                call('HDEL', PREFIX .. 'keys', each)
            end
        end
    end

    return {
        clear_tombstone = clear_tombstone,
        is_before = is_before,
        schedule = schedule,
        add_ready = add_ready,
        write_ready = write_ready,
        dequeue = dequeue,
        promote = promote,
        delete_job = delete_job,
    }
end

local loaded_transitions
local function transitions()
    loaded_transitions = loaded_transitions or make_transitions()
    return loaded_transitions
end

-- fragment: expiry
-- Jobs that end unless a worker claims them in time: id and spec of those that this script ended.
local expired = {}

local function expire(id, state, spec_text)
    call('HDEL', JOB .. id, 'lost_leases')
    call('HSET', JOB .. id, 'state', 'cancelled', 'reason', 'expired', 'endTime', NOW)
    call('HSETNX', JOB .. id, 'error', 'expired: no worker began it in time')
    safe_call('ZADD', PREFIX .. 'ended:cancelled', NOW, id)
    count(parse_spec(spec_text).queue, state, -1)
    count(parse_spec(spec_text).queue, 'cancelled', 1)
    count_unstarted(partition_field_of(id, parse_spec(spec_text)), -1)
    ended_ids[#ended_ids + 1] = id
    if call('HGET', JOB .. id, 'hasDependents') then
        note_end(id, 'cancelled')
    end
    expired[#expired + 1], expired[#expired + 2] = id, spec_text
end

-- True for a job that has expired and was never claimed.
local function is_expired(id)
    local expires_at, started_at = read_fields(id, 'expiresAt', 'pickupTime')
    return expires_at and not started_at and to_number(expires_at) <= now
end

-- Ends jobs that have expired before their start; returns the number of jobs examined.
local function end_expired(max_jobs)
    local ids = safe_call('ZRANGEBYSCORE', PREFIX .. 'expiry', '-inf', NOW, 'LIMIT', 0, max_jobs)
    if #ids == 0 then
        return 0
    end
    allow_when_full()
    for _, id in ipairs(ids) do
        local state, spec_text, lost_leases = read_fields(id, 'state', 'spec', 'lost_leases')
        local spec = parse_spec(spec_text or '')
        if spec and NOT_STARTED[state] and is_expired(id) then
            transitions().dequeue(id, spec, state, to_number(lost_leases))
            expire(id, state, spec_text)
        end
    end
    safe_call('ZREM', PREFIX .. 'expiry', unpack(ids))
    if ends_to_resolve[1] then -- jobs that waited for these may be due now
        resolve_ends()
        write_next_due()
    end
    return #ids
end
