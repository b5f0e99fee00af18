-- Jobs without what may be large: {id, fields, lease end or nil} of each of the ids from ARGV[3] on that is there.
local ASKED = { 'state', 'kind', 'seq', 'dueTime', 'created', 'options', 'reason', 'worker', 'cancel', 'claims', 'attempts', 'losses',
    'pickupTime', 'endTime', 'error' }
local jobs = {}
for n = 3, #ARGV do
    local id = ARGV[n]
    local v = read(id, unpack(ASKED))
    if v and v[1] then
        local fields = {}
        for m, field in ipairs(ASKED) do
            if v[m] then
                fields[#fields + 1] = field
                fields[#fields + 1] = (field == 'options' or field == 'error') and joined(id, field, v[m]) or v[m]
            end
        end
        local lease = redis.pcall('ZSCORE', LEASES, id)
        jobs[#jobs + 1] = { id, fields, type(lease) ~= 'table' and lease }
    end
end
return jobs
