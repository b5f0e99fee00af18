-- name: settle (partitions, transitions, waits)
-- Applies each settlement whose guard holds, in order. ARGV from 3 on: runs of settlements, each begins with its kind.
-- "worker": whose leases follow, "" for any worker.
-- "first": a length, and ids of that length in one text: successes without a result under a first claim, as most are.
-- "success": a number, then id, claims and result ("" for none) of each. Both need a live lease.
-- "other": id, claims, state, reason, delay, flags, result, "=" + error, "=" + traceback,
-- group of the error. Flag "r" (refund): the
-- attempt does not count. Flag "e" (lease expired): the guard demands an expired lease, without it a live one.
-- Returns 1 (accepted; 2 for a job under limits), or {accepted, state, run_at, 1 for a job under limits}.
allow_when_full()
local answers, succeeded_entries, settled_ids, settled_count = {}, {}, {}, 0
local succeeded_by_spec = {} -- spec → number
local failures = 0
local worker = '' -- guards against old claims that a failover brings back
local END_STAMP = NOW .. ':'
local ENDED = { succeeded = true, dead = true, cancelled = true }
local ENDS_CANCELLED = { failed = true, queued = true, scheduled = true, waiting = true }

-- Usually no lease at all has expired: then no ZSCORE is needed.
local first_lease_end = safe_call('ZRANGE', LEASES, 0, 0, 'WITHSCORES')[2]
local all_live = first_lease_end and tonumber(first_lease_end) > now

local function lease_end(id)
    return all_live and math.huge or tonumber(call('ZSCORE', LEASES, id) or nil)
end

local function is_held_by_other(holder)
    return worker ~= '' and holder ~= worker
end

local function refuse(id, claims, state)
    record_refused_write(id, claims, worker)
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
    local v = redis.pcall('HMGET', key, 'state', 'claims', 'spec', 'cancel', 'worker', 'awaited')
    if v.err or not v[1] then
        return { 0 }
    elseif v[1] ~= 'running' or (v[2] or '1') ~= claims or is_held_by_other(v[5])
        or (not all_live and (lease_end(id) or 0) <= now) then
        return refuse(id, claims, v[1])
    end
    if claims ~= '1' or v[4] then -- only such a job can have these fields
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
    succeeded_by_spec[v[3]] = (succeeded_by_spec[v[3]] or 0) + 1
    if v[6] then
        note_end(id, 'succeeded')
    end
    local spec = parse_spec(v[3])
    if spec and spec.is_limited then
        return release_limits(id, spec) and 2 or 1
    end
    return 1
end

