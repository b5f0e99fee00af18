-- The state and claims of each of the jobs from ARGV[3] on; nil for one that is not there.
local states = {}
for n = 3, #ARGV do
    local v = read(ARGV[n], 'state', 'claims')
    states[#states + 1] = v and v[1] and { v[1], v[2] or '0' } or false
end
return states
