-- fragment: common
-- What every script begins with. KEYS: prefix, schedule, ready, leases, job. ARGV[1]: microseconds since 1970, or "" for
-- the server's clock; ARGV[2]: who calls, so that it need not listen to itself. No value of a job is ever looked into.
--
-- A script that fails in the middle is not rolled back. So each one reads jobs with `read`, which survives a key of another
-- type, and asks our structures with `ours`, which moves such a key out of the way. A full Redis refuses a script at its
-- first write, if that one may need memory: `even_if_full` makes the first write one that never does.
--
-- Every call costs about a microsecond, and so does a string made of parts: what is done for each job counts both.
local P, SCHEDULE, READY, LEASES, JOB = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local call, unpack = redis.call, unpack
local CHUNK, PIECES = 64, 8 -- a hash is small as long as none of its values is longer than 64 bytes
local INDEXED = 64 -- jobs per piece of the index
local REACH = 2000 -- how far from an end of a ready list its order is kept exactly, and how far in all lists of a script
local MOST = 200 -- jobs one script handles
local SETBACKS = 10000 -- failed attempts that are kept for who follows what happens

local now
if ARGV[1] ~= '' then
    now = tonumber(ARGV[1])
else
    local t = call('TIME')
    now = t[1] * 1000000 + t[2]
end

local function int(n) -- tostring() would round it
    return string.format('%.0f', n)
end

local NOW = int(now)

local function number(text)
    return tonumber(text or 0) or 0
end

local function even_if_full()
    call('DEL', P .. 'nothing')
end

-- ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────
local odd = {} -- what was met that is not ours, by kind, how often

local function met(what)
    odd[what] = (odd[what] or 0) + 1
end

-- A command on a structure of ours. A key of another type, found there, is moved out of the way first.
local function ours(command, key, ...)
    local answer = redis.pcall(command, key, ...)
    if type(answer) == 'table' and answer.err then
        if string.find(answer.err, 'WRONGTYPE', 1, true) then
            call('RENAME', key, key .. ':foreign:' .. NOW)
            met('foreign')
        elseif string.find(answer.err, 'not an integer', 1, true) or string.find(answer.err, 'overflow', 1, true) then
            call('HDEL', key, (...)) -- a number in a hash that was made something else
        end
        return call(command, key, ...)
    end
    return answer
end

local function schedule_of(queue)
    return queue == 'default' and SCHEDULE or SCHEDULE .. ':' .. queue
end

local function ready_of(queue, level)
    local key = level == '0' and READY or READY .. '@' .. level
    return queue == 'default' and key or key .. ':' .. queue
end

local function levels_of(queue)
    return P .. 'levels:' .. queue
end

local function quarantine_of(queue)
    return P .. 'quarantine:' .. queue
end

local function index_of(seq)
    return P .. 'index:' .. int(math.floor(seq / INDEXED))
end

-- ── one job ─────────────────────────────────────────────────────────────────────────────────────────────────────
local function read(id, ...)
    local found = redis.pcall('HMGET', JOB .. id, ...)
    return not found.err and found or nil
end

local kinds = {}

-- What rarely changes of a job: "priority max_attempts queue\ntask", with a line break behind it for one under limits. So the
-- others are not asked for a partition.
local function kind_of(kind)
    local known = kinds[kind]
    if not known then
        local level, most, queue = string.match(kind or '', '^(-?%d+) (%S+) (.-)\n')
        known = level and { level = level, most = tonumber(most), queue = queue } or false
        if known and string.find(kind, '\n.*\n$') then
            known.is_limited = true
        end
        kinds[kind] = known
    end
    return known
end

local function field_of(id, known) -- its partition, and weights where not all are 1; nil for a job under no limit
    return known.is_limited and call('HGET', JOB .. id, 'partition') or nil
end

local function marked(kind, field) -- a kind as it is for a job with this partition, or none
    return string.gsub(kind, '\n$', '') .. (field and '\n' or '')
end

local function set_field(id, kind, field) -- answers its kind
    call('HDEL', JOB .. id, 'partition')
    kind = marked(kind, field)
    call('HSET', JOB .. id, 'kind', kind)
    if field then
        call('HSET', JOB .. id, 'partition', field)
    end
    return kind
end

