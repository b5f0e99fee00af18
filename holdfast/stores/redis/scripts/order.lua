-- Writes down what living workers are to do. ARGV: 3 order, 4 "all" or "named", then workers. Answers who was told.
even_if_full()
local told = {}
local workers = { unpack(ARGV, 5) }
if ARGV[4] == 'all' then
    workers = ours('ZRANGEBYSCORE', P .. 'workers', '(' .. NOW, '+inf')
end
for _, worker in ipairs(workers) do
    local alive = ours('ZSCORE', P .. 'workers', worker)
    if alive and tonumber(alive) > now then
        ours('HSET', P .. 'worker:' .. worker, 'ordered', ARGV[3])
        told[#told + 1] = worker
        tell('orders', 'worker:' .. worker)
    end
end
finish()
return told
