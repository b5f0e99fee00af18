-- name: claim (partitions, moving, expiring, taking)
-- Claims ready jobs in their order. ARGV: 6 limit, 7 max_must_start, 8 "1" to take one quarantined job alone, 9 "1" to make due
-- jobs ready first, 10 "1" to take although more are due than this made ready, 11 slots of every other queue or "",
-- 12 the queue served last, 13 what this claim has passed by already, then queue and slots of each that is named, in the
-- order of their turn.
-- Answers jobs, promoted, microseconds until the next falls due or -1, quarantined, lease end, served, what to do: 0
-- that was all, 1 there was more to look through, 2 nothing was taken because more is due; what was passed by, or ""; 1
-- where a queue was left at a job on its last attempt beyond the max_must_start ones; 1 where a queue among these has jobs under
-- limits, and the queues with limits of their own that have ready jobs without a partition: it takes none of either; id and kind
-- of jobs that have expired.
-- A full Redis lets this through: whatever it may do, it takes ids away first.
local limit, max_must_start, alone = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8] == '1'
local promoting, star, served = ARGV[9] == '1', tonumber(ARGV[11]), ARGV[12]
local named, turn = {}, {}
local promoted, quarantined, more, stopped_at_last_attempt, budget = 0, 0, 0, 0, limit + 2 * MOST
-- How many ids at the head of each ready list this claim may not take: its next script looks behind them, but not behind
-- more than some PASSED_MOST: then what is further back waits until those are taken.
local passed = ARGV[13] ~= '' and cmsgpack.unpack(ARGV[13]) or {}
local PASSED_MOST = 5000 -- moving them out of the way and back takes a millisecond
for i = 14, #ARGV, 2 do
    named[ARGV[i]] = tonumber(ARGV[i + 1])
    turn[#turn + 1] = ARGV[i]
end
local paused, guarded, has_tombstones, scheduled, overdue = {}, {}, false, false, false
-- Mostly there is none of these.
if call('EXISTS', P .. 'paused', P .. 'tombstones', P .. 'due', SCHEDULE, P .. 'expiry', P .. 'guarded') > 0 then
    overdue = expire_overdue(MOST) == MOST -- there may be more, which are not to be taken
    paused, guarded = paused_queues(), guarded_queues()
    has_tombstones = call('EXISTS', P .. 'tombstones') == 1
    scheduled = call('EXISTS', P .. 'due', SCHEDULE) > 0
end

local function next_due()
    local first
    if star then
        first = ours('ZRANGE', P .. 'due', 0, 0, 'WITHSCORES')[2]
        first = first and tonumber(first)
    else
        for _, queue in ipairs(turn) do
            local entry = named[queue] > 0 and ours('ZRANGE', schedule_of(queue), 0, 0, 'WITHSCORES')[2]
            if entry and (not first or tonumber(entry) < first) then
                first = tonumber(entry)
            end
        end
    end
    return first and int(math.max(0, first - now)) or '-1'
end

local function take_quarantined(queue)
    local best, chosen
    for _, id in ipairs(ours('ZRANGE', quarantine_of(queue), 0, MOST - 1)) do
        local v = read(id, unpack(FIELDS))
        local known = v and kind_of(v[2] or '')
        if not known or v[1] ~= 'queued' then
            call('ZREM', quarantine_of(queue), id)
        elseif not known.is_limited then
            local stands = { -number(known.level), number(v[6]), number(v[10]) }
            local level = best and stands[1] - best[1] or -1
            if level < 0 or level == 0 and moving().before({ stands[2], stands[3] }, { best[2], best[3] }) then
                best, chosen = stands, { id, v }
            end
        end
    end
    if chosen then
        call('ZREM', quarantine_of(queue), chosen[1])
        take(chosen[1], chosen[2])
    end
end

-- Whether an id met in a ready list is a job to take: its fields; or "suspect" for one to leave there, "last" for one to
-- leave there with all that are behind it.
local function claimable(id, queue, list)
    if has_tombstones and moving().clear_tombstone(list, id) then
        return nil
    end
    local v = read(id, unpack(FIELDS))
    if not v or not v[2] then
        v = adopt(id, queue)
    end
    local known = v and kind_of(v[2])
    if not known then
        return nil
    end
    if v[1] == 'scheduled' or v[1] == 'failed' then -- moved by hand
        if ours('ZSCORE', schedule_of(known.queue), id) then
            return nil
        end
    elseif v[1] ~= 'queued' then
        return nil
    end
    if overdue and is_overdue(id) then
        expire(id, v[1], v[2])
        ours('ZREM', P .. 'expiry', id)
        return nil
    end
    local tier = tier_of(v[5])
    if known.is_limited and v[12] then -- it waits in its partition
        if v[1] ~= 'queued' then
            call('HSET', JOB .. id, 'state', 'queued')
            count(known.queue, v[1], -1)
            count(known.queue, 'queued', 1)
        end
        moving().ready(known, number(v[6]), number(v[10]), id, number(v[5]), v[12])
        return nil
    end
    if tier == 2 then
        ours('ZADD', quarantine_of(known.queue), v[6], id)
        return nil
    end
    if tier == 1 or is_last(known, v) then
        if max_must_start <= 0 then
            return tier == 1 and 'suspect' or 'last'
        end
        max_must_start = max_must_start - 1
    end
    return v
end

-- Takes an id that was met in a ready list, if it stands for a job that was never claimed and whose id was minted, which is the
-- rule.
local function taken_first(id)
    local v = redis.pcall('HMGET', JOB .. id, 'state', 'kind', 'pickupTime', 'dueTime', 'created', 'payload', 'options', 'claims')
    local known = v[1] == 'queued' and not v[3] and not v[8] and kind_of(v[2])
    if not known or known.is_limited or known.most == 1 and max_must_start <= 0 then -- a key of another type has no first field either
        return false
    end
    if known.most == 1 then
        max_must_start = max_must_start - 1
    end
    take_first(id, 'queued', v[2], v[6], v[4], v[5], v[7])
    return true
end

local function put_back(list, ids, first) -- from the first of them that is named on
    for last = #ids, first, -1000 do
        local some = {}
        for n = last, math.max(first, last - 999), -1 do
            some[#some + 1] = ids[n]
        end
        call('LPUSH', list, unpack(some))
    end
end

local function take_level(queue, level, room)
    local list = ready_of(queue, level)
    local aside = passed[list] and ours('LPOP', list, passed[list]) or {}
    while room > 0 and budget > 0 do
        local ids = ours('LPOP', list, math.min(room, budget))
        if not ids or #ids == 0 then
            break
        end
        budget = budget - #ids
        for n, id in ipairs(ids) do
            if not has_tombstones and not overdue and taken_first(id) then
                room = room - 1
            else
                local v = claimable(id, queue, list)
                if v == 'suspect' then
                    aside[#aside + 1] = id
                elseif v == 'last' then
                    put_back(list, ids, n)
                    stopped_at_last_attempt, room = 1, 0
                    break
                elseif v then
                    take(id, v)
                    room = room - 1
                end
            end
        end
    end
    if aside[1] then
        put_back(list, aside, 1)
        passed[list] = #aside
    end
    local further = #aside < PASSED_MOST and (leased == 0 or #aside > 0)
    if room > 0 and budget <= 0 and further and call('LLEN', list) > #aside then
        more = 1
    end
    return room
end

local function take_levels(queue, room)
    local levels, at_zero = ours('ZRANGE', levels_of(queue), 0, -1, 'WITHSCORES'), false
    for n = 1, #levels, 2 do
        if not at_zero and tonumber(levels[n + 1]) > 0 then
            room, at_zero = take_level(queue, '0', room), true
        end
        room = take_level(queue, levels[n], room)
        if call('EXISTS', ready_of(queue, levels[n])) == 0 then
            call('ZREM', levels_of(queue), levels[n])
        end
    end
    return at_zero and room or take_level(queue, '0', room)
end

-- Jobs of a queue with limits wait in its partitions; those without one are given theirs first.
local function leave_to_limits(queue)
    if ours('ZCARD', quarantine_of(queue)) > 0 then
        quarantined = 1
    elseif call('EXISTS', ready_of(queue, '0'), levels_of(queue)) == 0 then
        ours('ZREM', P .. 'queues', queue)
    end
end

local function note_limited()
    local is_limited = star ~= nil and call('EXISTS', P .. 'limited')
    for _, queue in ipairs(is_limited == 1 and {} or turn) do
        if named[queue] > 0 and is_limited ~= 1 and ours('ZSCORE', P .. 'limited', queue) then
            is_limited = 1
        end
    end
    local unassigned = {}
    for queue in pairs(guarded) do
        local is_wanted = (named[queue] or star or 0) > 0 and not paused[queue]
        if is_wanted and (alone and call('EXISTS', quarantine_of(queue))
            or call('EXISTS', ready_of(queue, '0'), levels_of(queue))) > 0 then
            unassigned[#unassigned + 1] = queue
        end
    end
    return is_limited == 1 and 1 or 0, unassigned
end

local function take_from(queue, slots)
    served = queue
    if guarded[queue] then
        return leave_to_limits(queue)
    elseif alone then
        return take_quarantined(queue)
    end
    local room = math.min(slots, limit - leased)
    if call('EXISTS', quarantine_of(queue), levels_of(queue)) > 0 then
        quarantined = ours('ZCARD', quarantine_of(queue)) > 0 and 1 or quarantined
        room = take_levels(queue, room)
    else
        room = take_level(queue, '0', room)
    end
    if room > 0 and call('EXISTS', ready_of(queue, '0'), levels_of(queue), quarantine_of(queue)) == 0 then
        ours('ZREM', P .. 'queues', queue)
    end
end

local function full()
    return leased >= (alone and 1 or limit) or budget <= 0
end

local function take_in_turn()
    for _, queue in ipairs(turn) do
        if named[queue] > 0 and not paused[queue] and not full() then
            take_from(queue, named[queue])
        end
    end
    if not star then
        return
    end
    local start, listed = served, named['default'] ~= nil or paused['default']
    for _, range in ipairs({ { '(' .. start, '+' }, { '-', '[' .. start } }) do
        for _, queue in ipairs(full() and {} or ours('ZRANGEBYLEX', P .. 'queues', range[1], range[2], 'LIMIT', 0, 1000)) do
            listed = listed or queue == 'default'
            if not paused[queue] and not named[queue] and not full() then
                take_from(queue, star)
            end
        end
    end
    if not listed and not full() and call('EXISTS', READY) == 1 then
        take_from('default', star) -- a job was put there by hand
    end
end

if promoting and (scheduled or not star) then
    promoted = make_due_ready(turn, named, star)
end
local due = (scheduled or not star) and next_due() or '-1'
if due == '0' and promoting and ARGV[10] ~= '1' then
    more = 2
else
    take_in_turn()
    lease_taken()
end
if moves then
    moves.place_ready()
end
local is_limited, unassigned = 0, {}
if call('EXISTS', P .. 'limited', P .. 'guarded') > 0 then
    is_limited, unassigned = note_limited()
end
finish()
return {
    taken, promoted, due, quarantined, until_, served, more, next(passed) and cmsgpack.pack(passed) or '', stopped_at_last_attempt,
    is_limited, unassigned, expired,
}

-- name: deliver (partitions, moving, expiring, taking)
-- Claims just the delivered ids that can be claimed. ARGV: 6 limit, 7 the highest tier,
-- 8 "1" to make due ones ready, 9 slots of every other queue or "", 10 max_must_start, 11 number of named queues, queue and slots
-- of each, then the ids. Answers jobs, lease end, "1" where a queue was left at a job on its last attempt, and id and kind of
-- jobs that have expired.
even_if_full()
local limit, most, star, max_must_start = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[9]), tonumber(ARGV[10])
local named, paused, guarded, groups, order = {}, paused_queues(), guarded_queues(), {}, {}
local at, stopped_at_last_attempt = 12 + 2 * tonumber(ARGV[11]), 0
local overdue = expire_overdue(MOST) == MOST -- there may be more, which are not to be taken
for i = 12, at - 1, 2 do
    named[ARGV[i]] = tonumber(ARGV[i + 1])
    order[#order + 1] = ARGV[i]
end

local function eligible(id)
    local v = read(id, unpack(FIELDS))
    local known = v and kind_of(v[2] or '')
    if not known or paused[known.queue] or known.is_limited or guarded[known.queue] or tier_of(v[5]) > most then
        return nil -- a job under limits is claimed in its turn
    end
    local is_due = (v[1] == 'scheduled' or v[1] == 'failed') and ARGV[8] == '1' and number(v[6]) <= now
    if v[1] ~= 'queued' and not is_due or overdue and is_overdue(id) then
        return nil
    end
    local lane = named[known.queue] and known.queue or star and ''
    return lane, { number(v[6]), number(v[10]), id, v, known }
end

local seen, before = {}, moving().before
for i = at, #ARGV do
    local lane, job = nil, nil
    if not seen[ARGV[i]] then
        seen[ARGV[i]] = true
        lane, job = eligible(ARGV[i])
    end
    if lane then
        groups[lane] = groups[lane] or {}
        groups[lane][#groups[lane] + 1] = job
    end
end

if star then
    named[''] = star
    order[#order + 1] = ''
end
for _, lane in ipairs(order) do
    local group = groups[lane] or {}
    table.sort(group, function(a, b)
        local one, other = number(a[5].level), number(b[5].level)
        if one ~= other then
            return one > other
        end
        return before(a, b)
    end)
    for n = 1, math.min(#group, named[lane], limit - leased) do
        local job = group[n]
        if tier_of(job[4][5]) > 0 or is_last(job[5], job[4]) then
            if max_must_start <= 0 then
                stopped_at_last_attempt = 1
                break
            end
            max_must_start = max_must_start - 1
        end
        moving().withdraw(job[3], job[5], job[4][1], number(job[4][5]))
        take(job[3], job[4])
    end
end
lease_taken()
finish()
return { taken, until_, stopped_at_last_attempt, expired }

-- name: unheard
-- Running jobs that a worker claimed after an instant. ARGV: 3 worker, 4 the instant, 5 the lease in microseconds that it
-- claims for, 6 how many leases to skip. Answers {id, claims} of each, how many others were looked at, and whether there
-- are more.
local after = int(tonumber(ARGV[4]) + tonumber(ARGV[5]))
local ids = ours('ZRANGEBYSCORE', LEASES, '(' .. after, '+inf', 'LIMIT', ARGV[6], MOST)
local found = {}
for _, id in ipairs(ids) do
    local v = read(id, 'state', 'claims', 'pickupTime', 'worker')
    if v and v[1] == 'running' and v[4] == ARGV[3] and number(v[3]) > tonumber(ARGV[4]) then
        found[#found + 1] = { id, claims_of(v[2], v[3]) }
    end
end
return { found, #ids - #found, #ids == MOST and 1 or 0 }

-- name: mark_unreadable (partitions)
-- Ends a claimed job that cannot be read. ARGV: 3 id, 4 error.
even_if_full()
local v = read(ARGV[3], 'state', 'kind')
local known = v and kind_of(v[2] or '')
if known and v[1] == 'running' then
    ours('ZREM', LEASES, ARGV[3])
    drop(ARGV[3], 'error')
    local fields = { 'state', 'dead', 'reason', 'payload', 'endTime', NOW }
    pieces(fields, 'error', ARGV[4])
    call('HSET', JOB .. ARGV[3], unpack(fields))
    ours('ZADD', P .. 'ended:dead', NOW, ARGV[3])
    count(known.queue, 'running', -1)
    count(known.queue, 'dead', 1)
    endings[1] = ARGV[3]
    local field = field_of(ARGV[3], known)
    if field then
        release(known.queue, field)
        write_released()
    end
end
finish()
return 0
