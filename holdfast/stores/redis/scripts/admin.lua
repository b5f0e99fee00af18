-- fragment: answers
-- A call under the idempotency key ARGV[3] that was done, and sent again as its answer was lost, is not done twice.
local earlier_answer = redis.pcall('GET', PREFIX .. 'done:' .. ARGV[3])
if type(earlier_answer) == 'string' then
    return cmsgpack.unpack(earlier_answer)
end

local function keep_answer(answer)
    call('SET', PREFIX .. 'done:' .. ARGV[3], cmsgpack.pack(answer), 'EX', 60) -- seconds
end

-- name: operate (answers, partitions, transitions, waits, uniqueness, reopening, fingerprint)
-- Cancels, replays or deletes jobs. ARGV: 4 "cancel", "replay" or "delete", 5 "f" to replay successes too, "w" to keep
-- payloads in one piece, a number to forget the steps from this one on, 6 "" or "=" and the new payload, and of a
-- deletion "" or "in" and the states that it takes, 7 and 8
-- microseconds: delay of the first replayed job, and interval between two, 9 of a replay:
-- version of the limits. Then for each job: id, "" or the required "state claims" (else it is skipped), and of a replay
-- its fingerprint and its field `partition`.
-- Returns {state now, 1 changed | 0 refused | -1 skipped} of each, nil for no job; or CONFLICT.
local verb, force = ARGV[4], string.find(ARGV[5], 'f', 1, true)
if verb == 'replay' then
    local is_current = limits_version() == ARGV[9]
    for i = 10, #ARGV, 4 do
        is_current = is_current and has_fingerprint(ARGV[i], ARGV[i + 2])
    end
    if not is_current then
        return CONFLICT
    end
end
allow_when_full()
local in_one_piece = string.find(ARGV[5], 'w', 1, true)
local REPLAYABLE = { failed = true, dead = true, cancelled = true }
local answers = {}

