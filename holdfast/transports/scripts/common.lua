-- KEYS: what the ready ids' and the dead letters' keys are called. ARGV[1]: who asks. What the two kinds of transport do
-- differently (push, pop, length, held, unpop, ring, KIND) stands in list.lua and stream.lua, one of which follows.
local READY, DEAD, ME = KEYS[1], KEYS[2], ARGV[1]
-- Queues used of late, by when; those in which something may wait; those with dead letters; and what rings for new ones.
local QUEUES, ACTIVE, GRAVES, BELL = READY .. '@queues', READY .. '@active', DEAD .. '@queues', READY .. '@bell'
local FORGOTTEN = 86400 -- seconds until a queue that nobody uses is left out of the list of queues

local function of(key, queue)
    if queue == 'default' then return key end
    return key .. ':' .. queue
end

local function seconds()
    return tonumber(redis.call('TIME')[1])
end

-- Ids of a queue that were announced though more waited than anybody can look at, by when.
local function again(queue)
    return of(READY .. '@again', queue)
end

-- QUEUE, NUMBER and that many arguments, as often as there are: visit(queue, first, last).
local function groups(from, visit)
    while ARGV[from] do
        local number = tonumber(ARGV[from + 1])
        visit(ARGV[from], from + 2, from + 1 + number)
        from = from + 2 + number
    end
end

-- unpack takes some thousand values at once, and no more.
local function pieces(from, to, visit)
    for first = from, to, 1000 do
        visit(first, math.min(first + 999, to))
    end
end
