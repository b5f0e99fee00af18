-- fragment: claim_common
-- Common to the scripts that claim. ARGV: 3 worker, 4 lease in microseconds, 5 task of jobs written by hand.
local worker, lease_until = ARGV[3], int(now + tonumber(ARGV[4]))
local claimed, leases, claimed_count, claimed_by_spec = {}, {}, 0, {}
local DONE, MORE_TO_EXAMINE, MORE_DUE = 0, 1, 2 -- status of a claim, as `ClaimStatus` in Python

-- A job with the fields that a claim needs; nil for a key of another type. Of a missing job all of them are false.
local function read_job(id)
    local state, spec_text, claims, attempts, lost_leases, run_at, created, payload, options, seq, started_at,
        partition_field = read_fields(id, 'state', 'spec', 'claims', 'attempts', 'lost_leases', 'dueTime', 'created',
        'payload', 'options', 'seq', 'pickupTime', 'partition')
    return state ~= nil and {
        id = id, state = state, spec_text = spec_text, claims = claims, attempts = attempts, lost_leases = lost_leases,
        run_at = run_at, created = created, payload = payload, options = options, seq = seq, started_at = started_at,
        partition_field = partition_field,
    } or nil
end

-- Completes a hash written by hand to a job, with defaults.
local function import_manual_job(id, queue)
    local payload, own_task, given_run_at = read_fields(id, 'payload', 'task', 'dueTime')
    local task = own_task or ARGV[5] ~= '' and ARGV[5]
    if not task or not payload then
        count_anomaly('orphans')
        return nil
    end
    local seq = to_number(safe_call('GET', PREFIX .. 'seq')) + 1
    call('SET', PREFIX .. 'seq', int(seq))
    local is_due = to_number(given_run_at) > 0 and to_number(given_run_at) <= now and string.match(given_run_at, '^%d+$')
    call('HSET', JOB .. id, 'state', 'queued', 'spec', '0 5 ' .. queue .. '\n' .. task,
        'dueTime', is_due and given_run_at or NOW, 'created', NOW, 'seq', seq)
    safe_call('HSET', index_key(seq), seq, id)
    safe_call('ZADD', PREFIX .. 'chunks', math.floor(seq / INDEX_CHUNK), math.floor(seq / INDEX_CHUNK))
    count(queue, 'queued', 1)
    return read_job(id)
end

-- True if the next attempt is the last; `max_attempts` of a spec is nil for no limit.
local function is_last_attempt(spec, job)
    return spec.max_attempts
        and to_number(job.attempts or claims_of(job.claims, job.started_at)) + 1 >= spec.max_attempts
end

local function add_lease(id, spec_text, state)
    claimed_count = claimed_count + 1
    leases[2 * claimed_count - 1], leases[2 * claimed_count] = lease_until, id
    if state == 'queued' then
        claimed_by_spec[spec_text] = (claimed_by_spec[spec_text] or 0) + 1
    else
        local spec = parse_spec(spec_text)
        count(spec.queue, state, -1)
        count(spec.queue, 'running', 1)
    end
end

-- Appends the reply for a job: id, spec, payload, `run_at`; with options or earlier claims also created, options,
-- claims, attempts, lost_leases. A first claim writes neither claims nor attempts: `pickupTime` implies one of each.
local function write_first_claim(id, state, spec_text, payload, run_at, created, options)
    call('HSET', JOB .. id, 'state', 'running', 'worker', worker, 'pickupTime', NOW)
    payload = join_pieces(id, 'payload', payload)
    add_lease(id, spec_text, state)
    if created or options then
        claimed[claimed_count] = {
            id, spec_text, payload, run_at, created, join_pieces(id, 'options', options), '1', '1', false }
    else
        claimed[claimed_count] = { id, spec_text, payload, run_at }
    end
end