local function pieces(fields, field, text, whole) -- a text as fields of a hash, none longer than CHUNK
    if whole or #text <= CHUNK or #text > CHUNK * PIECES then
        fields[#fields + 1] = field
        fields[#fields + 1] = text
        return
    end
    for n = 0, math.floor((#text - 1) / CHUNK) do
        fields[#fields + 1] = n == 0 and field or field .. n
        fields[#fields + 1] = string.sub(text, n * CHUNK + 1, (n + 1) * CHUNK)
    end
end

local function joined(id, field, text) -- the text that `pieces` took apart
    local piece, n = text, 1
    while piece and #piece == CHUNK and n < PIECES do
        piece, n = call('HGET', JOB .. id, field .. n), n + 1
        text = piece and text .. piece or text
    end
    return text
end

-- Keys that a job was given after its first one, each in a field of its own.
local function more_keys(id)
    local keys = {}
    local key = call('HGET', JOB .. id, 'key:1')
    while key do
        keys[#keys + 1] = key
        key = call('HGET', JOB .. id, 'key:' .. #keys + 1)
    end
    return keys
end

-- 0 ready, 1 suspect, 2 quarantined: by the leases lost in a row.
local function tier_of(lost_leases)
    return math.min(number(lost_leases), 2)
end

-- How often a job was claimed: not said of one that was never picked up, nor where it is once.
local function claims_of(claims, picked)
    return claims or (picked and '1' or '0')
end

local function drop(id, field)
    call('HDEL', JOB .. id, field, field .. 1, field .. 2, field .. 3, field .. 4, field .. 5, field .. 6, field .. 7)
end

-- ── notifications and counts at the end ─────────────────────────────────────────────────────────────────────────
local tally, waits, topics, endings, rescheduled = {}, {}, {}, {}, {}

local function count(queue, state, by)
    local field = state .. ':' .. queue
    tally[field] = (tally[field] or 0) + by
end

-- Jobs under limits that have not started, by their partition as its field has it; nil for a job under no limit.
local function count_waiting(field, by)
    if field then
        waits[field] = (waits[field] or 0) + by
    end
end

local function write_waiting()
    local buckets = {}
    for field, by in pairs(waits) do
        for bucket in string.gmatch(string.match(field, '^[^\n]*'), '[^\31]+') do
            buckets[bucket] = (buckets[bucket] or 0) + by
        end
    end
    for bucket, by in pairs(buckets) do
        if by ~= 0 and ours('HINCRBY', P .. 'unstarted', bucket, by) <= 0 then
            call('HDEL', P .. 'unstarted', bucket)
        end
    end
end

-- A worker's write under a lease that the job does not have. If the lease is ahead of the job, a write that was
-- acknowledged is lost, unless the job was submitted again under its id: its claims begin at the clock, behind that lease.
local function note_refused(id, claims, worker)
    local v = read(id, 'state', 'claims', 'pickupTime', 'worker')
    if not v or not v[1] then
        return
    end
    local ahead = number(claims) - number(claims_of(v[2], v[3]))
    if ahead > 0 or ahead == 0 and worker ~= '' and v[4] ~= worker then
        met('lost')
    end
end

local function tell(channel, topic)
    local named = topics[channel] or { ARGV[2] }
    topics[channel] = named
    if not named[topic] then
        named[topic] = true
        named[#named + 1] = topic
    end
end

local function note_due()
    for queue in pairs(rescheduled) do
        local first = ours('ZRANGE', schedule_of(queue), 0, 0, 'WITHSCORES')
        if first[1] then
            ours('ZADD', P .. 'due', first[2], queue)
        else
            ours('ZREM', P .. 'due', queue)
        end
    end
    rescheduled = {}
end

local function finish()
    note_due()
    for field, by in pairs(tally) do
        if by ~= 0 and ours('HINCRBY', P .. 'counts', field, by) == 0 then
            call('HDEL', P .. 'counts', field)
        end
    end
    write_waiting()
    for what, number_of in pairs(odd) do
        ours('HINCRBY', P .. 'meta', what, number_of)
    end
    for channel, named in pairs(topics) do
        call('PUBLISH', P .. channel, table.concat(named, '\n'))
    end
    if #endings > 0 then
        call('PUBLISH', P .. 'ended', ARGV[2] .. '\n' .. table.concat(endings, '\n'))
    end
end
