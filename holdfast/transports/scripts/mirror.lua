-- QUEUE and ids: these of it are dead, and no others.
mirror(ARGV[2], 3, #ARGV)
redis.call(ARGV[3] and 'SADD' or 'SREM', GRAVES, ARGV[2])
