-- QUEUE, MOST: how many of its ids are known to have been announced again; then those that come next.
local found = held(ARGV[2], ARGV[3])
table.insert(found, 1, redis.call('ZCARD', again(ARGV[2])))
return found
