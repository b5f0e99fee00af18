-- fragment: uniqueness
-- Keys of jobs, "KEEP_UNTIL JOB" each: idempotency keys and, beginning with U+001F, unique keys.
local function is_unique(key)
    return string.sub(key, 1, 1) == '\31'
end

local function set_key(key, id, key_for) -- microseconds, or ""
    local entry = (key_for ~= '' and int(now + tonumber(key_for)) or '0') .. ' ' .. id
    safe_call('HSET', PREFIX .. 'keys', key, entry)
    safe_call('ZREM', PREFIX .. 'outlived', key)
    return entry
end

-- A unique key as text: "ON_CONFLICT DURING WINDOW KEY"; during: "unstarted", "active" or "-"; window: microseconds or "-".
local function key_of(unique)
    return string.match(unique, '^%S+ %S+ %S+ (.*)$')
end

-- Takes the key for a job unless another job holds it; then returns the on_conflict and that job.
local function take_unique(unique, id)
    local on_conflict, during, window, key = string.match(unique, '^(%S+) (%S+) (%S+) (.*)$')
    local keep_until, holder = string.match(safe_call('HGET', PREFIX .. 'keys', key) or '', '^(%d+) (.*)$')
    if holder and holder ~= id then
        local state = read_fields(holder, 'state') or ''
        local is_holder = during ~= '-' and NOT_STARTED[state] or during == 'active' and state == 'running'
        if is_holder or to_number(keep_until) > now then
            return on_conflict, holder
        end
    end
    set_key(key, id, window ~= '-' and window or '')
end

local function unique_of(id) -- in the form of `take_unique`; nil without such a key
    local options = join_pieces(id, 'options', call('HGET', JOB .. id, 'options'))
    if not options or not string.find(options, '"unique"', 1, true) then
        return nil
    end
    local is_readable, values = pcall(cjson.decode, options)
    local unique = is_readable and values.unique
    if not unique or not unique.key then
        return nil
    end
    local window = unique.window_us and int(unique.window_us) or '-'
    return table.concat({ unique.on_conflict or 'keep', unique.during or '-', window, unique.key }, ' ')
end

-- fragment: rewriting
local function set_expiry(id, expires)
    if expires == '-' then
        call('HDEL', JOB .. id, 'expiresAt')
        safe_call('ZREM', PREFIX .. 'expiry', id)
        return
    end
    local instant = to_number(string.sub(expires, 2)) + (string.sub(expires, 1, 1) == '+' and now or 0)
    call('HSET', JOB .. id, 'expiresAt', int(instant))
    safe_call('ZADD', PREFIX .. 'expiry', int(instant), id)
end

