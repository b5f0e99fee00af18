-- The state and claims of each of the jobs from ARGV[3] on; nil for one that is not there.
local states = {}
for n = 3, #ARGV do
    local v = read(ARGV[n], 'state', 'claims', 'pickupTime')
    states[#states + 1] = v and v[1] and { v[1], claims_of(v[2], v[3]) } or false
end
return states
