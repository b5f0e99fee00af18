-- fragment: common
-- KEYS: what the ready ids' and the dead letters' keys are called. ARGV[1]: who asks. What the two kinds of transport do
-- differently (push, pop, length, held, unpop, ring, KIND) stands in the fragments `list` and `stream`; a script contains
-- one of the two.
local READY, DEAD, ME = KEYS[1], KEYS[2], ARGV[1]
-- Queues used of late, by when; those in which something may wait; those with dead letters; and what rings for new ones.
local QUEUES, ACTIVE, DEAD_QUEUES, BELL = READY .. '@queues', READY .. '@active', DEAD .. '@queues', READY .. '@bell'
local FORGOTTEN = 86400 -- seconds until an unused queue is left out of the list of queues

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

-- fragment: list
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

local function add_dead_letters(queue, from, to)
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
        add_dead_letters(queue, from, to)
    end
end

local function tend()
    return {}
end

-- fragment: stream
local KIND = 'stream'
local GROUP = 'holdfast'
local MALFORMED = READY .. '@malformed'
local KEPT, KEPT_BYTES, KEPT_TEXTS = 100, 65536, 200 -- messages, and of each so many bytes and names and values

local function push(queue, from, to)
    for at = from, to do
        redis.call('XADD', of(READY, queue), '*', 'id', ARGV[at])
    end
end

local function value(fields)
    for at = 1, #fields, 2 do
        if fields[at] == 'id' then return fields[at + 1] end
    end
    return table.concat(fields, ' ') -- another program's
end

-- Whether there is something to read, for our group too, which is made if need be.
local function group(key)
    if redis.call('XLEN', key) == 0 then return false end
    redis.pcall('XGROUP', 'CREATE', key, GROUP, '0')
    return true
end

-- What the command answers; nil where there is no stream or no group yet.
local function ask(...)
    local reply = redis.pcall(...)
    if type(reply) == 'table' and reply.err then
        if string.find(reply.err, 'no such key') then return nil end
        if not string.find(reply.err, 'NOGROUP') then return redis.call(...) end
        return nil
    end
    return reply
end

local function read(key, number)
    return ask('XREADGROUP', 'GROUP', GROUP, ME, 'COUNT', number, 'STREAMS', key, '>')
end

