-- name: operate (partitions, moving, uniqueness, basis)
-- Cancels, replays or deletes jobs. ARGV: 3 "cancel", "replay" or "delete", 4 "f" to replay successes too, "w" where
-- payloads stay in one piece, 5 "" or "=" and the new payload, 6 a name for this very call: asked again under it, since the
-- answer was lost, nothing is done again, 7 and 8 microseconds: after how long the first is to be replayed, and how long after
-- it each other one, 9 of a replay the version of the limits. Then for each job: id, "" or the state and claims it must still
-- have ("state claims"; else it is passed over), and of a replay its basis and its partition as its field has it. Answers for
-- each {state it has now, 1 changed | 0 refused | -1 passed over}, nil for a job that is not there; or AGAIN.
local DONE, REMEMBERED = P .. 'done:' .. ARGV[6], 60 -- seconds
local done = redis.pcall('GET', DONE)
if type(done) == 'string' then
    return cmsgpack.unpack(done)
end
local what, force = ARGV[3], string.find(ARGV[4], 'f', 1, true)
if what == 'replay' then
    local stands = limits_version() == ARGV[9]
    for i = 10, #ARGV, 4 do
        stands = stands and has_basis(ARGV[i], ARGV[i + 2])
    end
    if not stands then
        return AGAIN
    end
end
even_if_full()
local whole = string.find(ARGV[4], 'w', 1, true)
local answers = {}

