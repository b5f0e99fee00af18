-- Of what ended in the state ARGV[3], newest first, MOST jobs behind the first ARGV[4]: how many there are, how long ago the last
-- of them ended, and how many of them ended within ARGV[5] microseconds and stand there still, by queue: {queue, number, …}.
local state, skipped, since = ARGV[3], tonumber(ARGV[4]), now - tonumber(ARGV[5])
local key, endings = P .. 'ended:' .. state, {}
if state == 'succeeded' then
    for _, entry in ipairs(ours('LRANGE', key, -(skipped + MOST), -(skipped + 1))) do
        local at, id = string.match(entry, '^(%d+):(.*)$')
        endings[#endings + 1] = { number(at), id or '' }
    end
else
    local flat = ours('ZREVRANGE', key, skipped, skipped + MOST - 1, 'WITHSCORES')
    for n = 1, #flat, 2 do
        endings[#endings + 1] = { number(flat[n + 1]), flat[n] }
    end
end

local first, numbers, seen = now, {}, {}
for _, ending in ipairs(endings) do
    local at, id = ending[1], ending[2]
    first = math.min(first, at)
    local v = at >= since and not seen[id] and read(id, 'state', 'kind')
    local known = v and v[1] == state and kind_of(v[2] or '')
    if known then
        seen[id] = true
        numbers[known.queue] = (numbers[known.queue] or 0) + 1
    end
end

local told = {}
for queue, number_of in pairs(numbers) do
    told[#told + 1] = queue
    told[#told + 1] = number_of
end
return { #endings, int(now - first), told }
