-- name: open
-- Makes the namespace ours where it is empty. ARGV: 3 the schema this program knows. Answers the schema that was there, 0
-- for none; -1 where a key of ours is another program's.
local meta = call('TYPE', P .. 'meta').ok
if meta ~= 'none' and meta ~= 'hash' then
    return -1
end
local schema = call('HGET', P .. 'meta', 'schema')
if not schema then
    call('HSET', P .. 'meta', 'schema', ARGV[3], 'created', NOW)
    return 0
end
return tonumber(schema) or -1

-- name: ailing (partitions)
-- For the doctor: leases that ended over a minute ago, what odd things scripts have met, and for each kind of structure its
-- name, how many jobs are counted there and how many ids it holds. Last, how many ids wait in a queue with an empty name.
local function size(command, key)
    local number_of = redis.pcall(command, key)
    return type(number_of) == 'number' and number_of or 0
end

local function listed(command, ...)
    local found = redis.pcall(command, ...)
    return found.err and {} or found
end

local counted, queues = {}, { default = true }
local counts = listed('HGETALL', P .. 'counts')
for n = 1, #counts, 2 do
    local state, queue = string.match(counts[n], '^(%w+):(.*)$')
    if state then
        counted[state] = (counted[state] or 0) + number(counts[n + 1])
        queues[queue] = true
    end
end
for _, queue in ipairs(listed('ZRANGE', P .. 'queues', 0, -1)) do
    queues[queue] = true
end

local ready, delayed, partitions_left = 0, 0, 10000
for queue in pairs(queues) do
    local levels = listed('ZRANGE', levels_of(queue), 0, -1)
    levels[#levels + 1] = '0'
    for _, level in ipairs(levels) do
        ready = ready + size('LLEN', ready_of(queue, level))
    end
    ready = ready + size('ZCARD', quarantine_of(queue))
    delayed = delayed + size('ZCARD', schedule_of(queue))
    for _, key in ipairs({ turns_of(queue), parked_of(queue), waiting_of(queue) }) do
        for _, name in ipairs(partitions_left > 0 and listed('ZRANGE', key, 0, partitions_left) or {}) do
            ready = ready + size('ZCARD', partition_of(queue, name))
            partitions_left = partitions_left - 1
        end
    end
end
if size('HLEN', P .. 'tombstones') <= 10000 and partitions_left > 0 then
    for _, times in ipairs(listed('HVALS', P .. 'tombstones')) do
        ready = ready - number(times)
    end
else -- too many to add them up while all clients wait
    ready = counted.queued or 0
end

-- What running jobs weigh in their buckets, against what is noted.
local weighed, noted = 0, 0
if size('ZCARD', LEASES) <= 10000 and size('HLEN', P .. 'used') <= 10000 then
    for _, id in ipairs(listed('ZRANGE', LEASES, 0, -1)) do
        local v = read(id, 'state', 'kind')
        local known = v and v[1] == 'running' and kind_of(v[2] or '')
        local partition, weights = split_field(known and field_of(id, known) or '')
        local n = 0
        for _ in string.gmatch(partition, '[^\31]+') do
            n = n + 1
            weighed = weighed + (weights and weights[n] or 1)
        end
    end
    for _, weight in ipairs(listed('HVALS', P .. 'used')) do
        noted = noted + number(weight)
    end
end

local sizes = {
    { 'queued', counted.queued or 0, ready },
    { 'scheduled or failed', (counted.scheduled or 0) + (counted.failed or 0), delayed },
    { 'running', counted.running or 0, size('ZCARD', LEASES) },
    { 'dead', counted.dead or 0, size('ZCARD', P .. 'ended:dead') },
    { 'cancelled', counted.cancelled or 0, size('ZCARD', P .. 'ended:cancelled') },
    { 'running under limits, by weight,', weighed, noted },
}
local overdue = ours('ZCOUNT', LEASES, '-inf', int(now - 60000000))
local met = ours('HMGET', P .. 'meta', 'orphans', 'foreign', 'lost')
return { overdue, { number(met[1]), number(met[2]), number(met[3]) }, sizes, size('LLEN', ready_of('', '0')) }

-- name: lost
-- Whether a job that was acknowledged is there no more, although no caller removed it: the numbers of submission end before it,
-- or its own was given again. ARGV: 3 its number, 4 its id. Answers how many are lost and not reported yet, and 0 where the
-- caller is to forget this one. Numbers go on behind what was lost: so the next loss is seen, and one that takes this telling
-- with it is reported again.
even_if_full()
local seq, known = number(ours('GET', P .. 'seq')), number(ARGV[3])
local lost, stands = 0, 1
if seq < known then
    lost = known - seq
    call('SET', P .. 'seq', ARGV[3])
else
    local there = ours('HGET', index_of(known), ARGV[3])
    if there and there ~= ARGV[4] then
        lost, stands = 1, 0
    end
end
if lost > 0 then
    odd.lost = lost
end
finish()
return { lost, stands }
