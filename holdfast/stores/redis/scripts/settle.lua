-- name: settle (partitions, moving)
-- Applies each settlement whose guard holds, in order. ARGV, from 3 on: runs of settlements, each with what it is of first:
-- "worker", whose leases those that follow are under, "" for any worker;
-- "first", a length and ids of that length in one text: successes without a result under a first claim, as most are;
-- "success", a number, and so often id, claims and result ("" for none); both under a live lease;
-- "other", id, claims, state, reason, delay, flags ("r" refund, "e" expired), result, error, traceback, "=" before an error
-- or traceback that is there. Answers 1 (accepted as asked; 2 for a job under limits), or {accepted, state, run_at, 1 for a
-- job under limits}.
even_if_full()
local answers, ended, settled, done = {}, {}, {}, 0
local succeeded = {} -- how many, by kind
local setbacks = 0
local worker = '' -- a failover can bring an old number of claims back: the lease is whose worker has the job now
local STAMP = NOW .. ':'
local ENDED = { succeeded = true, dead = true, cancelled = true }
local ENDS_CANCELLED = { failed = true, queued = true, scheduled = true, waiting = true }

-- Mostly no lease of anybody has expired: then none is asked for its end.
local oldest = ours('ZRANGE', LEASES, 0, 0, 'WITHSCORES')[2]
local all_live = oldest and tonumber(oldest) > now

local function lease_end(id)
    return all_live and math.huge or tonumber(call('ZSCORE', LEASES, id) or nil)
end

local function is_others(holder)
    return worker ~= '' and holder ~= worker
end

local function refused(id, claims, state)
    note_refused(id, claims, worker)
    return { 0, state }
end

local function give_back(id, known) -- room of limits; whether it had any
    local field = field_of(id, known)
    if field then
        release(known.queue, field)
    end
    return field
end

