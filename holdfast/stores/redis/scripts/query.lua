-- name: jobs
-- Jobs of the ids from ARGV[3] on: {id, fields, lease end or nil} of each that exists.
local jobs = {}
for n = 3, #ARGV do
    local fields = redis.pcall('HGETALL', JOB .. ARGV[n])
    if not fields.err and #fields > 0 then
        local lease = redis.pcall('ZSCORE', LEASES, ARGV[n])
        jobs[#jobs + 1] = { ARGV[n], fields, type(lease) ~= 'table' and lease }
    end
end
return jobs

-- name: summaries
-- Jobs without payload and result: {id, fields, lease end or nil} of each of the ids from ARGV[3] on that exists.
local SUMMARY_FIELDS = { 'state', 'spec', 'seq', 'dueTime', 'created', 'options', 'reason', 'worker', 'cancel',
    'claims', 'attempts', 'lost_leases', 'pickupTime', 'endTime', 'error', 'expiresAt', 'partition',
    'errorGroup' }
local jobs = {}
for n = 3, #ARGV do
    local id = ARGV[n]
    local values = { read_fields(id, unpack(SUMMARY_FIELDS)) }
    if values[1] then
        local fields = {}
        for m, field in ipairs(SUMMARY_FIELDS) do
            local value = values[m]
            if value then
                fields[#fields + 1] = field
                fields[#fields + 1] = (field == 'options' or field == 'error')
                    and join_pieces(id, field, value) or value
            end
        end
        local lease = redis.pcall('ZSCORE', LEASES, id)
        jobs[#jobs + 1] = { id, fields, type(lease) ~= 'table' and lease }
    end
end
return jobs

-- name: states
-- State and claims of each of the jobs from ARGV[3] on; nil for no job.
local states = {}
for n = 3, #ARGV do
    local state, claims, started_at = read_fields(ARGV[n], 'state', 'claims', 'pickupTime')
    states[#states + 1] = state and { state, claims_of(claims, started_at) } or false
end
return states

-- name: scan
-- Walks the index. ARGV: 3 "newest" or "oldest" first, 4 submission to start behind, 5 number of jobs to look at, 6 "1" for all
-- fields, else those of filters, 7.. states to return, none: all. Returns jobs like script `jobs`, at most
-- MAX_PER_SCRIPT, the last submission, and 1 if there may be more.
local newest, start_seq, max_jobs = ARGV[3] == 'newest', tonumber(ARGV[4]), tonumber(ARGV[5])
local SCAN_FIELDS = { 'state', 'spec', 'seq', 'dueTime', 'created', 'options', 'reason', 'worker', 'cancel', 'claims',
    'pickupTime', 'error', 'partition', 'errorGroup' }
local jobs, last, scanned = {}, start_seq, 0
local wanted = ARGV[7] and {}
for n = 7, #ARGV do
    wanted[ARGV[n]] = true
end

local function read_job(id)
    if ARGV[6] == '1' then
        local fields = redis.pcall('HGETALL', JOB .. id)
        return not fields.err and #fields > 0 and fields
    end
    if wanted and not wanted[redis.pcall('HGET', JOB .. id, 'state')] then
        return nil
    end
    local values = { read_fields(id, unpack(SCAN_FIELDS)) }
    if not values[1] then
        return nil
    end
    local fields = {}
    for n, field in ipairs(SCAN_FIELDS) do
        local value = values[n]
        if value then
            fields[#fields + 1] = field
            fields[#fields + 1] = (field == 'options' or field == 'error') and join_pieces(id, field, value) or value
        end
    end
    return fields
end

local function scan_chunk(chunk)
    local entries, found = redis.pcall('HGETALL', PREFIX .. 'index:' .. chunk), {}
    for n = 1, entries.err and 0 or #entries, 2 do
        local seq = tonumber(entries[n])
        if seq and (newest and seq < start_seq or not newest and seq > start_seq) then
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
        if scanned >= max_jobs or #jobs >= MAX_PER_SCRIPT then
            return
        end
        scanned, last = scanned + 1, entry[1]
        local fields = read_job(entry[3])
        if fields then
            local lease = redis.pcall('ZSCORE', LEASES, entry[3])
            jobs[#jobs + 1] = { entry[3], fields, type(lease) ~= 'table' and lease }
        end
    end
end

local chunk = int(math.floor(start_seq / INDEX_CHUNK))
local range = newest and { 'ZREVRANGEBYSCORE', chunk, '-inf' } or { 'ZRANGEBYSCORE', chunk, '+inf' }
local chunks = redis.pcall(range[1], PREFIX .. 'chunks', range[2], range[3], 'LIMIT', 0,
    2 + math.ceil(max_jobs / INDEX_CHUNK) * 4)
for n = 1, chunks.err and 0 or #chunks do
    if scanned < max_jobs and #jobs < MAX_PER_SCRIPT then
        scan_chunk(chunks[n])
    end
end
if #jobs >= MAX_PER_SCRIPT then
    return { jobs, int(last), 1 }
end
if scanned < max_jobs and not chunks.err and #chunks == 2 + math.ceil(max_jobs / INDEX_CHUNK) * 4 then
    -- these chunks held too few jobs: continue behind the last one
    last = to_number(chunks[#chunks]) * INDEX_CHUNK + (newest and 0 or INDEX_CHUNK - 1)
    return { jobs, int(last), 1 }
end
return { jobs, int(last), scanned >= max_jobs and 1 or 0 }

-- name: queues (partitions)
-- Counts by "state:queue", paused queues, and for each queue from ARGV[3] on how many microseconds its oldest ready job
-- has been ready, nil if none is ready.
if ARGV[3] == nil then
    return { call('HGETALL', PREFIX .. 'counts'), call('SMEMBERS', PREFIX .. 'paused') }
end
local ages = {}
for n = 3, #ARGV do
    local queue, oldest = ARGV[n], nil

    local function consider(id)
        local state, run_at = read_fields(id, 'state', 'dueTime')
        if state == 'queued' and (not oldest or to_number(run_at) < oldest) then
            oldest = to_number(run_at)
        end
        return state == 'queued'
    end

    local priorities = safe_call('ZRANGE', priorities_key(queue), 0, -1)
    priorities[#priorities + 1] = '0'
    for _, priority in ipairs(priorities) do
        for _, id in ipairs(safe_call('LRANGE', ready_key(queue, priority), 0, MAX_PER_SCRIPT - 1)) do
            if consider(id) then -- the rest came later
                break
            end
        end
    end
    for _, id in ipairs(safe_call('ZRANGE', quarantine_key(queue), 0, 0)) do
        consider(id)
    end
    for _, key in ipairs({ start_tags_key(queue), throttled_key(queue), full_key(queue) }) do
        for _, name in ipairs(safe_call('ZRANGE', key, 0, MAX_PER_SCRIPT / 2 - 1)) do -- a sample of the partitions
            local first = safe_call('ZRANGE', partition_key(queue, name), 0, 0)[1]
            if first then
                consider(string.sub(first, SORT_KEY_LENGTH + 1))
            end
        end
    end
    ages[#ages + 1] = oldest and int(math.max(0, now - oldest)) or false
end
return ages

-- name: workers
-- Every registered worker: {fields, 1 alive | 0 silent} of each.
local workers = {}
for _, worker in ipairs(call('ZRANGE', PREFIX .. 'workers', 0, -1)) do
    local fields = redis.pcall('HGETALL', PREFIX .. 'worker:' .. worker)
    if not fields.err and #fields > 0 then
        local alive = call('ZSCORE', PREFIX .. 'workers', worker)
        workers[#workers + 1] = { fields, tonumber(alive) > now and 1 or 0 }
    end
end
return workers

-- name: failed_jobs
-- Of the jobs that died ("dead" in ARGV[3]) or of the failures after which a job is retried, newest first, the next ARGV[5]
-- after ARGV[4]: their number, and {id, spec, group of the error, instant} of each job that is still in that state.
local state, skipped, jobs = ARGV[3], tonumber(ARGV[4]), {}
local key = PREFIX .. (state == 'dead' and 'ended:dead' or 'failures')
local flat = safe_call('ZREVRANGE', key, skipped, skipped + tonumber(ARGV[5]) - 1, 'WITHSCORES')
for n = 1, #flat, 2 do
    local claims, id = nil, flat[n]
    if state ~= 'dead' then
        claims, id = string.match(id, '^(%d+) (.*)$')
    end
    local state_now, spec_text, error_group, claims_now, started_at
    if id then
        state_now, spec_text, error_group, claims_now, started_at =
            read_fields(id, 'state', 'spec', 'errorGroup', 'claims', 'pickupTime')
    end
    local is_current = state_now == state and (not claims or claims_of(claims_now, started_at) == claims)
    if is_current and spec_text and error_group then
        jobs[#jobs + 1] = { id, spec_text, error_group, flat[n + 1] }
    end
end
return { #flat / 2, jobs }

-- name: recent
-- Of the ends in state ARGV[3], newest first, the next MAX_PER_SCRIPT after ARGV[4]: their number, age of the last, and the
-- number of jobs still in that state that ended within ARGV[5] microseconds, by queue: {queue, number, …}.
local state, skipped, since = ARGV[3], tonumber(ARGV[4]), now - tonumber(ARGV[5])
local key, ended_jobs = PREFIX .. 'ended:' .. state, {}
if state == 'succeeded' then
    for _, entry in ipairs(safe_call('LRANGE', key, -(skipped + MAX_PER_SCRIPT), -(skipped + 1))) do
        local at, id = string.match(entry, '^(%d+):(.*)$')
        ended_jobs[#ended_jobs + 1] = { to_number(at), id or '' }
    end
else
    local flat = safe_call('ZREVRANGE', key, skipped, skipped + MAX_PER_SCRIPT - 1, 'WITHSCORES')
    for n = 1, #flat, 2 do
        ended_jobs[#ended_jobs + 1] = { to_number(flat[n + 1]), flat[n] }
    end
end

local first, numbers, seen = now, {}, {}
for _, ended_job in ipairs(ended_jobs) do
    local at, id = ended_job[1], ended_job[2]
    first = math.min(first, at)
    local state_now, spec_text
    if at >= since and not seen[id] then
        state_now, spec_text = read_fields(id, 'state', 'spec')
    end
    local spec = state_now == state and parse_spec(spec_text or '')
    if spec then
        seen[id] = true
        numbers[spec.queue] = (numbers[spec.queue] or 0) + 1
    end
end

local flat = {}
for queue, number in pairs(numbers) do
    flat[#flat + 1] = queue
    flat[#flat + 1] = number
end
return { #ended_jobs, int(now - first), flat }

-- fragment: successes
-- The list of successes, "INSTANT:ID", ordered by the instant.
local SUCCEEDED = PREFIX .. 'ended:succeeded'

-- Position of the first one after an instant.
local function succeeded_after(instant)
    local low, high = 0, safe_call('LLEN', SUCCEEDED)
    while low < high do
        local middle = math.floor((low + high) / 2)
        local entry = safe_call('LINDEX', SUCCEEDED, middle) or ''
        if (tonumber(string.match(entry, '^(%d+):') or nil) or 0) <= instant then
            low = middle + 1
        else
            high = middle
        end
    end
    return low
end

-- name: events (successes)
-- Job events after an instant, the earliest of each kind. ARGV: 3 instant, 4 limit per kind, 5 maximum age. Returns
-- now; 1 if older failures were dropped; successes ("INSTANT:ID"); dead, cancelled; id, instant, record of failures.
local after, max_events = math.max(tonumber(ARGV[3]), now - tonumber(ARGV[5])), tonumber(ARGV[4])
local failures, low = PREFIX .. 'failures', succeeded_after(after)

-- The record of an attempt, from the end of the list: usually the last.
local function record_of(id, claims)
    local key, last = PREFIX .. 'attempts:' .. id, -1
    while true do
        local records = safe_call('LRANGE', key, last - 19, last)
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

local function read_after(key)
    return safe_call('ZRANGEBYSCORE', key, '(' .. int(after), '+inf', 'WITHSCORES', 'LIMIT', 0, max_events)
end

local found, records = read_after(failures), {}
for n = 1, #found, 2 do
    local claims, id = string.match(found[n], '^(%d+) (.*)$')
    records[#records + 1] = id or ''
    records[#records + 1] = found[n + 1]
    records[#records + 1] = id and record_of(id, claims) or false
end
local oldest = safe_call('ZRANGE', failures, 0, 0, 'WITHSCORES')[2]
local has_dropped = safe_call('ZCARD', failures) >= MAX_FAILURES and tonumber(oldest) > after
finish()
return {
    NOW, has_dropped and 1 or 0, safe_call('LRANGE', SUCCEEDED, low, low + max_events - 1),
    read_after(PREFIX .. 'ended:dead'), read_after(PREFIX .. 'ended:cancelled'), records,
}

-- name: now
-- The store's clock.
return NOW

-- name: history
-- Counts of ended jobs. ARGV: 3 length of an interval, 4 how long its counts are kept, 5 instant from which on. Returns those
-- of each interval: beginning, fields.
local length, since, found = tonumber(ARGV[3]), math.max(tonumber(ARGV[5]), now - tonumber(ARGV[4])), {}
for start = since - since % length, now, length do
    local fields = safe_call('HGETALL', PREFIX .. 'history:' .. int(length) .. ':' .. int(start))
    if fields[1] then
        found[#found + 1] = { int(start), fields }
    end
end
finish()
return found
