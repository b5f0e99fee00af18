-- name: republish
-- QUEUE, BEFORE, NOW and ids of ready jobs: pushes ids that were not republished since BEFORE; returns their number.
-- Older ids have been received since; claimed jobs are no longer ready.
local queue, count = ARGV[2], 0
local key = republished_key(queue)
redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. ARGV[3])
for at = 5, #ARGV do
    if redis.call('ZADD', key, 'NX', ARGV[4], ARGV[at]) == 1 then
        push(queue, at, at)
        count = count + 1
    end
end
redis.call('EXPIRE', key, UNUSED_SECONDS)
return count

-- fragment: activation
-- Consumers of every queue block on `default`, on active queues, and on `@new_queues`, which receives the names of queues
-- that become active.
local function activate(queue, ids)
    if ids > 0 and queue ~= 'default' and redis.call('SADD', ACTIVE, queue) == 1 then
        announce_queue(queue, math.min(16, ids))
    end
end

-- name: publish (activation)
-- Pushes the ids of each queue.
each_group(2, function(queue, from, to)
    push(queue, from, to)
    if queue ~= 'default' then redis.call('ZADD', QUEUES, seconds(), queue) end
    activate(queue, to - from + 1)
end)

-- name: backlog
-- Queues: returns the number of ids in each.
local found = {}
for at = 2, #ARGV do
    found[at - 1] = length(ARGV[at])
end
return found

-- name: add_dead_letters
-- QUEUE, NUMBER and that many ids: these jobs are dead.
each_group(2, function(queue, from, to)
    add_dead_letters(queue, from, to)
    redis.call('SADD', DEAD_QUEUES, queue)
end)

-- name: ack
-- QUEUE, NUMBER and that many receipts: acknowledges settled deliveries.
each_group(2, function(queue, from, to)
    in_parts(from, to, function(first, last)
        ack(key_of(READY, queue), {unpack(ARGV, first, last)})
    end)
end)

-- name: peek
-- QUEUE, LIMIT: returns the number of republished ids, then the next ids.
local found = next_ids(ARGV[2], ARGV[3])
table.insert(found, 1, redis.call('ZCARD', republished_key(ARGV[2])))
return found

-- name: dead_letter_queues
-- The queues that have a list of dead letters.
return redis.call('SMEMBERS', DEAD_QUEUES)

-- name: ids
-- QUEUE, LIMIT: returns every id of it; false if there are more than LIMIT.
if length(ARGV[2]) > tonumber(ARGV[3]) then return false end
return next_ids(ARGV[2], ARGV[3])

-- name: known_queues
-- FROM, NUMBER: a page of the recently used queues. NUMBER alone: that many active queues, at random.
if ARGV[3] then return redis.call('ZRANGE', QUEUES, ARGV[2], ARGV[2] + ARGV[3] - 1) end
return redis.call('SRANDMEMBER', ACTIVE, ARGV[2])

