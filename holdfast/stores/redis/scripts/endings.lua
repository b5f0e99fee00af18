-- What ended behind an instant, the earliest of each kind. ARGV: 3 instant, 4 limit of each kind, 5 how far back at most. Answers now, whether older setbacks were
-- let go, successes ("INSTANT:ID"), dead, cancelled (id, instant), and of each setback id, instant and the attempt's record.
local after, most = math.max(tonumber(ARGV[3]), now - tonumber(ARGV[5])), tonumber(ARGV[4])
local succeeded, setbacks = P .. 'ended:succeeded', P .. 'setbacks'

local function instant_at(place)
    return tonumber(string.match(ours('LINDEX', succeeded, place) or '', '^(%d+):') or nil) or 0
end

-- The list is in the order of instants: its first entry behind `after`.
local low, high = 0, ours('LLEN', succeeded)
while low < high do
    local middle = math.floor((low + high) / 2)
    if instant_at(middle) <= after then
        low = middle + 1
    else
        high = middle
    end
end

-- An attempt's record: mostly the last. There may be any number of them.
local function record_of(id, claims)
    local key, last = P .. 'attempts:' .. id, -1
    while true do
        local records = ours('LRANGE', key, last - 19, last)
        for n = #records, 1, -1 do
            local readable, record = pcall(cmsgpack.unpack, records[n])
            if readable and type(record) == 'table' and record[1] == claims then
                return records[n]
            end
        end
        if #records < 20 then
            return false
        end
        last = last - 20
    end
end

local function of(key)
    return ours('ZRANGEBYSCORE', key, '(' .. int(after), '+inf', 'WITHSCORES', 'LIMIT', 0, most)
end

local found, records = of(setbacks), {}
for n = 1, #found, 2 do
    local claims, id = string.match(found[n], '^(%d+) (.*)$')
    records[#records + 1] = id or ''
    records[#records + 1] = found[n + 1]
    records[#records + 1] = id and record_of(id, claims) or false
end
local oldest = ours('ZRANGE', setbacks, 0, 0, 'WITHSCORES')[2]
local gone = ours('ZCARD', setbacks) >= SETBACKS and tonumber(oldest) > after
finish()
return {
    NOW, gone and 1 or 0, ours('LRANGE', succeeded, low, low + most - 1), of(P .. 'ended:dead'), of(P .. 'ended:cancelled'), records,
}
