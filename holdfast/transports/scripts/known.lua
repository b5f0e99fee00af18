-- FROM, NUMBER: so many of the queues used of late. NUMBER alone: so many of those in which something may wait.
if ARGV[3] then return redis.call('ZRANGE', QUEUES, ARGV[2], ARGV[2] + ARGV[3] - 1) end
return redis.call('SRANDMEMBER', ACTIVE, ARGV[2])
