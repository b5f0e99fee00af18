-- Queues: see to it that there are streams and our group in each, the bell's too.
for at = 1, #ARGV do
    local key = at == 1 and BELL or of(READY, ARGV[at])
    local made = redis.pcall('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
    if made.err and not string.find(made.err, 'BUSYGROUP') then
        redis.call('XLEN', key)
    end
end
