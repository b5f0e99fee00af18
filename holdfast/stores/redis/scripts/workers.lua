-- name: heartbeat
-- Registers a worker and extends its live leases. ARGV: 3 worker, 4 lease in microseconds, 5 how long the worker counts
-- as alive, or "" not to register it, 6 and 7 what to add to its numbers of successes and failures, 8 number of its
-- fields, their names and values, then id and claims of each lease.
-- Returns the command, then for each lease 0 lost, 1 held, 2 asked to stop.
allow_when_full()
local lease_until = int(now + tonumber(ARGV[4]))
local worker = PREFIX .. 'worker:' .. ARGV[3]
local at = 9 + 2 * tonumber(ARGV[8])
if ARGV[5] ~= '' then
    local alive_until = int(now + tonumber(ARGV[5]))
    safe_call('HSET', worker, 'seen', NOW, 'until', alive_until, unpack(ARGV, 9, at - 1))
    call('HINCRBY', worker, 'succeeded', ARGV[6])
    call('HINCRBY', worker, 'failed', ARGV[7])
    call('HSETNX', worker, 'started', NOW)
    safe_call('ZADD', PREFIX .. 'workers', alive_until, ARGV[3])
end
local answers, extended = { safe_call('HGET', worker, 'command') or 'none' }, {}
for i = at, #ARGV, 2 do
    local id, lease_claims = ARGV[i], ARGV[i + 1]
    local state, claims, is_cancelling, stored_worker = read_fields(id, 'state', 'claims', 'cancel', 'worker')
    -- After a failover an old number of claims may return: only the worker of the job holds its lease.
    local is_holder = state == 'running' and claims_of(claims, true) == lease_claims and stored_worker == ARGV[3]
    local lease = is_holder and safe_call('ZSCORE', LEASES, id)
    if lease and tonumber(lease) > now then
        extended[#extended + 1] = lease_until
        extended[#extended + 1] = id
        answers[#answers + 1] = is_cancelling and 2 or 1
    else
        count_lost_write(id, lease_claims, ARGV[3])
        answers[#answers + 1] = 0
    end
end
if #extended > 0 then
    call('ZADD', LEASES, unpack(extended))
end
finish()
return answers

-- name: append_logs
-- Stores log lines of jobs. ARGV from 3 on, for each record: id, claims, number of lines; of each line its number, age
-- in microseconds, level, text, and "" or "=" and its fields. Returns 1 for a valid lease, else 0. A succeeded job
-- counts: no other worker can have logged under it. The entry id is CLAIMS-NUMBER: XADD refuses duplicates, and lines
-- that arrive late, which are merged.
local answers, at = {}, 3

local function is_valid_lease(id, state, claims, stored_claims)
    if not state or stored_claims ~= claims then
        return false
    end
    return state == 'succeeded' or state == 'running' and (tonumber(call('ZSCORE', LEASES, id) or nil) or 0) > now
end

local function position_of(entry)
    local claims, number = string.match(entry, '^(%d+)-(%d+)$')
    return tonumber(claims), tonumber(number)
end

local function is_before(one, other)
    local claims, number = position_of(one[1])
    local other_claims, other_number = position_of(other[1])
    return claims < other_claims or claims == other_claims and number < other_number
end

-- XADD only appends, even behind deleted entries: rewrites the stream with the late lines.
local function merge_late_lines(key, late)
    local missing, seen = {}, {}
    for _, line in ipairs(late) do
        if not seen[line[1]] and #call('XRANGE', key, line[1], line[1]) == 0 then
            missing[#missing + 1] = line
        end
        seen[line[1]] = true
    end
    if not missing[1] then
        return
    end
    local entries = call('XRANGE', key, '-', '+')
    for _, line in ipairs(missing) do
        entries[#entries + 1] = line
    end
    table.sort(entries, is_before)
    call('DEL', key)
    for _, entry in ipairs(entries) do
        call('XADD', key, entry[1], unpack(entry[2]))
    end
end

local function append_line(id, claims, attempt, n, late)
    local line = {
        PREFIX .. 'lines:' .. id, claims .. '-' .. ARGV[n], 'attempt', attempt, 'at', int(now - tonumber(ARGV[n + 1])),
        'level', ARGV[n + 2], 'text', ARGV[n + 3],
    }
    if ARGV[n + 4] ~= '' then
        line[#line + 1] = 'fields'
        line[#line + 1] = string.sub(ARGV[n + 4], 2)
    end
    local reply = redis.pcall('XADD', unpack(line))
    if reply.err and string.find(reply.err, 'WRONGTYPE', 1, true) then
        safe_call('XADD', unpack(line))
    elseif reply.err and string.find(reply.err, 'equal or smaller', 1, true) then
        late[#late + 1] = { line[2], { unpack(line, 3) } }
    elseif reply.err then
        return reply
    end
end

while at <= #ARGV do
    local id, claims, last = ARGV[at], ARGV[at + 1], at + 2 + 5 * tonumber(ARGV[at + 2])
    local state, stored_claims, started_at, attempts = read_fields(id, 'state', 'claims', 'pickupTime', 'attempts')
    local is_valid = is_valid_lease(id, state, claims, claims_of(stored_claims, started_at))
    local late = {}
    for n = at + 3, is_valid and last or 0, 5 do
        local problem = append_line(id, claims, attempts or claims, n, late)
        if problem then
            return problem
        end
    end
    if late[1] then
        merge_late_lines(PREFIX .. 'lines:' .. id, late)
    end
    answers[#answers + 1] = is_valid and 1 or 0
    at = last + 1
end
finish()
return answers

-- name: deregister
-- Removes a worker that has stopped. ARGV: 3 worker.
allow_when_full()
call('DEL', PREFIX .. 'worker:' .. ARGV[3])
safe_call('ZREM', PREFIX .. 'workers', ARGV[3])
return 0
