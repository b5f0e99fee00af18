-- name: open
-- Claims an empty namespace. ARGV: 3 schema of this program. Returns the schema found, 0 for none, -1 if foreign.
local meta = call('TYPE', PREFIX .. 'meta').ok
if meta ~= 'none' and meta ~= 'hash' then
    return -1
end
local schema = call('HGET', PREFIX .. 'meta', 'schema')
if not schema then
    call('HSET', PREFIX .. 'meta', 'schema', ARGV[3], 'created', NOW)
    return 0
end
return tonumber(schema) or -1

-- name: doctor (partitions)
-- For the doctor: leases that expired over a minute ago; anomalies; for each structure its name, the counted jobs and
-- the ids it holds; the number of ids in a queue with an empty name.
local function size(command, key)
    local number = redis.pcall(command, key)
    return type(number) == 'number' and number or 0
end

local function list_or_empty(command, ...)
    local found = redis.pcall(command, ...)
    return found.err and {} or found
end

local counted, queues = {}, { default = true }
local counts = list_or_empty('HGETALL', PREFIX .. 'counts')
for n = 1, #counts, 2 do
    local state, queue = string.match(counts[n], '^(%w+):(.*)$')
    if state then
        counted[state] = (counted[state] or 0) + to_number(counts[n + 1])
        queues[queue] = true
    end
end
for _, queue in ipairs(list_or_empty('ZRANGE', PREFIX .. 'queues', 0, -1)) do
    queues[queue] = true
end

local ready, delayed, partitions_left, schedules = 0, 0, 10000, {}
for queue in pairs(queues) do
    local priorities = list_or_empty('ZRANGE', priorities_key(queue), 0, -1)
    priorities[#priorities + 1] = '0'
    for _, priority in ipairs(priorities) do
        ready = ready + size('LLEN', ready_key(queue, priority))
    end
    ready = ready + size('ZCARD', quarantine_key(queue))
    delayed = delayed + size('ZCARD', schedule_key(queue))
    schedules[#schedules + 1] = schedule_key(queue)
    for _, key in ipairs({ start_tags_key(queue), throttled_key(queue), full_key(queue) }) do
        for _, name in ipairs(partitions_left > 0 and list_or_empty('ZRANGE', key, 0, partitions_left) or {}) do
            ready = ready + size('ZCARD', partition_key(queue, name))
            partitions_left = partitions_left - 1
        end
    end
end
if size('HLEN', PREFIX .. 'tombstones') <= 10000 and partitions_left > 0 then
    for _, times in ipairs(list_or_empty('HVALS', PREFIX .. 'tombstones')) do
        ready = ready - to_number(times)
    end
else -- too many to sum up while all clients wait
    ready = counted.queued or 0
end

-- Waiting jobs with a deadline stand in the schedules too.
local expected_delayed = (counted.scheduled or 0) + (counted.failed or 0)
if (counted.waiting or 0) > 0 and delayed > 10000 then -- too many to look at
    delayed = math.max(expected_delayed, delayed - counted.waiting)
elseif (counted.waiting or 0) > 0 then
    for _, key in ipairs(schedules) do
        for _, id in ipairs(list_or_empty('ZRANGE', key, 0, -1)) do
            delayed = delayed - (read_fields(id, 'state') == 'waiting' and 1 or 0)
        end
    end
end

-- Weight of running jobs in their buckets, against the stored use.
local expected_use, stored_use = 0, 0
if size('ZCARD', LEASES) <= 10000 and size('HLEN', PREFIX .. 'used') <= 10000 then
    for _, id in ipairs(list_or_empty('ZRANGE', LEASES, 0, -1)) do
        local state, spec_text = read_fields(id, 'state', 'spec')
        local spec = state == 'running' and parse_spec(spec_text or '')
        local partition, weights = parse_partition(spec and partition_field_of(id, spec) or '')
        local n = 0
        for _ in string.gmatch(partition, '[^\31]+') do
            n = n + 1
            expected_use = expected_use + (weights and weights[n] or 1)
        end
    end
    for _, weight in ipairs(list_or_empty('HVALS', PREFIX .. 'used')) do
        stored_use = stored_use + to_number(weight)
    end
end

local sizes = {
    { 'queued', counted.queued or 0, ready },
    { 'scheduled or failed', expected_delayed, delayed },
    { 'running', counted.running or 0, size('ZCARD', LEASES) },
    { 'dead', counted.dead or 0, size('ZCARD', PREFIX .. 'ended:dead') },
    { 'cancelled', counted.cancelled or 0, size('ZCARD', PREFIX .. 'ended:cancelled') },
    { 'running under limits, by weight,', expected_use, stored_use },
}
local expired_leases = safe_call('ZCOUNT', LEASES, '-inf', int(now - 60000000))
local anomaly_counts = safe_call('HMGET', PREFIX .. 'meta', 'orphans', 'foreign', 'lost')
return { expired_leases, { to_number(anomaly_counts[1]), to_number(anomaly_counts[2]), to_number(anomaly_counts[3]) }, sizes,
    size('LLEN', ready_key('', '0')) }

-- name: lost_writes
-- Finds acknowledged jobs that are lost: the numbers of submission end before ARGV[3], or that number belongs to
-- another job than ARGV[4]. Returns the number of unreported losses, and 0 if the caller must forget this job.
-- Submissions then continue after the lost numbers, so each loss is reported once, and again if that write is lost too.
allow_when_full()
local seq, known_seq = to_number(safe_call('GET', PREFIX .. 'seq')), to_number(ARGV[3])
local lost, is_known = 0, 1
if seq < known_seq then
    lost = known_seq - seq
    call('SET', PREFIX .. 'seq', ARGV[3])
else
    local holder = safe_call('HGET', index_key(known_seq), ARGV[3])
    if holder and holder ~= ARGV[4] then
        lost, is_known = 1, 0
    end
end
if lost > 0 then
    anomalies.lost = lost
end
finish()
return { lost, is_known }
