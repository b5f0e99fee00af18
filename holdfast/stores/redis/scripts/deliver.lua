-- Claims just the delivered ids that can be claimed. ARGV: 6 limit, 7 the highest tier,
-- 8 "1" to make due ones ready, 9 slots of every other queue or "", 10 startable, 11 number of named queues, queue and slots
-- of each, then the ids. Answers jobs, lease end and "1" where a queue was left at a job on its last attempt.
even_if_full()
local limit, most, star, startable = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[9]), tonumber(ARGV[10])
local named, paused, groups, order = {}, paused_queues(), {}, {}
local at, held_back = 12 + 2 * tonumber(ARGV[11]), 0
for i = 12, at - 1, 2 do
    named[ARGV[i]] = tonumber(ARGV[i + 1])
    order[#order + 1] = ARGV[i]
end

local function eligible(id)
    local v = read(id, unpack(FIELDS))
    local known = v and kind_of(v[2] or '')
    if not known or paused[known.queue] or tier_of(v[5]) > most then
        return nil
    end
    local is_due = (v[1] == 'scheduled' or v[1] == 'failed') and ARGV[8] == '1' and number(v[6]) <= now
    if v[1] ~= 'queued' and not is_due then
        return nil
    end
    local lane = named[known.queue] and known.queue or star and ''
    return lane, { number(v[6]), number(v[10]), id, v, known }
end

local seen, before = {}, moving().before
for i = at, #ARGV do
    local lane, job = nil, nil
    if not seen[ARGV[i]] then
        seen[ARGV[i]] = true
        lane, job = eligible(ARGV[i])
    end
    if lane then
        groups[lane] = groups[lane] or {}
        groups[lane][#groups[lane] + 1] = job
    end
end

if star then
    named[''] = star
    order[#order + 1] = ''
end
for _, lane in ipairs(order) do
    local group = groups[lane] or {}
    table.sort(group, function(a, b)
        local one, other = number(a[5].level), number(b[5].level)
        if one ~= other then
            return one > other
        end
        return before(a, b)
    end)
    for n = 1, math.min(#group, named[lane], limit - leased) do
        local job = group[n]
        if tier_of(job[4][5]) > 0 or is_last(job[5], job[4]) then
            if startable <= 0 then
                held_back = 1
                break
            end
            startable = startable - 1
        end
        moving().withdraw(job[3], job[5], job[4][1], number(job[4][5]))
        take(job[3], job[4])
    end
end
lease_taken()
finish()
return { taken, until_, held_back }
