-- QUEUE, NUMBER and that many ids: all that is dead. Of other queues nothing is.
local named = {}
groups(2, function(queue, from, to)
    named[queue] = true
    mirror(queue, from, to)
    redis.call('SADD', GRAVES, queue)
end)
for _, queue in ipairs(redis.call('SMEMBERS', GRAVES)) do
    if not named[queue] then
        mirror(queue, 1, 0)
        redis.call('SREM', GRAVES, queue)
    end
end