local function claim_job(job)
    local id = job.id
    if not job.claims and not job.started_at then
        return write_first_claim(id, job.state, job.spec_text, job.payload, job.run_at, job.created, job.options)
    end
    local earlier_claims = claims_of(job.claims, job.started_at)
    local claims, attempts = int(to_number(earlier_claims) + 1), int(to_number(job.attempts or earlier_claims) + 1)
    call('HSET', JOB .. id, 'state', 'running', 'claims', claims, 'attempts', attempts,
        'worker', worker, 'pickupTime', NOW)
    add_lease(id, job.spec_text, job.state)
    claimed[claimed_count] = {
        id, job.spec_text, join_pieces(id, 'payload', job.payload), job.run_at, job.created,
        join_pieces(id, 'options', job.options), claims, attempts, job.lost_leases,
    }
end

local function paused_queues()
    local paused = {}
    for _, queue in ipairs(safe_call('SMEMBERS', PREFIX .. 'paused')) do
        paused[queue] = true
    end
    return paused
end

-- Calls `serve(queue)`, true if it was not skipped, for the queues of a sorted set in order, from the one behind
-- `last_served` on, until `is_done()`, or MAX_SERVED were served: the next script continues there. Skipped queues do
-- not count. Returns true unless it stopped at MAX_SERVED.
local function each_queue(key, last_served, is_done, serve)
    local PAGE, MAX_SERVED = 1000, 1000
    local served = 0
    for _, range in ipairs({ { '(' .. last_served, '+' }, { '-', '[' .. last_served } }) do
        local first, names = range[1], nil
        while not is_done() and served < MAX_SERVED and (not names or #names == PAGE) do
            names = safe_call('ZRANGEBYLEX', key, first, range[2], 'LIMIT', 0, PAGE)
            for _, queue in ipairs(names) do
                served = served + (serve(queue) and 1 or 0)
            end
            first = '(' .. (names[#names] or '')
        end
    end
    return served < MAX_SERVED
end

-- Makes due jobs of the requested queues ready; returns their number. Needs `transitions`.
local function make_due_ready(queues, queue_slots, wildcard_slots)
    local promoted = 0
    if wildcard_slots then
        queues = safe_call('ZRANGEBYSCORE', PREFIX .. 'due', '-inf', NOW, 'LIMIT', 0, MAX_PER_SCRIPT)
        if call('EXISTS', SCHEDULE) == 1 then
            queues[#queues + 1] = 'default' -- a job may have been added by hand
        end
    end
    for _, queue in ipairs(queues) do
        if (wildcard_slots or queue_slots[queue] > 0) and promoted < MAX_PER_SCRIPT then
            promoted = promoted + transitions().promote(queue, MAX_PER_SCRIPT - promoted)
        end
    end
    write_next_due()
    return promoted
end

local function queues_with_limits()
    local limited_queues = {}
    for _, queue in ipairs(safe_call('SMEMBERS', PREFIX .. 'queues_with_limits')) do
        limited_queues[queue] = true
    end
    return limited_queues
end

local function write_leases()
    if claimed_count > 0 then
        safe_call('ZADD', LEASES, unpack(leases))
    end
    for spec_text, number in pairs(claimed_by_spec) do
        local spec = parse_spec(spec_text)
        count(spec.queue, 'queued', -number)
        count(spec.queue, 'running', number)
    end
end

-- name: claim (partitions, transitions, waits, expiry, claim_common)
-- Claims ready jobs in order. ARGV: 6 max_jobs, 7 max_must_start, 8 "1": one quarantined job alone, 9 "1": make due jobs
-- ready first, 10 "1": claim although more jobs are due, 11 slots of unlisted queues or "", 12 the queue served
-- last, 13 how many ids to skip at the head of each ready list, then name and slots of each named queue, in order.
-- Returns 1 jobs, 2 promoted, 3 microseconds until the next job is due or -1, 4 quarantined, 5 lease end, 6 the queue served
-- last, 7 its status: MORE_DUE if nothing was claimed because more jobs are due, MORE_TO_EXAMINE if it read as many ids
-- as it may, 8 how many ids to skip next or "", 9 1 if it stopped at a job on its last attempt beyond max_must_start,
-- 10 1 if a requested queue has jobs under limits, 11 queues with limits whose ready jobs have no partition yet, none
-- of which it claims, 12 id and spec of each expired job.
-- Needs no `allow_when_full`: its first write removes something (LPOP, ZREM), which Redis allows when its memory is full.
local max_jobs, max_must_start, isolated = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8] == '1'
local is_promoting, wildcard_slots, last_served = ARGV[9] == '1', tonumber(ARGV[11]), ARGV[12]
local queue_slots, queue_order = {}, {}
local promoted, quarantined, status, stopped_at_last_attempt, reads_left = 0, 0, DONE, 0, max_jobs + 2 * MAX_PER_SCRIPT
-- By ready list, the number of ids at its head that this claim may not take. Its next script starts after them. At most
-- MAX_SKIPPED are skipped: ids further back wait until those are claimed.
local skipped = ARGV[13] ~= '' and cmsgpack.unpack(ARGV[13]) or {}
local MAX_SKIPPED = 5000 -- popping and pushing them back takes a millisecond
for i = 14, #ARGV, 2 do
    queue_slots[ARGV[i]] = tonumber(ARGV[i + 1])
    queue_order[#queue_order + 1] = ARGV[i]
end
local paused, limited_queues, has_tombstones, has_scheduled, may_hold_expired = {}, {}, false, false, false
-- Usually none of these exists.
if call('EXISTS', PREFIX .. 'paused', PREFIX .. 'tombstones', PREFIX .. 'due', SCHEDULE, PREFIX .. 'expiry',
        PREFIX .. 'queues_with_limits') > 0 then
    may_hold_expired = end_expired(MAX_PER_SCRIPT) == MAX_PER_SCRIPT -- more expired jobs may be among the ready ones
    paused, limited_queues = paused_queues(), queues_with_limits()
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
    local best_priority, best_position, chosen
    for _, id in ipairs(safe_call('ZRANGE', quarantine_key(queue), 0, MAX_PER_SCRIPT - 1)) do
        local job = read_job(id)
        local spec = job and parse_spec(job.spec_text or '')
        if not spec or job.state ~= 'queued' then
            call('ZREM', quarantine_key(queue), id)
        elseif not spec.is_limited then
            local priority, position = to_number(spec.priority), { to_number(job.run_at), to_number(job.seq) }
            if not chosen or priority > best_priority
                or priority == best_priority and transitions().is_before(position, best_position) then
                best_priority, best_position, chosen = priority, position, job
            end
        end
    end
    if chosen then
        call('ZREM', quarantine_key(queue), chosen.id)
        claim_job(chosen)
    end
end

-- Checks an id of a ready list. Returns its job; nil if it was dropped or moved; "suspect" to skip it; "last" to stop there.
local function check_popped(id, queue, list)
    if has_tombstones and transitions().clear_tombstone(list, id) then
        return nil
    end
    local job = read_job(id)
    if not job or not job.spec_text then
        job = import_manual_job(id, queue)
    end
    local spec = job and parse_spec(job.spec_text)
    local is_delayed = spec and (job.state == 'scheduled' or job.state == 'failed') -- moved by hand
    if not spec or not is_delayed and job.state ~= 'queued'
        or is_delayed and safe_call('ZSCORE', schedule_key(spec.queue), id) then
        invalidate_repair()
        return nil
    end
    if may_hold_expired and is_expired(id) then
        expire(id, job.state, job.spec_text)
        safe_call('ZREM', PREFIX .. 'expiry', id)
        return nil
    end
    local tier = tier_of(job.lost_leases)
    if spec.is_limited and job.partition_field then -- it belongs in its partition
        if job.state ~= 'queued' then
            call('HSET', JOB .. id, 'state', 'queued')
            count(spec.queue, job.state, -1)
            count(spec.queue, 'queued', 1)
        end
        transitions().add_ready(spec, to_number(job.run_at), to_number(job.seq), id, to_number(job.lost_leases),
            job.partition_field)
        invalidate_repair()
        return nil
    end
    if tier == 2 then
        safe_call('ZADD', quarantine_key(spec.queue), job.run_at, id)
        invalidate_repair()
        return nil
    end
    if tier == 1 or is_last_attempt(spec, job) then
        if max_must_start <= 0 then
            return tier == 1 and 'suspect' or 'last'
        end
        max_must_start = max_must_start - 1
    end
    return job
end

-- Fast path, for most ids: claims a job that was never claimed and whose id the store generated; false for any other job.
local function claim_if_new(id)
    local state, spec_text, started_at, run_at, created, payload, options, claims = unpack(redis.pcall('HMGET', JOB .. id,
        'state', 'spec', 'pickupTime', 'dueTime', 'created', 'payload', 'options', 'claims'))
    local spec = state == 'queued' and not started_at and not claims and parse_spec(spec_text)
    if not spec or spec.is_limited or spec.max_attempts == 1 and max_must_start <= 0 then
        return false
    end
    if spec.max_attempts == 1 then
        max_must_start = max_must_start - 1
    end
    write_first_claim(id, 'queued', spec_text, payload, run_at, created, options)
    return true
end

local function push_back(list, ids, first) -- ids from index `first` on
    for last = #ids, first, -1000 do
        local part = {}
        for n = last, math.max(first, last - 999), -1 do
            part[#part + 1] = ids[n]
        end
        call('LPUSH', list, unpack(part))
    end
end

local function claim_priority(queue, priority, free_slots)
    local list = ready_key(queue, priority)
    local skipped_ids = skipped[list] and safe_call('LPOP', list, skipped[list]) or {}
    while free_slots > 0 and reads_left > 0 and #skipped_ids < MAX_SKIPPED do
        local ids = safe_call('LPOP', list, math.min(free_slots, reads_left))
        if not ids or #ids == 0 then
            break
        end
        reads_left = reads_left - #ids
        for n, id in ipairs(ids) do
            if not has_tombstones and not may_hold_expired and claim_if_new(id) then
                free_slots = free_slots - 1
            else
                local job = check_popped(id, queue, list)
                if job == 'suspect' then
                    skipped_ids[#skipped_ids + 1] = id
                elseif job == 'last' then
                    push_back(list, ids, n)
                    stopped_at_last_attempt, free_slots = 1, 0
                    break
                elseif job then
                    claim_job(job)
                    free_slots = free_slots - 1
                end
            end
        end
    end
    if skipped_ids[1] then
        push_back(list, skipped_ids, 1)
        skipped[list] = #skipped_ids
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

-- Jobs of a queue with limits wait in its partitions; `find_unassigned` finds those without one.
local function skip_limited_queue(queue)
    if safe_call('ZCARD', quarantine_key(queue)) > 0 then
        quarantined = 1
    elseif call('EXISTS', ready_key(queue, '0'), priorities_key(queue)) == 0 then
        safe_call('ZREM', PREFIX .. 'queues', queue)
    end
end

local function find_limited()
    local has_limited_jobs = wildcard_slots ~= nil and call('EXISTS', PREFIX .. 'partitioned_queues')
    for _, queue in ipairs(has_limited_jobs == 1 and {} or queue_order) do
        if queue_slots[queue] > 0 and has_limited_jobs ~= 1
            and safe_call('ZSCORE', PREFIX .. 'partitioned_queues', queue) then
            has_limited_jobs = 1
        end
    end
    local unassigned_queues = {}
    for queue in pairs(limited_queues) do
        local is_wanted = (queue_slots[queue] or wildcard_slots and 1 or 0) > 0 and not paused[queue]
        if is_wanted and (isolated and call('EXISTS', quarantine_key(queue))
            or call('EXISTS', ready_key(queue, '0'), priorities_key(queue))) > 0 then
            unassigned_queues[#unassigned_queues + 1] = queue
        end
    end
    return has_limited_jobs == 1 and 1 or 0, unassigned_queues
end

local function claim_queue(queue, slots)
    if limited_queues[queue] then
        return skip_limited_queue(queue)
    elseif isolated then
        return claim_quarantined(queue)
    end
    local free_slots = math.min(slots, max_jobs - claimed_count)
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
    return claimed_count >= (isolated and 1 or max_jobs) or reads_left <= 0
end

local function claim_unlisted(queue)
    local claimed_before = claimed_count
    last_served = queue
    claim_queue(queue, wildcard_slots)
    wildcard_slots = wildcard_slots - claimed_count + claimed_before
end

local function claim_queues()
    for _, queue in ipairs(queue_order) do
        if queue_slots[queue] > 0 and not paused[queue] and not is_full() then
            claim_queue(queue, queue_slots[queue])
        end
    end
    if not wildcard_slots then
        return
    end
    local is_default_seen = queue_slots['default'] ~= nil or paused['default']
    local function is_done()
        return is_full() or wildcard_slots <= 0
    end
    local saw_all = each_queue(PREFIX .. 'queues', last_served, is_done, function(queue)
        is_default_seen = is_default_seen or queue == 'default'
        if not paused[queue] and not queue_slots[queue] and not is_done() then
            claim_unlisted(queue)
            return true
        end
    end)
    if saw_all and not is_default_seen and not is_done() and call('EXISTS', READY) == 1 then
        claim_unlisted('default') -- a job was added by hand
    end
end

if is_promoting and (has_scheduled or not wildcard_slots) then
    promoted = make_due_ready(queue_order, queue_slots, wildcard_slots)
end
local due = (has_scheduled or not wildcard_slots) and next_due() or '-1'
if due == '0' and is_promoting and ARGV[10] ~= '1' then
    status = MORE_DUE
else
    claim_queues()
    write_leases()
    status = reads_left <= 0 and MORE_TO_EXAMINE or DONE
end
if loaded_transitions then
    loaded_transitions.write_ready()
end
local has_limited_jobs, unassigned_queues = 0, {}
if call('EXISTS', PREFIX .. 'partitioned_queues', PREFIX .. 'queues_with_limits') > 0 then
    has_limited_jobs, unassigned_queues = find_limited()
end
finish()
return {
    claimed, promoted, due, quarantined, lease_until, last_served, status,
    next(skipped) and cmsgpack.pack(skipped) or '', stopped_at_last_attempt, has_limited_jobs, unassigned_queues, expired,
}

-- name: claim_ids (partitions, transitions, waits, expiry, claim_common)
-- Claims the jobs of ids. ARGV: 6 max_jobs, 7 max tier, 8 "1": make due ones ready, 9 slots of unlisted queues or "",
-- 10 max_must_start, 11 number of named queues, name and slots of each, then different ids. Returns jobs, lease end, "1" if it
-- stopped at a job on its last attempt, and id and spec of expired jobs.
allow_when_full()
local max_jobs, max_tier, wildcard_slots, max_must_start =
    tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[9]), tonumber(ARGV[10])
local queue_slots, paused, limited_queues, jobs_by_slot, slot_names = {}, paused_queues(), queues_with_limits(), {}, {}
local first_id, stopped_at_last_attempt = 12 + 2 * tonumber(ARGV[11]), 0
local may_hold_expired = end_expired(MAX_PER_SCRIPT) == MAX_PER_SCRIPT -- more expired jobs may be among the ready ones
for i = 12, first_id - 1, 2 do
    queue_slots[ARGV[i]] = tonumber(ARGV[i + 1])
    slot_names[#slot_names + 1] = ARGV[i]
end

local function read_claimable(id)
    local job = read_job(id)
    local spec = job and parse_spec(job.spec_text or '')
    if not spec or paused[spec.queue] or spec.is_limited or limited_queues[spec.queue]
        or tier_of(job.lost_leases) > max_tier then
        return nil -- jobs under limits are claimed by claim_limited, in the order of start tags
    end
    local is_delayed = job.state == 'scheduled' or job.state == 'failed' or job.state == 'waiting'
    local is_due = is_delayed and ARGV[8] == '1' and to_number(job.run_at) <= now
    if job.state ~= 'queued' and not is_due or may_hold_expired and is_expired(id) then
        return nil
    end
    local slot_name = queue_slots[spec.queue] and spec.queue or wildcard_slots and ''
    job.spec, job.position = spec, { to_number(job.run_at), to_number(job.seq) }
    return slot_name, job
end

local is_before = transitions().is_before
for i = first_id, #ARGV do
    local slot_name, job = read_claimable(ARGV[i])
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
        local one, other = to_number(a.spec.priority), to_number(b.spec.priority)
        if one ~= other then
            return one > other
        end
        return is_before(a.position, b.position)
    end)
    local free_slots = math.min(queue_slots[slot_name], max_jobs - claimed_count)
    for _, job in ipairs(candidates) do
        local is_suspect = tier_of(job.lost_leases) > 0
        local must_start = is_suspect or is_last_attempt(job.spec, job)
        local is_beyond = must_start and max_must_start <= 0
        if free_slots <= 0 then
            break
        elseif is_beyond and not is_suspect then
            stopped_at_last_attempt = 1
            break
        elseif not is_beyond then -- a suspect beyond max_must_start is passed over
            max_must_start = max_must_start - (must_start and 1 or 0)
            free_slots = free_slots - 1
            transitions().dequeue(job.id, job.spec, job.state, to_number(job.lost_leases))
            if job.state == 'waiting' then
                call('HDEL', JOB .. job.id, 'reason')
            end
            claim_job(job)
        end
    end
end
write_leases()
finish()
return { claimed, lease_until, stopped_at_last_attempt, expired }

-- name: unconfirmed_claims
-- Running jobs that a worker claimed after an instant, if their leases stand. ARGV: 3 worker, 4 instant, 5 lease of its
-- claims in microseconds, 6 leases to skip. Returns {id, claims} of each, the number of other leases examined, and 1 if there are more.
local min_lease_end = int(math.max(tonumber(ARGV[4]) + tonumber(ARGV[5]), now))
local ids = safe_call('ZRANGEBYSCORE', LEASES, '(' .. min_lease_end, '+inf', 'LIMIT', ARGV[6], MAX_PER_SCRIPT)
local found = {}
for _, id in ipairs(ids) do
    local state, claims, started_at, stored_worker = read_fields(id, 'state', 'claims', 'pickupTime', 'worker')
    if state == 'running' and stored_worker == ARGV[3] and to_number(started_at) > tonumber(ARGV[4]) then
        found[#found + 1] = { id, claims_of(claims, started_at) }
    end
end
return { found, #ids - #found, #ids == MAX_PER_SCRIPT and 1 or 0 }

-- name: mark_unreadable (partitions, transitions, waits)
-- Ends a claimed job that cannot be read, if that claim still has it. ARGV: 3 id, 4 claims, 5 error.
allow_when_full()
local state, claims, started_at, spec_text, has_dependents = read_fields(ARGV[3], 'state', 'claims', 'pickupTime',
    'spec', 'hasDependents')
local spec = parse_spec(spec_text or '')
if spec and state == 'running' and claims_of(claims, started_at) == ARGV[4] then
    safe_call('ZREM', LEASES, ARGV[3])
    delete_pieces(ARGV[3], 'error')
    local fields = { 'state', 'dead', 'reason', 'payload', 'endTime', NOW, 'errorGroup', 'unreadable' }
    append_pieces(fields, 'error', ARGV[5])
    call('HSET', JOB .. ARGV[3], unpack(fields))
    safe_call('ZADD', PREFIX .. 'ended:dead', NOW, ARGV[3])
    count(spec.queue, 'running', -1)
    count(spec.queue, 'dead', 1)
    ended_ids[1] = ARGV[3]
    if has_dependents then
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
