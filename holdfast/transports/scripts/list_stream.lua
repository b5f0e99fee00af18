-- fragment: common
-- KEYS: prefixes of the keys of ready ids and of dead letters. ARGV[1]: the consumer. The fragments `list` and `stream`
-- implement push, pop, length, next_ids, nack, announce_queue, maintain and KEY_TYPE; a script contains one of the two.
local READY, DEAD, CONSUMER = KEYS[1], KEYS[2], ARGV[1]
-- Recently used queues by time; queues that may hold ids; queues with dead letters; queues that became active.
local QUEUES, ACTIVE, DEAD_QUEUES, NEW_QUEUES =
    READY .. '@queues', READY .. '@active', DEAD .. '@queues', READY .. '@new_queues'
local UNUSED_SECONDS = 86400 -- seconds until an unused queue is left out of the list of queues

local function key_of(key, queue)
    if queue == 'default' then return key end
    return key .. ':' .. queue
end

local function seconds()
    return tonumber(redis.call('TIME')[1])
end

-- Republished ids of a queue too deep to be compared, by time.
local function republished_key(queue)
    return key_of(READY .. '@republished', queue)
end

-- Calls visit(queue, first, last) for each group QUEUE, NUMBER, and that many arguments.
local function each_group(from, visit)
    while ARGV[from] do
        local number = tonumber(ARGV[from + 1])
        visit(ARGV[from], from + 2, from + 1 + number)
        from = from + 2 + number
    end
end

-- In parts: unpack fails beyond some thousand values.
local function in_parts(from, to, visit)
    for first = from, to, 1000 do
        visit(first, math.min(first + 999, to))
    end
end

-- fragment: list
local KEY_TYPE = 'list'

local function push(queue, from, to)
    in_parts(from, to, function(first, last)
        redis.call('LPUSH', key_of(READY, queue), unpack(ARGV, first, last))
    end)
end

