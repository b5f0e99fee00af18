-- What the two scripts that claim have in common. ARGV: 3 worker, 4 lease in microseconds, 5 what by-hand jobs run.
local worker, until_ = ARGV[3], int(now + tonumber(ARGV[4]))
local taken, leases, leased, started = {}, {}, 0, {}

local FIELDS = {
    'state', 'kind', 'claims', 'attempts', 'losses', 'dueTime', 'created', 'payload', 'options', 'seq', 'pickupTime',
}

-- A hash somebody wrote by hand becomes a job: what it does not say is made up.
local function adopt(id, queue)
    local v = read(id, 'payload', 'task', 'dueTime')
    local task = v and (v[2] or ARGV[5] ~= '' and ARGV[5])
    if not task or not v[1] then
        met('orphans')
        return nil
    end
    local seq = number(ours('GET', P .. 'seq')) + 1
    call('SET', P .. 'seq', int(seq))
    local due = number(v[3]) > 0 and number(v[3]) <= now and string.match(v[3], '^%d+$') and v[3] or NOW
    call('HSET', JOB .. id, 'state', 'queued', 'kind', '0 5 ' .. queue .. '\n' .. task, 'dueTime', due, 'created', NOW, 'seq', seq)
    ours('HSET', index_of(seq), seq, id)
    ours('ZADD', P .. 'chunks', math.floor(seq / INDEXED), math.floor(seq / INDEXED))
    count(queue, 'queued', 1)
    return read(id, unpack(FIELDS))
end

-- Whether one more attempt is the last that a job may have; `most` of its kind is nil where there is no limit.
local function is_last(known, v)
    return known.most and number(v[4] or claims_of(v[3], v[11])) + 1 >= known.most
end

local function lease(id, kind, state)
    leased = leased + 1
    leases[2 * leased - 1], leases[2 * leased] = until_, id
    if state == 'queued' then
        started[kind] = (started[kind] or 0) + 1
    else
        local known = kind_of(kind)
        count(known.queue, state, -1)
        count(known.queue, 'running', 1)
    end
end

-- Answers what a claim delivers of a job: id, kind, payload and eligible time; where there is more to say, also when it was
-- created, options, claims, attempts and losses. What was never claimed before needs neither its claims nor its attempts
-- written: that it was picked up says that there is one of each.
local function take_first(id, state, kind, payload, due, created, options)
    call('HSET', JOB .. id, 'state', 'running', 'worker', worker, 'pickupTime', NOW)
    payload = joined(id, 'payload', payload)
    lease(id, kind, state)
    if created or options then
        taken[leased] = { id, kind, payload, due, created, joined(id, 'options', options), '1', '1', false }
    else
        taken[leased] = { id, kind, payload, due }
    end
end

local function take(id, v)
    if not v[3] and not v[11] then
        return take_first(id, v[1], v[2], v[8], v[6], v[7], v[9])
    end
    local before_now = claims_of(v[3], v[11])
    local claims, attempts = int(number(before_now) + 1), int(number(v[4] or before_now) + 1)
    call('HSET', JOB .. id, 'state', 'running', 'claims', claims, 'attempts', attempts, 'worker', worker, 'pickupTime', NOW)
    lease(id, v[2], v[1])
    local payload, options = joined(id, 'payload', v[8]), joined(id, 'options', v[9])
    taken[leased] = { id, v[2], payload, v[6], v[7], options, claims, attempts, v[5] }
end

local function paused_queues()
    local paused = {}
    for _, queue in ipairs(ours('SMEMBERS', P .. 'paused')) do
        paused[queue] = true
    end
    return paused
end

local function lease_taken()
    if leased > 0 then
        ours('ZADD', LEASES, unpack(leases))
    end
    for kind, number_of in pairs(started) do
        local known = kind_of(kind)
        count(known.queue, 'queued', -number_of)
        count(known.queue, 'running', number_of)
    end
end
