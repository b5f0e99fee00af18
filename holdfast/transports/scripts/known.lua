-- NUMBER: so many of the queues there are, those last used first.
return redis.call('ZREVRANGE', QUEUES, 0, tonumber(ARGV[2]) - 1)