-- Pairs of receipt (empty: a list needs none) and id.
local function pop(queue, number)
    local found = {}
    for _, id in ipairs(redis.call('RPOP', key_of(READY, queue), number) or {}) do
        found[#found + 1] = {'', id}
    end
    return found
end

-- Puts ids back to the head; the arguments are pairs of receipt and id, the next one first.
local function nack(queue, from, to)
    for at = to, from, -2 do
        redis.call('RPUSH', key_of(READY, queue), ARGV[at])
    end
end

local function length(queue)
    return redis.call('LLEN', key_of(READY, queue))
end

-- The next ids, at most `number`.
local function next_ids(queue, number)
    return redis.call('LRANGE', key_of(READY, queue), -number, -1)
end

local function announce_queue(queue, times)
    for _ = 1, times do
        redis.call('LPUSH', NEW_QUEUES, queue)
    end
    redis.call('LTRIM', NEW_QUEUES, 0, 15)
    redis.call('PEXPIRE', NEW_QUEUES, 10000)
end

local function add_dead_letters(queue, from, to)
    in_parts(from, to, function(first, last)
        redis.call('RPUSH', key_of(DEAD, queue), unpack(ARGV, first, last))
    end)
end

-- Makes the list of dead letters hold exactly these ids.
local function sync_dead_letters(queue, from, to)
    local key = key_of(DEAD, queue)
    local present = redis.call('LRANGE', key, 0, -1)
    local same = #present == to - from + 1
    for at = 1, #present do
        same = same and present[at] == ARGV[from + at - 1]
    end
    if not same then
        redis.call('DEL', key)
        add_dead_letters(queue, from, to)
    end
end

local function maintain()
    return {}
end

-- fragment: stream
local KEY_TYPE = 'stream'
local GROUP = 'holdfast'
local MALFORMED = READY .. '@malformed'
local MAX_MALFORMED, MAX_MALFORMED_BYTES, MAX_MALFORMED_FIELDS = 100, 65536, 200 -- entries; size of each

local function push(queue, from, to)
    for at = from, to do
        redis.call('XADD', key_of(READY, queue), '*', 'id', ARGV[at])
    end
end

local function id_of(fields)
    for at = 1, #fields, 2 do
        if fields[at] == 'id' then return fields[at + 1] end
    end
    return table.concat(fields, ' ') -- an entry of another program
end

-- Returns true if the stream has entries; creates the group if it is missing.
local function ensure_group(key)
    if redis.call('XLEN', key) == 0 then return false end
    redis.pcall('XGROUP', 'CREATE', key, GROUP, '0')
    return true
end

-- The answer of a command; nil if the stream or the group does not exist.
local function call_group(...)
    local reply = redis.pcall(...)
    if type(reply) == 'table' and reply.err then
        if string.find(reply.err, 'no such key') then return nil end
        if not string.find(reply.err, 'NOGROUP') then return redis.call(...) end
        return nil
    end
    return reply
end

local function read(key, number)
    return call_group('XREADGROUP', 'GROUP', GROUP, CONSUMER, 'COUNT', number, 'STREAMS', key, '>')
end

-- Pairs of receipt and id.
local function pop(queue, number)
    local key = key_of(READY, queue)
    local reply = read(key, number)
    if reply == nil and ensure_group(key) then reply = read(key, number) end
    local found = {}
    if reply then
        for _, entry in ipairs(reply[1][2]) do
            found[#found + 1] = {entry[1], id_of(entry[2])}
        end
    end
    return found
end

local function ack(key, receipts)
    if #receipts > 0 then
        call_group('XACK', key, GROUP, unpack(receipts))
        redis.call('XDEL', key, unpack(receipts))
    end
end

-- Moves an entry without an id to the stream MALFORMED, which is bounded in length and size.
local function set_aside(queue, receipt)
    local key = key_of(READY, queue)
    local entry = redis.call('XRANGE', key, receipt, receipt)[1]
    if entry then
        local fields, bytes_left = {'queue', queue, 'entry', receipt}, MAX_MALFORMED_BYTES
        for at = 1, math.min(#entry[2], MAX_MALFORMED_FIELDS) do
            local text = string.sub(entry[2][at], 1, bytes_left)
            bytes_left = bytes_left - #text
            fields[#fields + 1] = text
        end
        redis.call('XADD', MALFORMED, 'MAXLEN', MAX_MALFORMED, '*', unpack(fields))
    end
    ack(key, {receipt})
end

-- A stream cannot take ids back at its head: they are appended.
local function nack(queue, from, to)
    local key = key_of(READY, queue)
    for at = from, to, 2 do
        redis.call('XADD', key, '*', 'id', ARGV[at + 1])
        ack(key, {ARGV[at]})
    end
end

local function pending(key, name)
    local reply = call_group('XPENDING', key, name)
    if not reply then return 0, nil end
    return reply[1], reply[2]
end

local function length(queue)
    local key = key_of(READY, queue)
    return redis.call('XLEN', key) - pending(key, GROUP)
end

local function groups_of(key)
    local found = {}
    for _, flat in ipairs(call_group('XINFO', 'GROUPS', key) or {}) do
        local fields = {}
        for at = 1, #flat, 2 do
            fields[flat[at]] = flat[at + 1]
        end
        found[#found + 1] = fields
    end
    return found
end

-- The ids that were never read, at most `number`.
local function next_ids(queue, number)
    local key, from, found = key_of(READY, queue), '-', {}
    for _, each in ipairs(groups_of(key)) do
        if each['name'] == GROUP then from = '(' .. each['last-delivered-id'] end
    end
    for _, entry in ipairs(redis.call('XRANGE', key, from, '+', 'COUNT', number)) do
        found[#found + 1] = id_of(entry[2])
    end
    return found
end

local function announce_queue(queue, times)
    for _ = 1, times do
        redis.call('XADD', NEW_QUEUES, 'MAXLEN', 16, '*', 'id', queue)
    end
end

local function add_dead_letters(queue, from, to)
    for at = from, to do
        redis.call('XADD', key_of(DEAD, queue), '*', 'id', ARGV[at])
    end
end

-- Makes the stream of dead letters hold exactly these ids. Kept entries keep their positions for other groups.
local function sync_dead_letters(queue, from, to)
    local key, missing = key_of(DEAD, queue), {}
    for at = from, to do
        missing[ARGV[at]] = true
    end
    for _, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do
        local id = id_of(entry[2])
        if missing[id] then missing[id] = nil else redis.call('XDEL', key, entry[1]) end
    end
    for at = from, to do
        if missing[ARGV[at]] then add_dead_letters(queue, at, at) end
    end
end

local function split_id(id)
    local milliseconds, number = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(milliseconds), tonumber(number)
end

local function is_earlier(left, right)
    local a, b = split_id(left)
    local c, d = split_id(right)
    return a < c or (a == c and b < d)
end

-- Removes entries that every group has acknowledged: another program may acknowledge without deleting.
local function trim_acked(key)
    local keep
    for _, each in ipairs(groups_of(key)) do
        local _, first = pending(key, each['name'])
        if not first then
            local milliseconds, number = split_id(each['last-delivered-id'])
            first = string.format('%.0f-%.0f', milliseconds, number + 1)
        end
        if not keep or is_earlier(first, keep) then keep = first end
    end
    if keep then redis.call('XTRIM', key, 'MINID', keep) end
end

-- Removes consumers without pending entries that have been idle for three times the allowed silence.
local function remove_consumers(key, silence)
    for _, flat in ipairs(call_group('XINFO', 'CONSUMERS', key, GROUP) or {}) do
        local fields = {}
        for at = 1, #flat, 2 do
            fields[flat[at]] = flat[at + 1]
        end
        if fields['pending'] == 0 and fields['idle'] > 3 * silence and fields['name'] ~= CONSUMER then
            redis.call('XGROUP', 'DELCONSUMER', key, GROUP, fields['name'])
        end
    end
end

-- Takes over deliveries of consumers silent for `silence` milliseconds: up to 100 of the first 10,000 per sweep.
local function reclaim(key, silence)
    local cursor, found = '0-0', {}
    for _ = 1, 10 do
        local reply = call_group('XAUTOCLAIM', key, GROUP, CONSUMER, silence, cursor, 'COUNT', 100, 'JUSTID')
        for _, receipt in ipairs(reply and reply[2] or {}) do
            local entry = redis.call('XRANGE', key, receipt, receipt)[1]
            if entry then
                found[#found + 1] = {receipt, id_of(entry[2])}
            else -- it was deleted
                redis.call('XACK', key, GROUP, receipt)
            end
        end
        cursor = reply and reply[1] or '0-0'
        if cursor == '0-0' or #found >= 100 then break end
    end
    return found
end

local function maintain(queue, silence)
    local key = key_of(READY, queue)
    local found = reclaim(key, silence)
    remove_consumers(key, silence)
    trim_acked(key)
    return found
end
