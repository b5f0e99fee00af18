-- name: promote (partitions, transitions)
-- Makes due jobs of every queue ready, up to ARGV[3]; returns their number.
allow_when_full()
local max_jobs, promoted = tonumber(ARGV[3]), 0
local queues = safe_call('ZRANGEBYSCORE', PREFIX .. 'due', '-inf', NOW, 'LIMIT', 0, MAX_PER_SCRIPT)
queues[#queues + 1] = 'default' -- a job may have been added by hand
for _, queue in ipairs(queues) do
    if promoted < max_jobs then
        local made_ready = transitions().promote(queue, max_jobs - promoted)
        promoted = promoted + made_ready
        rescheduled_queues[queue] = true
        if made_ready > 0 then
            notify('ready_jobs', 'queue:' .. queue)
        end
    end
end
finish()
return promoted

-- name: expire (partitions, transitions, waits, expiry)
-- Ends expired jobs that wait. ARGV: 3 limit. Returns the number examined; id and spec of those that ended.
local scanned = end_expired(tonumber(ARGV[3]))
finish()
return { scanned, expired }

-- name: expired_leases
-- Running jobs whose lease has expired. ARGV: 3 leases to skip, 4 limit. Returns {id, fields, lease end} of each, and
-- the number of leases examined. Drops a lease without a running job.
allow_when_full()
local found = safe_call('ZRANGEBYSCORE', LEASES, '-inf', NOW, 'WITHSCORES', 'LIMIT', ARGV[3], ARGV[4])
local jobs, scanned = {}, 0
for n = 1, #found, 2 do
    local fields = redis.pcall('HGETALL', JOB .. found[n])
    local state, spec_text = read_fields(found[n], 'state', 'spec')
    if state == 'running' and parse_spec(spec_text or '') then
        scanned = scanned + 1
        jobs[#jobs + 1] = { found[n], fields, found[n + 1] }
    else
        call('ZREM', LEASES, found[n])
        count_anomaly('orphans')
    end
end
finish()
return { jobs, scanned }

-- fragment: pruning
-- Deletion of jobs whose retention is over. ARGV: 3 state, 4 retention in microseconds, 5 limit. A job is kept as long
-- as a waiter needs it; one that a dependency has cancelled, as long as one that failed is stored. It is in `kept:STATE`,
-- by the instant of the latest look at it, and its field `keptFor` names that job.
local state, cutoff, max_jobs = ARGV[3], now - tonumber(ARGV[4]), tonumber(ARGV[5])
local ended, kept = PREFIX .. 'ended:' .. state, PREFIX .. 'kept:' .. state
local MAX_LOOKS = 1000 -- waiters that one script looks at
local pruned, scanned, looks_left = 0, 0, MAX_LOOKS

-- True if a waiter has not ended, or has started the job and died or was cancelled after `cutoff`: its replay may read how this ended.
local function needs(waiter, id)
    local waiter_state, ended_at = read_fields(waiter, 'state', 'endTime')
    local _, _, wait = parse_edge(safe_call('HGET', dependencies_key(waiter), id))
    local may_replay = wait ~= '0' and waiter_state ~= 'succeeded' and to_number(ended_at) > cutoff
    return wait and waiter_state and (not ENDED_STATES[waiter_state] or may_replay)
end

-- True if a waiter needs the job; nil if it is not known yet: the next script looks at its further waiters. `looked_to`:
-- the field `hasDependents`, the last waiter at which earlier scripts have looked, or 1.
local function is_needed(id, kept_for, looked_to)
    local needing = kept_for and needs(kept_for, id) and kept_for
    local from = looked_to == '1' and '-' or '(' .. looked_to
    local waiters = needing and {} or safe_call('ZRANGEBYLEX', dependents_key(id), from, '+', 'LIMIT', 0, MAX_LOOKS)
    for _, waiter in ipairs(waiters) do
        looks_left = looks_left - 1
        if needs(waiter, id) then
            needing = waiter
            break
        end
    end
    if needing then
        call('HSET', JOB .. id, 'keptFor', needing, 'hasDependents', 1) -- others may need it at the next look
        return true
    elseif #waiters < MAX_LOOKS then
        return false
    end
    call('HSET', JOB .. id, 'hasDependents', waiters[#waiters]) -- all stay: a replay brings them back
    return nil
end

-- True if a job for which this one waited has failed and is still stored: its replay brings this one back.
local function has_failed_dependency(id, kept_for)
    local function is_stored(other, text)
        local _, state = parse_edge(text)
        return state == 'failed' and call('EXISTS', JOB .. other) == 1
    end
    if kept_for and is_stored(kept_for, safe_call('HGET', dependencies_key(id), kept_for)) then
        return true
    end
    local edges = safe_call('HGETALL', dependencies_key(id))
    looks_left = looks_left - #edges / 2
    for n = 1, #edges, 2 do
        if is_stored(edges[n], edges[n + 1]) then
            call('HSET', JOB .. id, 'keptFor', edges[n])
            return true
        end
    end
    return false
end

-- Deletes a job that ended at this instant (nil: at any). Returns "deleted", "kept", "recent", "stale" (it ran again,
-- or is deleted), or "later" (the next script goes on).
local function prune(id, ended_at)
    local state_now, spec_text, stored_ended_at, seq, key, waits, has_dependents, kept_for, reason =
        read_fields(id, 'state', 'spec', 'endTime', 'seq', 'key', 'waits', 'hasDependents', 'keptFor', 'reason')
    local spec = parse_spec(spec_text or '')
    if not spec or state_now ~= state or ended_at and to_number(stored_ended_at) ~= ended_at then
        return 'stale'
    elseif to_number(stored_ended_at) > cutoff then
        return 'recent'
    end
    if has_dependents then
        local is_kept = is_needed(id, kept_for, has_dependents)
        if is_kept ~= false then
            return is_kept and 'kept' or 'later'
        end
    end
    if state == 'cancelled' and reason == 'dependency' and has_failed_dependency(id, kept_for) then
        return 'kept'
    end
    transitions().delete_job(id, to_number(seq), key, true, waits, has_dependents)
    count(spec.queue, state, -1)
    pruned = pruned + 1
    return 'deleted'
end

-- name: prune (partitions, transitions, waits, pruning)
-- Deletes jobs whose retention is over. Returns deleted, examined.
allow_when_full()
if state == 'succeeded' then
    while pruned < max_jobs and scanned < 2 * MAX_PER_SCRIPT and looks_left > 0 do
        local ended_at, id = string.match(safe_call('LINDEX', ended, 0) or '', '^(%d+):(.*)$')
        if not id then
            if not call('LPOP', ended) then
                break
            end
        elseif tonumber(ended_at) > cutoff and tonumber(ended_at) <= now then
            break
        else
            local outcome = prune(id, tonumber(ended_at))
            if outcome == 'kept' or outcome == 'recent' then -- recent: the clock was ahead when it ended
                safe_call('ZADD', kept, NOW, id)
            end
            if outcome ~= 'later' then
                call('LPOP', ended)
            end
        end
        scanned = scanned + 1
    end
    if scanned > 0 then
        invalidate_repair()
    end
else
    -- Returns true if it met one that is kept.
    local function prune_from(place)
        local found, met_kept = safe_call('ZRANGEBYSCORE', ended, '-inf', int(cutoff), 'WITHSCORES', 'LIMIT', place,
            math.min(max_jobs, MAX_PER_SCRIPT)), false
        for n = 1, #found, 2 do
            if safe_call('ZSCORE', kept, found[n]) then
                met_kept = true
            else
                local outcome = looks_left > 0 and prune(found[n], tonumber(found[n + 1])) or 'later'
                if outcome == 'kept' then
                    safe_call('ZADD', kept, NOW, found[n])
                elseif outcome ~= 'later' then
                    call('ZREM', ended, found[n])
                end
                scanned = scanned + 1
            end
        end
        return met_kept
    end
    if prune_from(safe_call('ZCARD', kept)) then -- those that are kept come first, unless the clock went back
        prune_from(0)
    end
end
finish()
return { pruned, scanned }

-- name: prune_kept (partitions, transitions, waits, pruning)
-- Looks again at the kept jobs at which no script has looked since ARGV[6] ("" for the present), the earliest first, up
-- to MAX_PER_SCRIPT. Returns deleted, examined, and the present.
allow_when_full()
local since = ARGV[6] ~= '' and ARGV[6] or NOW
local found = max_jobs > 0 and safe_call('ZRANGEBYSCORE', kept, '-inf', '(' .. since, 'LIMIT', 0,
    math.min(max_jobs, MAX_PER_SCRIPT)) or {}
for _, id in ipairs(found) do
    local outcome = looks_left > 0 and prune(id, nil) or 'later'
    if outcome == 'kept' or outcome == 'recent' then
        call('ZADD', kept, NOW, id)
    elseif outcome ~= 'later' then
        call('ZREM', kept, id)
        if state ~= 'succeeded' and outcome == 'deleted' then
            safe_call('ZREM', ended, id)
        end
    end
    scanned = scanned + 1
end
finish()
return { pruned, scanned, NOW }

-- name: prune_rest
-- Deletes keys that outlived their job and their lifetime, workers that went silent long ago, and buckets that are full
-- again. ARGV: 3 limit, 4 microseconds that a silent worker stays listed.
allow_when_full()
local outlived = PREFIX .. 'outlived'
for _, key in ipairs(safe_call('ZRANGEBYSCORE', outlived, '-inf', NOW, 'LIMIT', 0, ARGV[3])) do
    local keep_until, id = string.match(safe_call('HGET', PREFIX .. 'keys', key) or '', '^(%d+) (.*)$')
    if id and to_number(keep_until) <= now and call('EXISTS', JOB .. id) == 0 then
        call('HDEL', PREFIX .. 'keys', key)
    end
    call('ZREM', outlived, key)
end
for _, worker in ipairs(safe_call('ZRANGEBYSCORE', PREFIX .. 'workers', '-inf', int(now - tonumber(ARGV[4])), 'LIMIT',
    0, ARGV[3])) do
    call('DEL', PREFIX .. 'worker:' .. worker)
    call('ZREM', PREFIX .. 'workers', worker)
end
for _, bucket in ipairs(safe_call('ZRANGEBYSCORE', PREFIX .. 'refills', '-inf', NOW, 'LIMIT', 0, ARGV[3])) do
    safe_call('HDEL', PREFIX .. 'buckets', bucket)
    call('ZREM', PREFIX .. 'refills', bucket)
end
finish()
return 0

-- name: count_ended (successes)
-- Adds ended jobs to the history. ARGV: 3 lag, 4 span before the first count, 5 limit of each state, then the length of
-- each interval and the seconds for which its counts are kept. Fields of `history:LENGTH:START` are "STATE QUEUE", values
-- the number, the length of the last attempts in all, and that of the longest. Returns 1 if there are more.
allow_when_full()
local last, limit = now - tonumber(ARGV[3]), tonumber(ARGV[5])
local mark = tonumber(safe_call('GET', PREFIX .. 'history_mark') or nil) or now - tonumber(ARGV[4])

local function ended_after(state) -- id, instant …; those of the last instant may be incomplete if there are `limit`
    if state ~= 'succeeded' then
        local key = PREFIX .. 'ended:' .. state
        return safe_call('ZRANGEBYSCORE', key, '(' .. int(mark), int(last), 'WITHSCORES', 'LIMIT', 0, limit)
    end
    local found, low = {}, succeeded_after(mark)
    for _, entry in ipairs(safe_call('LRANGE', SUCCEEDED, low, low + limit - 1)) do
        local instant, id = string.match(entry, '^(%d+):(.*)$')
        found[#found + 1] = id or ''
        found[#found + 1] = instant or int(mark)
    end
    return found
end

local pages, upto
while last > mark do
    pages, upto = {}, last
    for _, state in ipairs({ 'succeeded', 'dead', 'cancelled' }) do
        local found = ended_after(state)
        pages[state] = found
        if #found >= 2 * limit then
            upto = math.min(upto, tonumber(found[#found]) - 1)
        end
    end
    if upto > mark then
        break
    end
    limit = limit * 2 -- so many ended at one instant
end
if not upto then
    finish()
    return 0
end

local counts = {} -- by key and field: number, total, longest

local function add(key, field, run)
    local fields = counts[key] or {}
    local group = fields[field] or { 0, 0, 0 }
    counts[key], fields[field] = fields, group
    group[1], group[2], group[3] = group[1] + 1, group[2] + run, math.max(group[3], run)
end

for state, found in pairs(pages) do
    for n = 1, #found, 2 do
        local instant = tonumber(found[n + 1])
        local state_now, spec_text, ended_at, started_at
        if instant <= upto then
            state_now, spec_text, ended_at, started_at = read_fields(found[n], 'state', 'spec', 'endTime', 'pickupTime')
        end
        local spec = state_now == state and to_number(ended_at) == instant and parse_spec(spec_text or '')
        if spec then -- it was neither replayed nor deleted
            local run = math.max(0, instant - (tonumber(started_at or nil) or instant))
            for at = 6, #ARGV, 2 do
                local start = instant - instant % tonumber(ARGV[at])
                add(PREFIX .. 'history:' .. ARGV[at] .. ':' .. int(start) .. ' ' .. ARGV[at + 1], state .. ' ' .. spec.queue, run)
            end
        end
    end
end
for key_and_seconds, fields in pairs(counts) do
    local key, seconds = string.match(key_and_seconds, '^(.*) (%d+)$')
    for field, group in pairs(fields) do
        local known = safe_call('HGET', key, field) or ''
        local number, total, longest = string.match(known, '^(%d+) (%d+) (%d+)$')
        local values = { group[1] + to_number(number), group[2] + to_number(total), math.max(group[3], to_number(longest)) }
        call('HSET', key, field, int(values[1]) .. ' ' .. int(values[2]) .. ' ' .. int(values[3]))
    end
    call('EXPIRE', key, seconds)
end
safe_call('SET', PREFIX .. 'history_mark', int(upto))
finish()
return upto < last and 1 or 0
