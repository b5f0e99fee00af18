-- name: show
-- Jobs as they stand: {id, fields, lease end or nil} of each of the ids from ARGV[3] on that is there.
local jobs = {}
for n = 3, #ARGV do
    local fields = redis.pcall('HGETALL', JOB .. ARGV[n])
    if not fields.err and #fields > 0 then
        local lease = redis.pcall('ZSCORE', LEASES, ARGV[n])
        jobs[#jobs + 1] = { ARGV[n], fields, type(lease) ~= 'table' and lease }
    end
end
return jobs

-- name: outline
-- Jobs without what may be large: {id, fields, lease end or nil} of each of the ids from ARGV[3] on that is there.
local ASKED = { 'state', 'kind', 'seq', 'dueTime', 'created', 'options', 'reason', 'worker', 'cancel', 'claims', 'attempts', 'lost_leases',
    'pickupTime', 'endTime', 'error', 'expiresAt', 'partition' }
local jobs = {}
for n = 3, #ARGV do
    local id = ARGV[n]
    local v = read(id, unpack(ASKED))
    if v and v[1] then
        local fields = {}
        for m, field in ipairs(ASKED) do
            if v[m] then
                fields[#fields + 1] = field
                fields[#fields + 1] = (field == 'options' or field == 'error') and joined(id, field, v[m]) or v[m]
            end
        end
        local lease = redis.pcall('ZSCORE', LEASES, id)
        jobs[#jobs + 1] = { id, fields, type(lease) ~= 'table' and lease }
    end
end
return jobs

-- name: states
-- The state and claims of each of the jobs from ARGV[3] on; nil for one that is not there.
local states = {}
for n = 3, #ARGV do
    local v = read(ARGV[n], 'state', 'claims', 'pickupTime')
    states[#states + 1] = v and v[1] and { v[1], claims_of(v[2], v[3]) } or false
end
return states

-- name: scan
-- Walks the index. ARGV: 3 "newest" or "oldest" first, 4 the submission to begin behind, 5 how many jobs, 6 "1" for whole
-- jobs, else those fields only that filters ask for. Answers the jobs as `show` does, the last submission looked at, and
-- whether there may be more.
local newest, edge, most = ARGV[3] == 'newest', tonumber(ARGV[4]), tonumber(ARGV[5])
local ASKED = { 'state', 'kind', 'seq', 'dueTime', 'created', 'options', 'reason', 'worker', 'cancel', 'claims', 'pickupTime',
    'error', 'partition' }
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

-- name: queues (partitions)
-- Counts by "state:queue", paused queues, and of each queue from ARGV[3] on the microseconds its oldest ready job has been
-- eligible, nil where none is ready.
if ARGV[3] == nil then
    return { call('HGETALL', P .. 'counts'), call('SMEMBERS', P .. 'paused') }
end
local ages = {}
for n = 3, #ARGV do
    local queue, oldest = ARGV[n], nil

    local function consider(id)
        local v = read(id, 'state', 'dueTime')
        if v and v[1] == 'queued' and (not oldest or number(v[2]) < oldest) then
            oldest = number(v[2])
        end
        return v and v[1] == 'queued'
    end

    local levels = ours('ZRANGE', levels_of(queue), 0, -1)
    levels[#levels + 1] = '0'
    for _, level in ipairs(levels) do
        for _, id in ipairs(ours('LRANGE', ready_of(queue, level), 0, MOST - 1)) do
            if consider(id) then -- the rest came later
                break
            end
        end
    end
    for _, id in ipairs(ours('ZRANGE', quarantine_of(queue), 0, 0)) do
        consider(id)
    end
    for _, key in ipairs({ turns_of(queue), parked_of(queue), waiting_of(queue) }) do
        for _, name in ipairs(ours('ZRANGE', key, 0, MOST / 2 - 1)) do -- of more partitions these stand for all
            local first = ours('ZRANGE', partition_of(queue, name), 0, 0)[1]
            if first then
                consider(string.sub(first, PLACE + 1))
            end
        end
    end
    ages[#ages + 1] = oldest and int(math.max(0, now - oldest)) or false
end
return ages

-- name: workers
-- Every registered worker: {fields, 1 alive | 0 silent} of each.
local workers = {}
for _, worker in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
    local fields = redis.pcall('HGETALL', P .. 'worker:' .. worker)
    if not fields.err and #fields > 0 then
        local alive = call('ZSCORE', P .. 'workers', worker)
        workers[#workers + 1] = { fields, tonumber(alive) > now and 1 or 0 }
    end
end
return workers

-- name: lately
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

local flat = {}
for queue, number_of in pairs(numbers) do
    flat[#flat + 1] = queue
    flat[#flat + 1] = number_of
end
return { #endings, int(now - first), flat }

-- name: endings
-- What ended behind an instant, the earliest of each kind. ARGV: 3 instant, 4 limit of each kind, 5 how far back at most. Answers now, whether older setbacks were
-- dropped, successes ("INSTANT:ID"), dead, cancelled (id, instant), and of each setback id, instant and the attempt's record.
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

-- name: now
-- The store's clock.
return NOW
