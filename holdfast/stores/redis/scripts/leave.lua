-- Forgets a worker that has stopped. ARGV: 3 worker.
even_if_full()
call('DEL', P .. 'worker:' .. ARGV[3])
ours('ZREM', P .. 'workers', ARGV[3])
return 0
