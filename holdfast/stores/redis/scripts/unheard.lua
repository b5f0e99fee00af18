-- Running jobs that a worker claimed after an instant. ARGV: 3 worker, 4 the instant, 5 the lease in microseconds that it
-- claims for, 6 how many leases to skip. Answers {id, claims} of each, how many others were looked at, and whether there
-- are more.
local after = int(tonumber(ARGV[4]) + tonumber(ARGV[5]))
local ids = ours('ZRANGEBYSCORE', LEASES, '(' .. after, '+inf', 'LIMIT', ARGV[6], MOST)
local found = {}
for _, id in ipairs(ids) do
    local v = read(id, 'state', 'claims', 'pickupTime', 'worker')
    if v and v[1] == 'running' and v[4] == ARGV[3] and number(v[3]) > tonumber(ARGV[4]) then
        found[#found + 1] = { id, claims_of(v[2], v[3]) }
    end
end
return { found, #ids - #found, #ids == MOST and 1 or 0 }
