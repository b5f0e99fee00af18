-- Makes due jobs of every queue ready, up to ARGV[3]; how many.
even_if_full()
local most, promoted = tonumber(ARGV[3]), 0
local queues = ours('ZRANGEBYSCORE', P .. 'due', '-inf', NOW, 'LIMIT', 0, MOST)
queues[#queues + 1] = 'default' -- somebody may have put a job there by hand
for _, queue in ipairs(queues) do
    if promoted < most then
        local made_ready = moving().promote(queue, most - promoted)
        promoted = promoted + made_ready
        rescheduled[queue] = true
        if made_ready > 0 then
            tell('news', 'queue:' .. queue)
        end
    end
end
finish()
return promoted
