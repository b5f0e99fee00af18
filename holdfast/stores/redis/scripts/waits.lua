-- fragment: waits
-- What jobs wait for. A waiter's dependencies are in the hash `dependencies:WAITER`: job → "CONDITION STATE WAIT". WAIT
-- is 0 for those given at its submission, else the number of the wait for which it started this child. A child whose key
-- another job holds has "held JOB" instead. The waiters of a job are in `dependents:JOB`, all scores 0. The field `waits` of a
-- waiter is the number of its dependencies that are not met, or 1 for a signal; only dependencies whose WAIT is 0 or equals
-- `waitNumber` count. A batch has `members` and `failed`; its `waits` counts open members, and 1 more while it has `submitting`.
local resolved = {} -- jobs that this script has made due or cancelled since their waits are over
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
        call('HSET', JOB .. edges[n], 'hasDependents', 1)
    end
end

local function make_waits()
    -- Makes a job in state `waiting` due now.
    local function resume(id, spec, run_at, created)
        call('HDEL', JOB .. id, 'reason')
        call('HSET', JOB .. id, 'state', 'scheduled', 'dueTime', NOW, 'created', created or run_at)
        transitions().schedule(spec.queue, now, id)
        count(spec.queue, 'waiting', -1)
        count(spec.queue, 'scheduled', 1)
        notify('ready_jobs', 'queue:' .. spec.queue)
        notify_caller_too()
        resolved[id] = true
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
        notify_caller_too()
        resolved[id] = true
    end

    local function write_cancelled()
        for n = 1, #cancelled_entries, 1000 do
            safe_call('ZADD', PREFIX .. 'ended:cancelled',
                unpack(cancelled_entries, n, math.min(n + 999, #cancelled_entries)))
        end
        cancelled_entries = {}
    end

    -- Resolves the open dependencies on a job. `changes`: in order, and by waiter the numbers of dependencies
    -- that are met, by wait, and the text of the first that failed.
    local function resolve_edges(id, how, changes)
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
        notify_caller_too()
        resolved[id] = true
        if call('HGET', JOB .. id, 'hasDependents') then
            note_end(id, state)
        end
    end

    -- Counts so many ends in a batch. Dependencies on its failure are resolved with the first failed member.
    local function count_ends(id, successes, failures)
        local state, spec_text, old_waits, members, old_failed, has_dependents =
            read_fields(id, 'state', 'spec', 'waits', 'members', 'failed', 'hasDependents')
        local spec = parse_spec(spec_text or '')
        if not spec then
            return
        end
        local waits = math.max(0, to_number(old_waits) - successes - failures)
        local failed = to_number(old_failed) + failures
        call('HSET', JOB .. id, 'waits', int(waits), 'failed', int(failed))
        if state == 'waiting' and waits == 0 then
            end_batch(id, spec, to_number(members), failed)
        elseif state == 'waiting' and has_dependents and failures > 0 and failed == failures then
            note_end(id, 'failing')
        end
    end

    local function apply_change(change)
        local id = change.waiter
        local state, spec_text, old_waits, wait_number, has_dependents, run_at, created, members = read_fields(id,
            'state', 'spec', 'waits', 'waitNumber', 'hasDependents', 'dueTime', 'created', 'members')
        local spec = parse_spec(spec_text or '')
        if not spec then
            return
        elseif members then
            return count_ends(id, change.met['0'] or 0, change.failures)
        end
        local met = (change.met['0'] or 0) + (wait_number and change.met[wait_number] or 0)
        local waits = math.max(0, to_number(old_waits) - met)
        if met > 0 then
            call('HSET', JOB .. id, 'waits', int(waits))
        end
        if state == 'waiting' and change.error then
            cancel_waiter(id, spec, change.error)
            if has_dependents then
                note_end(id, 'cancelled')
            end
        elseif state == 'waiting' and met > 0 and waits == 0 then
            resume(id, spec, run_at, created)
        end
    end

    -- Level by level: each cancelled waiter is an end too, and each batch that ends.
    local function resolve()
        while ends_to_resolve[1] do
            local ends, changes = ends_to_resolve, {}
            ends_to_resolve = {}
            for n = 1, #ends, 2 do
                resolve_edges(ends[n], ends[n + 1], changes)
            end
            for _, change in ipairs(changes) do
                apply_change(change)
            end
        end
        write_cancelled()
    end

    return { resolve = resolve, resume = resume, count_ends = count_ends }
end

local loaded_waits
local function waits()
    loaded_waits = loaded_waits or make_waits()
    return loaded_waits
end

resolve_ends = function()
    waits().resolve()
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
            local job_state = read_fields(edges[n], 'state')
            local is_open = job_state and not ENDED_STATES[job_state]
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
local function revive(id, spec, state, run_at, created, open)
    transitions().dequeue(id, spec, state)
    call('HDEL', JOB .. id, 'endTime', 'expiresAt', 'errorGroup')
    delete_pieces(id, 'error')
    delete_pieces(id, 'result')
    call('HSET', JOB .. id, 'state', 'waiting', 'reason', 'dependency', 'dueTime', NEVER, 'created', created or run_at,
        'waits', open)
    count(spec.queue, state, -1)
    count(spec.queue, 'waiting', 1)
    count_unstarted(partition_field_of(id, spec), 1)
end

-- A batch that was not cancelled itself waits for a replayed member again. Adds one that had ended to `revived`.
local function reopen_batch(id, spec, batch, member, revived)
    local condition, state, number = parse_edge(safe_call('HGET', dependencies_key(id), member))
    if batch.state == 'cancelled' or state ~= 'met' and state ~= 'failed' then
        return
    end
    call('HSET', dependencies_key(id), member, condition .. ' open ' .. number)
    local open = safe_call('HINCRBY', JOB .. id, 'waits', 1)
    if state == 'failed' then
        safe_call('HINCRBY', JOB .. id, 'failed', -1)
    end
    if batch.state ~= 'waiting' then
        revive(id, spec, batch.state, batch.run_at, batch.created, open)
        revived[#revived + 1] = batch.has_dependents and id or nil
    end
end

-- Opens the dependency of a waiter on a replayed job, if no worker has started the waiter and it waits, or was
-- cancelled by a dependency and has no unique key. Adds a waiter that waits again to `revived`.
local function reopen_edge(waiter, id, revived)
    local waiter_state, spec_text, reason, started_at, has_dependents, run_at, created, members = read_fields(waiter,
        'state', 'spec', 'reason', 'pickupTime', 'hasDependents', 'dueTime', 'created', 'members')
    local spec = parse_spec(spec_text or '')
    if spec and members then
        local batch = { state = waiter_state, has_dependents = has_dependents, run_at = run_at, created = created }
        return reopen_batch(waiter, spec, batch, id, revived)
    end
    local is_cancelled = spec and waiter_state == 'cancelled' and reason == 'dependency'
    if not spec or started_at or not (waiter_state == 'waiting' or is_cancelled and not unique_of(waiter)) then
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
        revive(waiter, spec, 'cancelled', run_at, created, open)
        if has_dependents then
            revived[#revived + 1] = waiter
        end
    end
end

-- Level by level: a waiter that waits again counts as replayed, and is added to `ids`.
local function reopen_dependents(ids)
    local n = 0
    while n < #ids do
        n = n + 1
        call('HSET', JOB .. ids[n], 'hasDependents', 1) -- pruning looks at all of them again
        each_dependent(ids[n], function(waiter)
            reopen_edge(waiter, ids[n], ids)
        end)
    end
end
