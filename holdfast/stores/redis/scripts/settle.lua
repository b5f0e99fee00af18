-- Applies each settlement whose guard holds, in order. ARGV: for each: id, claims, then "s" and the result ("" for none) of
-- a success under a live lease; else state, reason, delay, flags ("r" refund, "e" expired), result, error, traceback, with
-- "=" before an error or traceback that is there. Answers 1 (accepted as asked), or {accepted, state, run_at}.
even_if_full()
local answers, ended, jobs = {}, {}, {}
local ENDED = { succeeded = true, dead = true, cancelled = true }
local ENDS_CANCELLED = { failed = true, queued = true, scheduled = true, waiting = true }
ensure(LEASES, 'zset')

local at = 3
while at <= #ARGV do
    local job = { id = ARGV[at], claims = ARGV[at + 1], state = ARGV[at + 2] }
    if job.state == 's' then
        job.simple, job.state, job.result = true, 'succeeded', ARGV[at + 3]
        job.reason, job.delay, job.flags, job.error, job.traceback = '', '', '', '', ''
        at = at + 4
    else
        job.reason, job.delay, job.flags, job.result = ARGV[at + 3], ARGV[at + 4], ARGV[at + 5], ARGV[at + 6]
        job.error, job.traceback = ARGV[at + 7], ARGV[at + 8]
        at = at + 9
    end
    jobs[#jobs + 1] = job
end

local function end_job(job)
    if job.state == 'succeeded' then
        ended[#ended + 1] = NOW .. ':' .. job.id
    else
        call('ZADD', ensure(P .. 'ended:' .. job.state, 'zset'), NOW, job.id)
    end
    endings[#endings + 1] = job.id
end

local function succeed(job, v)
    if v[4] or v[5] or v[6] or v[7] then
        call('HDEL', JOB .. job.id, 'losses', 'cancel', 'reason')
        drop(job.id, 'error')
    end
    local fields = { 'state', 'succeeded', 'endTime', NOW }
    if job.result ~= '' then
        pieces(fields, 'result', job.result)
    end
    call('HSET', JOB .. job.id, unpack(fields))
    end_job(job)
end

local function record(job, v)
    local entry = { v[2], v[8] or '0', v[9] or false, v[10] or false, NOW, job.state, job.asked,
        job.error ~= '' and string.sub(job.error, 2), job.traceback ~= '' and string.sub(job.traceback, 2) }
    call('RPUSH', ensure(P .. 'attempts:' .. job.id, 'list'), cmsgpack.pack(entry))
end

local function let_go(job, v, known)
    local refund, expired = string.find(job.flags, 'r', 1, true), string.find(job.flags, 'e', 1, true)
    job.asked = job.reason ~= '' and job.reason
    if v[5] and ENDS_CANCELLED[job.state] then
        job.state, job.reason = 'cancelled', 'cancelled'
    end
    if not refund and job.state ~= 'succeeded' then
        record(job, v)
    end
    local losses = number(v[4])
    losses = expired and losses + 1 or refund and losses or 0
    local fields = { 'state', job.state, 'attempts', int(number(v[8]) - (refund and 1 or 0)) }
    local run_at = job.delay ~= '' and now + tonumber(job.delay) or number(v[11])
    local function set(field, value)
        fields[#fields + 1] = field
        fields[#fields + 1] = value
    end
    if job.delay ~= '' then
        set('dueTime', int(run_at))
        if not v[12] then
            set('created', v[11]) -- until now the same as its due time
        end
    end
    call('HDEL', JOB .. job.id, 'losses', 'cancel', 'reason')
    if losses > 0 then
        set('losses', int(losses))
    end
    if job.reason ~= '' then
        set('reason', job.reason)
    end
    if job.state == 'succeeded' or job.error ~= '' then
        drop(job.id, 'error')
    end
    if job.state ~= 'succeeded' and job.error ~= '' then
        pieces(fields, 'error', string.sub(job.error, 2))
    end
    if job.result ~= '' then
        pieces(fields, 'result', job.result)
    end
    if ENDED[job.state] then
        set('endTime', NOW)
        end_job(job)
    elseif job.state == 'queued' then
        ready(known, run_at, number(v[13]), job.id, losses)
    elseif job.state ~= 'waiting' then
        schedule(known.queue, run_at, job.id)
    end
    call('HSET', JOB .. job.id, unpack(fields))
    if not ENDED[job.state] then
        tell('queue:' .. known.queue)
    end
    return { 1, job.state, int(run_at) }
end

local function apply(job)
    local v = job.simple and read(job.id, 'state', 'claims', 'kind', 'losses', 'cancel', 'reason', 'error')
        or read(job.id, 'state', 'claims', 'kind', 'losses', 'cancel', 'reason', 'error', 'attempts', 'worker', 'pickupTime',
            'dueTime', 'created', 'seq')
    local known = v and kind_of(v[3] or '')
    if not known then
        return { 0 }
    end
    local lease = v[1] == 'running' and v[2] == job.claims and call('ZSCORE', LEASES, job.id)
    local expired = string.find(job.flags, 'e', 1, true) ~= nil
    if not lease or (tonumber(lease) <= now) ~= expired then
        return { 0, v[1] or false }
    end
    call('ZREM', LEASES, job.id)
    count(known.queue, 'running', -1)
    local answer = 1
    if job.simple then
        succeed(job, v)
    else
        answer = let_go(job, v, known)
    end
    count(known.queue, job.state, 1)
    return answer
end

for n, job in ipairs(jobs) do
    answers[n] = apply(job)
end
if #ended > 0 then
    call('RPUSH', ensure(P .. 'ended:succeeded', 'list'), unpack(ended))
end
place_ready()
finish()
return answers
