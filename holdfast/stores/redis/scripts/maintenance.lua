-- name: promote (moving)
-- Makes due jobs of every queue ready, up to ARGV[3]; how many.
even_if_full()
local most, promoted = tonumber(ARGV[3]), 0
local queues = ours('ZRANGEBYSCORE', P .. 'due', '-inf', NOW, 'LIMIT', 0, MOST)
queues[#queues + 1] = 'default' -- a job may have been put there by hand
for _, queue in ipairs(queues) do
    if promoted < most then
        local made_ready = moving().promote(queue, most - promoted)
        promoted = promoted + made_ready
        rescheduled[queue] = true
        if made_ready > 0 then
            tell('news', 'queue:' .. queue)
        end
    end
end
finish()
return promoted

-- name: expire (moving, expiring)
-- Ends jobs that no worker has taken by their instant. ARGV: 3 how many to look at. Answers how many those were; id and kind of
-- those that ended.
local looked = expire_overdue(tonumber(ARGV[3]))
finish()
return { looked, expired }

-- name: expired
-- Running jobs whose lease ran out. ARGV: 3 how many to skip, 4 limit. Answers {fields, lease end} of each, and how many
-- leases were looked at. A lease of nothing is dropped.
even_if_full()
local found = ours('ZRANGEBYSCORE', LEASES, '-inf', NOW, 'WITHSCORES', 'LIMIT', ARGV[3], ARGV[4])
local jobs, looked = {}, 0
for n = 1, #found, 2 do
    local fields = redis.pcall('HGETALL', JOB .. found[n])
    local state = not fields.err and read(found[n], 'state', 'kind')
    if state and state[1] == 'running' and kind_of(state[2] or '') then
        looked = looked + 1
        jobs[#jobs + 1] = { found[n], fields, found[n + 1] }
    else
        call('ZREM', LEASES, found[n])
        met('orphans')
    end
end
finish()
return { jobs, looked }

-- name: prune (moving)
-- Deletes jobs of a terminal state that ended long enough ago. ARGV: 3 state, 4 microseconds, 5 limit; how many, and
-- whether to look again.
even_if_full()
local state, edge, most = ARGV[3], now - tonumber(ARGV[4]), tonumber(ARGV[5])
local ended = P .. 'ended:' .. state
local pruned, looked = 0, 0

local function remove(id, ended_at)
    local v = read(id, 'state', 'kind', 'endTime', 'seq', 'key')
    local known = v and kind_of(v[2] or '')
    if not known or v[1] ~= state or number(v[3]) ~= ended_at then
        return -- it ran again since, or is gone
    end
    moving().forget(id, number(v[4]), v[5], true)
    count(known.queue, state, -1)
    pruned = pruned + 1
end

if state == 'succeeded' then
    while pruned < most and looked < 2 * MOST do
        local ended_at, id = string.match(ours('LINDEX', ended, 0) or '', '^(%d+):(.*)$')
        if not id or tonumber(ended_at) > edge then
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
        looked = looked + 1
    end
else
    local found = ours('ZRANGEBYSCORE', ended, '-inf', int(edge), 'WITHSCORES', 'LIMIT', 0, math.min(most, MOST))
    for n = 1, #found, 2 do
        call('ZREM', ended, found[n])
        remove(found[n], tonumber(found[n + 1]))
        looked = looked + 1
    end
end
finish()
return { pruned, looked }

-- name: prune_rest
-- Deletes keys that outlived their job and their lifetime, and workers that fell silent long ago. ARGV: 3 limit, 4
-- microseconds a silent worker is listed.
even_if_full()
local outlived = P .. 'outlived'
for _, key in ipairs(ours('ZRANGEBYSCORE', outlived, '-inf', NOW, 'LIMIT', 0, ARGV[3])) do
    local keep_until, id = string.match(ours('HGET', P .. 'keys', key) or '', '^(%d+) (.*)$')
    if id and number(keep_until) <= now and call('EXISTS', JOB .. id) == 0 then
        call('HDEL', P .. 'keys', key)
    end
    call('ZREM', outlived, key)
end
for _, worker in ipairs(ours('ZRANGEBYSCORE', P .. 'workers', '-inf', int(now - tonumber(ARGV[4])), 'LIMIT', 0, ARGV[3])) do
    call('DEL', P .. 'worker:' .. worker)
    call('ZREM', P .. 'workers', worker)
end
finish()
return 0