-- Applies an edit, or a later submission of its unique key, to a job in one of `states`. `change`: new values
-- of priority, queue, when, payload, options, expires, partition ("" for none), nil to keep. A job in state `waiting`
-- keeps its `run_at`. Returns state and changed.
local function rewrite(id, change, states, in_one_piece)
    local old_state, old_spec_text, seq, lost_leases, created, old_run_at =
        read_fields(id, 'state', 'spec', 'seq', 'lost_leases', 'created', 'dueTime')
    local spec = parse_spec(old_spec_text or '')
    if not spec or not states[old_state] then
        return old_state or false, false
    end
    local state, run_at, spec_text, fields = old_state, old_run_at, old_spec_text, {}
    local partition_field = partition_field_of(id, spec)
    local new_field = change.partition or partition_field
    count_unstarted(partition_field, -1)
    if change.when and state ~= 'waiting' then
        local is_later
        run_at, is_later = run_at_of(change.when)
        state = is_later and 'scheduled' or 'queued'
        fields = { 'dueTime', run_at, 'created', created or old_run_at }
    end
    if change.priority or change.queue then
        local priority, max_attempts, queue, task = string.match(spec_text, '^(%S+) (%S+) (.-)\n(.*)$')
        spec_text = (change.priority or priority) .. ' ' .. max_attempts
            .. ' ' .. (change.queue or queue) .. '\n' .. task
    end
    new_field = new_field ~= '' and new_field or nil
    count_unstarted(new_field, 1)
    spec_text = mark_limited(spec_text, new_field)
    local is_moved = spec_text ~= old_spec_text or state ~= old_state or run_at ~= old_run_at or new_field ~= partition_field
    if is_moved then
        transitions().dequeue(id, spec, old_state, to_number(lost_leases))
        count(spec.queue, old_state, -1)
        spec = parse_spec(spec_text)
        count(spec.queue, state, 1)
    end
    for _, text in ipairs({ 'payload', 'options' }) do
        if change[text] then
            delete_pieces(id, text)
            if change[text] ~= '' then
                append_pieces(fields, text, change[text], text == 'payload' and in_one_piece)
            end
        end
    end
    if new_field ~= partition_field then
        call('HDEL', JOB .. id, 'partition')
        if new_field then
            fields[#fields + 1], fields[#fields + 2] = 'partition', new_field
        end
    end
    call('HSET', JOB .. id, 'state', state, 'spec', spec_text, unpack(fields))
    if change.expires then
        set_expiry(id, change.expires)
    end
    if is_moved or change.expires then
        invalidate_repair()
    end
    if is_moved and state == 'queued' then
        transitions().add_ready(spec, to_number(run_at), to_number(seq), id, to_number(lost_leases), new_field)
    elseif is_moved and (state ~= 'waiting' or to_number(run_at) < to_number(NEVER)) then
        transitions().schedule(spec.queue, to_number(run_at), id)
    end
    notify('ready_jobs', 'queue:' .. spec.queue)
    return state, true
end

-- fragment: due_times
-- Times are "" for now, "+SPAN", "=INSTANT", in microseconds; "-" is no expiry.
local function run_at_of(when) -- and true if it is in the future
    local run_at = to_number(string.sub(when, 2))
    if string.sub(when, 1, 1) == '+' then
        run_at = now + run_at
    end
    if run_at > now then
        return int(run_at), true
    end
    return NOW, false
end

-- fragment: storing
-- Each call of a script defines its functions anew, which takes longer than to store a job: jobs without extras have
-- the script `submit_fast`, without the functions that other jobs need.
local in_one_piece = false
local first_seq, seq
local created_ids, answers = {}, {}
local given_specs, ready_lists, index_entries, delayed = {}, {}, {}, {}

local function exists(id)
    if created_ids[id] then
        return true
    elseif call('EXISTS', JOB .. id) == 0 then
        return false
    end
    safe_call('HEXISTS', JOB .. id, 'spec') -- renames a key of another type
    return call('EXISTS', JOB .. id) == 1
end

-- Iterates over the jobs of a submission: position of the job's id in ARGV, position of its run, and whether its arguments
-- are the extended ones.
local function each_job(from, visit)
    local run = from + 2 + tonumber(ARGV[from + 1])
    while run <= #ARGV do
        local is_extended = ARGV[run + 4] == 'extended'
        local arguments_per_job = is_extended and 11 or 2
        local last = run + 4 + arguments_per_job * tonumber(ARGV[run])
        for n = run + 5, last, arguments_per_job do
            visit(n, run, is_extended)
        end
        run = last + 1
    end
end

local function read_specs(from)
    in_one_piece = string.sub(ARGV[from], 1, 1) == '1'
    first_seq = to_number(safe_call('GET', PREFIX .. 'seq'))
    seq = first_seq
    for n = from + 2, from + 1 + tonumber(ARGV[from + 1]) do
        local spec = parse_spec(ARGV[n])
        local key = ready_key(spec.queue, spec.priority)
        ready_lists[key] = ready_lists[key] or { queue = spec.queue, priority = spec.priority }
        given_specs[n - from - 1] = { text = ARGV[n], queue = spec.queue, priority = spec.priority,
            list = ready_lists[key], numbers = {} }
    end
end

-- Gives a new job its number, and its place in the index, the counts and, unless it is under limits, in its queue.
local function enter_job(id, spec, state, run_at, is_limited)
    seq = seq + 1
    created_ids[id] = true
    spec.numbers[state] = (spec.numbers[state] or 0) + 1
    if state == 'scheduled' then
        local entries = delayed[spec.queue] or {}
        delayed[spec.queue] = entries
        entries[#entries + 1] = run_at
        entries[#entries + 1] = id
    elseif state == 'queued' and not is_limited then
        spec.list[#spec.list + 1] = id
    end
    local chunk = math.floor(seq / INDEX_CHUNK)
    local entries = index_entries[chunk] or {}
    index_entries[chunk] = entries
    entries[#entries + 1] = seq
    entries[#entries + 1] = id
end

local function create_without_extras(id, spec, when, payload)
    local run_at, is_later = NOW, false
    if when ~= '' then
        run_at, is_later = run_at_of(when)
    end
    enter_job(id, spec, is_later and 'scheduled' or 'queued', run_at, false)
    if not is_later and #payload <= PIECE_BYTES then
        call('HSET', JOB .. id, 'state', 'queued', 'spec', spec.text, 'dueTime', run_at, 'seq', seq, 'payload', payload)
        return
    end
    local fields = { 'state', is_later and 'scheduled' or 'queued', 'spec', spec.text, 'dueTime', run_at, 'seq', seq }
    if is_later then
        fields[9], fields[10] = 'created', NOW
    end
    append_pieces(fields, 'payload', payload, in_one_piece)
    call('HSET', JOB .. id, unpack(fields))
end

-- Writes the queues of the created jobs.
local function write_queues()
    for key, list in pairs(ready_lists) do
        if #list > 0 then
            safe_call('ZADD', PREFIX .. 'queues', 0, list.queue)
            if list.priority ~= '0' then
                safe_call('ZADD', priorities_key(list.queue), -to_number(list.priority), list.priority)
            end
            safe_call('RPUSH', key, unpack(list))
            for n = #list, 1, -1 do
                list[n] = nil
            end
        end
    end
    for queue, entries in pairs(delayed) do
        safe_call('ZADD', schedule_key(queue), unpack(entries))
        rescheduled_queues[queue] = true
    end
    delayed = {}
end

-- Writes index, counts and the number of the last submission; if it has changed, appends it and the time to the answers.
local function write_entries()
    for chunk, entries in pairs(index_entries) do
        safe_call('HSET', PREFIX .. 'index:' .. int(chunk), unpack(entries))
        safe_call('ZADD', PREFIX .. 'chunks', chunk, chunk)
    end
    for _, spec in ipairs(given_specs) do
        for state, number in pairs(spec.numbers) do
            count(spec.queue, state, number)
            notify('ready_jobs', 'queue:' .. spec.queue)
        end
    end
    if seq > first_seq then
        local last = int(seq)
        call('SET', PREFIX .. 'seq', last)
        answers[#answers + 1] = last .. ' ' .. NOW
    end
end

-- fragment: relations
local REPLACEABLE = { queued = true, scheduled = true, failed = true }
local key_entries = {}
local left_out = {} -- ids that are not to be stored
local given_ids, aliases = {}, {} -- ids as they were given, and the jobs that were answered in place of some

local function holder_of(key)
    local entry = key_entries[key] or safe_call('HGET', PREFIX .. 'keys', key)
    local keep_until, id = string.match(entry or '', '^(%d+) (.*)$')
    if id and (exists(id) or to_number(keep_until) > now) then
        return id
    end
end

local function take_key(key, id, key_for)
    key_entries[key] = set_key(key, id, key_for ~= '' and string.sub(key_for, 2) or '')
end

local function add_key(id, key) -- of an existing job; deleting the job frees all
    local first_key = call('HGET', JOB .. id, 'key')
    if not first_key then
        call('HSET', JOB .. id, 'key', key)
    elseif first_key ~= key then
        local other = key
        if is_unique(first_key) then -- field `key` is the one that is shown
            call('HSET', JOB .. id, 'key', key)
            other = first_key
        end
        call('HSET', JOB .. id, 'key:' .. safe_call('HINCRBY', JOB .. id, 'extraKeys', 1), other)
    end
end

-- Writes the dependencies of a new job. Returns the number of those that are not met, and the text of the first that failed.
local function add_dependencies(waiter, after)
    local edges, seen, unmet, failure = {}, {}, 0, nil
    for n = 1, #after, 3 do
        local id, condition = aliases[after[n]] or after[n], after[n + 1]
        if not seen[id] and not exists(id) then
            safe_call('HSET', dependencies_key(waiter), id, condition .. ' met 0') -- deleted, but its key is still there
        elseif not seen[id] then
            local how, failed_members = read_fields(id, 'state', 'failed')
            local state = 'open'
            if condition == 'failure' and how == 'waiting' and to_number(failed_members) > 0 then
                state = 'met' -- a batch that will not succeed
            elseif ENDED_STATES[how] then
                state = is_as_asked(condition, how) and 'met' or 'failed'
                failure = failure or state == 'failed' and describe_failure(id, how) or nil
            end
            unmet = unmet + (state == 'met' and 0 or 1)
            edges[#edges + 1] = id
            edges[#edges + 1] = condition .. ' ' .. state .. ' 0'
        end
        seen[id] = true
    end
    add_edges(waiter, edges)
    return unmet, failure
end

-- State, `run_at` and further fields of a new job that waits for others.
local function begin_waiting(id, after)
    local unmet, failure = add_dependencies(id, after)
    local fields = { 'waits', unmet }
    if unmet == 0 then
        return 'scheduled', NOW, fields
    end
    fields[3], fields[4] = 'reason', 'dependency'
    if failure then
        fields[5], fields[6] = 'endTime', NOW
        append_pieces(fields, 'error', failure)
        safe_call('ZADD', PREFIX .. 'ended:cancelled', NOW, id)
        ended_ids[#ended_ids + 1] = id
        notify_caller_too()
    end
    return failure and 'cancelled' or 'waiting', NEVER, fields
end

-- Makes a job a member of a batch, unless it is one already, or the batch has ended: its submission is repeated.
local function add_member(batch, id)
    local is_known = safe_call('HEXISTS', dependencies_key(batch), id) == 1
    if is_known or ENDED_STATES[read_fields(batch, 'state') or ''] then
        return
    end
    local state = exists(id) and read_fields(id, 'state')
    safe_call('HINCRBY', JOB .. batch, 'members', 1)
    if not state then
        safe_call('HSET', dependencies_key(batch), id, 'success met 0') -- deleted, but its key is still there
        return
    end
    safe_call('HINCRBY', JOB .. batch, 'waits', 1)
    add_edges(batch, { id, 'success open 0' })
    if ENDED_STATES[state] then
        note_end(id, state)
    end
end

-- State, `run_at` and further fields of a new batch. Its submission holds it until its last member is stored.
local function begin_batch()
    return 'waiting', NEVER, { 'waits', 1, 'submitting', 1, 'members', 0, 'failed', 0, 'reason', 'dependency' }
end

local function create(id, spec, when, payload, key, options, has_client_id, partition_field, after, is_batch)
    local state, run_at, fields = 'queued', NOW, {}
    if is_batch then
        state, run_at, fields = begin_batch()
    elseif after then
        state, run_at, fields = begin_waiting(id, after)
    elseif when ~= '' then
        local is_later
        run_at, is_later = run_at_of(when)
        state = is_later and 'scheduled' or 'queued'
    end
    enter_job(id, spec, state, run_at, partition_field ~= nil)
    count_unstarted(partition_field, state ~= 'cancelled' and 1 or 0)
    if state == 'queued' and partition_field then
        partitions().add_member(spec.queue, (parse_partition(partition_field)),
            member_of(spec.priority, to_number(run_at), seq, id))
    end
    if state ~= 'queued' then
        fields[#fields + 1], fields[#fields + 2] = 'created', NOW
    end
    append_pieces(fields, 'payload', payload, in_one_piece)
    if options ~= '' then
        append_pieces(fields, 'options', string.sub(options, 2))
    end
    if key then
        fields[#fields + 1], fields[#fields + 2] = 'key', key
    end
    if has_client_id then -- the id may be reused: claims begin at the clock, above those of earlier jobs
        for _, each in ipairs({ 'claims', NOW, 'attempts', '0' }) do
            fields[#fields + 1] = each
        end
    end
    if partition_field then
        fields[#fields + 1], fields[#fields + 2] = 'partition', partition_field
    end
    call('HSET', JOB .. id, 'state', state, 'spec', spec.text, 'dueTime', run_at, 'seq', seq, unpack(fields))
end

-- Writes the created jobs into their structures.
local function write_created()
    write_queues()
    if loaded_partitions then
        loaded_partitions.write_members()
    end
end

local function store(id, spec, when, payload, key, key_for, options, has_client_id, unique, expires, partition_field,
    after, is_batch)
    local holder = key and holder_of(key)
    if holder and (holder ~= id or not exists(id)) then -- unless the key is its own, from an earlier life of this id
        return holder
    elseif exists(id) then
        if key and not holder then
            take_key(key, id, key_for)
            add_key(id, key)
        end
        return 0
    end
    if unique ~= '' then
        local on_conflict, unique_holder = take_unique(unique, id)
        if unique_holder then
            if created_ids[unique_holder] then
                write_created()
            end
            if on_conflict == 'keep' or after then -- state waiting: no run_at of its own
                return unique_holder
            end
            local change = { when = when, expires = expires }
            if on_conflict == 'replace' then
                change.payload, change.priority, change.partition = payload,
                    string.match(spec.text, '^%S+'), partition_field or ''
            end
            local _, changed = rewrite(unique_holder, change, REPLACEABLE, in_one_piece)
            return changed and '+' .. unique_holder or unique_holder
        end
    end
    if key and not holder then
        take_key(key, id, key_for)
    end
    create(id, spec, when, payload, key or unique ~= '' and key_of(unique), options, has_client_id, partition_field,
        after, is_batch)
    if expires ~= '-' then
        set_expiry(id, expires)
    end
    if key and unique ~= '' then
        add_key(id, key_of(unique))
    end
    return 1
end

local function dependencies_of(n, is_extended) -- {id, condition, "1" if it was answered for a key and may be gone, …}, or nil
    return is_extended and ARGV[n + 8] ~= '' and cmsgpack.unpack(ARGV[n + 8]) or nil
end

-- True for a batch; the batch of which the job is a member, or nil; and true if that comes in the same submission.
local function relation_of(n, is_extended)
    local mark, own, batch = string.match(is_extended and ARGV[n + 9] or '', '^(%*?)(%+?)(.*)$')
    return mark == '*', batch ~= '' and batch or nil, own == '+'
end

-- The first batch that is neither stored nor an earlier job, after "missing ", whose id another job has, after "other ", or
-- that has ended and would get a new member, after "ended ". A member with a key is none if another stands for it: with its
-- batch, it counts as repeated. A batch of an earlier part may be gone by now.
local function find_refused_batch(from)
    local refused, here = nil, {}
    local only_checks = string.match(ARGV[from], '^%S*c')
    each_job(from, function(n, _, is_extended)
        local is_batch, batch, is_own = relation_of(n, is_extended)
        here[is_batch and ARGV[n] or ''] = true
        if is_batch and exists(ARGV[n]) and not read_fields(ARGV[n], 'members') then
            refused = refused or 'other ' .. ARGV[n]
        end
        if not batch or left_out[ARGV[n]] then
            return
        end
        local state, members = read_fields(batch, 'state', 'members')
        local is_repeated = is_own and (ARGV[n + 2] ~= '' or ARGV[n + 6] ~= '')
        if not members and not (is_own and (here[batch] or only_checks)) then
            refused = refused or 'missing ' .. batch
        elseif ENDED_STATES[state or ''] and not is_repeated
            and safe_call('HEXISTS', dependencies_key(batch), ARGV[n]) == 0
        then
            refused = refused or 'ended ' .. batch
        end
    end)
    return refused
end

-- Adds members to their batches, and gives batches free whose last member is stored.
local function write_members(from)
    each_job(from, function(n, _, is_extended)
        local _, batch = relation_of(n, is_extended)
        if batch and not left_out[ARGV[n]] then
            add_member(batch, aliases[ARGV[n]] or ARGV[n])
        end
    end)
    for batch in string.gmatch(ARGV[from], ' (%S+)') do
        if call('HDEL', JOB .. batch, 'submitting') == 1 then
            waits().count_ends(batch, 1, 0)
        end
    end
    if seq == first_seq then -- no job was created, but batches may have changed
        invalidate_repair()
    end
end

-- The first dependency that is neither stored nor earlier in the submission. A job that is known already needs none.
local function find_missing(from)
    local earlier, missing = {}, nil
    each_job(from, function(n, _, is_extended)
        local key = is_extended and string.match(ARGV[n + 2], '^=(.*)$') or ''
        local after = not missing and dependencies_of(n, is_extended)
        if after and (left_out[ARGV[n]] or exists(ARGV[n]) or key ~= '' and holder_of(key)) then
            after = nil
        end
        for m = 1, after and #after or 0, 3 do
            local is_there = earlier[after[m]] or exists(after[m]) or after[m + 2] ~= ''
            missing = missing or not is_there and after[m] or nil
        end
        earlier[ARGV[n]] = true
    end)
    return missing
end

-- Stores jobs, encoded from ARGV[from] on: flags, number of specs, the specs, then runs of jobs.
--   flags       "1" to keep payloads in one piece, else "0"; "a" if a job has dependencies, "b" if one is a batch or a member or
--               an ID follows; "c" to store nothing, and only say what is refused; " ID" of each batch that gets no more members
--   of a run    number of jobs, spec, when ("" now, "+delay", "=instant"), field `partition` or "", and "" or "extended"
--   of a job    n id, n+1 payload; in an extended run also, "" where there is none:
--               n+2 "=" and key, n+3 "=" and key_for, n+4 "=" and options, n+5 "1" for a client's own id, n+6 unique key as
--               `take_unique` expects it, n+7 expiry or "-", n+8 dependencies in MessagePack, n+9 "*" for a batch, then, after "+" if it comes
--               earlier in the submission, the id of the batch of which it is a member, n+10 name and text of each of its steps
--               in MessagePack
-- Returns nil and what was refused: the id of a missing dependency, after "after ", or that of a batch, after "missing ",
-- "other " or "ended "; or per job 1 (created), 0 (known), or the id of the job that holds its key, after "+" if that was changed.
-- If any job was created, the number of the last submission and the time follow, "NUMBER MICROSECONDS".
local function store_jobs(from)
    local flags = string.match(ARGV[from], '^%S+')
    local missing = string.find(flags, 'a', 1, true) and find_missing(from)
    local has_batches = string.find(flags, 'b', 1, true)
    local refused = missing and 'after ' .. missing or has_batches and find_refused_batch(from)
    if refused or string.find(flags, 'c', 1, true) then
        return nil, refused
    end
    read_specs(from)

    each_job(from, function(n, run, is_extended)
        local partition_field = ARGV[run + 3] ~= '' and ARGV[run + 3] or nil
        local key, key_for, options, has_client_id, unique, expires = nil, '', '', false, '', '-'
        if is_extended then
            key = ARGV[n + 2] ~= '' and string.sub(ARGV[n + 2], 2) or nil
            key_for, options, has_client_id, unique = ARGV[n + 3], ARGV[n + 4], ARGV[n + 5] == '1', ARGV[n + 6]
            expires = ARGV[n + 7]
        end
        local answer = left_out[ARGV[n]] and 0 or store(
            ARGV[n], given_specs[tonumber(ARGV[run + 1])], ARGV[run + 2], ARGV[n + 1], key, key_for, options,
            has_client_id, unique, expires, partition_field, dependencies_of(n, is_extended),
            (relation_of(n, is_extended))
        )
        given_ids[#given_ids + 1], answers[#answers + 1] = ARGV[n], answer
        if answer == 1 and is_extended and ARGV[n + 10] ~= '' then
            local record = cmsgpack.unpack(ARGV[n + 10])
            for m = 1, #record, 1000 do
                safe_call('HSET', PREFIX .. 'steps:' .. ARGV[n], unpack(record, m, math.min(m + 999, #record)))
            end
        end
        if type(answer) == 'string' then
            aliases[ARGV[n]] = string.gsub(answer, '^%+', '')
        end
    end)
    write_created()
    if loaded_transitions then
        loaded_transitions.write_ready()
    end
    if has_batches then
        write_members(from)
    end
    write_entries()
    return answers
end

-- name: submit_one (only basics)
-- `submit_fast` for one job that is ready at once: most of the time of a script goes into defining functions and tables, and
-- this one has few. ARGV from 3 on: id, spec, queue, priority, payload, "1" to keep it in one piece, else "0". Returns 1 and
-- what `store_jobs` adds. Returns 0 and stores nothing where it is known or a key has another type or another value than
-- ours: `submit_fast` finds out and mends that.
local id, queue, priority, payload = ARGV[3], ARGV[5], ARGV[6], ARGV[7]
local seq = tonumber(redis.pcall('GET', PREFIX .. 'seq') or 0)
if not seq or call('EXISTS', JOB .. id) == 1 then
    return { 0 }
end
seq = seq + 1

local function fails(...)
    return type(redis.pcall(...)) == 'table'
end

local chunk, counts, counter = int(math.floor(seq / INDEX_CHUNK)), PREFIX .. 'counts', 'queued:' .. queue
if fails('ZADD', PREFIX .. 'queues', 0, queue) or fails('ZADD', PREFIX .. 'chunks', chunk, chunk)
    or priority ~= '0' and fails('ZADD', priorities_key(queue), -priority, priority)
    or fails('HSET', PREFIX .. 'index:' .. chunk, seq, id) or fails('HINCRBY', counts, counter, 1)
then
    return { 0 }
elseif fails('RPUSH', ready_key(queue, priority), id) then
    call('HINCRBY', counts, counter, -1)
    return { 0 }
end
if #payload <= PIECE_BYTES then
    call('HSET', JOB .. id, 'state', 'queued', 'spec', ARGV[4], 'dueTime', NOW, 'seq', seq, 'payload', payload)
else
    local fields = { 'state', 'queued', 'spec', ARGV[4], 'dueTime', NOW, 'seq', seq }
    append_pieces(fields, 'payload', payload, ARGV[8] == '1')
    call('HSET', JOB .. id, unpack(fields))
end
seq = int(seq)
call('SET', PREFIX .. 'seq', seq)
call('PUBLISH', PREFIX .. 'ready_jobs', ARGV[2] .. '\nqueue:' .. queue)
return { 1, seq .. ' ' .. NOW }

-- name: submit_fast (due_times, storing)
-- `submit` for jobs that are not extended and under no limits. Returns per job 1 (created) or 0 (known), and what `store_jobs` adds.
read_specs(3)
each_job(3, function(n, run)
    local is_known = exists(ARGV[n])
    answers[#answers + 1] = is_known and 0 or 1
    if not is_known then
        create_without_extras(ARGV[n], given_specs[tonumber(ARGV[run + 1])], ARGV[run + 2], ARGV[n + 1])
    end
end)
write_queues()
write_entries()
finish()
return answers

-- name: submit (partitions, transitions, waits, uniqueness, due_times, rewriting, storing, relations)
-- ARGV from 3 on: the jobs. Returns the reply of `store_jobs`, or what was refused.
local stored, refused = store_jobs(3)
finish()
return stored or refused
