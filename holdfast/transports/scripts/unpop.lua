-- QUEUE, NUMBER and that many receipts and ids by turns: they were taken, and are for somebody else.
groups(2, function(queue, from, to)
    unpop(queue, from, to)
    redis.call('SADD', ACTIVE, queue)
end)