local function append_attempt(id, v, claims, state, reason, error, traceback)
    safe_call('RPUSH', PREFIX .. 'attempts:' .. id, cmsgpack.pack({
        claims, v[5] or claims, v[6] or false, v[7] or false, NOW, state, reason ~= '' and reason,
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
    local v = read_fields(id, 'state', 'claims', 'spec', 'cancel', 'attempts', 'worker', 'pickupTime', 'lost_leases',
        'dueTime', 'created', 'seq', 'waits', 'awaited')
    local spec, lease = v and v[3] and parse_spec(v[3]), lease_end(id)
    if not spec then
        return { 0 }
    elseif v[1] ~= 'running' or (v[2] or '1') ~= claims or is_held_by_other(v[6]) or not lease
        or (lease <= now) ~= lease_expired then
        return refuse(id, claims, v[1])
    end
    local requested_reason = reason
    if v[4] and ENDS_CANCELLED[state] then
        state, reason = 'cancelled', 'cancelled'
    end
    if state == 'waiting' and (to_number(v[12]) == 0 or has_stale_receiver(id, claims)) then
        state, delay = 'scheduled', '0' -- what it waited for has come
    end
    if not refund and state ~= 'succeeded' then
        append_attempt(id, v, claims, state, requested_reason, error, traceback)
    end
    if not refund and state ~= 'succeeded' and not ENDED[state] then
        failures = failures + 1
        safe_call('ZADD', PREFIX .. 'failures', NOW, claims .. ' ' .. id)
    end
    local lost_leases = lease_expired and to_number(v[8]) + 1 or refund and to_number(v[8]) or 0
    local run_at = delay ~= '' and now + tonumber(delay) or to_number(state == 'waiting' and NEVER or v[9])
    -- another program may have set it to 0
    local attempts = math.max(0, to_number(v[5] or claims) - (refund and 1 or 0))
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
        set('created', v[10] or v[9]) -- absent while equal to its due time
    end
    if lost_leases > 0 then
        set('lost_leases', int(lost_leases))
    end
    if reason ~= '' then
        set('reason', reason)
    end
    if result ~= '' then
        append_pieces(fields, 'result', result)
    end
    if ENDED[state] then
        set('endTime', NOW)
    end
    call('HSET', JOB .. id, unpack(fields))
    settled_count = settled_count + 1
    settled_ids[settled_count] = id
    count(spec.queue, 'running', -1)
    count(spec.queue, state, 1)
    local partition_field = release_limits(id, spec)
    count_unstarted(partition_field, ENDED[state] and 0 or 1)
    if state == 'succeeded' then
        succeeded_entries[#succeeded_entries + 1] = END_STAMP .. id
    elseif ENDED[state] then
        safe_call('ZADD', PREFIX .. 'ended:' .. state, NOW, id)
    elseif state == 'queued' then
        transitions().add_ready(spec, run_at, to_number(v[11]), id, lost_leases, partition_field)
    elseif state ~= 'waiting' or delay ~= '' then
        transitions().schedule(spec.queue, run_at, id)
    end
    if ENDED[state] then
        ended_ids[#ended_ids + 1] = id
        if v[13] then
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
    call('EXPIRE', PREFIX .. 'failures', 3600) -- the longest absence of a follower
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

-- name: heartbeat
-- Registers a worker and extends its live leases. ARGV: 3 worker, 4 lease in microseconds, 5 how long the worker counts
-- as alive, or "" not to register it, 6 number of its fields, their names and values, then id and claims of each lease.
-- Returns the command, then for each lease 0 lost, 1 held, 2 asked to stop.
allow_when_full()
local lease_until = int(now + tonumber(ARGV[4]))
local worker = PREFIX .. 'worker:' .. ARGV[3]
local at = 7 + 2 * tonumber(ARGV[6])
if ARGV[5] ~= '' then
    local alive_until = int(now + tonumber(ARGV[5]))
    safe_call('HSET', worker, 'seen', NOW, 'until', alive_until, unpack(ARGV, 7, at - 1))
    call('HSETNX', worker, 'started', NOW)
    safe_call('ZADD', PREFIX .. 'workers', alive_until, ARGV[3])
end
local answers, extended = { safe_call('HGET', worker, 'command') or 'none' }, {}
for i = at, #ARGV, 2 do
    local v = read_fields(ARGV[i], 'state', 'claims', 'cancel', 'worker')
    -- After a failover an old number of claims may return: only the worker of the job holds its lease.
    local is_holder = v and v[1] == 'running' and claims_of(v[2], true) == ARGV[i + 1] and v[4] == ARGV[3]
    local lease = is_holder and safe_call('ZSCORE', LEASES, ARGV[i])
    if lease and tonumber(lease) > now then
        extended[#extended + 1] = lease_until
        extended[#extended + 1] = ARGV[i]
        answers[#answers + 1] = v[3] and 2 or 1
    else
        record_refused_write(ARGV[i], ARGV[i + 1], ARGV[3])
        answers[#answers + 1] = 0
    end
end
if #extended > 0 then
    call('ZADD', LEASES, unpack(extended))
end
finish()
return answers

-- fragment: steps
-- True for a live lease, and the job's field `waitNumber`. `worker`: "" for any.
local function holds_lease(id, claims, worker)
    local v = read_fields(id, 'state', 'claims', 'pickupTime', 'worker', 'waitNumber')
    local is_held = v and v[1] == 'running' and claims_of(v[2], v[3]) == claims and (worker == '' or v[4] == worker)
        and (tonumber(call('ZSCORE', LEASES, id) or nil) or 0) > now
    return is_held, is_held and v[5]
end

-- Records a step, unless it is there; a value (number 0) replaces an earlier one. `result`: "" or "=" and its text.
local function record_step(id, claims, name, number, in_order, result)
    local head = table.concat({ number, in_order, claims, NOW }, ' ')
    safe_call(number == '0' and 'HSET' or 'HSETNX', PREFIX .. 'steps:' .. id, name, head .. '\n' .. result)
end

-- name: save_steps (steps)
-- Stores steps of jobs. ARGV from 3 on, of each: id, claims, worker or "", name, number, 1 if in order, "" or "=" and
-- its result. Returns 1 for a lease that is held, else 0. A step that is there stays.
local answers = {}
for n = 3, #ARGV, 7 do
    local is_held = holds_lease(ARGV[n], ARGV[n + 1], ARGV[n + 2])
    if is_held then
        record_step(ARGV[n], ARGV[n + 1], ARGV[n + 3], ARGV[n + 4], ARGV[n + 5], ARGV[n + 6])
    end
    answers[#answers + 1] = is_held and 1 or 0
end
finish()
return answers

-- name: append_logs
-- Stores log lines of jobs. ARGV from 3 on, for each record: id, claims, number of lines; of each line its number, age
-- in microseconds, level, text, and "" or "=" and its fields. Returns 1 for a valid lease, else 0. A succeeded job
-- counts: no other worker can have logged under it. The entry id is CLAIMS-NUMBER: XADD refuses duplicates, and lines
-- that arrive late, which are merged.
local answers, at = {}, 3

local function is_valid_lease(id, claims, v)
    if not v or not v[1] or claims_of(v[2], v[3]) ~= claims then
        return false
    end
    return v[1] == 'succeeded' or v[1] == 'running' and (tonumber(call('ZSCORE', LEASES, id) or nil) or 0) > now
end

local function position_of(entry)
    local claims, number = string.match(entry, '^(%d+)-(%d+)$')
    return tonumber(claims), tonumber(number)
end

local function is_before(one, other)
    local claims, number = position_of(one[1])
    local other_claims, other_number = position_of(other[1])
    return claims < other_claims or claims == other_claims and number < other_number
end

-- XADD only appends, even behind deleted entries: rewrites the stream with the late lines.
local function merge_late_lines(key, late)
    local missing, seen = {}, {}
    for _, line in ipairs(late) do
        if not seen[line[1]] and #call('XRANGE', key, line[1], line[1]) == 0 then
            missing[#missing + 1] = line
        end
        seen[line[1]] = true
    end
    if not missing[1] then
        return
    end
    local entries = call('XRANGE', key, '-', '+')
    for _, line in ipairs(missing) do
        entries[#entries + 1] = line
    end
    table.sort(entries, is_before)
    call('DEL', key)
    for _, entry in ipairs(entries) do
        call('XADD', key, entry[1], unpack(entry[2]))
    end
end

local function append_line(id, claims, attempt, n, late)
    local line = {
        PREFIX .. 'lines:' .. id, claims .. '-' .. ARGV[n], 'attempt', attempt, 'at', int(now - tonumber(ARGV[n + 1])),
        'level', ARGV[n + 2], 'text', ARGV[n + 3],
    }
    if ARGV[n + 4] ~= '' then
        line[#line + 1] = 'fields'
        line[#line + 1] = string.sub(ARGV[n + 4], 2)
    end
    local reply = redis.pcall('XADD', unpack(line))
    if reply.err and string.find(reply.err, 'WRONGTYPE', 1, true) then
        safe_call('XADD', unpack(line))
    elseif reply.err and string.find(reply.err, 'equal or smaller', 1, true) then
        late[#late + 1] = { line[2], { unpack(line, 3) } }
    elseif reply.err then
        return reply
    end
end

while at <= #ARGV do
    local id, claims, last = ARGV[at], ARGV[at + 1], at + 2 + 5 * tonumber(ARGV[at + 2])
    local v = read_fields(id, 'state', 'claims', 'pickupTime', 'attempts')
    local is_valid = is_valid_lease(id, claims, v)
    local late = {}
    for n = at + 3, is_valid and last or 0, 5 do
        local problem = append_line(id, claims, v[4] or claims, n, late)
        if problem then
            return problem
        end
    end
    if late[1] then
        merge_late_lines(PREFIX .. 'lines:' .. id, late)
    end
    answers[#answers + 1] = is_valid and 1 or 0
    at = last + 1
end
finish()
return answers

-- name: deregister
-- Removes a worker that has stopped. ARGV: 3 worker.
allow_when_full()
call('DEL', PREFIX .. 'worker:' .. ARGV[3])
safe_call('ZREM', PREFIX .. 'workers', ARGV[3])
return 0
