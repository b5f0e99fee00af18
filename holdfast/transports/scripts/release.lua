-- TOKEN: the sweep that holds the lock with it is over.
if redis.call('GET', READY .. '@sweep') == ARGV[2] then redis.call('DEL', READY .. '@sweep') end
