-- Keeps log lines with their jobs. ARGV, from 3 on, for each record: id, claims, how many lines, and of each line its number,
-- microseconds since it was said, level, text, and "" or "=" and its fields. Answers 1 for a lease that stands, else 0. That
-- of a success does: nobody else can have written it. A line's place is its claims and number: one that is there already, or
-- comes before one that is, is refused by the stream itself.
local answers, at = {}, 3

local function stands(id, claims, v)
    if not v or not v[1] or claims_of(v[2], v[3]) ~= claims then
        return false
    end
    return v[1] == 'succeeded' or v[1] == 'running' and (tonumber(call('ZSCORE', LEASES, id) or nil) or 0) > now
end

local function keep(id, claims, attempt, n)
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
    elseif reply.err and not string.find(reply.err, 'equal or smaller', 1, true) then
        return reply
    end
end

while at <= #ARGV do
    local id, claims, last = ARGV[at], ARGV[at + 1], at + 2 + 5 * tonumber(ARGV[at + 2])
    local v = read(id, 'state', 'claims', 'pickupTime', 'attempts')
    local standing = stands(id, claims, v)
    for n = at + 3, standing and last or 0, 5 do
        local trouble = keep(id, claims, v[4] or claims, n)
        if trouble then
            return trouble
        end
    end
    answers[#answers + 1] = standing and 1 or 0
    at = last + 1
end
finish()
return answers
