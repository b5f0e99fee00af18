-- fragment: steps
-- True for a live lease, and the job's field `waitNumber`. `worker`: "" for any.
local function holds_lease(id, claims, worker)
    local state, stored_claims, started_at, stored_worker, wait_number =
        read_fields(id, 'state', 'claims', 'pickupTime', 'worker', 'waitNumber')
    local has_lease = state == 'running' and claims_of(stored_claims, started_at) == claims
        and (worker == '' or stored_worker == worker) and (tonumber(call('ZSCORE', LEASES, id) or nil) or 0) > now
    return has_lease, has_lease and wait_number
end

-- Records a step, unless it is there; a value (number 0) replaces an earlier one. `result`: "" or "=" and its text.
local function record_step(id, claims, name, number, is_ordered, result)
    local head = table.concat({ number, is_ordered, claims, NOW }, ' ')
    safe_call(number == '0' and 'HSET' or 'HSETNX', PREFIX .. 'steps:' .. id, name, head .. '\n' .. result)
end

-- name: save_steps (steps)
-- Stores steps of jobs. ARGV from 3 on, of each: id, claims, worker or "", name, number, 1 if its order is fixed, "" or "=" and
-- its result. Returns 1 for a lease that is held, else 0. A step that is there stays.
allow_when_full()
local answers = {}
for n = 3, #ARGV, 7 do
    local has_lease = holds_lease(ARGV[n], ARGV[n + 1], ARGV[n + 2])
    if has_lease then
        record_step(ARGV[n], ARGV[n + 1], ARGV[n + 3], ARGV[n + 4], ARGV[n + 5], ARGV[n + 6])
    end
    answers[#answers + 1] = has_lease and 1 or 0
end
finish()
return answers

-- fragment: receivers
-- The receiver of a signal that a job is: `receiver:JOB` with topic, step, number, isOrdered, claims, since, until; and
-- the job in `receivers:TOPIC`, by since. Claims of 0: it waits for something else, and the deadline stays.
local function receivers_key(topic)
    return PREFIX .. 'receivers:' .. topic
end

local function receiver_of(id) -- nil for none
    local topic, step, number, is_ordered, claims, since, deadline = unpack(safe_call('HMGET',
        PREFIX .. 'receiver:' .. id, 'topic', 'step', 'number', 'isOrdered', 'claims', 'since', 'until'))
    return topic and step and {
        topic = topic, step = step, number = number or '0', is_ordered = is_ordered or '0', claims = claims or '0',
        since = to_number(since), deadline = to_number(deadline),
    } or nil
end

local function remove_receiver(id, receiver)
    call('DEL', PREFIX .. 'receiver:' .. id)
    safe_call('ZREM', receivers_key(receiver.topic), id)
end

local function signal_result(value)
    return '={"signal":' .. value .. '}'
end

-- A signal in the hash `signals`: "=JOB" of its receiver, or "LENGTH:TOPIC" and the value.
local function encode_signal(topic, value)
    return #topic .. ':' .. topic .. value
end

local function decode_signal(text) -- topic and value; nil for one that was received
    local length, rest = string.match(text or '', '^(%d+):(.*)$')
    if length then
        return string.sub(rest, 1, tonumber(length)), string.sub(rest, tonumber(length) + 1)
    end
end

local function forget_kept(id, topic)
    safe_call('ZREM', PREFIX .. 'signals_kept', id)
    safe_call('ZREM', PREFIX .. 'signals_kept:' .. topic, id)
end

-- name: receive_signal (steps, receivers)
-- Takes the oldest signal of a topic for a step, or makes the job its receiver. ARGV: 3 id, 4 claims, 5 worker or "", 6
-- step, 7 its number, 8 "1" if its order is fixed, 9 topic, 10 timeout in microseconds. Returns {0} if the lease is lost, {1,
-- result or nil}, or {2, microseconds until the deadline}.
allow_when_full()
local id, claims, step, number, is_ordered, topic = ARGV[3], ARGV[4], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
if not holds_lease(id, claims, ARGV[5]) then
    finish()
    return { 0 }
end
local recorded = safe_call('HGET', PREFIX .. 'steps:' .. id, step)
if recorded then
    return { 1, string.match(recorded, '^[^\n]*\n=(.*)$') }
end

local function oldest_signal() -- id and value
    local kept = safe_call('ZRANGE', PREFIX .. 'signals_kept:' .. topic, 0, MAX_PER_SCRIPT - 1)
    for _, signal in ipairs(kept) do
        local its_topic, value = decode_signal(safe_call('HGET', PREFIX .. 'signals', signal))
        if its_topic == topic then
            return signal, value
        end
        forget_kept(signal, topic) -- another program replaced it
    end
end

local old = receiver_of(id)
local is_same = old and old.step == step
local deadline = is_same and old.deadline or math.min(now + tonumber(ARGV[10]), tonumber(NEVER))
local signal, value = oldest_signal()
local result
if signal then
    forget_kept(signal, topic)
    call('HSET', PREFIX .. 'signals', signal, '=' .. id)
    result = signal_result(value)
elseif deadline <= now then
    result = '={"timed_out":true}'
end
if result then
    record_step(id, claims, step, number, is_ordered, result)
    if is_same then
        remove_receiver(id, old)
        if old.claims ~= '0' then
            call('HSET', JOB .. id, 'waits', 0)
        end
    end
    finish()
    return { 1, string.sub(result, 2) }
end

local since = is_same and old.since or now
if old and old.topic ~= topic then
    safe_call('ZREM', receivers_key(old.topic), id)
end
safe_call('HSET', PREFIX .. 'receiver:' .. id, 'topic', topic, 'step', step, 'number', number, 'isOrdered', is_ordered,
    'claims', claims, 'since', int(since), 'until', int(deadline))
safe_call('ZADD', receivers_key(topic), int(since), id)
call('HSET', JOB .. id, 'waits', 1)
safe_call('HINCRBY', JOB .. id, 'waitNumber', 1) -- children of earlier waits do not count
finish()
return { 2, int(deadline - now) }

-- name: send_signal (partitions, transitions, waits, steps, receivers)
-- Records a signal as the step of the job that has waited longest, or keeps it. ARGV: 3 id, 4 topic, 5 value, 6 signals
-- of a topic that are kept at most. Returns {1 new | 0 known | -1 too many, job or nil}.
local signal, topic, value = ARGV[3], ARGV[4], ARGV[5]
local known = safe_call('HGET', PREFIX .. 'signals', signal)
if known then
    return { 0, string.match(known, '^=(.*)$') }
end

-- Gives the signal to a job, unless it waits no more under the lease with which it became the receiver.
local function deliver(id)
    local receiver = receiver_of(id)
    local state, claims, started_at, spec_text, run_at, created =
        read_fields(id, 'state', 'claims', 'pickupTime', 'spec', 'dueTime', 'created')
    local spec = parse_spec(spec_text or '')
    local is_receiver = receiver and spec and receiver.topic == topic
        and (state == 'running' or state == 'waiting') and claims_of(claims, started_at) == receiver.claims
        and safe_call('HEXISTS', PREFIX .. 'steps:' .. id, receiver.step) == 0
    if not is_receiver then
        return false
    end
    remove_receiver(id, receiver)
    record_step(id, receiver.claims, receiver.step, receiver.number, receiver.is_ordered, signal_result(value))
    call('HSET', JOB .. id, 'waits', 0)
    if state == 'waiting' then
        waits().resume(id, spec, run_at, created)
    end
    return true
end

local function find_receiver()
    while true do
        local id = safe_call('ZRANGE', receivers_key(topic), 0, 0)[1]
        if not id or deliver(id) then
            return id
        end
        safe_call('ZREM', receivers_key(topic), id)
    end
end

local receiver = find_receiver()
if receiver then
    safe_call('HSET', PREFIX .. 'signals', signal, '=' .. receiver)
elseif safe_call('ZCARD', PREFIX .. 'signals_kept:' .. topic) >= tonumber(ARGV[6]) then
    finish()
    return { -1 }
else
    local last = safe_call('ZRANGE', PREFIX .. 'signals_kept', -1, -1, 'WITHSCORES')[2]
    local position = int(to_number(last) + 1)
    safe_call('HSET', PREFIX .. 'signals', signal, encode_signal(topic, value))
    safe_call('ZADD', PREFIX .. 'signals_kept', position, signal)
    safe_call('ZADD', PREFIX .. 'signals_kept:' .. topic, position, signal)
end
safe_call('ZADD', PREFIX .. 'signals_sent', NOW, signal)
finish()
return { 1, receiver }

-- name: read_signals (receivers)
-- Signals that no job has received, the oldest first. ARGV: 3 "one" or "all", 4 topic, 5 limit. Returns {id, topic,
-- value, instant} of each.
local key, found = PREFIX .. 'signals_kept' .. (ARGV[3] == 'one' and ':' .. ARGV[4] or ''), {}
for _, id in ipairs(safe_call('ZRANGE', key, 0, tonumber(ARGV[5]) - 1)) do
    local topic, value = decode_signal(safe_call('HGET', PREFIX .. 'signals', id))
    if topic then
        found[#found + 1] = { id, topic, value, safe_call('ZSCORE', PREFIX .. 'signals_sent', id) or '0' }
    end
end
return found

-- name: prune_signals (receivers)
-- Deletes signals that were sent ARGV[3] microseconds ago or earlier, up to ARGV[4]; returns their number.
allow_when_full()
local sent = PREFIX .. 'signals_sent'
local ids = safe_call('ZRANGEBYSCORE', sent, '-inf', int(now - tonumber(ARGV[3])), 'LIMIT', 0, ARGV[4])
for _, id in ipairs(ids) do
    local topic = decode_signal(safe_call('HGET', PREFIX .. 'signals', id))
    if topic then
        forget_kept(id, topic)
    end
    safe_call('HDEL', PREFIX .. 'signals', id)
    call('ZREM', sent, id)
end
finish()
return #ids

-- name: start_children (partitions, transitions, waits, uniqueness, due_times, rewriting, storing, relations, steps)
-- Stores children of a running job, which waits for their ends. ARGV: 3 id, 4 claims, 5 worker, 6 "1" for the first
-- part, 7 on: the jobs. Returns nil if the lease is lost, what was refused, or id and state ("" for none) of each child
-- and the reply of `store_jobs`.
local parent = ARGV[3]
local has_lease, wait = holds_lease(parent, ARGV[4], ARGV[5])
if not has_lease then
    return false
end
local is_first = ARGV[6] == '1'
each_job(7, function(n)
    local text = safe_call('HGET', dependencies_key(parent), ARGV[n])
    aliases[ARGV[n]] = string.match(text or '', '^held (.+)$')
    left_out[ARGV[n]] = aliases[ARGV[n]] or (select(3, parse_edge(text)) or '0') ~= '0' -- started before
end)
local stored, refused = store_jobs(7)
if refused then
    return refused
end
local old = is_first and safe_call('HGET', PREFIX .. 'receiver:' .. parent, 'topic')
if old then
    safe_call('ZREM', PREFIX .. 'receivers:' .. old, parent)
    call('HSET', PREFIX .. 'receiver:' .. parent, 'claims', '0')
end
if is_first or not wait then
    wait = int(safe_call('HINCRBY', JOB .. parent, 'waitNumber', 1))
end
local open, edges, children, seen = 0, {}, {}, {}
for n, given in ipairs(given_ids) do
    local child = aliases[given] or given
    local state = read_fields(child, 'state') or '' -- it was deleted
    children[n] = { child, state }
    local _, edge_state, edge_wait = parse_edge(safe_call('HGET', dependencies_key(parent), child))
    local is_counted = seen[child] or edge_wait == wait and edge_state == 'open'
    seen[child] = true
    if child ~= parent and state ~= '' then -- a child may have the key of its parent, which cannot wait for itself
        local is_open = not ENDED_STATES[state]
        open = open + (is_open and not is_counted and 1 or 0)
        edges[#edges + 1] = child
        edges[#edges + 1] = (is_open and 'end open ' or 'end met ') .. wait
        if child ~= given then
            safe_call('HSET', dependencies_key(parent), given, 'held ' .. child)
        end
    end
end
add_edges(parent, edges)
invalidate_repair()
if is_first then
    call('HSET', JOB .. parent, 'waits', open)
else
    safe_call('HINCRBY', JOB .. parent, 'waits', open)
end
finish()
return { children, stored }

-- name: read_batch
-- Progress of the batch ARGV[3]: members, those that have not ended, and those that have failed; nil for no batch.
local members, waits, failed, is_submitting = read_fields(ARGV[3], 'members', 'waits', 'failed', 'submitting')
if not members then
    return false
end
return { to_number(members), to_number(waits) - (is_submitting and 1 or 0), to_number(failed) }

-- name: read_waits
-- What the job ARGV[3] waits for, and its dependents, up to ARGV[4]. Returns topic, step, since and until of its receiver,
-- or nothing; its dependencies, {job, "CONDITION STATE WAIT", …}; its waiters, {job, the same, its `waitNumber`, …}; and its own.
local receiver = redis.pcall('HMGET', PREFIX .. 'receiver:' .. ARGV[3], 'topic', 'step', 'since', 'until', 'claims')
local dependencies = redis.pcall('HGETALL', PREFIX .. 'dependencies:' .. ARGV[3])
local waiters = redis.pcall('ZRANGE', PREFIX .. 'dependents:' .. ARGV[3], 0, tonumber(ARGV[4]) - 1)
local dependents = {}
for _, waiter in ipairs(waiters.err and {} or waiters) do
    local edge = redis.pcall('HGET', PREFIX .. 'dependencies:' .. waiter, ARGV[3])
    if type(edge) == 'string' then
        dependents[#dependents + 1] = waiter
        dependents[#dependents + 1] = edge
        dependents[#dependents + 1] = read_fields(waiter, 'waitNumber') or '0'
    end
end
local state, claims, started_at, wait = read_fields(ARGV[3], 'state', 'claims', 'pickupTime', 'waitNumber')
local is_shown = not receiver.err and receiver[4] and (state == 'running' or state == 'waiting')
    and receiver[5] == claims_of(claims, started_at)
return { is_shown and receiver or {}, dependencies.err and {} or dependencies, dependents, wait or '0' }
