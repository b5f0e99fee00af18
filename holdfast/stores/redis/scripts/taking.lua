-- What the two scripts that claim have in common. ARGV: 3 worker, 4 lease in microseconds, 5 what by-hand jobs run.
local worker, until_ = ARGV[3], int(now + tonumber(ARGV[4]))
local taken, leases, started = {}, {}, {}

local FIELDS = { 'state', 'kind', 'claims', 'attempts', 'losses', 'dueTime', 'created', 'payload', 'options', 'seq' }

-- A hash somebody wrote by hand becomes a job: what it does not say is made up.
local function adopt(id, queue)
    local v = read(id, 'payload', 'task', 'dueTime')
    local task = v and (v[2] or ARGV[5] ~= '' and ARGV[5])
    if not task or not v[1] then
        odd.orphans = odd.orphans + 1
        return nil
    end
    local seq = call('INCR', ensure(P .. 'seq', 'string'))
    local due = number(v[3]) > 0 and number(v[3]) <= now and string.match(v[3], '^%d+$') and v[3] or NOW
    call('HSET', JOB .. id, 'state', 'queued', 'kind', '0 5 ' .. queue .. '\n' .. task, 'dueTime', due, 'created', NOW, 'seq', seq)
    call('HSET', ensure(index_of(seq), 'hash'), seq, id)
    call('ZADD', ensure(P .. 'chunks', 'zset'), int(math.floor(seq / INDEXED)), int(math.floor(seq / INDEXED)))
    count(queue, 'queued', 1)
    return read(id, unpack(FIELDS))
end

local function take(id, v)
    local claims = v[3] and int(number(v[3]) + 1) or '1'
    local attempts = v[4] and int(number(v[4]) + 1) or '1'
    call('HSET', JOB .. id, 'state', 'running', 'claims', claims, 'attempts', attempts, 'worker', worker, 'pickupTime', NOW)
    local payload, options = v[8], v[9]
    if payload and #payload == CHUNK then
        payload = joined(id, 'payload', payload)
    end
    if options and #options == CHUNK then
        options = joined(id, 'options', options)
    end
    local number_of = #leases
    leases[number_of + 1] = until_
    leases[number_of + 2] = id
    taken[#taken + 1] = { id, v[2], payload, claims, attempts, v[5], v[6], v[7], options }
    if v[1] == 'queued' then
        started[v[2]] = (started[v[2]] or 0) + 1
    else
        local known = kind_of(v[2])
        count(known.queue, v[1], -1)
        count(known.queue, 'running', 1)
    end
end

local function paused_queues()
    local paused = {}
    for _, queue in ipairs(call('SMEMBERS', ensure(P .. 'paused', 'set'))) do
        paused[queue] = true
    end
    return paused
end

local function lease_taken()
    if #leases > 0 then
        call('ZADD', ensure(LEASES, 'zset'), unpack(leases))
    end
    for kind, number_of in pairs(started) do
        local known = kind_of(kind)
        count(known.queue, 'queued', -number_of)
        count(known.queue, 'running', number_of)
    end
end
