-- Push the ids of each queue, and have who waits for every queue look at one that was not known.
groups(2, function(queue, from, to)
    push(queue, from, to)
    if redis.call('ZADD', QUEUES, seconds(), queue) == 1 then
        ring(queue, math.min(16, to - from + 1))
    end
end)
