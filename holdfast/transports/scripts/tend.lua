-- SILENCE in milliseconds, NUMBER: what silent consumers had in hand, up to so many of a queue, as QUEUE, RECEIPT, ID.
local found = {}
for _, queue in ipairs(redis.call('ZRANGE', QUEUES, 0, -1)) do
    for _, each in ipairs(tend(queue, tonumber(ARGV[2]), tonumber(ARGV[3]))) do
        found[#found + 1] = queue
        found[#found + 1] = each[1]
        found[#found + 1] = each[2]
    end
end
for _, queue in ipairs(redis.call('ZRANGEBYSCORE', QUEUES, '-inf', seconds() - FORGOTTEN)) do
    if redis.call('EXISTS', of(READY, queue)) == 0 then redis.call('ZREM', QUEUES, queue) end
end
return found
