-- Deletes keys that outlived their job and their lifetime, and workers that fell silent long ago. ARGV: 3 limit, 4
-- microseconds a silent worker is listed.
even_if_full()
local outlived = P .. 'outlived'
for _, key in ipairs(ours('ZRANGEBYSCORE', outlived, '-inf', NOW, 'LIMIT', 0, ARGV[3])) do
    local keep_until, id = string.match(ours('HGET', P .. 'keys', key) or '', '^(%d+) (.*)$')
    if id and number(keep_until) <= now and call('EXISTS', JOB .. id) == 0 then
        call('HDEL', P .. 'keys', key)
    end
    call('ZREM', outlived, key)
end
for _, worker in ipairs(ours('ZRANGEBYSCORE', P .. 'workers', '-inf', int(now - tonumber(ARGV[4])), 'LIMIT', 0, ARGV[3])) do
    call('DEL', P .. 'worker:' .. worker)
    call('ZREM', P .. 'workers', worker)
end
finish()
return 0
