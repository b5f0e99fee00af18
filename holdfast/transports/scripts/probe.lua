-- Whether everything can be read and written.
local names = redis.call('ZRANGE', QUEUES, 0, -1)
names[#names + 1] = 'default'
for _, queue in ipairs(names) do
    local key = of(READY, queue)
    local kind = redis.call('TYPE', key)['ok']
    if kind ~= 'none' and kind ~= KIND then
        return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. kind .. ', not a ' .. KIND)
    end
end
redis.call('SET', READY .. '@probe', '1', 'PX', 1000)
