-- Closes (ARGV[3] "1") or opens a queue for claims. ARGV: 4 queue.
even_if_full()
ours(ARGV[3] == '1' and 'SADD' or 'SREM', P .. 'paused', ARGV[4])
if ARGV[3] ~= '1' then
    tell('news', 'queue:' .. ARGV[4])
end
finish()
return 0
