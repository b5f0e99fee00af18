-- QUEUE, NUMBER and that many ids: these jobs are dead.
groups(2, function(queue, from, to)
    bury(queue, from, to)
    redis.call('SADD', GRAVES, queue)
end)
