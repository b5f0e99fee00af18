-- fragment: uniqueness
-- Keys of jobs, "KEEP_UNTIL JOB" each: idempotency keys, and those under a policy of uniqueness, which begin with U+001F.
local function is_unique(key)
    return string.sub(key, 1, 1) == '\31'
end

local function set_key(key, id, keep_for) -- microseconds, or ""
    local held = (keep_for ~= '' and int(now + tonumber(keep_for)) or '0') .. ' ' .. id
    ours('HSET', P .. 'keys', key, held)
    ours('ZREM', P .. 'outlived', key)
    return held
end

local WAITS = { queued = true, scheduled = true, failed = true, waiting = true }

-- A unique key is said as "POLICY DURING WINDOW KEY"; during: "waiting", "active" or "-"; window: microseconds or "-".
local function key_of(unique)
    return string.match(unique, '^%S+ %S+ %S+ (.*)$')
end

-- Takes the key for a job unless another holds it. Answers what is to be done in that case, and the other job.
local function take_unique(unique, id)
    local policy, during, window, key = string.match(unique, '^(%S+) (%S+) (%S+) (.*)$')
    local keep_until, holder = string.match(ours('HGET', P .. 'keys', key) or '', '^(%d+) (.*)$')
    if holder and holder ~= id then
        local v = read(holder, 'state')
        local state = v and v[1] or ''
        local held = during ~= '-' and WAITS[state] or during == 'active' and state == 'running'
        if held or number(keep_until) > now then
            return policy, holder
        end
    end
    set_key(key, id, window ~= '-' and window or '')
    return policy, nil
end

-- fragment: rewriting
-- Times are said as "" at once, "+SPAN" from now, "=INSTANT"; of expiries "-" is never. All in microseconds.
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

local function set_expiry(id, expires)
    if expires == '-' then
        call('HDEL', JOB .. id, 'expiresAt')
        ours('ZREM', P .. 'expiry', id)
        return
    end
    local instant = number(string.sub(expires, 2)) + (string.sub(expires, 1, 1) == '+' and now or 0)
    call('HSET', JOB .. id, 'expiresAt', int(instant))
    ours('ZADD', P .. 'expiry', int(instant), id)
end

