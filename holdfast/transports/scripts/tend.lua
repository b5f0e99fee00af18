-- SILENCE in milliseconds, and queues: what silent consumers had in hand, as QUEUE, RECEIPT, ID by turns. Queues that nobody
-- uses are forgotten.
local found = {}
local old = seconds() - FORGOTTEN
for at = 3, #ARGV do
    local queue = ARGV[at]
    for _, each in ipairs(tend(queue, tonumber(ARGV[2]))) do
        found[#found + 1] = queue
        found[#found + 1] = each[1]
        found[#found + 1] = each[2]
    end
    if length(queue) > 0 then redis.call('SADD', ACTIVE, queue) end -- somebody else may have pushed
    if tonumber(redis.call('ZSCORE', QUEUES, queue) or old) < old and redis.call('EXISTS', of(READY, queue)) == 0 then
        redis.call('ZREM', QUEUES, queue)
    end
end
return found
