-- Walks the index. ARGV: 3 "newest" or "oldest" first, 4 the submission to begin behind, 5 how many jobs, 6 "1" for whole
-- jobs, else those fields only that filters ask for. Answers the jobs as `show` does, the last submission looked at, and
-- whether there may be more.
local newest, edge, most = ARGV[3] == 'newest', tonumber(ARGV[4]), tonumber(ARGV[5])
local ASKED = { 'state', 'kind', 'seq', 'dueTime', 'created', 'options', 'reason', 'worker', 'cancel', 'claims', 'pickupTime',
    'error' }
local jobs, last, looked = {}, edge, 0

local function shown(id)
    if ARGV[6] == '1' then
        local fields = redis.pcall('HGETALL', JOB .. id)
        return not fields.err and #fields > 0 and fields
    end
    local v = read(id, unpack(ASKED))
    if not v or not v[1] then
        return nil
    end
    local fields = {}
    for n, field in ipairs(ASKED) do
        if v[n] then
            fields[#fields + 1] = field
            fields[#fields + 1] = (field == 'options' or field == 'error') and joined(id, field, v[n]) or v[n]
        end
    end
    return fields
end

local function look_into(chunk)
    local entries, found = redis.pcall('HGETALL', P .. 'index:' .. chunk), {}
    for n = 1, entries.err and 0 or #entries, 2 do
        local seq = tonumber(entries[n])
        if seq and (newest and seq < edge or not newest and seq > edge) then
            found[#found + 1] = { seq, 0, entries[n + 1] }
        end
    end
    table.sort(found, function(a, b)
        if newest then
            return a[1] > b[1]
        end
        return a[1] < b[1]
    end)
    for _, entry in ipairs(found) do
        if looked >= most then
            return
        end
        looked, last = looked + 1, entry[1]
        local fields = shown(entry[3])
        if fields then
            local lease = redis.pcall('ZSCORE', LEASES, entry[3])
            jobs[#jobs + 1] = { entry[3], fields, type(lease) ~= 'table' and lease }
        end
    end
end

local chunk = int(math.floor(edge / INDEXED))
local range = newest and { 'ZREVRANGEBYSCORE', chunk, '-inf' } or { 'ZRANGEBYSCORE', chunk, '+inf' }
local chunks = redis.pcall(range[1], P .. 'chunks', range[2], range[3], 'LIMIT', 0, 2 + math.ceil(most / INDEXED) * 4)
for n = 1, chunks.err and 0 or #chunks do
    if looked < most then
        look_into(chunks[n])
    end
end
if looked < most and not chunks.err and #chunks == 2 + math.ceil(most / INDEXED) * 4 then
    -- these pieces held too little: the rest begins at the last one's end
    last = number(chunks[#chunks]) * INDEXED + (newest and 0 or INDEXED - 1)
    return { jobs, int(last), 1 }
end
return { jobs, int(last), looked >= most and 1 or 0 }
