-- Jobs as they stand: {id, fields, lease end or nil} of each of the ids from ARGV[3] on that is there.
local jobs = {}
for n = 3, #ARGV do
    local fields = redis.pcall('HGETALL', JOB .. ARGV[n])
    if not fields.err and #fields > 0 then
        local lease = redis.pcall('ZSCORE', LEASES, ARGV[n])
        jobs[#jobs + 1] = { ARGV[n], fields, type(lease) ~= 'table' and lease }
    end
end
return jobs
