-- name: claim (partitions, transitions, waits, expiry, claim_common)
-- Claims ready jobs in order. ARGV: 6 limit, 7 max_must_start, 8 "1": one quarantined job alone, 9 "1": make due jobs
-- ready first, 10 "1": claim although more jobs are due, 11 slots of unnamed queues or "", 12 the queue served
-- last, 13 ids skipped by the scripts before, then name and slots of each named queue, in order of service.
-- Returns jobs; promoted; microseconds until the next job is due or -1; quarantined; lease end; queue served last; 0
-- done, 1 more ids to examine, 2 nothing claimed because more jobs are due; ids skipped or ""; 1 if it stopped at a job
-- on its last attempt beyond max_must_start; 1 if a requested queue has jobs under limits, and its queues with limits
-- that have ready jobs without a partition, none of which it claims; id and spec of expired jobs.
-- Needs no `allow_when_full`: each path removes ids first.
local limit, max_must_start, isolated = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8] == '1'
local is_promoting, wildcard_slots, last_served = ARGV[9] == '1', tonumber(ARGV[11]), ARGV[12]
local queue_slots, queue_order = {}, {}
local promoted, quarantined, more, stopped_at_last_attempt, read_budget = 0, 0, 0, 0, limit + 2 * MAX_BATCH
-- Ids at the head of each ready list that this claim may not take. Its next script looks behind them, up to
-- MAX_SKIPPED: later ids wait until those are claimed.
local skipped = ARGV[13] ~= '' and cmsgpack.unpack(ARGV[13]) or {}
local MAX_SKIPPED = 5000 -- popping and pushing them back takes a millisecond
for i = 14, #ARGV, 2 do
    queue_slots[ARGV[i]] = tonumber(ARGV[i + 1])
    queue_order[#queue_order + 1] = ARGV[i]
end
local paused, has_limit, has_tombstones, has_scheduled, has_overdue = {}, {}, false, false, false
-- Usually none of these exists.
if call('EXISTS', PREFIX .. 'paused', PREFIX .. 'tombstones', PREFIX .. 'due', SCHEDULE, PREFIX .. 'expiry',
        PREFIX .. 'queues_with_limits') > 0 then
    has_overdue = expire_overdue(MAX_BATCH) == MAX_BATCH -- more expired jobs may be among the ready ones
    paused, has_limit = paused_queues(), queues_with_limits()
    has_tombstones = call('EXISTS', PREFIX .. 'tombstones') == 1
    has_scheduled = call('EXISTS', PREFIX .. 'due', SCHEDULE) > 0
end

local function next_due()
    local first
    if wildcard_slots then
        first = safe_call('ZRANGE', PREFIX .. 'due', 0, 0, 'WITHSCORES')[2]
        first = first and tonumber(first)
    else
        for _, queue in ipairs(queue_order) do
            local entry = queue_slots[queue] > 0 and safe_call('ZRANGE', schedule_key(queue), 0, 0, 'WITHSCORES')[2]
            if entry and (not first or tonumber(entry) < first) then
                first = tonumber(entry)
            end
        end
    end
    return first and int(math.max(0, first - now)) or '-1'
end

local function claim_quarantined(queue)
    local best_position, chosen
    for _, id in ipairs(safe_call('ZRANGE', quarantine_key(queue), 0, MAX_BATCH - 1)) do
        local v = read_fields(id, unpack(FIELDS))
        local spec = v and parse_spec(v[2] or '')
        if not spec or v[1] ~= 'queued' then
            call('ZREM', quarantine_key(queue), id)
        elseif not spec.is_limited then
            local position = { -to_number(spec.priority), to_number(v[6]), to_number(v[10]) }
            local difference = best_position and position[1] - best_position[1] or -1
            if difference < 0 or difference == 0
                and transitions().is_before({ position[2], position[3] }, { best_position[2], best_position[3] }) then
                best_position, chosen = position, { id, v }
            end
        end
    end
    if chosen then
        call('ZREM', quarantine_key(queue), chosen[1])
        claim_job(chosen[1], chosen[2])
    end
end

-- Fields of a job that may be claimed; nil to drop its id; "suspect" to skip it; "last" to leave it and all behind it.
local function claimable(id, queue, list)
    if has_tombstones and transitions().clear_tombstone(list, id) then
        return nil
    end
    local v = read_fields(id, unpack(FIELDS))
    if not v or not v[2] then
        v = import_manual_job(id, queue)
    end
    local spec = v and parse_spec(v[2])
    if not spec then
        return nil
    end
    if v[1] == 'scheduled' or v[1] == 'failed' then -- moved by hand
        if safe_call('ZSCORE', schedule_key(spec.queue), id) then
            return nil
        end
    elseif v[1] ~= 'queued' then
        return nil
    end
    if has_overdue and is_overdue(id) then
        expire(id, v[1], v[2])
        safe_call('ZREM', PREFIX .. 'expiry', id)
        return nil
    end
    local tier = tier_of(v[5])
    if spec.is_limited and v[12] then -- it waits in its partition
        if v[1] ~= 'queued' then
            call('HSET', JOB .. id, 'state', 'queued')
            count(spec.queue, v[1], -1)
            count(spec.queue, 'queued', 1)
        end
        transitions().add_ready(spec, to_number(v[6]), to_number(v[10]), id, to_number(v[5]), v[12])
        return nil
    end
    if tier == 2 then
        safe_call('ZADD', quarantine_key(spec.queue), v[6], id)
        return nil
    end
    if tier == 1 or is_last_attempt(spec, v) then
        if max_must_start <= 0 then
            return tier == 1 and 'suspect' or 'last'
        end
        max_must_start = max_must_start - 1
    end
    return v
end

-- Fast path, for most ids: a job that was never claimed and whose id the store generated.
local function try_claim_new(id)
    local v = redis.pcall('HMGET', JOB .. id, 'state', 'spec', 'pickupTime', 'dueTime', 'created', 'payload', 'options',
        'claims')
    local spec = v[1] == 'queued' and not v[3] and not v[8] and parse_spec(v[2])
    -- v is an error for a key of another type
    if not spec or spec.is_limited or spec.max_attempts == 1 and max_must_start <= 0 then
        return false
    end
    if spec.max_attempts == 1 then
        max_must_start = max_must_start - 1
    end
    claim_new(id, 'queued', v[2], v[6], v[4], v[5], v[7])
    return true
end

local function push_back(list, ids, first) -- ids from index `first` on
    for last = #ids, first, -1000 do
        local batch = {}
        for n = last, math.max(first, last - 999), -1 do
            batch[#batch + 1] = ids[n]
        end
        call('LPUSH', list, unpack(batch))
    end
end

local function claim_priority(queue, priority, free_slots)
    local list = ready_key(queue, priority)
    local skipped_ids = skipped[list] and safe_call('LPOP', list, skipped[list]) or {}
    while free_slots > 0 and read_budget > 0 do
        local ids = safe_call('LPOP', list, math.min(free_slots, read_budget))
        if not ids or #ids == 0 then
            break
        end
        read_budget = read_budget - #ids
        for n, id in ipairs(ids) do
            if not has_tombstones and not has_overdue and try_claim_new(id) then
                free_slots = free_slots - 1
            else
                local v = claimable(id, queue, list)
                if v == 'suspect' then
                    skipped_ids[#skipped_ids + 1] = id
                elseif v == 'last' then
                    push_back(list, ids, n)
                    stopped_at_last_attempt, free_slots = 1, 0
                    break
                elseif v then
                    claim_job(id, v)
                    free_slots = free_slots - 1
                end
            end
        end
    end
    if skipped_ids[1] then
        push_back(list, skipped_ids, 1)
        skipped[list] = #skipped_ids
    end
    local may_look_further = #skipped_ids < MAX_SKIPPED and (claimed_count == 0 or #skipped_ids > 0)
    if free_slots > 0 and read_budget <= 0 and may_look_further and call('LLEN', list) > #skipped_ids then
        more = 1
    end
    return free_slots
end

local function claim_priorities(queue, free_slots)
    local priorities, is_zero_done = safe_call('ZRANGE', priorities_key(queue), 0, -1, 'WITHSCORES'), false
    for n = 1, #priorities, 2 do
        if not is_zero_done and tonumber(priorities[n + 1]) > 0 then
            free_slots, is_zero_done = claim_priority(queue, '0', free_slots), true
        end
        free_slots = claim_priority(queue, priorities[n], free_slots)
        if call('EXISTS', ready_key(queue, priorities[n])) == 0 then
            call('ZREM', priorities_key(queue), priorities[n])
        end
    end
    return is_zero_done and free_slots or claim_priority(queue, '0', free_slots)
end

-- Jobs of a queue with limits wait in its partitions; `unassigned` finds those without one.
local function skip_limited_queue(queue)
    if safe_call('ZCARD', quarantine_key(queue)) > 0 then
        quarantined = 1
    elseif call('EXISTS', ready_key(queue, '0'), priorities_key(queue)) == 0 then
        safe_call('ZREM', PREFIX .. 'queues', queue)
    end
end

local function find_limited()
    local is_limited = wildcard_slots ~= nil and call('EXISTS', PREFIX .. 'partitioned_queues')
    for _, queue in ipairs(is_limited == 1 and {} or queue_order) do
        if queue_slots[queue] > 0 and is_limited ~= 1
            and safe_call('ZSCORE', PREFIX .. 'partitioned_queues', queue) then
            is_limited = 1
        end
    end
    local unassigned = {}
    for queue in pairs(has_limit) do
        local is_wanted = (queue_slots[queue] or wildcard_slots and 1 or 0) > 0 and not paused[queue]
        if is_wanted and (isolated and call('EXISTS', quarantine_key(queue))
            or call('EXISTS', ready_key(queue, '0'), priorities_key(queue))) > 0 then
            unassigned[#unassigned + 1] = queue
        end
    end
    return is_limited == 1 and 1 or 0, unassigned
end

local function claim_queue(queue, slots)
    if has_limit[queue] then
        return skip_limited_queue(queue)
    elseif isolated then
        return claim_quarantined(queue)
    end
    local free_slots = math.min(slots, limit - claimed_count)
    if call('EXISTS', quarantine_key(queue), priorities_key(queue)) > 0 then
        quarantined = safe_call('ZCARD', quarantine_key(queue)) > 0 and 1 or quarantined
        free_slots = claim_priorities(queue, free_slots)
    else
        free_slots = claim_priority(queue, '0', free_slots)
    end
    if free_slots > 0 and call('EXISTS', ready_key(queue, '0'), priorities_key(queue), quarantine_key(queue)) == 0 then
        safe_call('ZREM', PREFIX .. 'queues', queue)
    end
end

local function is_full()
    return claimed_count >= (isolated and 1 or limit) or read_budget <= 0
end

local function claim_unnamed(queue)
    local claimed_before = claimed_count
    last_served = queue
    claim_queue(queue, wildcard_slots)
    wildcard_slots = wildcard_slots - claimed_count + claimed_before
end

local function claim_in_turn()
    for _, queue in ipairs(queue_order) do
        if queue_slots[queue] > 0 and not paused[queue] and not is_full() then
            claim_queue(queue, queue_slots[queue])
        end
    end
    if not wildcard_slots then
        return
    end
    local start, is_default_seen = last_served, queue_slots['default'] ~= nil or paused['default']
    for _, range in ipairs({ { '(' .. start, '+' }, { '-', '[' .. start } }) do
        for _, queue in ipairs(is_full() and {}
            or safe_call('ZRANGEBYLEX', PREFIX .. 'queues', range[1], range[2], 'LIMIT', 0, 1000)) do
            is_default_seen = is_default_seen or queue == 'default'
            if not paused[queue] and not queue_slots[queue] and not is_full() and wildcard_slots > 0 then
                claim_unnamed(queue)
            end
        end
    end
    if not is_default_seen and not is_full() and wildcard_slots > 0 and call('EXISTS', READY) == 1 then
        claim_unnamed('default') -- a job was added by hand
    end
end

if is_promoting and (has_scheduled or not wildcard_slots) then
    promoted = make_due_ready(queue_order, queue_slots, wildcard_slots)
end
local due = (has_scheduled or not wildcard_slots) and next_due() or '-1'
if due == '0' and is_promoting and ARGV[10] ~= '1' then
    more = 2
else
    claim_in_turn()
    write_leases()
end
if loaded_transitions then
    loaded_transitions.write_ready()
end
local is_limited, unassigned = 0, {}
if call('EXISTS', PREFIX .. 'partitioned_queues', PREFIX .. 'queues_with_limits') > 0 then
    is_limited, unassigned = find_limited()
end
finish()
return {
    claimed, promoted, due, quarantined, lease_until, last_served, more,
    next(skipped) and cmsgpack.pack(skipped) or '', stopped_at_last_attempt, is_limited, unassigned, expired,
}

-- name: deliver (partitions, transitions, waits, expiry, claim_common)
-- Claims delivered ids. ARGV: 6 limit, 7 max tier, 8 "1": make due ones ready, 9 slots of unnamed queues or "",
-- 10 max_must_start, 11 number of named queues, name and slots of each, then ids. Returns jobs, lease end, "1" if it
-- stopped at a job on its last attempt, and id and spec of expired jobs.
allow_when_full()
local limit, max_tier, wildcard_slots, max_must_start =
    tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[9]), tonumber(ARGV[10])
local queue_slots, paused, has_limit, jobs_by_slot, slot_names = {}, paused_queues(), queues_with_limits(), {}, {}
local first_id, stopped_at_last_attempt = 12 + 2 * tonumber(ARGV[11]), 0
local has_overdue = expire_overdue(MAX_BATCH) == MAX_BATCH -- more expired jobs may be among the ready ones
for i = 12, first_id - 1, 2 do
    queue_slots[ARGV[i]] = tonumber(ARGV[i + 1])
    slot_names[#slot_names + 1] = ARGV[i]
end

local function eligible(id)
    local v = read_fields(id, unpack(FIELDS))
    local spec = v and parse_spec(v[2] or '')
    if not spec or paused[spec.queue] or spec.is_limited or has_limit[spec.queue] or tier_of(v[5]) > max_tier then
        return nil -- jobs under limits are claimed in the turn of their partition
    end
    local is_delayed = v[1] == 'scheduled' or v[1] == 'failed' or v[1] == 'waiting'
    local is_due = is_delayed and ARGV[8] == '1' and to_number(v[6]) <= now
    if v[1] ~= 'queued' and not is_due or has_overdue and is_overdue(id) then
        return nil
    end
    local slot_name = queue_slots[spec.queue] and spec.queue or wildcard_slots and ''
    return slot_name, { to_number(v[6]), to_number(v[10]), id, v, spec }
end

local seen, is_before = {}, transitions().is_before
for i = first_id, #ARGV do
    local slot_name, job = nil, nil
    if not seen[ARGV[i]] then
        seen[ARGV[i]] = true
        slot_name, job = eligible(ARGV[i])
    end
    if slot_name then
        jobs_by_slot[slot_name] = jobs_by_slot[slot_name] or {}
        jobs_by_slot[slot_name][#jobs_by_slot[slot_name] + 1] = job
    end
end

if wildcard_slots then
    queue_slots[''] = wildcard_slots
    slot_names[#slot_names + 1] = ''
end
for _, slot_name in ipairs(slot_names) do
    local candidates = jobs_by_slot[slot_name] or {}
    table.sort(candidates, function(a, b)
        local one, other = to_number(a[5].priority), to_number(b[5].priority)
        if one ~= other then
            return one > other
        end
        return is_before(a, b)
    end)
    for n = 1, math.min(#candidates, queue_slots[slot_name], limit - claimed_count) do
        local job = candidates[n]
        if tier_of(job[4][5]) > 0 or is_last_attempt(job[5], job[4]) then
            if max_must_start <= 0 then
                stopped_at_last_attempt = 1
                break
            end
            max_must_start = max_must_start - 1
        end
        transitions().dequeue(job[3], job[5], job[4][1], to_number(job[4][5]))
        claim_job(job[3], job[4])
    end
end
write_leases()
finish()
return { claimed, lease_until, stopped_at_last_attempt, expired }

-- name: unconfirmed_claims
-- Running jobs that a worker claimed after an instant. ARGV: 3 worker, 4 instant, 5 lease in microseconds of its
-- claims, 6 leases to skip. Returns {id, claims} of each, the number of other leases examined, and 1 if there are more.
local min_lease_end = int(tonumber(ARGV[4]) + tonumber(ARGV[5]))
local ids = safe_call('ZRANGEBYSCORE', LEASES, '(' .. min_lease_end, '+inf', 'LIMIT', ARGV[6], MAX_BATCH)
local found = {}
for _, id in ipairs(ids) do
    local v = read_fields(id, 'state', 'claims', 'pickupTime', 'worker')
    if v and v[1] == 'running' and v[4] == ARGV[3] and to_number(v[3]) > tonumber(ARGV[4]) then
        found[#found + 1] = { id, claims_of(v[2], v[3]) }
    end
end
return { found, #ids - #found, #ids == MAX_BATCH and 1 or 0 }

-- name: mark_unreadable (partitions, transitions, waits)
-- Ends a claimed job that cannot be read. ARGV: 3 id, 4 error.
allow_when_full()
local v = read_fields(ARGV[3], 'state', 'spec', 'awaited')
local spec = v and parse_spec(v[2] or '')
if spec and v[1] == 'running' then
    safe_call('ZREM', LEASES, ARGV[3])
    delete_pieces(ARGV[3], 'error')
    local fields = { 'state', 'dead', 'reason', 'payload', 'endTime', NOW, 'errorGroup', 'unreadable' }
    append_pieces(fields, 'error', ARGV[4])
    call('HSET', JOB .. ARGV[3], unpack(fields))
    safe_call('ZADD', PREFIX .. 'ended:dead', NOW, ARGV[3])
    count(spec.queue, 'running', -1)
    count(spec.queue, 'dead', 1)
    ended_ids[1] = ARGV[3]
    if v[3] then
        note_end(ARGV[3], 'dead')
    end
    local partition_field = partition_field_of(ARGV[3], spec)
    if partition_field then
        release(spec.queue, partition_field)
        write_released()
    end
end
finish()
return 0
