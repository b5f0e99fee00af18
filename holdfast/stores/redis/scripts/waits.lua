-- fragment: waits
-- What jobs wait for. A waiter's dependencies are in the hash `dependencies:WAITER`: job → "CONDITION STATE WAIT". WAIT
-- is 0 for those given at its submission, else the number of the wait for which it started this child. The waiters of a
-- job are in `dependents:JOB`, all scores 0. The field `waits` of a waiter is the number of its dependencies that are
-- not met, or 1 for a signal; a dependency of another wait than `waitNumber` says is not counted. A batch has the fields
-- `members` and `failed`; its `waits` counts members that have not ended, and 1 more while it has the field `hold`: its
-- submission goes on.
local decided = {} -- jobs that this script has made due or cancelled since their waits are over
local ENDED_STATES = { succeeded = true, dead = true, cancelled = true }

local function dependencies_key(waiter)
    return PREFIX .. 'dependencies:' .. waiter
end

local function dependents_key(id)
    return PREFIX .. 'dependents:' .. id
end

local function parse_edge(text) -- condition, state, number of the wait
    return string.match(text or '', '^(%l+) (%l+) (%d+)$')
end

local function is_as_asked(condition, how)
    return condition == 'end' or (condition == 'success') == (how == 'succeeded')
end

local function describe_failure(id, how) -- as `core.dependencies.describe_failed_dependency`
    return 'job ' .. id .. ', for which it waited, is ' .. how
end

-- Calls `visit(waiter)` for each waiter of a job.
local function each_dependent(id, visit)
    local position, names = 0, nil
    repeat
        names = safe_call('ZRANGE', dependents_key(id), position, position + 999)
        for _, waiter in ipairs(names) do
            visit(waiter)
        end
        position = position + #names
    until #names < 1000
end

