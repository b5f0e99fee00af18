-- Push the ids of each queue. Who waits for every queue blocks on `default`, on queues in which something waits, and on the
-- bell, which tells of the others.
groups(2, function(queue, from, to)
    push(queue, from, to)
    if queue ~= 'default' then
        redis.call('ZADD', QUEUES, seconds(), queue)
        if redis.call('SADD', ACTIVE, queue) == 1 then
            ring(queue, math.min(16, to - from + 1))
        end
    end
end)
