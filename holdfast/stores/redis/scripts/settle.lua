-- name: settle (partitions, transitions, waits)
-- Applies each settlement whose guard holds, in order. ARGV from 3 on: groups of settlements, each begins with its kind.
-- "worker": whose leases follow, "" for any worker.
-- "first": packed ids, their length first and all in one text: successes without a result under a first claim, as most are.
-- "success": a number, then id, claims and result ("" for none) of each. Both need a live lease.
-- "other": id, claims, state, reason, delay, flags, result, "=" + error, "=" + traceback,
-- group of the error. Flag "r" (refund): the
-- attempt does not count. Flag "e" (lease expired): the guard demands an expired lease, without it a live one. Flag
-- "p" and a number: priority of the job if it failed.
-- Returns 1 (accepted; 2 for a job under limits), or {accepted, state, run_at, 1 for a job under limits}.
allow_when_full()
local answers, succeeded_entries, settled_ids, settled_count = {}, {}, {}, 0
local succeeded_by_spec = {} -- spec → number
local failures = 0
local worker = '' -- guards against old claims that a failover brings back
local END_STAMP = NOW .. ':'

-- Usually no lease at all has expired: then no ZSCORE is needed.
local first_lease_end = safe_call('ZRANGE', LEASES, 0, 0, 'WITHSCORES')[2]
local all_live = first_lease_end and tonumber(first_lease_end) > now

local function lease_end(id)
    return all_live and math.huge or tonumber(call('ZSCORE', LEASES, id) or nil)
end

local function belongs_to_other(stored_worker)
    return worker ~= '' and stored_worker ~= worker
end

local function refuse(id, claims, state)
    count_lost_write(id, claims, worker)
    return { 0, state }
end

local function release_limits(id, spec) -- returns the field `partition`, nil for a job under no limit
    local partition_field = partition_field_of(id, spec)
    if partition_field then
        release(spec.queue, partition_field)
    end
    return partition_field
end