local function cancel(id, v, known)
    if v[1] == 'running' then
        call('HSET', JOB .. id, 'cancel', 1)
        tell('orders', 'worker:' .. (v[6] or ''))
        return 'running'
    end
    if v[1] ~= 'queued' and v[1] ~= 'scheduled' and v[1] ~= 'failed' and v[1] ~= 'waiting' then
        return nil
    end
    moving().withdraw(id, known, v[1], number(v[4]))
    call('HDEL', JOB .. id, 'lost_leases')
    call('HSET', JOB .. id, 'state', 'cancelled', 'reason', 'cancelled', 'endTime', NOW)
    call('HSETNX', JOB .. id, 'error', 'cancelled')
    ours('ZADD', P .. 'ended:cancelled', NOW, id)
    endings[#endings + 1] = id
    return 'cancelled'
end

local function unique_of(id) -- as `take_unique` takes it; nil for a job without such a key
    local options = joined(id, 'options', call('HGET', JOB .. id, 'options'))
    if not options or not string.find(options, '"unique"', 1, true) then
        return nil
    end
    local read_well, values = pcall(cjson.decode, options)
    local unique = read_well and values.unique
    if not unique or not unique.key then
        return nil
    end
    local window = unique.window_us and int(unique.window_us) or '-'
    return table.concat({ unique.on_conflict or 'keep', unique.during or '-', window, unique.key }, ' ')
end

local function replay(id, v, known, later, field)
    if v[1] ~= 'failed' and v[1] ~= 'dead' and v[1] ~= 'cancelled' and not (force and v[1] == 'succeeded') then
        return nil
    end
    local unique = unique_of(id)
    if unique then
        local _, holder = take_unique(unique, id)
        if holder then
            return nil
        end
    end
    moving().withdraw(id, known, v[1], 0)
    call('HDEL', JOB .. id, 'lost_leases', 'reason', 'endTime', 'cancel', 'expiresAt')
    drop(id, 'error')
    drop(id, 'result')
    local state, due = later > 0 and 'scheduled' or 'queued', now + later
    local fields = { 'state', state, 'dueTime', int(due), 'created', v[8] or v[7] }
    if v[10] then -- else there is none to forget, and the first claim says so by itself
        fields[7], fields[8] = 'attempts', '0'
    end
    if ARGV[5] ~= '' then
        drop(id, 'payload')
        pieces(fields, 'payload', string.sub(ARGV[5], 2), whole)
    end
    call('HSET', JOB .. id, unpack(fields))
    field = field ~= '' and field or nil
    if field ~= field_of(id, known) then
        known = kind_of(set_field(id, v[3], field))
    end
    if later > 0 then
        moving().schedule(known.queue, due, id)
    else
        moving().ready(known, now, number(v[5]), id, 0, field)
    end
    tell('news', 'queue:' .. known.queue)
    return state
end

local function delete(id, v, known)
    if v[1] == 'running' then
        return nil
    end
    moving().withdraw(id, known, v[1], number(v[4]))
    moving().forget(id, number(v[5]), v[9], false)
    return v[1]
end

local WAITING = { queued = true, scheduled = true, failed = true, waiting = true }
local verbs = { cancel = cancel, replay = replay, delete = delete }
local after, every = tonumber(ARGV[7]), tonumber(ARGV[8])
for i = 10, #ARGV, 4 do
    local id, expected = ARGV[i], ARGV[i + 1]
    local v = read(id, 'state', 'claims', 'kind', 'lost_leases', 'seq', 'worker', 'dueTime', 'created', 'key', 'pickupTime')
    local known = v and kind_of(v[3] or '')
    if not known then
        answers[#answers + 1] = { false, expected ~= '' and -1 or 0 }
    elseif expected ~= '' and expected ~= v[1] .. ' ' .. claims_of(v[2], v[10]) then
        answers[#answers + 1] = { v[1], -1 }
    else
        local field = field_of(id, known)
        local state = verbs[what](id, v, known, after + (i - 10) / 4 * every, ARGV[i + 3])
        answers[#answers + 1] = { state or v[1], state and 1 or 0 }
        if state and (what == 'delete' or state ~= v[1]) then
            count(known.queue, v[1], -1)
            count_waiting(field, WAITING[v[1]] and -1 or 0)
            if what ~= 'delete' then
                if what == 'replay' then
                    field = ARGV[i + 3] ~= '' and ARGV[i + 3] or nil
                end
                count(known.queue, state, 1)
                count_waiting(field, WAITING[state] and 1 or 0)
            end
        end
    end
end
call('SET', DONE, cmsgpack.pack(answers), 'EX', REMEMBERED)
moving().place_ready()
finish()
return answers

-- name: edit (partitions, moving, rewriting, basis)
-- Changes a job that waits. ARGV: 3 id, 4 a name for this very call, as for `operate`, 5 "w" where payloads stay in one piece,
-- 6 and 7 version of the limits and basis of a partition that comes with it, or ""; then names and values of what `rewrite`
-- changes. Answers the state it has now, and 1 where it was changed; or AGAIN.
local DONE, REMEMBERED = P .. 'done:' .. ARGV[4], 60 -- seconds
local done = redis.pcall('GET', DONE)
if type(done) == 'string' then
    return cmsgpack.unpack(done)
end
if ARGV[6] ~= '' and not (limits_version() == ARGV[6] and has_basis(ARGV[3], ARGV[7])) then
    return AGAIN
end
local change = {}
for n = 8, #ARGV, 2 do
    change[ARGV[n]] = ARGV[n + 1]
end
local EDITABLE = { queued = true, scheduled = true, failed = true, waiting = true }
local states = EDITABLE
if change.expires and change.expires ~= '-' and (read(ARGV[3], 'pickupTime') or {})[1] then
    states = {} -- it has begun, and cannot expire any more
end
local state, changed = rewrite(ARGV[3], change, states, ARGV[5] == 'w')
local answer = { state, changed and 1 or 0 }
if changed then
    call('SET', DONE, cmsgpack.pack(answer), 'EX', REMEMBERED)
    moving().place_ready()
end
finish()
return answer

-- name: pause
-- Closes (ARGV[3] "1") or opens a queue for claims. ARGV: 4 queue.
even_if_full()
ours(ARGV[3] == '1' and 'SADD' or 'SREM', P .. 'paused', ARGV[4])
if ARGV[3] ~= '1' then
    tell('news', 'queue:' .. ARGV[4])
end
finish()
return 0

-- name: order
-- Writes down what living workers are to do. ARGV: 3 order, 4 "all" or "named", then workers. Answers the workers.
even_if_full()
local ordered = {}
local workers = { unpack(ARGV, 5) }
if ARGV[4] == 'all' then
    workers = ours('ZRANGEBYSCORE', P .. 'workers', '(' .. NOW, '+inf')
end
for _, worker in ipairs(workers) do
    local alive = ours('ZSCORE', P .. 'workers', worker)
    if alive and tonumber(alive) > now then
        ours('HSET', P .. 'worker:' .. worker, 'ordered', ARGV[3])
        ordered[#ordered + 1] = worker
        tell('orders', 'worker:' .. worker)
    end
end
finish()
return ordered
