-- Deletes keys that outlived their job and their lifetime, and workers that fell silent long ago. ARGV: 3 limit, 4
-- microseconds a silent worker is listed.
even_if_full()
local outlived = ensure(P .. 'outlived', 'zset')
for _, key in ipairs(call('ZRANGEBYSCORE', outlived, '-inf', NOW, 'LIMIT', 0, ARGV[3])) do
    local keep_until, id = string.match(call('HGET', ensure(P .. 'keys', 'hash'), key) or '', '^(%d+) (.*)$')
    if id and number(keep_until) <= now and call('EXISTS', JOB .. id) == 0 then
        call('HDEL', P .. 'keys', key)
    end
    call('ZREM', outlived, key)
end
for _, worker in ipairs(call('ZRANGEBYSCORE', ensure(P .. 'workers', 'zset'), '-inf', int(now - tonumber(ARGV[4])))) do
    call('DEL', P .. 'worker:' .. worker)
    call('ZREM', P .. 'workers', worker)
end
finish()
return 0