local function succeed(id, claims, result)
    local key = JOB .. id
    local state, stored_claims, spec_text, is_cancelling, stored_worker, has_dependents =
        unpack(redis.pcall('HMGET', key, 'state', 'claims', 'spec', 'cancel', 'worker', 'hasDependents'))
    if not state then
        return { 0 }
    elseif state ~= 'running' or (stored_claims or '1') ~= claims or belongs_to_other(stored_worker)
        or (not all_live and (lease_end(id) or 0) <= now) then
        return refuse(id, claims, state)
    end
    if claims ~= '1' or is_cancelling then -- only such a job can have these fields
        call('HDEL', key, 'lost_leases', 'cancel', 'reason', 'errorGroup')
        delete_pieces(id, 'error')
    end
    if result == '' then
        call('HSET', key, 'state', 'succeeded', 'endTime', NOW)
    elseif #result <= PIECE_BYTES then
        call('HSET', key, 'state', 'succeeded', 'endTime', NOW, 'result', result)
    else
        local fields = { 'state', 'succeeded', 'endTime', NOW }
        append_pieces(fields, 'result', result)
        call('HSET', key, unpack(fields))
    end
    settled_count = settled_count + 1
    settled_ids[settled_count] = id
    ended_ids[#ended_ids + 1] = id
    succeeded_entries[#succeeded_entries + 1] = END_STAMP .. id
    succeeded_by_spec[spec_text] = (succeeded_by_spec[spec_text] or 0) + 1
    if has_dependents then
        note_end(id, 'succeeded')
    end
    local spec = parse_spec(spec_text)
    if spec and spec.is_limited then
        return release_limits(id, spec) and 2 or 1
    end
    return 1
end

local function append_attempt(id, claims, attempts, stored_worker, started_at, state, reason, error, traceback)
    safe_call('RPUSH', PREFIX .. 'attempts:' .. id, cmsgpack.pack({
        claims, attempts or claims, stored_worker, started_at, NOW, state, reason ~= '' and reason,
        error ~= '' and string.sub(error, 2), traceback ~= '' and string.sub(traceback, 2),
    }))
end

-- True for the receiver of an earlier lease, to which no signal is given.
local function has_stale_receiver(id, claims)
    local found = safe_call('HGET', PREFIX .. 'receiver:' .. id, 'claims')
    return found and found ~= '0' and found ~= claims
end

local function settle_other(n)
    local id, claims, state, reason, delay = ARGV[n], ARGV[n + 1], ARGV[n + 2], ARGV[n + 3], ARGV[n + 4]
    local flags, result, error, traceback, group = ARGV[n + 5], ARGV[n + 6], ARGV[n + 7], ARGV[n + 8], ARGV[n + 9]
    local refund, lease_expired = string.find(flags, 'r', 1, true), string.find(flags, 'e', 1, true) ~= nil
    local old_state, stored_claims, spec_text, is_cancelling, counted_attempts, stored_worker, started_at, old_lost_leases, old_run_at,
        created, seq, waits, has_dependents = read_fields(id, 'state', 'claims', 'spec', 'cancel', 'attempts', 'worker',
        'pickupTime', 'lost_leases', 'dueTime', 'created', 'seq', 'waits', 'hasDependents')
    local spec, lease = spec_text and parse_spec(spec_text), lease_end(id)
    if not spec then
        return { 0 }
    elseif old_state ~= 'running' or (stored_claims or '1') ~= claims or belongs_to_other(stored_worker) or not lease
        or (lease <= now) ~= lease_expired then
        return refuse(id, claims, old_state)
    end
    local requested_reason = reason
    if is_cancelling and NOT_STARTED[state] then
        state, reason = 'cancelled', 'cancelled'
    end
    if state == 'waiting' and (to_number(waits) == 0 or has_stale_receiver(id, claims)) then
        state, delay, reason = 'scheduled', '0', '' -- what it waited for has come
    end
    if not refund and state ~= 'succeeded' then
        append_attempt(id, claims, counted_attempts, stored_worker, started_at, state, requested_reason, error, traceback)
    end
    if not refund and state ~= 'succeeded' and not ENDED_STATES[state] then
        failures = failures + 1
        safe_call('ZADD', PREFIX .. 'failures', NOW, claims .. ' ' .. id)
    end
    local lost_leases = lease_expired and to_number(old_lost_leases) + 1 or refund and to_number(old_lost_leases) or 0
    local run_at = delay ~= '' and now + tonumber(delay) or to_number(state == 'waiting' and NEVER or old_run_at)
    -- another program may have set it to 0
    local attempts = math.max(0, to_number(counted_attempts or claims) - (refund and 1 or 0))
    local fields = { 'state', state, 'attempts', int(attempts) }
    local function set(field, value)
        fields[#fields + 1] = field
        fields[#fields + 1] = value
    end
    call('HDEL', JOB .. id, 'lost_leases', 'cancel', 'reason')
    if state == 'succeeded' or error ~= '' then
        call('HDEL', JOB .. id, 'errorGroup')
        delete_pieces(id, 'error')
    end
    if state ~= 'succeeded' and error ~= '' then
        append_pieces(fields, 'error', string.sub(error, 2))
        set('errorGroup', group)
    end
    if delay ~= '' or state == 'waiting' then
        set('dueTime', int(run_at))
        set('created', created or old_run_at) -- absent while equal to `run_at`
    end
    if lost_leases > 0 then
        set('lost_leases', int(lost_leases))
    end
    local priority = state == 'failed' and string.match(flags, 'p(-?%d+)')
    if priority then
        set('spec', (string.gsub(spec_text, '^%S+', priority)))
    end
    if reason ~= '' then
        set('reason', reason)
    end
    if result ~= '' then
        append_pieces(fields, 'result', result)
    end
    if ENDED_STATES[state] then
        set('endTime', NOW)
    end
    call('HSET', JOB .. id, unpack(fields))
    settled_count = settled_count + 1
    settled_ids[settled_count] = id
    count(spec.queue, 'running', -1)
    count(spec.queue, state, 1)
    local partition_field = release_limits(id, spec)
    count_unstarted(partition_field, ENDED_STATES[state] and 0 or 1)
    if state == 'succeeded' then
        succeeded_entries[#succeeded_entries + 1] = END_STAMP .. id
    elseif ENDED_STATES[state] then
        safe_call('ZADD', PREFIX .. 'ended:' .. state, NOW, id)
    elseif state == 'queued' then
        transitions().add_ready(spec, run_at, to_number(seq), id, lost_leases, partition_field)
    elseif state ~= 'waiting' or delay ~= '' then
        transitions().schedule(spec.queue, run_at, id)
    end
    if ENDED_STATES[state] then
        ended_ids[#ended_ids + 1] = id
        if has_dependents then
            note_end(id, state)
        end
    else
        notify('ready_jobs', 'queue:' .. spec.queue)
    end
    return { 1, state, int(run_at), partition_field and 1 or 0 }
end

local at = 3
while at <= #ARGV do
    local mode = ARGV[at]
    if mode == 'worker' then
        worker = ARGV[at + 1]
        at = at + 2
    elseif mode == 'first' then
        local length, ids = tonumber(ARGV[at + 1]), ARGV[at + 2]
        for n = 1, #ids, length do
            answers[#answers + 1] = succeed(string.sub(ids, n, n + length - 1), '1', '')
        end
        at = at + 3
    elseif mode == 'success' then
        local last = at + 3 * tonumber(ARGV[at + 1]) - 1
        for n = at + 2, last, 3 do
            answers[#answers + 1] = succeed(ARGV[n], ARGV[n + 1], ARGV[n + 2])
        end
        at = last + 3
    else
        answers[#answers + 1] = settle_other(at + 1)
        at = at + 11
    end
end
if settled_count > 0 then
    call('ZREM', LEASES, unpack(settled_ids))
end
if #succeeded_entries > 0 then
    safe_call('RPUSH', PREFIX .. 'ended:succeeded', unpack(succeeded_entries))
end
if failures > 0 then
    call('EXPIRE', PREFIX .. 'failures', 3600) -- the longest time between two reads of job events
    if call('ZCARD', PREFIX .. 'failures') > MAX_FAILURES then
        call('ZREMRANGEBYRANK', PREFIX .. 'failures', 0, -MAX_FAILURES - 1)
    end
end
for spec_text, number in pairs(succeeded_by_spec) do
    local spec = parse_spec(spec_text)
    if spec then
        count(spec.queue, 'running', -number)
        count(spec.queue, 'succeeded', number)
    end
end
if loaded_transitions then
    loaded_transitions.write_ready()
end
write_released()
finish()
return answers
