-- Every registered worker: {fields, 1 alive | 0 silent} of each.
local workers = {}
for _, worker in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
    local fields = redis.pcall('HGETALL', P .. 'worker:' .. worker)
    if not fields.err and #fields > 0 then
        local alive = call('ZSCORE', P .. 'workers', worker)
        workers[#workers + 1] = { fields, tonumber(alive) > now and 1 or 0 }
    end
end
return workers