-- What an edit, or a later submission of its unique key, makes of a job that waits in one of these states: of `change` its
-- level, queue, when, payload, options, expires and partition ("" for none) are said, or nil to leave them. Answers the state
-- it is in, and whether it was changed.
local function rewrite(id, change, states, whole)
    local v = read(id, 'state', 'kind', 'seq', 'lost_leases', 'created', 'dueTime')
    local known = v and kind_of(v[2] or '')
    if not known or not states[v[1]] then
        return v and v[1] or false, false
    end
    local state, due, kind, fields = v[1], v[6], v[2], {}
    local field = field_of(id, known)
    local new = change.partition or field
    count_waiting(field, -1)
    if change.when then
        local later
        due, later = due_of(change.when)
        state = state == 'waiting' and state or later and 'scheduled' or 'queued'
        fields = { 'dueTime', due, 'created', v[5] or v[6] }
    end
    if change.level or change.queue then
        local level, most, queue, task = string.match(kind, '^(%S+) (%S+) (.-)\n(.*)$')
        kind = (change.level or level) .. ' ' .. most .. ' ' .. (change.queue or queue) .. '\n' .. task
    end
    new = new ~= '' and new or nil
    count_waiting(new, 1)
    kind = marked(kind, new)
    local moved = kind ~= v[2] or state ~= v[1] or due ~= v[6] or new ~= field
    if moved then
        moving().withdraw(id, known, v[1], number(v[4]))
        count(known.queue, v[1], -1)
        known = kind_of(kind)
        count(known.queue, state, 1)
    end
    for _, text in ipairs({ 'payload', 'options' }) do
        if change[text] then
            drop(id, text)
            if change[text] ~= '' then
                pieces(fields, text, change[text], text == 'payload' and whole)
            end
        end
    end
    if new ~= field then
        call('HDEL', JOB .. id, 'partition')
        if new then
            fields[#fields + 1], fields[#fields + 2] = 'partition', new
        end
    end
    call('HSET', JOB .. id, 'state', state, 'kind', kind, unpack(fields))
    if change.expires then
        set_expiry(id, change.expires)
    end
    if moved and state == 'queued' then
        moving().ready(known, number(due), number(v[3]), id, number(v[4]), new)
    elseif moved and state ~= 'waiting' then
        moving().schedule(known.queue, number(due), id)
    end
    tell('news', 'queue:' .. known.queue)
    return state, true
end

-- fragment: storing
local REPLACEABLE = { queued = true, scheduled = true, failed = true }
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
    owners[key] = set_key(key, id, keep_for ~= '' and string.sub(keep_for, 2) or '')
end

local function note_key(id, key) -- one key more of a job that is there; deleting the job frees them all
    local first = call('HGET', JOB .. id, 'key')
    if not first then
        call('HSET', JOB .. id, 'key', key)
    elseif first ~= key then
        local other = key
        if is_unique(first) then -- the first is the one that is shown
            call('HSET', JOB .. id, 'key', key)
            other = first
        end
        call('HSET', JOB .. id, 'key:' .. ours('HINCRBY', JOB .. id, 'moreKeys', 1), other)
    end
end

local function create(id, kind, when, payload, key, options, given, field)
    local due, later = NOW, false
    if when ~= '' then
        due, later = due_of(when)
    end
    seq = seq + 1
    made[id] = true
    count_waiting(field, 1)
    if later then
        local entries = delayed[kind.queue] or {}
        delayed[kind.queue] = entries
        entries[#entries + 1] = due
        entries[#entries + 1] = id
        kind.scheduled = kind.scheduled + 1
    elseif field then
        partitions().add(kind.queue, (split_field(field)), member_of(kind.level, number(due), seq, id))
        kind.queued = kind.queued + 1
    else
        kind.list[#kind.list + 1] = id
        kind.queued = kind.queued + 1
    end
    if not later and not key and not given and not field and options == '' and #payload <= CHUNK then
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
        if field then
            fields[#fields + 1], fields[#fields + 2] = 'partition', field
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

-- Puts the jobs that were created where they wait.
local function write_made()
    for key, list in pairs(lists) do
        if #list > 0 then
            ours('ZADD', P .. 'queues', 0, list.queue)
            if list.level ~= '0' then
                ours('ZADD', levels_of(list.queue), -number(list.level), list.level)
            end
            ours('RPUSH', key, unpack(list))
            for n = #list, 1, -1 do
                list[n] = nil
            end
        end
    end
    for queue, entries in pairs(delayed) do
        ours('ZADD', schedule_of(queue), unpack(entries))
        rescheduled[queue] = true
    end
    delayed = {}
    if ready_partitions then
        ready_partitions.place()
    end
end

local function store(id, kind, when, payload, key, keep_for, options, given, unique, expires, field)
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
    if unique ~= '' then
        local policy, holder = take_unique(unique, id)
        if holder then
            if made[holder] then
                write_made()
            end
            if policy == 'keep' then
                return holder
            end
            local change = { when = when, expires = expires ~= '' and expires or '-' }
            if policy == 'replace' then
                change.payload, change.level, change.partition = payload, string.match(kind.text, '^%S+'), field or ''
            end
            local _, changed = rewrite(holder, change, REPLACEABLE, whole)
            return changed and '+' .. holder or holder
        end
    end
    if key and not owner then
        take_key(key, id, keep_for)
    end
    create(id, kind, when, payload, key or unique ~= '' and key_of(unique), options, given, field)
    if expires ~= '' then
        set_expiry(id, expires)
    end
    if key and unique ~= '' then
        note_key(id, key_of(unique))
    end
    return 1
end

-- Stores a batch of jobs, said from ARGV[from] on: "1" where payloads stay in one piece, number of kinds, the kinds, then runs
-- of jobs, each with what they have in common first: number, kind, when ("" at once, "+delay", "=instant"), partition as its
-- field has it, or "", and "" or "x"; then id
-- and payload of each, with "x" also key, its lifetime and options, "=" before each, "" for none, "1" where its client
-- chose the id, its unique key as `take_unique` takes it, or "", and its expiry, or "". Answers 1 (created), 0 (known), or the id of the job its
-- key stands for, "+" before it where that was replaced or rescheduled; where any was created, in the end also the number of
-- the last one's submission.
local function store_batch(from)
    whole = ARGV[from] == '1'
    local at = from + 2 + tonumber(ARGV[from + 1])
    first = number(ours('GET', P .. 'seq'))
    seq = first
    for n = from + 2, at - 1 do
        local known = kind_of(ARGV[n])
        local key = ready_of(known.queue, known.level)
        lists[key] = lists[key] or { queue = known.queue, level = known.level }
        kinds_here[n - from - 1] = { text = ARGV[n], queue = known.queue, level = known.level, list = lists[key], queued = 0, scheduled = 0 }
    end

    while at <= #ARGV do
        local kind, when, each = kinds_here[tonumber(ARGV[at + 1])], ARGV[at + 2], ARGV[at + 4] == 'x' and 8 or 2
        local field = ARGV[at + 3] ~= '' and ARGV[at + 3] or nil
        local last = at + 4 + each * tonumber(ARGV[at])
        for n = at + 5, last, each do
            local key, keep_for, options, given, unique, expires = nil, '', '', false, '', ''
            if each == 8 then
                key = ARGV[n + 2] ~= '' and string.sub(ARGV[n + 2], 2) or nil
                keep_for, options, given, unique = ARGV[n + 3], ARGV[n + 4], ARGV[n + 5] == '1', ARGV[n + 6]
                expires = ARGV[n + 7]
            end
            answers[#answers + 1] = store(
                ARGV[n], kind, when, ARGV[n + 1], key, keep_for, options, given, unique, expires, field
            )
        end
        at = last + 1
    end
    write_made()
    if moves then
        moves.place_ready()
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

-- name: submit (partitions, moving, uniqueness, rewriting, storing)
-- ARGV from 3 on: the batch. Answers as `store_batch`.
local stored = store_batch(3)
finish()
return stored

-- name: write_schedule (partitions, moving, uniqueness, rewriting, storing)
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