local function cancel(id, job, spec)
    if job.state == 'running' then
        call('HSET', JOB .. id, 'cancel', 1)
        notify('commands', 'worker:' .. (job.worker or ''))
        return 'running'
    end
    if not NOT_STARTED[job.state] then
        return nil
    end
    transitions().dequeue(id, spec, job.state, to_number(job.lost_leases))
    call('HDEL', JOB .. id, 'lost_leases')
    call('HSET', JOB .. id, 'state', 'cancelled', 'reason', 'cancelled', 'endTime', NOW)
    call('HSETNX', JOB .. id, 'error', 'cancelled')
    safe_call('ZADD', PREFIX .. 'ended:cancelled', NOW, id)
    ended_ids[#ended_ids + 1] = id
    if job.has_dependents then
        note_end(id, 'cancelled')
    end
    return 'cancelled'
end

local from_step = tonumber(string.match(ARGV[5], '%d+') or nil)

local function delete_steps(id)
    local steps = safe_call('HGETALL', PREFIX .. 'steps:' .. id)
    for n = 1, #steps, 2 do
        if to_number(string.match(steps[n + 1], '^%d+')) >= from_step or steps[n] == '#children' then
            call('HDEL', PREFIX .. 'steps:' .. id, steps[n])
        end
    end
    local topic, number = unpack(safe_call('HMGET', PREFIX .. 'receiver:' .. id, 'topic', 'number'))
    if topic and to_number(number) >= from_step then
        call('DEL', PREFIX .. 'receiver:' .. id)
        safe_call('ZREM', PREFIX .. 'receivers:' .. topic, id)
    end
end

-- Replayed jobs of this script: they get their places once all of them are replayed.
local replayed = {}

local function replay(id, job, spec, delay, partition_field)
    if not REPLAYABLE[job.state] and not (force and job.state == 'succeeded')
        or call('HEXISTS', JOB .. id, 'members') == 1 then
        return nil
    end
    local unique = unique_of(id)
    if unique then
        local _, holder = take_unique(unique, id)
        if holder then
            return nil
        end
    end
    if from_step then
        delete_steps(id)
    end
    transitions().dequeue(id, spec, job.state, 0)
    call('HDEL', JOB .. id, 'lost_leases', 'reason', 'endTime', 'cancel', 'expiresAt', 'errorGroup')
    delete_pieces(id, 'error')
    delete_pieces(id, 'result')
    local state, run_at = delay > 0 and 'scheduled' or 'queued', now + delay
    local fields = { 'state', state, 'dueTime', int(run_at), 'created', job.created or job.run_at }
    if job.started_at then -- absent before the second claim
        fields[7], fields[8] = 'attempts', '0'
    end
    if ARGV[6] ~= '' then
        delete_pieces(id, 'payload')
        append_pieces(fields, 'payload', string.sub(ARGV[6], 2), in_one_piece)
    end
    call('HSET', JOB .. id, unpack(fields))
    partition_field = partition_field ~= '' and partition_field or nil
    if partition_field ~= partition_field_of(id, spec) then
        spec = parse_spec(set_partition_field(id, job.spec_text, partition_field))
    end
    replayed[#replayed + 1] = {
        id = id, spec = spec, run_at = run_at, seq = to_number(job.seq), partition_field = partition_field, state = state,
        may_wait = job.waits and not job.started_at, has_dependents = job.has_dependents, answer = #answers + 1,
    }
    notify('ready_jobs', 'queue:' .. spec.queue)
    return state
end

local function place(job)
    if job.may_wait and reopen_own(job.id) then
        call('HSET', JOB .. job.id, 'state', 'waiting', 'dueTime', NEVER, 'reason', 'dependency')
        count(job.spec.queue, job.state, -1)
        count(job.spec.queue, 'waiting', 1)
        answers[job.answer][1] = 'waiting'
    elseif job.state == 'scheduled' then
        transitions().schedule(job.spec.queue, job.run_at, job.id)
    else
        transitions().add_ready(job.spec, job.run_at, job.seq, job.id, 0, job.partition_field)
    end
end

local function place_replayed()
    local depended_on, may_wait = {}, false
    for _, job in ipairs(replayed) do
        depended_on[#depended_on + 1] = job.has_dependents and job.id or nil
        may_wait = may_wait or job.may_wait
    end
    reopen_dependents(depended_on) -- first: what waits again has not ended
    for _, job in ipairs(replayed) do
        place(job)
    end
    if may_wait then
        reopen_dependents(depended_on) -- of those that wait again now
    end
end

local function delete(id, job, spec)
    if job.state == 'running' or ARGV[6] ~= '' and not string.find(ARGV[6], job.state or '?', 1, true) then
        return nil
    end
    transitions().dequeue(id, spec, job.state, to_number(job.lost_leases))
    if job.has_dependents and not ENDED_STATES[job.state] then
        call('HSET', JOB .. id, 'state', 'cancelled') -- it waits for nothing more, also not through its own end
        note_end(id, 'deleted')
        resolve_ends()
    end
    transitions().delete_job(id, to_number(job.seq), job.key, false, job.waits, job.has_dependents)
    return job.state
end

-- Fields of a job that an operation needs; nil for no job.
local function read_operated(id)
    local state, claims, spec_text, lost_leases, seq, worker, run_at, created, key, started_at, waits, has_dependents =
        read_fields(id, 'state', 'claims', 'spec', 'lost_leases', 'seq', 'worker', 'dueTime', 'created', 'key',
        'pickupTime', 'waits', 'hasDependents')
    return spec_text and {
        state = state, claims = claims, spec_text = spec_text, lost_leases = lost_leases, seq = seq, worker = worker,
        run_at = run_at, created = created, key = key, started_at = started_at, waits = waits, has_dependents = has_dependents,
    } or nil
end

local operations = { cancel = cancel, replay = replay, delete = delete }
local first_delay, interval = tonumber(ARGV[7]), tonumber(ARGV[8])
for i = 10, #ARGV, 4 do
    local id, expected = ARGV[i], ARGV[i + 1]
    local job = read_operated(id)
    local spec = job and parse_spec(job.spec_text)
    if not spec then
        answers[#answers + 1] = { false, expected ~= '' and -1 or 0 }
    elseif expected ~= '' and not resolved[id]
        and expected ~= job.state .. ' ' .. claims_of(job.claims, job.started_at) then
        answers[#answers + 1] = { job.state, -1 }
    else
        local partition_field = partition_field_of(id, spec)
        local state = operations[verb](id, job, spec, first_delay + (i - 10) / 4 * interval, ARGV[i + 3])
        answers[#answers + 1] = { state or job.state, state and 1 or 0 }
        if state and (verb == 'delete' or state ~= job.state) then
            count(spec.queue, job.state, -1)
            count_unstarted(partition_field, NOT_STARTED[job.state] and -1 or 0)
            if verb ~= 'delete' then
                if verb == 'replay' then
                    partition_field = ARGV[i + 3] ~= '' and ARGV[i + 3] or nil
                end
                count(spec.queue, state, 1)
                count_unstarted(partition_field, NOT_STARTED[state] and 1 or 0)
            end
        end
    end
end
place_replayed()
keep_answer(answers)
transitions().write_ready()
finish()
return answers

-- name: edit (answers, partitions, transitions, due_times, rewriting, fingerprint)
-- Changes a job that has not started. ARGV: 4 id, 5 "w" to keep payloads in one piece, 6 and 7 version of the limits and
-- fingerprint for a new partition, or ""; then names and values for `rewrite`. Returns its state, and 1 if it was changed; or CONFLICT.
if ARGV[6] ~= '' and not (limits_version() == ARGV[6] and has_fingerprint(ARGV[4], ARGV[7])) then
    return CONFLICT
end
local change = {}
for n = 8, #ARGV, 2 do
    change[ARGV[n]] = ARGV[n + 1]
end
local states = NOT_STARTED
if change.expires and change.expires ~= '-' and read_fields(ARGV[4], 'pickupTime') then
    states = {} -- a job that has started cannot expire
end
local state, changed = rewrite(ARGV[4], change, states, ARGV[5] == 'w')
local answer = { state, changed and 1 or 0 }
if changed then
    keep_answer(answer)
    transitions().write_ready()
end
finish()
return answer

-- name: pause
-- Closes (ARGV[3] "1") or opens a queue for claims. ARGV: 4 queue.
allow_when_full()
safe_call(ARGV[3] == '1' and 'SADD' or 'SREM', PREFIX .. 'paused', ARGV[4])
if ARGV[3] ~= '1' then
    notify('ready_jobs', 'queue:' .. ARGV[4])
end
finish()
return 0

-- name: send_command
-- Stores a command for living workers. ARGV: 3 command, 4 "all" or "named", then workers. Returns the workers.
allow_when_full()
local commanded = {}
local workers = { unpack(ARGV, 5) }
if ARGV[4] == 'all' then
    workers = safe_call('ZRANGEBYSCORE', PREFIX .. 'workers', '(' .. NOW, '+inf')
end
for _, worker in ipairs(workers) do
    local alive = safe_call('ZSCORE', PREFIX .. 'workers', worker)
    if alive and tonumber(alive) > now then
        safe_call('HSET', PREFIX .. 'worker:' .. worker, 'command', ARGV[3])
        commanded[#commanded + 1] = worker
        notify('commands', 'worker:' .. worker)
    end
end
finish()
return commanded
