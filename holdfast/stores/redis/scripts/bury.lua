-- Ends a claimed job that cannot be read. ARGV: 3 id, 4 error.
even_if_full()
local v = read(ARGV[3], 'state', 'kind')
local known = v and kind_of(v[2] or '')
if known and v[1] == 'running' then
    ours('ZREM', LEASES, ARGV[3])
    drop(ARGV[3], 'error')
    local fields = { 'state', 'dead', 'reason', 'payload', 'endTime', NOW }
    pieces(fields, 'error', ARGV[4])
    call('HSET', JOB .. ARGV[3], unpack(fields))
    ours('ZADD', P .. 'ended:dead', NOW, ARGV[3])
    count(known.queue, 'running', -1)
    count(known.queue, 'dead', 1)
    endings[1] = ARGV[3]
end
finish()
return 0
