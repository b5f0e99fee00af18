-- name: again
-- QUEUE, BEFORE, NOW and ids of its ready jobs: announce those that were not since BEFORE; how many.
-- What was announced earlier than that has been taken since, and what was claimed is no longer ready.
local queue, count = ARGV[2], 0
local key = again(queue)
redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. ARGV[3])
for at = 5, #ARGV do
    if redis.call('ZADD', key, 'NX', ARGV[4], ARGV[at]) == 1 then
        push(queue, at, at)
        count = count + 1
    end
end
redis.call('EXPIRE', key, FORGOTTEN)
return count

-- name: announce
-- Push the ids of each queue. Who waits for every queue blocks on `default`, on queues in which something waits, and on the
-- bell, which tells of the others.
groups(2, function(queue, from, to)
    push(queue, from, to)
    if queue ~= 'default' then
        redis.call('ZADD', QUEUES, seconds(), queue)
        if redis.call('SADD', ACTIVE, queue) == 1 then
            ring(queue, math.min(16, to - from + 1))
        end
    end
end)

-- name: backlog
-- Queues: how many ids wait in each.
local found = {}
for at = 2, #ARGV do
    found[at - 1] = length(ARGV[at])
end
return found

-- name: add_dead_letters
-- QUEUE, NUMBER and that many ids: these jobs are dead.
groups(2, function(queue, from, to)
    add_dead_letters(queue, from, to)
    redis.call('SADD', DEAD_QUEUES, queue)
end)

-- name: done
-- QUEUE, NUMBER and that many receipts: whatever they stood for is settled.
groups(2, function(queue, from, to)
    pieces(from, to, function(first, last)
        drop(of(READY, queue), {unpack(ARGV, first, last)})
    end)
end)

-- name: front
-- QUEUE, MOST: how many of its ids are known to have been announced again; then those that come next.
local found = held(ARGV[2], ARGV[3])
table.insert(found, 1, redis.call('ZCARD', again(ARGV[2])))
return found

-- name: dead_letter_queues
-- The queues that have a list of dead letters.
return redis.call('SMEMBERS', DEAD_QUEUES)

-- name: held
-- QUEUE, MOST: every id that waits; nothing where there are more than so many.
if length(ARGV[2]) > tonumber(ARGV[3]) then return false end
return held(ARGV[2], ARGV[3])

-- name: known
-- FROM, NUMBER: so many of the queues used of late. NUMBER alone: so many of those in which something may wait.
if ARGV[3] then return redis.call('ZRANGE', QUEUES, ARGV[2], ARGV[2] + ARGV[3] - 1) end
return redis.call('SRANDMEMBER', ACTIVE, ARGV[2])

-- name: mirror
-- QUEUE and ids: these of it are dead, and no others.
mirror(ARGV[2], 3, #ARGV)
redis.call(ARGV[3] and 'SADD' or 'SREM', DEAD_QUEUES, ARGV[2])

-- name: prepare
-- Queues: see to it that there are streams and our group in each, the bell's too.
for at = 1, #ARGV do
    local key = at == 1 and BELL or of(READY, ARGV[at])
    local made = redis.pcall('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
    if made.err and not string.find(made.err, 'BUSYGROUP') then
        redis.call('XLEN', key)
    end
end

-- name: probe
-- Whether everything can be read and written.
local names = redis.call('ZRANGE', QUEUES, 0, -1)
names[#names + 1] = 'default'
for _, queue in ipairs(names) do
    local key = of(READY, queue)
    local kind = redis.call('TYPE', key)['ok']
    if kind ~= 'none' and kind ~= KIND then
        return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. kind .. ', not a ' .. KIND)
    end
end
redis.call('SET', READY .. '@probe', '1', 'PX', 1000)

-- name: release
-- TOKEN: the sweep that holds the lock with it is over.
if redis.call('GET', READY .. '@sweep') == ARGV[2] then redis.call('DEL', READY .. '@sweep') end

-- name: set_aside
-- QUEUE, NUMBER and that many receipts: these messages hold no id.
groups(2, function(queue, from, to)
    for at = from, to do
        set_aside(queue, ARGV[at])
    end
end)

-- name: take
-- LIMIT, the queue served last, NUMBER of shut queues and these, then QUEUE and SLOTS as often as there are. Of each queue at
-- most its slots, in turn; `*` stands for every queue that is not named. Answers QUEUE, RECEIPT, ID as often as there are.
local left, served = tonumber(ARGV[2]), ARGV[3]
local first = 5 + tonumber(ARGV[4])
local closed, slots, names = {}, {}, {}
for at = 5, first - 1 do
    closed[ARGV[at]] = true
end
for at = first, #ARGV, 2 do
    slots[ARGV[at]] = tonumber(ARGV[at + 1])
end
local others = slots['*']
if others then
    for _, queue in ipairs(redis.call('SMEMBERS', ACTIVE)) do
        slots[queue] = slots[queue] or others
    end
    slots['default'] = slots['default'] or others
    slots['*'] = nil
end
for queue, number in pairs(slots) do
    if number > 0 and not closed[queue] then names[#names + 1] = queue end
end
table.sort(names)
local start = 1
while names[start] and names[start] <= served do
    start = start + 1
end
local found = {}
for turn = 0, #names - 1 do
    local queue = names[(start + turn - 1) % #names + 1]
    for _, each in ipairs(pop(queue, math.min(left, slots[queue]))) do
        found[#found + 1] = queue
        found[#found + 1] = each[1]
        found[#found + 1] = each[2]
        left = left - 1
    end
    if length(queue) == 0 then redis.call('SREM', ACTIVE, queue) end
    if left == 0 then break end
end
return found

-- name: tend
-- SILENCE in milliseconds, and queues: what silent consumers had in hand, as QUEUE, RECEIPT, ID by turns. Queues that no client
-- uses are forgotten.
local found = {}
local old = seconds() - FORGOTTEN
for at = 3, #ARGV do
    local queue = ARGV[at]
    for _, each in ipairs(tend(queue, tonumber(ARGV[2]))) do
        found[#found + 1] = queue
        found[#found + 1] = each[1]
        found[#found + 1] = each[2]
    end
    if length(queue) > 0 then redis.call('SADD', ACTIVE, queue) end -- another client may have pushed
    if tonumber(redis.call('ZSCORE', QUEUES, queue) or old) < old and redis.call('EXISTS', of(READY, queue)) == 0 then
        redis.call('ZREM', QUEUES, queue)
    end
end
return found

-- name: touch
-- QUEUE, NUMBER and that many receipts: their jobs are still in work.
groups(2, function(queue, from, to)
    local key = of(READY, queue)
    pieces(from, to, function(first, last)
        local words = {unpack(ARGV, first, last)}
        words[#words + 1] = 'JUSTID'
        ask('XCLAIM', key, GROUP, ME, 0, unpack(words))
    end)
end)

-- name: unpop
-- QUEUE, NUMBER and that many receipts and ids by turns: they were taken, and are for another consumer.
groups(2, function(queue, from, to)
    unpop(queue, from, to)
    redis.call('SADD', ACTIVE, queue)
end)
