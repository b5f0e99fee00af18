-- fragment: storing
local whole = false
local first, seq
local made, owners, answers = {}, {}, {}
local kinds_here, lists, indexes, delayed = {}, {}, {}, {}

local function exists(id)
    if made[id] then
        return true
    elseif call('EXISTS', JOB .. id) == 0 then
        return false
    end
    ours('HEXISTS', JOB .. id, 'kind') -- a key of another type makes way
    return call('EXISTS', JOB .. id) == 1
end

local function owner_of(key)
    local held = owners[key] or ours('HGET', P .. 'keys', key)
    local keep_until, id = string.match(held or '', '^(%d+) (.*)$')
    if id and (exists(id) or number(keep_until) > now) then
        return id
    end
end

local function take_key(key, id, keep_for)
    local held = (keep_for ~= '' and int(now + tonumber(string.sub(keep_for, 2))) or '0') .. ' ' .. id
    owners[key] = held
    ours('HSET', P .. 'keys', key, held)
    ours('ZREM', P .. 'outlived', key)
end

local function note_key(id, key) -- one key more of a job that is there; deleting the job frees them all
    if call('HSETNX', JOB .. id, 'key', key) == 0 then
        call('HSET', JOB .. id, 'key:' .. ours('HINCRBY', JOB .. id, 'moreKeys', 1), key)
    end
end

local function due_of(when) -- eligible time, and whether that is to come
    local run_at = number(string.sub(when, 2))
    if string.sub(when, 1, 1) == '+' then
        run_at = now + run_at
    end
    if run_at > now then
        return int(run_at), true
    end
    return NOW, false
end

