-- fragment: basics
-- Prologue of every script, with `common`. A script `-- name: NAME (A, B)` also has the fragments A and B, of any file, before
-- it, and uses their locals; `(only A)` has nothing but A. KEYS: prefix, schedule, ready, leases, job. ARGV[1]: microseconds since 1970, or "" for the server's
-- clock. ARGV[2]: the caller, which ignores its own notifications. Scripts never parse payloads.
--
-- In the hash of a job `dueTime` is `run_at`, `pickupTime` `started_at` and `endTime` `ended_at`: programs of other authors read these names.
--
-- Redis does not roll back a script that fails. `read_fields` tolerates a job key of another type; `safe_call` renames
-- such a key in our structures. Redis at `maxmemory` refuses a script at its first write if that may need memory:
-- `allow_when_full` makes the first write a DEL.
-- Each call, and each concatenation, costs about a microsecond: keep both few per job.
local PREFIX, SCHEDULE, READY, LEASES, JOB = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local call, unpack = redis.call, unpack
local PIECE_BYTES, MAX_PIECES = 64, 8 -- longer values cost a hash its compact encoding
local INDEX_CHUNK = 64 -- jobs per chunk of the index

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

-- ── keys and fields ─────────────────────────────────────────────────────────────────────────────────────────────
local function schedule_key(queue)
    return queue == 'default' and SCHEDULE or SCHEDULE .. ':' .. queue
end

local function ready_key(queue, priority)
    local key = priority == '0' and READY or READY .. '@' .. priority
    return queue == 'default' and key or key .. ':' .. queue
end

local function priorities_key(queue)
    return PREFIX .. 'priorities:' .. queue
end

local function quarantine_key(queue)
    return PREFIX .. 'quarantine:' .. queue
end

local function index_key(seq)
    return PREFIX .. 'index:' .. int(math.floor(seq / INDEX_CHUNK))
end

