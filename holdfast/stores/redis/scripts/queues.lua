-- Counts by "state:queue", paused queues, and of each queue from ARGV[3] on the microseconds its oldest ready job has been
-- eligible, nil where none is ready.
if ARGV[3] == nil then
    return { call('HGETALL', P .. 'counts'), call('SMEMBERS', P .. 'paused') }
end
local ages = {}
for n = 3, #ARGV do
    local queue, oldest = ARGV[n], nil

    local function consider(id)
        local v = read(id, 'state', 'dueTime')
        if v and v[1] == 'queued' and (not oldest or number(v[2]) < oldest) then
            oldest = number(v[2])
        end
        return v and v[1] == 'queued'
    end

    local levels = ours('ZRANGE', levels_of(queue), 0, -1)
    levels[#levels + 1] = '0'
    for _, level in ipairs(levels) do
        for _, id in ipairs(ours('LRANGE', ready_of(queue, level), 0, MOST - 1)) do
            if consider(id) then -- the rest came later
                break
            end
        end
    end
    for _, id in ipairs(ours('ZRANGE', quarantine_of(queue), 0, 0)) do
        consider(id)
    end
    ages[#ages + 1] = oldest and int(math.max(0, now - oldest)) or false
end
return ages
