-- LIMIT, the queue served last, NUMBER of shut queues and these, then QUEUE and SLOTS as often as there are. Of each queue at
-- most its slots, in turn; `*` stands for every queue that is not named. Answers QUEUE, RECEIPT, ID as often as there are.
local left, served = tonumber(ARGV[2]), ARGV[3]
local first = 5 + tonumber(ARGV[4])
local closed, slots, names = {}, {}, {}
for at = 5, first - 1 do
    closed[ARGV[at]] = true
end
for at = first, #ARGV, 2 do
    slots[ARGV[at]] = tonumber(ARGV[at + 1])
end
local others = slots['*']
if others then
    for _, queue in ipairs(redis.call('SMEMBERS', ACTIVE)) do
        slots[queue] = slots[queue] or others
    end
    slots['default'] = slots['default'] or others
    slots['*'] = nil
end
for queue, number in pairs(slots) do
    if number > 0 and not closed[queue] then names[#names + 1] = queue end
end
table.sort(names)
local start = 1
while names[start] and names[start] <= served do
    start = start + 1
end
local found = {}
for turn = 0, #names - 1 do
    local queue = names[(start + turn - 1) % #names + 1]
    for _, each in ipairs(pop(queue, math.min(left, slots[queue]))) do
        found[#found + 1] = queue
        found[#found + 1] = each[1]
        found[#found + 1] = each[2]
        left = left - 1
    end
    if length(queue) == 0 then redis.call('SREM', ACTIVE, queue) end
    if left == 0 then break end
end
return found