local function append_pieces(fields, field, text, in_one_piece) -- splits values of 65 to 512 bytes; `in_one_piece`: never
    if in_one_piece or #text <= PIECE_BYTES or #text > PIECE_BYTES * MAX_PIECES then
        fields[#fields + 1] = field
        fields[#fields + 1] = text
        return
    end
    for n = 0, math.floor((#text - 1) / PIECE_BYTES) do
        fields[#fields + 1] = n == 0 and field or field .. n
        fields[#fields + 1] = string.sub(text, n * PIECE_BYTES + 1, (n + 1) * PIECE_BYTES)
    end
end

-- fragment: common
local MERGE_WINDOW = 2000 -- ids at an end of a ready list that one script sorts
local MAX_PER_SCRIPT = 200 -- jobs one script handles
local MAX_FAILURES = 10000 -- failed attempts stored for readers of job events
local NEVER = '253402300799000000' -- `run_at` of a job that waits without a deadline: the end of the year 9999

local function to_number(text)
    return tonumber(text or 0) or 0
end

local function allow_when_full()
    call('DEL', PREFIX .. 'nothing')
end

-- ── anomalies ────────────────────────────────────────────────────────────────────────────────────────────────────
local anomalies = {} -- entries and keys that are not ours: kind → number

local function count_anomaly(what)
    anomalies[what] = (anomalies[what] or 0) + 1
end

-- A command on one of our structures. If another program has put a key of another type there, renames that and calls again.
local function safe_call(command, key, ...)
    local answer = redis.pcall(command, key, ...)
    if type(answer) == 'table' and answer.err then
        if string.find(answer.err, 'WRONGTYPE', 1, true) then
            call('RENAME', key, key .. ':foreign:' .. NOW)
            count_anomaly('foreign')
        elseif string.find(answer.err, 'not an integer', 1, true) or string.find(answer.err, 'overflow', 1, true) then
            call('HDEL', key, (...)) -- another program replaced the number
        end
        return call(command, key, ...)
    end
    return answer
end

-- Aborts a repair under way at a change that no counter shows: it watches this key, and the others of `_WATCHED` in Python.
local function invalidate_repair()
    safe_call('SET', PREFIX .. 'changes', NOW, 'GET') -- GET: an error, not a loss, where another program has a list there
end

-- ── one job ─────────────────────────────────────────────────────────────────────────────────────────────────────
-- Values of fields, false for those it lacks; none for a key of another type.
local function read_fields(id, ...)
    return unpack(redis.pcall('HMGET', JOB .. id, ...))
end

local specs = {}

-- The `spec` of a job: "priority max_attempts queue\ntask". A trailing line break marks a job under limits.
local function parse_spec(spec_text)
    local spec = specs[spec_text]
    if not spec then
        local priority, max_attempts, queue = string.match(spec_text or '', '^(-?%d+) (%S+) (.-)\n')
        spec = priority and { priority = priority, max_attempts = tonumber(max_attempts), queue = queue } or false
        if spec and string.find(spec_text, '\n.*\n$') then
            spec.is_limited = true
        end
        specs[spec_text] = spec
    end
    return spec
end

local function partition_field_of(id, spec) -- nil for a job under no limit
    return spec.is_limited and call('HGET', JOB .. id, 'partition') or nil
end

local function mark_limited(spec_text, partition_field) -- adds or removes the trailing line break
    return string.gsub(spec_text, '\n$', '') .. (partition_field and '\n' or '')
end

local function set_partition_field(id, spec_text, partition_field) -- returns the new spec
    call('HDEL', JOB .. id, 'partition')
    spec_text = mark_limited(spec_text, partition_field)
    call('HSET', JOB .. id, 'spec', spec_text)
    if partition_field then
        call('HSET', JOB .. id, 'partition', partition_field)
    end
    return spec_text
end

local function join_pieces(id, field, text) -- inverse of `append_pieces`
    local piece, n = text, 1
    while piece and #piece == PIECE_BYTES and n < MAX_PIECES do
        piece, n = call('HGET', JOB .. id, field .. n), n + 1
        text = piece and text .. piece or text
    end
    return text
end

-- Keys of a job after its first, each in a field of its own.
local function extra_keys(id)
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
    return math.min(to_number(lost_leases), 2)
end

-- Number of claims. The field is absent until the second claim.
local function claims_of(claims, started_at)
    return claims or (started_at and '1' or '0')
end

local function delete_pieces(id, field)
    call('HDEL', JOB .. id, field, field .. 1, field .. 2, field .. 3, field .. 4, field .. 5, field .. 6, field .. 7)
end

-- ── notifications and counts at the end ─────────────────────────────────────────────────────────────────────────
local count_changes, unstarted_changes, topics, ended_ids, rescheduled_queues = {}, {}, {}, {}, {}
local sender = ARGV[2] -- a caller ignores notifications of its own

local function notify_caller_too()
    sender = ''
end

-- Ends of jobs for which others wait: id, and the state or "deleted". Resolved by `resolve_ends` of fragment `waits`,
-- which each script needs that calls `note_end`.
local ends_to_resolve, resolve_ends = {}, nil

local function note_end(id, how)
    ends_to_resolve[#ends_to_resolve + 1], ends_to_resolve[#ends_to_resolve + 2] = id, how
end

local function count(queue, state, by)
    local counter = state .. ':' .. queue
    count_changes[counter] = (count_changes[counter] or 0) + by
end

-- Counts unstarted jobs under limits by the field `partition`; nil for a job under no limit.
local function count_unstarted(partition_field, by)
    if partition_field then
        unstarted_changes[partition_field] = (unstarted_changes[partition_field] or 0) + by
    end
end

-- Adds to fields of a hash; deletes those that come to nothing.
local function add_to_fields(key, changes)
    local names = {}
    for name, by in pairs(changes) do
        names[#names + 1] = by ~= 0 and name or nil
    end
    for first = 1, #names, 1000 do
        local last, changed, emptied = math.min(first + 999, #names), {}, {}
        local values = safe_call('HMGET', key, unpack(names, first, last))
        for n = first, last do
            local value = to_number(values[n - first + 1]) + changes[names[n]]
            if value > 0 then
                changed[#changed + 1], changed[#changed + 2] = names[n], value
            else
                emptied[#emptied + 1] = names[n]
            end
        end
        if #changed > 0 then
            call('HSET', key, unpack(changed))
        end
        if #emptied > 0 then
            call('HDEL', key, unpack(emptied))
        end
    end
end

local function write_unstarted()
    local buckets = {}
    for partition_field, by in pairs(unstarted_changes) do
        for bucket in string.gmatch(string.match(partition_field, '^[^\n]*'), '[^\31]+') do
            buckets[bucket] = (buckets[bucket] or 0) + by
        end
    end
    add_to_fields(PREFIX .. 'unstarted', buckets)
end

-- A worker's write under a lease that its job does not have. A lease with more claims than the
-- job has proves that Redis has lost an acknowledged write: claims never decrease, not even where a client submits an id again.
local function count_lost_write(id, claims, worker)
    local state, stored_claims, started_at, stored_worker = read_fields(id, 'state', 'claims', 'pickupTime', 'worker')
    if not state then
        return
    end
    local ahead = to_number(claims) - to_number(claims_of(stored_claims, started_at))
    if ahead > 0 or ahead == 0 and worker ~= '' and stored_worker ~= worker then
        count_anomaly('lost')
    end
end

local function notify(channel, topic)
    local message = topics[channel] or { '' } -- its sender
    topics[channel] = message
    if not message[topic] then
        message[topic] = true
        message[#message + 1] = topic
    end
end

local function write_next_due()
    for queue in pairs(rescheduled_queues) do
        local first = safe_call('ZRANGE', schedule_key(queue), 0, 0, 'WITHSCORES')
        if first[1] then
            safe_call('ZADD', PREFIX .. 'due', first[2], queue)
        else
            safe_call('ZREM', PREFIX .. 'due', queue)
        end
    end
    rescheduled_queues = {}
end

local function finish()
    if ends_to_resolve[1] then
        resolve_ends()
    end
    write_next_due()
    for counter, by in pairs(count_changes) do
        if by ~= 0 and safe_call('HINCRBY', PREFIX .. 'counts', counter, by) == 0 then
            call('HDEL', PREFIX .. 'counts', counter)
        end
    end
    write_unstarted()
    for what, number in pairs(anomalies) do
        safe_call('HINCRBY', PREFIX .. 'meta', what, number)
    end
    for channel, message in pairs(topics) do
        message[1] = sender
        call('PUBLISH', PREFIX .. channel, table.concat(message, '\n'))
    end
    if #ended_ids > 0 then
        call('PUBLISH', PREFIX .. 'ended', sender .. '\n' .. table.concat(ended_ids, '\n'))
    end
end