local function add_edges(waiter, edges) -- {job, "CONDITION STATE WAIT", …}
    for n = 1, #edges, 1000 do
        safe_call('HSET', dependencies_key(waiter), unpack(edges, n, math.min(n + 999, #edges)))
    end
    for n = 1, #edges, 2 do
        safe_call('ZADD', dependents_key(edges[n]), 0, waiter)
        call('HSET', JOB .. edges[n], 'awaited', 1)
    end
end

local function make_waits()
    -- Makes a waiting job due now.
    local function resume(id, spec, due, created, has_started)
        if not has_started then
            call('HDEL', JOB .. id, 'reason') -- the success of a first claim leaves it
        end
        call('HSET', JOB .. id, 'state', 'scheduled', 'dueTime', NOW, 'created', created or due)
        transitions().schedule(spec.queue, now, id)
        count(spec.queue, 'waiting', -1)
        count(spec.queue, 'scheduled', 1)
        notify('ready_jobs', 'queue:' .. spec.queue)
        sender, decided[id] = '', true
    end

    local cancelled_entries = {}

    local function cancel_waiter(id, spec, error)
        local fields = { 'state', 'cancelled', 'reason', 'dependency', 'endTime', NOW }
        append_pieces(fields, 'error', error)
        call('HSET', JOB .. id, unpack(fields))
        cancelled_entries[#cancelled_entries + 1] = NOW
        cancelled_entries[#cancelled_entries + 1] = id
        count(spec.queue, 'waiting', -1)
        count(spec.queue, 'cancelled', 1)
        count_unstarted(partition_field_of(id, spec), -1)
        ended_ids[#ended_ids + 1] = id
        sender, decided[id] = '', true
    end

    local function write_cancelled()
        for n = 1, #cancelled_entries, 1000 do
            safe_call('ZADD', PREFIX .. 'ended:cancelled',
                unpack(cancelled_entries, n, math.min(n + 999, #cancelled_entries)))
        end
        cancelled_entries = {}
    end

    -- Decides the open dependencies of waiters on a job. `changes`: in order, and by waiter the numbers of dependencies
    -- that are met, by wait, and the text of the first that failed.
    local function decide_edges(id, how, changes)
        each_dependent(id, function(waiter)
            local condition, state, number = parse_edge(safe_call('HGET', dependencies_key(waiter), id))
            if state ~= 'open' or how == 'failing' and condition ~= 'failure' then
                return
            end
            local is_met = is_as_asked(condition, how)
            call('HSET', dependencies_key(waiter), id,
                condition .. (is_met and ' met ' or ' failed ') .. number)
            local change = changes[waiter]
            if not change then
                change = { waiter = waiter, met = {}, failures = 0 }
                changes[waiter], changes[#changes + 1] = change, change
            end
            if is_met then
                change.met[number] = (change.met[number] or 0) + 1
            else
                change.failures = change.failures + 1
                change.error = change.error or describe_failure(id, how)
            end
        end)
    end

    local function end_batch(id, spec, members, failed)
        local state = failed == 0 and 'succeeded' or 'dead'
        local fields = { 'state', state, 'endTime', NOW }
        if failed == 0 then
            call('HDEL', JOB .. id, 'reason')
            append_pieces(fields, 'result', '{"members":' .. int(members) .. '}')
            safe_call('RPUSH', PREFIX .. 'ended:succeeded', NOW .. ':' .. id)
        else
            append_pieces(fields, 'error', int(failed) .. ' of ' .. int(members) .. ' jobs of the batch have failed')
            append_pieces(fields, 'errorGroup', 'batch')
            safe_call('ZADD', PREFIX .. 'ended:dead', NOW, id)
        end
        call('HSET', JOB .. id, unpack(fields))
        count(spec.queue, 'waiting', -1)
        count(spec.queue, state, 1)
        count_unstarted(partition_field_of(id, spec), -1)
        ended_ids[#ended_ids + 1] = id
        sender, decided[id] = '', true
        if call('HGET', JOB .. id, 'awaited') then
            note_end(id, state)
        end
    end

    -- Counts so many ends in a batch. Dependencies on its failure are decided with the first failed member.
    local function count_ends(id, successes, failures)
        local v = read_fields(id, 'state', 'spec', 'waits', 'members', 'failed', 'awaited')
        local spec = v and parse_spec(v[2] or '')
        if not spec then
            return
        end
        local waits, failed = math.max(0, to_number(v[3]) - successes - failures), to_number(v[5]) + failures
        call('HSET', JOB .. id, 'waits', int(waits), 'failed', int(failed))
        if v[1] == 'waiting' and waits == 0 then
            end_batch(id, spec, to_number(v[4]), failed)
        elseif v[1] == 'waiting' and v[6] and failures > 0 and failed == failures then
            note_end(id, 'failing')
        end
    end

    local function apply_change(change)
        local id = change.waiter
        local v = read_fields(id, 'state', 'spec', 'waits', 'waitNumber', 'awaited', 'dueTime', 'created', 'pickupTime',
            'members')
        local spec = v and parse_spec(v[2] or '')
        if not spec then
            return
        elseif v[9] then
            return count_ends(id, change.met['0'] or 0, change.failures)
        end
        local met = (change.met['0'] or 0) + (v[4] and change.met[v[4]] or 0)
        local waits = math.max(0, to_number(v[3]) - met)
        if met > 0 then
            call('HSET', JOB .. id, 'waits', int(waits))
        end
        if v[1] == 'waiting' and change.error then
            cancel_waiter(id, spec, change.error)
            if v[5] then
                note_end(id, 'cancelled')
            end
        elseif v[1] == 'waiting' and met > 0 and waits == 0 then
            resume(id, spec, v[6], v[7], v[8])
        end
    end

    -- Level by level: each cancelled waiter is an end too, and each batch that ends.
    local function decide()
        while awaited_ends[1] do
            local ends, changes = awaited_ends, {}
            awaited_ends = {}
            for n = 1, #ends, 2 do
                decide_edges(ends[n], ends[n + 1], changes)
            end
            for _, change in ipairs(changes) do
                apply_change(change)
            end
        end
        write_cancelled()
    end

    return { decide = decide, resume = resume, count_ends = count_ends }
end

local loaded_waits
local function waits()
    loaded_waits = loaded_waits or make_waits()
    return loaded_waits
end

decide_ends = function()
    waits().decide()
end

-- fragment: reopening
-- Replays of jobs that have dependencies, and of those for which others wait.

-- True if a job that was never started waits again for dependencies that are not met and whose jobs have not ended. The
-- others count as met.
local function reopen_own(id)
    local edges, changed, open = safe_call('HGETALL', dependencies_key(id)), {}, 0
    for n = 1, #edges, 2 do
        local condition, state, number = parse_edge(edges[n + 1])
        if state == 'open' or state == 'failed' then
            local v = read_fields(edges[n], 'state')
            local is_open = v and v[1] and not ENDED_STATES[v[1]]
            open = open + (is_open and 1 or 0)
            changed[#changed + 1] = edges[n]
            changed[#changed + 1] = condition .. (is_open and ' open ' or ' met ') .. number
        end
    end
    for n = 1, #changed, 1000 do
        call('HSET', dependencies_key(id), unpack(changed, n, math.min(n + 999, #changed)))
    end
    call('HSET', JOB .. id, 'waits', open)
    return open > 0
end

-- Number of dependencies of a waiter that are not met; nil if one of them failed.
local function count_open(waiter)
    local open = 0
    for _, text in ipairs(safe_call('HVALS', dependencies_key(waiter))) do
        local _, state = parse_edge(text)
        if state == 'failed' then
            return nil
        end
        open = open + (state == 'open' and 1 or 0)
    end
    return open
end

-- A cancelled waiter waits again, or a batch that has ended.
local function revive(id, spec, state, due, created, open)
    transitions().dequeue(id, spec, state)
    call('HDEL', JOB .. id, 'endTime', 'expiresAt', 'errorGroup')
    delete_pieces(id, 'error')
    delete_pieces(id, 'result')
    call('HSET', JOB .. id, 'state', 'waiting', 'reason', 'dependency', 'dueTime', NEVER, 'created', created or due,
        'waits', open)
    count(spec.queue, state, -1)
    count(spec.queue, 'waiting', 1)
    count_unstarted(partition_field_of(id, spec), 1)
end

-- A batch that was not cancelled itself waits for a replayed member again. Adds one that had ended to `revived`.
local function reopen_batch(id, spec, v, member, revived)
    local condition, state, number = parse_edge(safe_call('HGET', dependencies_key(id), member))
    if v[1] == 'cancelled' or state ~= 'met' and state ~= 'failed' then
        return
    end
    call('HSET', dependencies_key(id), member, condition .. ' open ' .. number)
    local open = safe_call('HINCRBY', JOB .. id, 'waits', 1)
    if state == 'failed' then
        safe_call('HINCRBY', JOB .. id, 'failed', -1)
    end
    if v[1] ~= 'waiting' then
        revive(id, spec, v[1], v[6], v[7], open)
        revived[#revived + 1] = v[5] and id or nil
    end
end

-- Opens the dependency of a waiter on a replayed job, if no worker has started the waiter and it waits, or was
-- cancelled by a dependency and has no unique key. Adds a waiter that waits again to `revived`.
local function reopen_edge(waiter, id, revived)
    local v = read_fields(waiter, 'state', 'spec', 'reason', 'pickupTime', 'awaited', 'dueTime', 'created', 'members')
    local spec = v and parse_spec(v[2] or '')
    if spec and v[8] then
        return reopen_batch(waiter, spec, v, id, revived)
    end
    local is_cancelled = spec and v[1] == 'cancelled' and v[3] == 'dependency'
    if not spec or v[4] or not (v[1] == 'waiting' or is_cancelled and not unique_of(waiter)) then
        return
    end
    local condition, state, number = parse_edge(safe_call('HGET', dependencies_key(waiter), id))
    if state == 'met' or state == 'failed' then
        call('HSET', dependencies_key(waiter), id, condition .. ' open ' .. number)
        if state == 'met' then
            safe_call('HINCRBY', JOB .. waiter, 'waits', 1)
        end
    end
    local open = is_cancelled and state and count_open(waiter)
    if open then
        revive(waiter, spec, 'cancelled', v[6], v[7], open)
        if v[5] then
            revived[#revived + 1] = waiter
        end
    end
end

-- Level by level: a waiter that waits again counts as replayed, and is added to `ids`.
local function reopen_dependents(ids)
    local n = 0
    while n < #ids do
        n = n + 1
        each_dependent(ids[n], function(waiter)
            reopen_edge(waiter, ids[n], ids)
        end)
    end
end

-- fragment: receivers
-- The receiver of a signal that a job is: `receiver:JOB` with topic, step, number, inOrder, claims, since, until; and
-- the job in `receivers:TOPIC`, by since. Claims of 0: it waits for something else, and the deadline stays.
local function receivers_key(topic)
    return PREFIX .. 'receivers:' .. topic
end

local function receiver_of(id) -- nil for none
    local v = safe_call('HMGET', PREFIX .. 'receiver:' .. id, 'topic', 'step', 'number', 'inOrder', 'claims', 'since',
        'until')
    return v[1] and v[2] and {
        topic = v[1], step = v[2], number = v[3] or '0', in_order = v[4] or '0', claims = v[5] or '0',
        since = to_number(v[6]), deadline = to_number(v[7]),
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
-- step, 7 its number, 8 "1" if in order, 9 topic, 10 timeout in microseconds. Returns {0} if the lease is lost, {1,
-- result or nil}, or {2, microseconds until the deadline}.
local id, claims, step, number, in_order, topic = ARGV[3], ARGV[4], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
if not holds_lease(id, claims, ARGV[5]) then
    finish()
    return { 0 }
end
local recorded = safe_call('HGET', PREFIX .. 'steps:' .. id, step)
if recorded then
    return { 1, string.match(recorded, '^[^\n]*\n=(.*)$') }
end

local function oldest_signal() -- id and value
    local kept = safe_call('ZRANGE', PREFIX .. 'signals_kept:' .. topic, 0, MAX_BATCH - 1)
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
local signal, value = oldest_signal()
local result
if signal then
    forget_kept(signal, topic)
    call('HSET', PREFIX .. 'signals', signal, '=' .. id)
    result = signal_result(value)
elseif is_same and old.deadline <= now then
    result = '={"timed_out":true}'
end
if result then
    record_step(id, claims, step, number, in_order, result)
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
local deadline = is_same and old.deadline or math.min(now + tonumber(ARGV[10]), tonumber(NEVER))
if old and old.topic ~= topic then
    safe_call('ZREM', receivers_key(old.topic), id)
end
safe_call('HSET', PREFIX .. 'receiver:' .. id, 'topic', topic, 'step', step, 'number', number, 'inOrder', in_order,
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
    local v = read_fields(id, 'state', 'claims', 'pickupTime', 'spec', 'dueTime', 'created')
    local spec = v and parse_spec(v[4] or '')
    local is_receiver = receiver and spec and receiver.topic == topic
        and (v[1] == 'running' or v[1] == 'waiting') and claims_of(v[2], v[3]) == receiver.claims
        and safe_call('HEXISTS', PREFIX .. 'steps:' .. id, receiver.step) == 0
    if not is_receiver then
        return false
    end
    remove_receiver(id, receiver)
    record_step(id, receiver.claims, receiver.step, receiver.number, receiver.in_order, signal_result(value))
    call('HSET', JOB .. id, 'waits', 0)
    if v[1] == 'waiting' then
        waits().resume(id, spec, v[5], v[6], true)
    end
    return true
end

local function find_receiver()
    while true do
        local ids = safe_call('ZRANGE', receivers_key(topic), 0, 99)
        for _, id in ipairs(ids) do
            if deliver(id) then
                return id
            end
            safe_call('ZREM', receivers_key(topic), id)
        end
        if #ids < 100 then
            return nil
        end
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

-- name: start_children (partitions, transitions, waits, uniqueness, rewriting, storing, steps)
-- Stores children of a running job, which waits for their ends. ARGV: 3 id, 4 claims, 5 worker, 6 "1" for the first
-- part, 7 on: the batch. Returns nil if the lease is lost; else id and state ("" for none) of each child, and the
-- reply of `store_batch`.
local parent = ARGV[3]
local is_held, wait = holds_lease(parent, ARGV[4], ARGV[5])
if not is_held then
    return false
end
local is_first = ARGV[6] == '1'
each_job(7, function(n)
    local _, _, number = parse_edge(safe_call('HGET', dependencies_key(parent), ARGV[n]))
    if (number or '0') ~= '0' and call('EXISTS', JOB .. ARGV[n]) == 0 then
        left_out[ARGV[n]] = true -- started before, and deleted since
    end
end)
local stored = store_batch(7)
local old = is_first and safe_call('HGET', PREFIX .. 'receiver:' .. parent, 'topic')
if old then
    safe_call('ZREM', PREFIX .. 'receivers:' .. old, parent)
    call('HSET', PREFIX .. 'receiver:' .. parent, 'claims', '0')
end
if is_first or not wait then
    wait = int(safe_call('HINCRBY', JOB .. parent, 'waitNumber', 1))
end
local open, edges, children, seen = 0, {}, {}, {}
for n, given in ipairs(batch_ids) do
    local child = aliases[given] or given
    local v = read_fields(child, 'state')
    local state = v and v[1] or '' -- it was deleted
    children[n] = { child, state }
    local _, edge_state, edge_wait = parse_edge(safe_call('HGET', dependencies_key(parent), child))
    local is_counted = seen[child] or edge_wait == wait and edge_state == 'open'
    seen[child] = true
    if v and v[1] and not ENDED_STATES[state] then
        open = open + (is_counted and 0 or 1)
        edges[#edges + 1] = child
        edges[#edges + 1] = 'end open ' .. wait
    elseif v and v[1] then
        edges[#edges + 1] = child
        edges[#edges + 1] = 'end met ' .. wait
    end
end
add_edges(parent, edges)
if is_first then
    call('HSET', JOB .. parent, 'waits', open)
else
    safe_call('HINCRBY', JOB .. parent, 'waits', open)
end
finish()
return { children, stored }

-- name: read_batch
-- Progress of the batch ARGV[3]: members, those that have not ended, and those that have failed; nil for no batch.
local found = redis.pcall('HMGET', JOB .. ARGV[3], 'members', 'waits', 'failed', 'hold')
if found.err or not found[1] then
    return false
end
local open = to_number(found[2]) - (found[4] and 1 or 0)
return { to_number(found[1]), open, to_number(found[3]) }

-- name: read_waits
-- What the job ARGV[3] waits for, and its dependents, up to ARGV[4]. Returns topic, step, since and until of its
-- receiver, or nothing; its dependencies, {job, "CONDITION STATE WAIT", …}; and in the same form its waiters.
local receiver = redis.pcall('HMGET', PREFIX .. 'receiver:' .. ARGV[3], 'topic', 'step', 'since', 'until', 'claims')
local dependencies = redis.pcall('HGETALL', PREFIX .. 'dependencies:' .. ARGV[3])
local waiters = redis.pcall('ZRANGE', PREFIX .. 'dependents:' .. ARGV[3], 0, tonumber(ARGV[4]) - 1)
local dependents = {}
for _, waiter in ipairs(waiters.err and {} or waiters) do
    local edge = redis.pcall('HGET', PREFIX .. 'dependencies:' .. waiter, ARGV[3])
    if type(edge) == 'string' then
        dependents[#dependents + 1] = waiter
        dependents[#dependents + 1] = edge
    end
end
local is_shown = not receiver.err and receiver[4] and receiver[5] ~= '0'
return { is_shown and receiver or {}, dependencies.err and {} or dependencies, dependents }
