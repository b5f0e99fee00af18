-- Deletes jobs of a terminal state that ended long enough ago. ARGV: 3 state, 4 microseconds, 5 limit; how many, and
-- whether to look again.
even_if_full()
local state, edge, most = ARGV[3], now - tonumber(ARGV[4]), tonumber(ARGV[5])
local ended = P .. 'ended:' .. state
local pruned, looked = 0, 0

local function remove(id, ended_at)
    local v = read(id, 'state', 'kind', 'endTime', 'seq', 'key')
    local known = v and kind_of(v[2] or '')
    if not known or v[1] ~= state or number(v[3]) ~= ended_at then
        return -- it ran again since, or is gone
    end
    moving().forget(id, number(v[4]), v[5], true)
    count(known.queue, state, -1)
    pruned = pruned + 1
end

if state == 'succeeded' then
    while pruned < most and looked < 2 * MOST do
        local ended_at, id = string.match(ours('LINDEX', ended, 0) or '', '^(%d+):(.*)$')
        if not id or tonumber(ended_at) > edge then
            if not id then
                call('LPOP', ended)
            end
            if call('LLEN', ended) == 0 or id then
                break
            end
        else
            call('LPOP', ended)
            remove(id, tonumber(ended_at))
        end
        looked = looked + 1
    end
else
    local found = ours('ZRANGEBYSCORE', ended, '-inf', int(edge), 'WITHSCORES', 'LIMIT', 0, math.min(most, MOST))
    for n = 1, #found, 2 do
        call('ZREM', ended, found[n])
        remove(found[n], tonumber(found[n + 1]))
        looked = looked + 1
    end
end
finish()
return { pruned, looked }
