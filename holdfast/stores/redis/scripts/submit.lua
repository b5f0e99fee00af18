-- Stores a batch of jobs. ARGV: 3 "1" where payloads stay in one piece, 4 number of kinds, the kinds, then for each job:
-- id, kind, when ("" at once, "+delay", "=instant"), payload, and "" or "x" with key, its lifetime and options, "=" before
-- each, "" for none. Answers 1 (created), 0 (known), or the id of the job its key stands for.
local whole = ARGV[3] == '1'
local first_kind = 4
local at = first_kind + tonumber(ARGV[4]) + 1
local seq = number(call('GET', ensure(P .. 'seq', 'string')))
local keys = ensure(P .. 'keys', 'hash')
local made, owners, answers = {}, {}, {}
local lists, indexes, delayed = {}, {}, {}

local function exists(id)
    if made[id] then
        return true
    end
    return call('EXISTS', JOB .. id) == 1 and call('TYPE', ensure(JOB .. id, 'hash')).ok == 'hash'
end

local function owner_of(key)
    local held = owners[key] or call('HGET', keys, key)
    local keep_until, id = string.match(held or '', '^(%d+) (.*)$')
    if id and (exists(id) or number(keep_until) > now) then
        return id
    end
end

local function take_key(key, id, keep_for)
    local held = (keep_for ~= '' and int(now + tonumber(string.sub(keep_for, 2))) or '0') .. ' ' .. id
    owners[key] = held
    call('HSET', keys, key, held)
    call('ZREM', ensure(P .. 'outlived', 'zset'), key)
end

local function append(groups, queue, level, id)
    local levels = groups[queue] or {}
    groups[queue] = levels
    local ids = levels[level] or {}
    levels[level] = ids
    ids[#ids + 1] = id
end

local created = {} -- how many, by state and kind

local function create(id, kind, when, payload, key, options)
    local run_at, state = now, 'queued'
    if when ~= '' then
        local span = number(string.sub(when, 2))
        run_at = math.max(now, string.sub(when, 1, 1) == '+' and now + span or span)
        state = run_at > now and 'scheduled' or 'queued'
    end
    seq = seq + 1
    made[id] = true
    local known, text = kind_of(kind), int(seq)
    local due = run_at == now and NOW or int(run_at)
    local fields = { 'state', state, 'kind', kind, 'dueTime', due, 'seq', text }
    if state == 'scheduled' then
        fields[9], fields[10] = 'created', NOW
        delayed[known.queue] = delayed[known.queue] or {}
        local entries = delayed[known.queue]
        entries[#entries + 1] = due
        entries[#entries + 1] = id
    else
        append(lists, known.queue, known.level, id)
    end
    pieces(fields, 'payload', payload, whole)
    if options ~= '' then
        pieces(fields, 'options', string.sub(options, 2))
    end
    if key then
        fields[#fields + 1] = 'key'
        fields[#fields + 1] = key
    end
    call('HSET', JOB .. id, unpack(fields))
    local chunk = math.floor(seq / INDEXED)
    local entries = indexes[chunk] or {}
    indexes[chunk] = entries
    entries[#entries + 1] = text
    entries[#entries + 1] = id
    created[state] = created[state] or {}
    created[state][kind] = (created[state][kind] or 0) + 1
end

while at <= #ARGV do
    local id, kind, when, payload = ARGV[at], ARGV[first_kind + tonumber(ARGV[at + 1])], ARGV[at + 2], ARGV[at + 3]
    local key, keep_for, options = nil, '', ''
    if ARGV[at + 4] == 'x' then
        key = ARGV[at + 5] ~= '' and string.sub(ARGV[at + 5], 2) or nil
        keep_for, options = ARGV[at + 6], ARGV[at + 7]
        at = at + 3
    end
    at = at + 5
    local owner = key and owner_of(key)
    if owner and owner ~= id then
        answers[#answers + 1] = owner
    elseif exists(id) then
        if key and not owner and not call('HGET', JOB .. id, 'key') then
            take_key(key, id, keep_for)
            call('HSET', JOB .. id, 'key', key)
        end
        answers[#answers + 1] = 0
    else
        if key and not owner then
            take_key(key, id, keep_for)
        end
        create(id, kind, when, payload, key, options)
        answers[#answers + 1] = 1
    end
end

for queue, levels in pairs(lists) do
    call('ZADD', ensure(P .. 'queues', 'zset'), 0, queue)
    for level, ids in pairs(levels) do
        if level ~= '0' then
            call('ZADD', levels_of(queue), -number(level), level)
        end
        call('RPUSH', ready_of(queue, level), unpack(ids))
    end
end
for queue, entries in pairs(delayed) do
    call('ZADD', schedule_of(queue), unpack(entries))
    rescheduled[queue] = true
end
for chunk, entries in pairs(indexes) do
    call('HSET', ensure(P .. 'index:' .. int(chunk), 'hash'), unpack(entries))
    call('ZADD', ensure(P .. 'chunks', 'zset'), int(chunk), int(chunk))
end
for state, number_of in pairs(created) do
    for kind, by in pairs(number_of) do
        count(kind_of(kind).queue, state, by)
        tell('queue:' .. kind_of(kind).queue)
    end
end
if next(made) then
    call('SET', P .. 'seq', int(seq))
end
finish()
return answers