local function create(id, kind, when, payload, key, options, given)
    local due, later = NOW, false
    if when ~= '' then
        due, later = due_of(when)
    end
    seq = seq + 1
    made[id] = true
    if later then
        local entries = delayed[kind.queue] or {}
        delayed[kind.queue] = entries
        entries[#entries + 1] = due
        entries[#entries + 1] = id
        kind.scheduled = kind.scheduled + 1
    else
        kind.list[#kind.list + 1] = id
        kind.queued = kind.queued + 1
    end
    if not later and not key and not given and options == '' and #payload <= CHUNK then
        call('HSET', JOB .. id, 'state', 'queued', 'kind', kind.text, 'dueTime', due, 'seq', seq, 'payload', payload)
    else
        local fields = { 'state', later and 'scheduled' or 'queued', 'kind', kind.text, 'dueTime', due, 'seq', seq }
        if later then
            fields[9], fields[10] = 'created', NOW
        end
        pieces(fields, 'payload', payload, whole)
        if options ~= '' then
            pieces(fields, 'options', string.sub(options, 2))
        end
        if key then
            fields[#fields + 1] = 'key'
            fields[#fields + 1] = key
        end
        if given then -- the id may return: its claims begin at the clock, which no earlier life of it reached
            for _, each in ipairs({ 'claims', NOW, 'attempts', '0' }) do
                fields[#fields + 1] = each
            end
        end
        call('HSET', JOB .. id, unpack(fields))
    end
    local chunk = math.floor(seq / INDEXED)
    local entries = indexes[chunk]
    if not entries then
        entries = {}
        indexes[chunk] = entries
    end
    entries[#entries + 1] = seq
    entries[#entries + 1] = id
end

local function store(id, kind, when, payload, key, keep_for, options, given)
    local owner = key and owner_of(key)
    if owner and owner ~= id then
        return owner
    elseif exists(id) then
        if key and not owner then
            take_key(key, id, keep_for)
            note_key(id, key)
        end
        return 0
    end
    if key and not owner then
        take_key(key, id, keep_for)
    end
    create(id, kind, when, payload, key, options, given)
    return 1
end

-- Stores a batch of jobs, said from ARGV[from] on: "1" where payloads stay in one piece, number of kinds, the kinds, then runs
-- of jobs, each with what they have in common first: number, kind, when ("" at once, "+delay", "=instant"), "" or "x"; then id
-- and payload of each, with "x" also key, its lifetime and options, "=" before each, "" for none, and "1" where its client
-- chose the id. Answers 1 (created), 0 (known), or the id of the job its key stands for; where any was created, in the end
-- also the number of the last one's submission.
local function store_batch(from)
    whole = ARGV[from] == '1'
    local at = from + 2 + tonumber(ARGV[from + 1])
    first = number(ours('GET', P .. 'seq'))
    seq = first
    for n = from + 2, at - 1 do
        local known = kind_of(ARGV[n])
        local key = ready_of(known.queue, known.level)
        lists[key] = lists[key] or { queue = known.queue, level = known.level }
        kinds_here[n - from - 1] = { text = ARGV[n], queue = known.queue, list = lists[key], queued = 0, scheduled = 0 }
    end

    while at <= #ARGV do
        local kind, when, each = kinds_here[tonumber(ARGV[at + 1])], ARGV[at + 2], ARGV[at + 3] == 'x' and 6 or 2
        local last = at + 3 + each * tonumber(ARGV[at])
        for n = at + 4, last, each do
            local key, keep_for, options, given = nil, '', '', false
            if each == 6 then
                key = ARGV[n + 2] ~= '' and string.sub(ARGV[n + 2], 2) or nil
                keep_for, options, given = ARGV[n + 3], ARGV[n + 4], ARGV[n + 5] == '1'
            end
            answers[#answers + 1] = store(ARGV[n], kind, when, ARGV[n + 1], key, keep_for, options, given)
        end
        at = last + 1
    end

    for key, list in pairs(lists) do
        if #list > 0 then
            ours('ZADD', P .. 'queues', 0, list.queue)
            if list.level ~= '0' then
                ours('ZADD', levels_of(list.queue), -number(list.level), list.level)
            end
            ours('RPUSH', key, unpack(list))
        end
    end
    for queue, entries in pairs(delayed) do
        ours('ZADD', schedule_of(queue), unpack(entries))
        rescheduled[queue] = true
    end
    for chunk, entries in pairs(indexes) do
        ours('HSET', P .. 'index:' .. int(chunk), unpack(entries))
        ours('ZADD', P .. 'chunks', chunk, chunk)
    end
    for _, kind in ipairs(kinds_here) do
        if kind.queued + kind.scheduled > 0 then
            count(kind.queue, 'queued', kind.queued)
            count(kind.queue, 'scheduled', kind.scheduled)
            tell('news', 'queue:' .. kind.queue)
        end
    end
    if seq > first then
        local last = int(seq)
        call('SET', P .. 'seq', last)
        answers[#answers + 1] = last
    end
    return answers
end

-- name: submit (storing)
-- ARGV from 3 on: the batch. Answers as `store_batch`.
local stored = store_batch(3)
finish()
return stored

-- name: write_schedule (storing)
-- Replaces, adds or removes a schedule if it has the expected revision, and stores the jobs of its ticks. ARGV: 3 name, 4
-- expected revision, 5 its next tick or "", 6 document, "" to remove it, 7 on: the batch. Answers its revision, or "" and nothing
-- was changed; and what `store_batch` answers.
local stands = string.match(ours('HGET', P .. 'schedules', ARGV[3]) or '0', '^(%d+)')
if stands ~= ARGV[4] then
    return { '', {} }
end
local revision = stands == '0' and NOW or int(tonumber(stands) + 1)
if ARGV[6] == '' then
    call('HDEL', P .. 'schedules', ARGV[3])
else
    call('HSET', P .. 'schedules', ARGV[3], revision .. ' ' .. ARGV[6])
end
if ARGV[5] == '' then
    ours('ZREM', P .. 'ticks', ARGV[3])
else
    ours('ZADD', P .. 'ticks', ARGV[5], ARGV[3])
end
local stored = store_batch(7)
finish()
return { revision, stored }

-- name: schedules
-- Schedules, "REVISION DOCUMENT" each: of the name ARGV[4] where ARGV[3] is "one"; else those whose tick has come, up to ARGV[4],
-- then now and the first tick to come, or "".
if ARGV[3] == 'one' then
    return { ours('HGET', P .. 'schedules', ARGV[4]) }
end
local due = {}
for _, name in ipairs(ours('ZRANGEBYSCORE', P .. 'ticks', '-inf', NOW, 'LIMIT', 0, ARGV[4])) do
    due[#due + 1] = ours('HGET', P .. 'schedules', name) or nil
end
local coming = ours('ZRANGEBYSCORE', P .. 'ticks', '(' .. NOW, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
return { due, NOW, coming[2] or '' }