-- Receipts and ids.
local function pop(queue, number)
    local key = of(READY, queue)
    local reply = read(key, number)
    if reply == nil and group(key) then reply = read(key, number) end
    local found = {}
    if reply then
        for _, entry in ipairs(reply[1][2]) do
            found[#found + 1] = {entry[1], value(entry[2])}
        end
    end
    return found
end

local function drop(key, receipts)
    if #receipts > 0 then
        ask('XACK', key, GROUP, unpack(receipts))
        redis.call('XDEL', key, unpack(receipts))
    end
end

-- Moves a message that holds no id to a stream of its own, which is short, and its messages are cut.
local function set_aside(queue, receipt)
    local key = of(READY, queue)
    local entry = redis.call('XRANGE', key, receipt, receipt)[1]
    if entry then
        local words, left = {'queue', queue, 'entry', receipt}, KEPT_BYTES
        for at = 1, math.min(#entry[2], KEPT_TEXTS) do
            local text = string.sub(entry[2][at], 1, left)
            left = left - #text
            words[#words + 1] = text
        end
        redis.call('XADD', MALFORMED, 'MAXLEN', KEPT, '*', unpack(words))
    end
    drop(key, {receipt})
end

-- A stream has no way back: they go to its end.
local function unpop(queue, from, to)
    local key = of(READY, queue)
    for at = from, to, 2 do
        redis.call('XADD', key, '*', 'id', ARGV[at + 1])
        drop(key, {ARGV[at]})
    end
end

local function pending(key, name)
    local reply = ask('XPENDING', key, name)
    if not reply then return 0, nil end
    return reply[1], reply[2]
end

local function length(queue)
    local key = of(READY, queue)
    return redis.call('XLEN', key) - pending(key, GROUP)
end

local function groups_of(key)
    local found = {}
    for _, flat in ipairs(ask('XINFO', 'GROUPS', key) or {}) do
        local fields = {}
        for at = 1, #flat, 2 do
            fields[flat[at]] = flat[at + 1]
        end
        found[#found + 1] = fields
    end
    return found
end

-- What was never read, so much of it.
local function held(queue, number)
    local key, from, found = of(READY, queue), '-', {}
    for _, each in ipairs(groups_of(key)) do
        if each['name'] == GROUP then from = '(' .. each['last-delivered-id'] end
    end
    for _, entry in ipairs(redis.call('XRANGE', key, from, '+', 'COUNT', number)) do
        found[#found + 1] = value(entry[2])
    end
    return found
end

local function ring(queue, times)
    for _ = 1, times do
        redis.call('XADD', BELL, 'MAXLEN', 16, '*', 'id', queue)
    end
end

local function add_dead_letters(queue, from, to)
    for at = from, to do
        redis.call('XADD', of(DEAD, queue), '*', 'id', ARGV[at])
    end
end

-- Make the dead letters' stream hold exactly these ids; who reads it by a group of their own, goes on.
local function mirror(queue, from, to)
    local key, missing = of(DEAD, queue), {}
    for at = from, to do
        missing[ARGV[at]] = true
    end
    for _, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do
        local id = value(entry[2])
        if missing[id] then missing[id] = nil else redis.call('XDEL', key, entry[1]) end
    end
    for at = from, to do
        if missing[ARGV[at]] then add_dead_letters(queue, at, at) end
    end
end

local function parts(id)
    local milliseconds, number = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(milliseconds), tonumber(number)
end

local function earlier(one, other)
    local a, b = parts(one)
    local c, d = parts(other)
    return a < c or (a == c and b < d)
end

-- What every group has done with goes, should another program have acknowledged without deleting; nothing else does.
local function trim(key)
    local keep
    for _, each in ipairs(groups_of(key)) do
        local _, first = pending(key, each['name'])
        if not first then
            local milliseconds, number = parts(each['last-delivered-id'])
            first = string.format('%.0f-%.0f', milliseconds, number + 1)
        end
        if not keep or earlier(first, keep) then keep = first end
    end
    if keep then redis.call('XTRIM', key, 'MINID', keep) end
end

-- Who has nothing in hand and was not heard of for three times as long as a consumer may be silent, is dead.
local function remove_consumers(key, silence)
    for _, flat in ipairs(ask('XINFO', 'CONSUMERS', key, GROUP) or {}) do
        local fields = {}
        for at = 1, #flat, 2 do
            fields[flat[at]] = flat[at + 1]
        end
        if fields['pending'] == 0 and fields['idle'] > 3 * silence and fields['name'] ~= ME then
            redis.call('XGROUP', 'DELCONSUMER', key, GROUP, fields['name'])
        end
    end
end

-- The deliveries of consumers that are silent for so many milliseconds are ours now; a hundred of them, among the first
-- ten thousand. The rest is another sweep's.
local function recover(key, silence)
    local cursor, found = '0-0', {}
    for _ = 1, 10 do
        local reply = ask('XAUTOCLAIM', key, GROUP, ME, silence, cursor, 'COUNT', 100, 'JUSTID')
        for _, receipt in ipairs(reply and reply[2] or {}) do
            local entry = redis.call('XRANGE', key, receipt, receipt)[1]
            if entry then
                found[#found + 1] = {receipt, value(entry[2])}
            else -- it was deleted
                redis.call('XACK', key, GROUP, receipt)
            end
        end
        cursor = reply and reply[1] or '0-0'
        if cursor == '0-0' or #found >= 100 then break end
    end
    return found
end

local function tend(queue, silence)
    local key = of(READY, queue)
    local found = recover(key, silence)
    remove_consumers(key, silence)
    trim(key)
    return found
end
