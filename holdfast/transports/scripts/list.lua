local KIND = 'list'

local function push(queue, from, to)
    pieces(from, to, function(first, last)
        redis.call('LPUSH', of(READY, queue), unpack(ARGV, first, last))
    end)
end

-- Receipts (none are needed) and ids.
local function pop(queue, number)
    local found = {}
    for _, id in ipairs(redis.call('RPOP', of(READY, queue), number) or {}) do
        found[#found + 1] = {'', id}
    end
    return found
end

-- Back to where they were: pairs of receipt and id, the first to be taken first.
local function unpop(queue, from, to)
    for at = to, from, -2 do
        redis.call('RPUSH', of(READY, queue), ARGV[at])
    end
end

local function length(queue)
    return redis.call('LLEN', of(READY, queue))
end

-- What comes next, so many of it.
local function held(queue, number)
    return redis.call('LRANGE', of(READY, queue), -number, -1)
end

local function ring(queue, times)
    for _ = 1, times do
        redis.call('LPUSH', BELL, queue)
    end
    redis.call('LTRIM', BELL, 0, 15)
    redis.call('PEXPIRE', BELL, 10000)
end

local function bury(queue, from, to)
    pieces(from, to, function(first, last)
        redis.call('RPUSH', of(DEAD, queue), unpack(ARGV, first, last))
    end)
end

-- Make the dead letters' list hold exactly these ids.
local function mirror(queue, from, to)
    local key = of(DEAD, queue)
    local held = redis.call('LRANGE', key, 0, -1)
    local same = #held == to - from + 1
    for at = 1, #held do
        same = same and held[at] == ARGV[from + at - 1]
    end
    if not same then
        redis.call('DEL', key)
        bury(queue, from, to)
    end
end

local function tend()
    return {}
end
