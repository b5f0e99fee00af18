-- name: write_schedule (answers, partitions, transitions, waits, uniqueness, due_times, rewriting, storing, relations)
-- Replaces, adds or removes a schedule if it has the expected revision, and stores the jobs of its ticks. ARGV: 4 name,
-- 5 expected revision, -1 for any, 6 its next tick or "", 7 document, "" to remove it, 8 on: the jobs. Returns its revision and the
-- reply of `store_jobs`; or, if nothing was changed, "" and what was refused, {} for another revision.
local current_revision = string.match(safe_call('HGET', PREFIX .. 'schedules', ARGV[4]) or '', '^(%d+)') or '0'
if ARGV[5] ~= current_revision and ARGV[5] ~= '-1' then
    return { '', {} }
end
local stored, refused = store_jobs(8)
if refused then
    return { '', refused }
end
local revision = current_revision == '0' and NOW or int(tonumber(current_revision) + 1)
if ARGV[7] == '' then
    call('HDEL', PREFIX .. 'schedules', ARGV[4])
else
    call('HSET', PREFIX .. 'schedules', ARGV[4], revision .. ' ' .. ARGV[7])
end
if ARGV[6] == '' then
    safe_call('ZREM', PREFIX .. 'ticks', ARGV[4])
else
    safe_call('ZADD', PREFIX .. 'ticks', ARGV[6], ARGV[4])
end
local answer = { revision, stored }
keep_answer(answer)
finish()
return answer

-- name: schedules
-- Schedules, "REVISION DOCUMENT" each: of the name ARGV[4] if ARGV[3] is "one"; else up to ARGV[4] that are due, then
-- now and the first later tick, or "".
if ARGV[3] == 'one' then
    return { safe_call('HGET', PREFIX .. 'schedules', ARGV[4]) }
end
local due = {}
for _, name in ipairs(safe_call('ZRANGEBYSCORE', PREFIX .. 'ticks', '-inf', NOW, 'LIMIT', 0, ARGV[4])) do
    due[#due + 1] = safe_call('HGET', PREFIX .. 'schedules', name) or nil
end
local coming = safe_call('ZRANGEBYSCORE', PREFIX .. 'ticks', '(' .. NOW, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
return { due, NOW, coming[2] or '' }
