-- Registers a worker and extends its live leases. ARGV: 3 worker, 4 lease in microseconds, 5 "1" to register, 6 number of
-- fields of the worker, the fields and their values, then id and claims of each lease. Answers the order, then 0 lost,
-- 1 held, 2 asked to stop for each lease.
even_if_full()
local until_ = int(now + tonumber(ARGV[4]))
local worker = P .. 'worker:' .. ARGV[3]
local at = 7 + 2 * tonumber(ARGV[6])
if ARGV[5] == '1' then
    ours('HSET', worker, 'seen', NOW, 'until', until_, unpack(ARGV, 7, at - 1))
    call('HSETNX', worker, 'started', NOW)
    ours('ZADD', P .. 'workers', until_, ARGV[3])
end
local answers, extended = { ours('HGET', worker, 'ordered') or 'none' }, {}
for i = at, #ARGV, 2 do
    local v = read(ARGV[i], 'state', 'claims', 'cancel', 'worker')
    -- A failover can bring an old number of claims back: the lease is whose worker has the job now.
    local held = v and v[1] == 'running' and claims_of(v[2], true) == ARGV[i + 1] and v[4] == ARGV[3]
    local lease = held and ours('ZSCORE', LEASES, ARGV[i])
    if lease and tonumber(lease) > now then
        extended[#extended + 1] = until_
        extended[#extended + 1] = ARGV[i]
        answers[#answers + 1] = v[3] and 2 or 1
    else
        note_refused(ARGV[i], ARGV[i + 1], ARGV[3])
        answers[#answers + 1] = 0
    end
end
if #extended > 0 then
    call('ZADD', LEASES, unpack(extended))
end
finish()
return answers