-- name: sync_dead_letters
-- QUEUE and ids: makes its dead letters exactly these ids.
sync_dead_letters(ARGV[2], 3, #ARGV)
redis.call(ARGV[3] and 'SADD' or 'SREM', DEAD_QUEUES, ARGV[2])

-- name: prepare
-- Queues: creates missing streams and groups, also for the key `@new_queues`.
for at = 1, #ARGV do
    local key = at == 1 and NEW_QUEUES or key_of(READY, ARGV[at])
    local created = redis.pcall('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
    if created.err and not string.find(created.err, 'BUSYGROUP') then
        redis.call('XLEN', key)
    end
end

-- name: probe
-- Fails unless the keys can be read and written.
local queues = redis.call('ZRANGE', QUEUES, 0, -1)
queues[#queues + 1] = 'default'
for _, queue in ipairs(queues) do
    local key = key_of(READY, queue)
    local key_type = redis.call('TYPE', key)['ok']
    if key_type ~= 'none' and key_type ~= KEY_TYPE then
        return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. key_type .. ', not a ' .. KEY_TYPE)
    end
end
redis.call('SET', READY .. '@probe', seconds(), 'PX', 1000)

-- name: end_sweep
-- TOKEN: releases the lock of the sweep that holds it with this token.
if redis.call('GET', READY .. '@sweep') == ARGV[2] then redis.call('DEL', READY .. '@sweep') end

-- name: set_aside
-- QUEUE, NUMBER and that many receipts: sets aside messages without a job id.
each_group(2, function(queue, from, to)
    for at = from, to do
        set_aside(queue, ARGV[at])
    end
end)

-- name: receive
-- LIMIT, the listed and the unlisted queue served last, the number of paused queues and their names, then pairs of QUEUE
-- and SLOTS. Takes at most the slots of each listed queue, round robin, then those of `*`, which unlisted queues share, round robin
-- too. Returns triples of QUEUE, RECEIPT, ID.
local remaining, last_listed, last_unlisted = tonumber(ARGV[2]), ARGV[3], ARGV[4]
local first = 6 + tonumber(ARGV[5])
local paused, slots, listed, unlisted, found = {}, {}, {}, {}, {}
for at = 6, first - 1 do
    paused[ARGV[at]] = true
end
for at = first, #ARGV, 2 do
    slots[ARGV[at]] = tonumber(ARGV[at + 1])
end
local wildcard_slots = slots['*'] or 0
slots['*'] = nil
for queue in pairs(slots) do
    if not paused[queue] then listed[#listed + 1] = queue end
end
if wildcard_slots > 0 then
    local active = { default = true }
    for _, queue in ipairs(redis.call('SMEMBERS', ACTIVE)) do
        active[queue] = true
    end
    for queue in pairs(active) do
        if not slots[queue] and not paused[queue] then unlisted[#unlisted + 1] = queue end
    end
end

local function take_round_robin(queues, last_served)
    table.sort(queues)
    local start = 1
    while queues[start] and queues[start] <= last_served do
        start = start + 1
    end
    for offset = 0, #queues - 1 do
        local queue = queues[(start + offset - 1) % #queues + 1]
        local wanted = math.min(remaining, slots[queue] or wildcard_slots)
        local popped = wanted > 0 and pop(queue, wanted) or {}
        for _, each in ipairs(popped) do
            found[#found + 1] = queue
            found[#found + 1] = each[1]
            found[#found + 1] = each[2]
        end
        remaining = remaining - #popped
        if not slots[queue] then wildcard_slots = wildcard_slots - #popped end
        if wanted > 0 and length(queue) == 0 then redis.call('SREM', ACTIVE, queue) end
    end
end

take_round_robin(listed, last_listed)
take_round_robin(unlisted, last_unlisted)
return found

-- name: maintain (activation)
-- SILENCE in milliseconds, and queues: reclaims deliveries of silent consumers; returns triples of QUEUE, RECEIPT, ID.
-- Removes unused queues.
local found = {}
local oldest_use = seconds() - UNUSED_SECONDS
for at = 3, #ARGV do
    local queue = ARGV[at]
    for _, each in ipairs(maintain(queue, tonumber(ARGV[2]))) do
        found[#found + 1] = queue
        found[#found + 1] = each[1]
        found[#found + 1] = each[2]
    end
    activate(queue, length(queue)) -- another client may have pushed
    if tonumber(redis.call('ZSCORE', QUEUES, queue) or oldest_use) < oldest_use
        and redis.call('EXISTS', key_of(READY, queue)) == 0 then
        redis.call('ZREM', QUEUES, queue)
    end
end
return found

-- name: extend
-- QUEUE, NUMBER and that many receipts: prolongs deliveries whose jobs still run.
each_group(2, function(queue, from, to)
    local key = key_of(READY, queue)
    in_parts(from, to, function(first, last)
        local arguments = {unpack(ARGV, first, last)}
        arguments[#arguments + 1] = 'JUSTID'
        call_group('XCLAIM', key, GROUP, CONSUMER, 0, unpack(arguments))
    end)
end)

-- name: nack (activation)
-- QUEUE, NUMBER and that many values, receipts and ids in turn: gives deliveries back for another consumer.
each_group(2, function(queue, from, to)
    nack(queue, from, to)
    activate(queue, (to - from + 1) / 2)
end)
