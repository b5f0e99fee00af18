-- Keeps log lines with their jobs. ARGV, from 3 on, for each record: id, claims, how many lines, and of each line its number,
-- microseconds since it was said, level, text, and "" or "=" and its fields. Answers 1 for a lease that stands, else 0. That
-- of a success does: nobody else can have written it. A line's place is its claims and number: the stream itself refuses
-- one that is there already, and one that comes late, behind later ones; these are put in where they belong.
local answers, at = {}, 3

local function stands(id, claims, v)
    if not v or not v[1] or claims_of(v[2], v[3]) ~= claims then
        return false
    end
    return v[1] == 'succeeded' or v[1] == 'running' and (tonumber(call('ZSCORE', LEASES, id) or nil) or 0) > now
end

local function place(entry)
    local claims, number = string.match(entry, '^(%d+)-(%d+)$')
    return tonumber(claims), tonumber(number)
end

local function before(one, other)
    local claims, number = place(one[1])
    local others_claims, others_number = place(other[1])
    return claims < others_claims or claims == others_claims and number < others_number
end

-- A stream takes what is behind everything alone, even what it has lost: so it is made anew.
local function weave(key, late)
    local new, known = {}, {}
    for _, line in ipairs(late) do
        if not known[line[1]] and #call('XRANGE', key, line[1], line[1]) == 0 then
            new[#new + 1] = line
        end
        known[line[1]] = true
    end
    if not new[1] then
        return
    end
    local entries = call('XRANGE', key, '-', '+')
    for _, line in ipairs(new) do
        entries[#entries + 1] = line
    end
    table.sort(entries, before)
    call('DEL', key)
    for _, entry in ipairs(entries) do
        call('XADD', key, entry[1], unpack(entry[2]))
    end
end

local function keep(id, claims, attempt, n, late)
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
    elseif reply.err and string.find(reply.err, 'equal or smaller', 1, true) then
        late[#late + 1] = { line[2], { unpack(line, 3) } }
    elseif reply.err then
        return reply
    end
end

while at <= #ARGV do
    local id, claims, last = ARGV[at], ARGV[at + 1], at + 2 + 5 * tonumber(ARGV[at + 2])
    local v = read(id, 'state', 'claims', 'pickupTime', 'attempts')
    local standing = stands(id, claims, v)
    local late = {}
    for n = at + 3, standing and last or 0, 5 do
        local trouble = keep(id, claims, v[4] or claims, n, late)
        if trouble then
            return trouble
        end
    end
    if late[1] then
        weave(P .. 'lines:' .. id, late)
    end
    answers[#answers + 1] = standing and 1 or 0
    at = last + 1
end
finish()
return answers
