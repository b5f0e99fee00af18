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