local function succeed(id, claims, result)
    local key = JOB .. id
    local v = redis.pcall('HMGET', key, 'state', 'claims', 'kind', 'cancel', 'worker')
    if v.err or not v[1] then
        return { 0 }
    elseif v[1] ~= 'running' or (v[2] or '1') ~= claims or is_others(v[5]) or (not all_live and (lease_end(id) or 0) <= now) then
        return refused(id, claims, v[1])
    end
    if claims ~= '1' or v[4] then -- only then it can have been in trouble
        call('HDEL', key, 'lost_leases', 'cancel', 'reason')
        drop(id, 'error')
    end
    if result == '' then
        call('HSET', key, 'state', 'succeeded', 'endTime', NOW)
    elseif #result <= CHUNK then
        call('HSET', key, 'state', 'succeeded', 'endTime', NOW, 'result', result)
    else
        local fields = { 'state', 'succeeded', 'endTime', NOW }
        pieces(fields, 'result', result)
        call('HSET', key, unpack(fields))
    end
    done = done + 1
    settled[done] = id
    endings[#endings + 1] = id
    ended[#ended + 1] = STAMP .. id
    succeeded[v[3]] = (succeeded[v[3]] or 0) + 1
    local known = kind_of(v[3])
    if known and known.is_limited then
        return give_back(id, known) and 2 or 1
    end
    return 1
end

local function record(id, v, claims, state, reason, error, traceback)
    ours('RPUSH', P .. 'attempts:' .. id, cmsgpack.pack({
        claims, v[5] or claims, v[6] or false, v[7] or false, NOW, state, reason ~= '' and reason,
        error ~= '' and string.sub(error, 2), traceback ~= '' and string.sub(traceback, 2),
    }))
end

local function let_go(n)
    local id, claims, state, reason, delay = ARGV[n], ARGV[n + 1], ARGV[n + 2], ARGV[n + 3], ARGV[n + 4]
    local flags, result, error, traceback = ARGV[n + 5], ARGV[n + 6], ARGV[n + 7], ARGV[n + 8]
    local refund, expired = string.find(flags, 'r', 1, true), string.find(flags, 'e', 1, true) ~= nil
    local v = read(id, 'state', 'claims', 'kind', 'cancel', 'attempts', 'worker', 'pickupTime', 'lost_leases', 'dueTime', 'created', 'seq')
    local known, lease = v and v[3] and kind_of(v[3]), lease_end(id)
    if not known then
        return { 0 }
    elseif v[1] ~= 'running' or (v[2] or '1') ~= claims or is_others(v[6]) or not lease or (lease <= now) ~= expired then
        return refused(id, claims, v[1])
    end
    local asked = reason
    if v[4] and ENDS_CANCELLED[state] then
        state, reason = 'cancelled', 'cancelled'
    end
    if not refund and state ~= 'succeeded' then
        record(id, v, claims, state, asked, error, traceback)
    end
    if not refund and state ~= 'succeeded' and not ENDED[state] then
        setbacks = setbacks + 1
        ours('ZADD', P .. 'setbacks', NOW, claims .. ' ' .. id)
    end
    local lost_leases = expired and number(v[8]) + 1 or refund and number(v[8]) or 0
    local run_at = delay ~= '' and now + tonumber(delay) or number(v[9])
    local attempts = math.max(0, number(v[5] or claims) - (refund and 1 or 0)) -- another program may have set it to 0
    local fields = { 'state', state, 'attempts', int(attempts) }
    local function set(field, value)
        fields[#fields + 1] = field
        fields[#fields + 1] = value
    end
    call('HDEL', JOB .. id, 'lost_leases', 'cancel', 'reason')
    if state == 'succeeded' or error ~= '' then
        drop(id, 'error')
    end
    if state ~= 'succeeded' and error ~= '' then
        pieces(fields, 'error', string.sub(error, 2))
    end
    if delay ~= '' then
        set('dueTime', int(run_at))
        set('created', v[10] or v[9]) -- until now the same as its due time
    end
    if lost_leases > 0 then
        set('lost_leases', int(lost_leases))
    end
    if reason ~= '' then
        set('reason', reason)
    end
    if result ~= '' then
        pieces(fields, 'result', result)
    end
    if ENDED[state] then
        set('endTime', NOW)
    end
    call('HSET', JOB .. id, unpack(fields))
    done = done + 1
    settled[done] = id
    count(known.queue, 'running', -1)
    count(known.queue, state, 1)
    local field = give_back(id, known)
    count_waiting(field, ENDED[state] and 0 or 1)
    if state == 'succeeded' then
        ended[#ended + 1] = STAMP .. id
    elseif ENDED[state] then
        ours('ZADD', P .. 'ended:' .. state, NOW, id)
    elseif state == 'queued' then
        moving().ready(known, run_at, number(v[11]), id, lost_leases, field)
    elseif state ~= 'waiting' then
        moving().schedule(known.queue, run_at, id)
    end
    if ENDED[state] then
        endings[#endings + 1] = id
    else
        tell('news', 'queue:' .. known.queue)
    end
    return { 1, state, int(run_at), field and 1 or 0 }
end

local at = 3
while at <= #ARGV do
    local what = ARGV[at]
    if what == 'worker' then
        worker = ARGV[at + 1]
        at = at + 2
    elseif what == 'first' then
        local length, ids = tonumber(ARGV[at + 1]), ARGV[at + 2]
        for n = 1, #ids, length do
            answers[#answers + 1] = succeed(string.sub(ids, n, n + length - 1), '1', '')
        end
        at = at + 3
    elseif what == 'success' then
        local last = at + 3 * tonumber(ARGV[at + 1]) - 1
        for n = at + 2, last, 3 do
            answers[#answers + 1] = succeed(ARGV[n], ARGV[n + 1], ARGV[n + 2])
        end
        at = last + 3
    else
        answers[#answers + 1] = let_go(at + 1)
        at = at + 10
    end
end
if done > 0 then
    call('ZREM', LEASES, unpack(settled))
end
if #ended > 0 then
    ours('RPUSH', P .. 'ended:succeeded', unpack(ended))
end
if setbacks > 0 then
    call('EXPIRE', P .. 'setbacks', 3600) -- as long as who follows what happens may be away
    if call('ZCARD', P .. 'setbacks') > SETBACKS then
        call('ZREMRANGEBYRANK', P .. 'setbacks', 0, -SETBACKS - 1)
    end
end
for kind, number_of in pairs(succeeded) do
    local known = kind_of(kind)
    if known then
        count(known.queue, 'running', -number_of)
        count(known.queue, 'succeeded', number_of)
    end
end
if moves then
    moves.place_ready()
end
write_released()
finish()
return answers

-- name: beat
-- Registers a worker and extends its live leases. ARGV: 3 worker, 4 lease in microseconds, 5 "1" to register, 6 number of
-- fields of the worker, the fields and their values, then id and claims of each lease. Answers the order, then 0 lost,
-- 1 held, 2 asked to stop for each lease.
even_if_full()
local until_ = int(now + tonumber(ARGV[4]))
local worker = P .. 'worker:' .. ARGV[3]
local at = 7 + 2 * tonumber(ARGV[6])
if ARGV[5] == '1' then
    ours('HSET', worker, 'seen', NOW, 'until', until_, unpack(ARGV, 7, at - 1))
    call('HSETNX', worker, 'started', NOW)
    ours('ZADD', P .. 'workers', until_, ARGV[3])
end
local answers, extended = { ours('HGET', worker, 'ordered') or 'none' }, {}
for i = at, #ARGV, 2 do
    local v = read(ARGV[i], 'state', 'claims', 'cancel', 'worker')
    -- A failover can bring an old number of claims back: the lease is whose worker has the job now.
    local held = v and v[1] == 'running' and claims_of(v[2], true) == ARGV[i + 1] and v[4] == ARGV[3]
    local lease = held and ours('ZSCORE', LEASES, ARGV[i])
    if lease and tonumber(lease) > now then
        extended[#extended + 1] = until_
        extended[#extended + 1] = ARGV[i]
        answers[#answers + 1] = v[3] and 2 or 1
    else
        note_refused(ARGV[i], ARGV[i + 1], ARGV[3])
        answers[#answers + 1] = 0
    end
end
if #extended > 0 then
    call('ZADD', LEASES, unpack(extended))
end
finish()
return answers

-- name: record
-- Keeps log lines with their jobs. ARGV, from 3 on, for each record: id, claims, how many lines, and of each line its number,
-- microseconds since it was said, level, text, and "" or "=" and its fields. Answers 1 for a lease that stands, else 0. That
-- of a success does: no other worker can have written it. A line's place is its claims and number: the stream itself refuses
-- one that is there already, and one that comes late, behind later ones; these are put in where they belong.
local answers, at = {}, 3

local function stands(id, claims, v)
    if not v or not v[1] or claims_of(v[2], v[3]) ~= claims then
        return false
    end
    return v[1] == 'succeeded' or v[1] == 'running' and (tonumber(call('ZSCORE', LEASES, id) or nil) or 0) > now
end

local function place(entry)
    local claims, number = string.match(entry, '^(%d+)-(%d+)$')
    return tonumber(claims), tonumber(number)
end

local function before(one, other)
    local claims, number = place(one[1])
    local others_claims, others_number = place(other[1])
    return claims < others_claims or claims == others_claims and number < others_number
end

-- A stream takes what is behind everything alone, even what it has lost: so it is made anew.
local function weave(key, late)
    local new, known = {}, {}
    for _, line in ipairs(late) do
        if not known[line[1]] and #call('XRANGE', key, line[1], line[1]) == 0 then
            new[#new + 1] = line
        end
        known[line[1]] = true
    end
    if not new[1] then
        return
    end
    local entries = call('XRANGE', key, '-', '+')
    for _, line in ipairs(new) do
        entries[#entries + 1] = line
    end
    table.sort(entries, before)
    call('DEL', key)
    for _, entry in ipairs(entries) do
        call('XADD', key, entry[1], unpack(entry[2]))
    end
end

local function keep(id, claims, attempt, n, late)
    local line = {
        P .. 'lines:' .. id, claims .. '-' .. ARGV[n], 'attempt', attempt, 'at', int(now - tonumber(ARGV[n + 1])),
        'level', ARGV[n + 2], 'text', ARGV[n + 3],
    }
    if ARGV[n + 4] ~= '' then
        line[#line + 1] = 'fields'
        line[#line + 1] = string.sub(ARGV[n + 4], 2)
    end
    local reply = redis.pcall('XADD', unpack(line))
    if reply.err and string.find(reply.err, 'WRONGTYPE', 1, true) then
        ours('XADD', unpack(line))
    elseif reply.err and string.find(reply.err, 'equal or smaller', 1, true) then
        late[#late + 1] = { line[2], { unpack(line, 3) } }
    elseif reply.err then
        return reply
    end
end

while at <= #ARGV do
    local id, claims, last = ARGV[at], ARGV[at + 1], at + 2 + 5 * tonumber(ARGV[at + 2])
    local v = read(id, 'state', 'claims', 'pickupTime', 'attempts')
    local standing = stands(id, claims, v)
    local late = {}
    for n = at + 3, standing and last or 0, 5 do
        local trouble = keep(id, claims, v[4] or claims, n, late)
        if trouble then
            return trouble
        end
    end
    if late[1] then
        weave(P .. 'lines:' .. id, late)
    end
    answers[#answers + 1] = standing and 1 or 0
    at = last + 1
end
finish()
return answers

-- name: leave
-- Forgets a worker that has stopped. ARGV: 3 worker.
even_if_full()
call('DEL', P .. 'worker:' .. ARGV[3])
ours('ZREM', P .. 'workers', ARGV[3])
return 0
