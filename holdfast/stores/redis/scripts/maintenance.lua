-- name: promote (partitions, transitions)
-- Makes due jobs of every queue ready, up to ARGV[3]; returns their number.
allow_when_full()
local max_jobs, promoted = tonumber(ARGV[3]), 0
local queues = safe_call('ZRANGEBYSCORE', PREFIX .. 'due', '-inf', NOW, 'LIMIT', 0, MAX_BATCH)
queues[#queues + 1] = 'default' -- a job may have been added by hand
for _, queue in ipairs(queues) do
    if promoted < max_jobs then
        local made_ready = transitions().promote(queue, max_jobs - promoted)
        promoted = promoted + made_ready
        rescheduled_queues[queue] = true
        if made_ready > 0 then
            notify('ready_jobs', 'queue:' .. queue)
        end
    end
end
finish()
return promoted

-- name: expire (partitions, transitions, expiry)
-- Ends expired jobs that wait. ARGV: 3 limit. Returns the number examined; id and spec of those that ended.
local scanned = expire_overdue(tonumber(ARGV[3]))
finish()
return { scanned, expired }

-- name: expired_leases
-- Running jobs whose lease has expired. ARGV: 3 leases to skip, 4 limit. Returns {id, fields, lease end} of each, and
-- the number of leases examined. Drops a lease without a running job.
allow_when_full()
local found = safe_call('ZRANGEBYSCORE', LEASES, '-inf', NOW, 'WITHSCORES', 'LIMIT', ARGV[3], ARGV[4])
local jobs, scanned = {}, 0
for n = 1, #found, 2 do
    local fields = redis.pcall('HGETALL', JOB .. found[n])
    local state = not fields.err and read_fields(found[n], 'state', 'spec')
    if state and state[1] == 'running' and parse_spec(state[2] or '') then
        scanned = scanned + 1
        jobs[#jobs + 1] = { found[n], fields, found[n + 1] }
    else
        call('ZREM', LEASES, found[n])
        count_anomaly('orphans')
    end
end
finish()
return { jobs, scanned }

-- name: prune (partitions, transitions)
-- Deletes jobs whose retention is over. ARGV: 3 state, 4 retention in microseconds, 5 limit. Returns deleted, examined.
allow_when_full()
local state, cutoff, max_jobs = ARGV[3], now - tonumber(ARGV[4]), tonumber(ARGV[5])
local ended = PREFIX .. 'ended:' .. state
local pruned, scanned = 0, 0

local function remove(id, ended_at)
    local v = read_fields(id, 'state', 'spec', 'endTime', 'seq', 'key')
    local spec = v and parse_spec(v[2] or '')
    if not spec or v[1] ~= state or to_number(v[3]) ~= ended_at then
        return -- stale: it ran again, or was deleted
    end
    transitions().delete_job(id, to_number(v[4]), v[5], true)
    count(spec.queue, state, -1)
    pruned = pruned + 1
end

if state == 'succeeded' then
    while pruned < max_jobs and scanned < 2 * MAX_BATCH do
        local ended_at, id = string.match(safe_call('LINDEX', ended, 0) or '', '^(%d+):(.*)$')
        if not id or tonumber(ended_at) > cutoff then
            if not id then
                call('LPOP', ended)
            end
            if call('LLEN', ended) == 0 or id then
                break
            end
        else
            call('LPOP', ended)
            remove(id, tonumber(ended_at))
        end
        scanned = scanned + 1
    end
else
    local found = safe_call('ZRANGEBYSCORE', ended, '-inf', int(cutoff), 'WITHSCORES', 'LIMIT', 0,
        math.min(max_jobs, MAX_BATCH))
    for n = 1, #found, 2 do
        call('ZREM', ended, found[n])
        remove(found[n], tonumber(found[n + 1]))
        scanned = scanned + 1
    end
end
finish()
return { pruned, scanned }

-- name: prune_rest
-- Deletes keys that outlived their job and their lifetime, workers that went silent long ago, and buckets that are full
-- again. ARGV: 3 limit, 4 microseconds that a silent worker stays listed.
allow_when_full()
local outlived = PREFIX .. 'outlived'
for _, key in ipairs(safe_call('ZRANGEBYSCORE', outlived, '-inf', NOW, 'LIMIT', 0, ARGV[3])) do
    local keep_until, id = string.match(safe_call('HGET', PREFIX .. 'keys', key) or '', '^(%d+) (.*)$')
    if id and to_number(keep_until) <= now and call('EXISTS', JOB .. id) == 0 then
        call('HDEL', PREFIX .. 'keys', key)
    end
    call('ZREM', outlived, key)
end
for _, worker in ipairs(safe_call('ZRANGEBYSCORE', PREFIX .. 'workers', '-inf', int(now - tonumber(ARGV[4])), 'LIMIT',
    0, ARGV[3])) do
    call('DEL', PREFIX .. 'worker:' .. worker)
    call('ZREM', PREFIX .. 'workers', worker)
end
for _, bucket in ipairs(safe_call('ZRANGEBYSCORE', PREFIX .. 'refills', '-inf', NOW, 'LIMIT', 0, ARGV[3])) do
    safe_call('HDEL', PREFIX .. 'buckets', bucket)
    call('ZREM', PREFIX .. 'refills', bucket)
end
finish()
return 0
