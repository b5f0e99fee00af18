-- The queues that have a list of dead letters.
return redis.call('SMEMBERS', GRAVES)
