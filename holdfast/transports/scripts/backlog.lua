-- Queues: how many ids wait in each.
local found = {}
for at = 2, #ARGV do
    found[at - 1] = length(ARGV[at])
end
return found
