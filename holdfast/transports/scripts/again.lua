-- QUEUE, BEFORE, NOW and ids of its ready jobs: announce those that were not since BEFORE; how many.
-- What was announced earlier than that has been taken since, and whoever claimed it is no longer ready.
local queue, count = ARGV[2], 0
local key = again(queue)
redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. ARGV[3])
for at = 5, #ARGV do
    if redis.call('ZADD', key, 'NX', ARGV[4], ARGV[at]) == 1 then
        push(queue, at, at)
        count = count + 1
    end
end
redis.call('EXPIRE', key, FORGOTTEN)
return count
