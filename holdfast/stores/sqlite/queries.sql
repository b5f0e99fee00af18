-- Every statement of the SQLite store. Each batch is one JSON parameter, so that a verb runs one statement for all of it
-- (and releases the interpreter lock once, not once a row). `+column` keeps the planner off an index that
-- looks selective while few rows are in that state. No clock function: :now is a parameter.

-- States: 0 queued, 1 scheduled, 2 running, 3 failed, 4 waiting, 5 succeeded, 6 dead, 7 cancelled. Other codes are explained
-- at their columns, in migrations/0001_initial.sql.

-- A name stands for the same work in every SQL store; what only this one needs is its own. A fragment is no statement: it
-- stands, once, for what several have in common.

-- fragment: job_json
-- A job as a reader sees it: the fields of Job (core/models.py) in their order.
json_array(
    j.id, j.task, j.queue, coalesce(j.payload, (select p.payload from holdfast_payload p where p.seq = j.seq)),
    j.claims, j.attempts, j.max_attempts, -j.rank, j.lost_leases, j.run_at, j.created_at, json(j.options),
    json_extract(
        '["queued","scheduled","running","failed","waiting","succeeded","dead","cancelled"]', '$[' || j.state || ']'),
    j.worker, j.lease_until, j.started_at, j.ended_at, j.reason, j.error, j.result,
    case when j.has_key then (select k.key from holdfast_key k where k.job_id = j.id and k.key > ' ' limit 1) end, -- no unique key
    json(case when j.cancelling then 'true' else 'false' end), j.partition, j.expires_at, j.error_group)

-- fragment: claimed
-- The chosen rows of a claim; their jobs as they will be once taken: the first fields of Job (core/models.py); and how many of
-- them must start at once: suspects, and jobs on their last attempt.
json_group_array(seq), json_group_array(json_array(
    id, task, queue, coalesce(payload, (select p.payload from holdfast_payload p where p.seq = picked.seq)),
    claims + 1, attempts + 1, max_attempts, -rank, lost_leases, run_at, created_at, json(options), 'running', :worker)),
sum(lost_leases > 0 or attempts + 1 >= max_attempts)

-- fragment: unexpired
-- A job whose instant has passed is never started. A job that was ever claimed does not expire.
(expires_at is null or expires_at > :now or started_at is not null)

-- fragment: matching
-- What a filter says of a job; null leaves a condition out.
(:states is null or +j.state in (select value from json_each(:states)))
  and (:queue is null or +j.queue = :queue)
  and (:tasks is null or j.task in (select value from json_each(:tasks)))
  and (:tag is null or exists (select 1 from holdfast_tag t where t.tag = :tag and t.seq = j.seq))
  and (:reason is null or j.reason = :reason)
  and (:worker is null or j.worker = :worker)
  and (:error is null or instr(j.error, :error) > 0)
  and (:error_group is null or j.error_group = :error_group)
  and (:created_after is null or j.created_at > :created_after)
  and (:created_before is null or j.created_at < :created_before)
  and (:not_started_after is null or j.started_at is null or j.started_at <= :not_started_after)

-- fragment: counted
-- Numbers of jobs by state, in the order of the states' codes, and the earliest creation.
count(*) filter (where m.state = 0), count(*) filter (where m.state = 1),
count(*) filter (where m.state = 2), count(*) filter (where m.state = 3),
count(*) filter (where m.state = 4), count(*) filter (where m.state = 5),
count(*) filter (where m.state = 6), count(*) filter (where m.state = 7),
min(m.created_at)

-- own: insert_job
-- Empty texts stand for null: Python's driver takes a microsecond for each None.
insert into holdfast_job
    (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, has_key, options, claims, partition, weights)
values (?, ?, ?, nullif(?, ''), ?, ?, ?, ?, ?, ?, nullif(?, ''), ?, nullif(?, ''), nullif(?, ''))
on conflict (id) do nothing;

-- own: insert_single_job
insert into holdfast_job
    (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, has_key, options, claims, partition, weights)
values (?, ?, ?, nullif(?, ''), ?, ?, ?, ?, ?, ?, nullif(?, ''), ?, nullif(?, ''), nullif(?, ''))
on conflict (id) do nothing
returning id;

-- own: insert_payload
-- changes(): only if the statement just before wrote the job; a resubmission adds nothing.
insert into holdfast_payload (seq, payload)
select seq, ?2 from holdfast_job where id = ?1 and payload is null and changes() > 0
on conflict (seq) do nothing;

-- own: insert_tag
insert into holdfast_tag (tag, seq)
select ?2, seq from holdfast_job where id = ?1 and changes() > 0
on conflict do nothing;

-- own: take_key
-- A key is free once its own lifetime is over, and its job's row is gone or in none of the states ?5, a bit mask.
insert into holdfast_key (key, job_id, keep_until) values (?1, ?2, ?3)
on conflict (key) do update set job_id = excluded.job_id, keep_until = excluded.keep_until
where coalesce(keep_until, 0) <= ?4 and not exists (
    select 1 from holdfast_job where id = holdfast_key.job_id and (1 << state) & ?5)
returning 1;

-- own: release_key
delete from holdfast_key where key = ?;

-- own: insert_expiry
-- changes(): only if the insert just before created the job, or the update just before changed it.
insert into holdfast_expiry (seq, expires_at)
select seq, ?2 from holdfast_job where id = ?1 and changes() > 0
on conflict (seq) do update set expires_at = excluded.expires_at;

-- name: set_expiry
update holdfast_job set expires_at = ?2 where id = ?1 and changes() > 0;

-- name: rewrite_unstarted
-- What an edit, or a later submission of its unique key, makes of a job that waits, in one of the states ?3, a bit mask.
-- Null leaves a value as it is. ?7: only if no worker has taken it.
update holdfast_job
set queue = coalesce(?4, queue), rank = coalesce(?5, rank), run_at = case state when 4 then run_at else coalesce(?6, run_at) end,
    state = case when ?6 is null or state = 4 then state when ?6 <= ?2 then 0 else 1 end
where id = ?1 and (1 << state) & ?3 and (not ?7 or started_at is null)
returning seq, state, queue;

-- own: rewrite_options
update holdfast_job set options = ?2 where id = ?1;

-- own: rewrite_payload
update holdfast_job set payload = ?2 where id = ?1;

-- name: drop_tags
delete from holdfast_tag where seq = (select seq from holdfast_job where id = ?);

-- own: drop_expiry
delete from holdfast_expiry where seq = (select seq from holdfast_job where id = ?);

-- own: clear_expiry
update holdfast_job set expires_at = null where id = ?;

-- own: any_expired
select exists (select 1 from holdfast_expiry where expires_at <= :now);

-- own: expired
select seq from holdfast_expiry where expires_at <= :now order by expires_at limit :limit;

-- own: drop_expired
delete from holdfast_expiry where seq in (select value from json_each(:seqs));

-- name: expire_jobs
-- One that a worker has taken has begun, and does not expire any more.
update holdfast_job
set state = 7, reason = 'expired', error = coalesce(error, 'expired: no worker began it in time'), ended_at = :now, lost_leases = 0
where seq in (select value from json_each(:seqs))
  and +state in (0, 1, 3, 4) and started_at is null and expires_at <= :now
returning id, task, queue, has_dependents;

-- own: is_stored
select 1 from holdfast_job where id = ?;

-- own: mark_keyed
-- A known id submitted with a key: the key is this job's, and goes when it goes.
update holdfast_job set has_key = 1
where id = ?1 and has_key = 0 and (select job_id from holdfast_key where key = ?2) = ?1;

-- name: key_holder
select job_id from holdfast_key where key = ?;

-- own: paused_queues
select name from holdfast_queue where paused;

-- own: next_ready_queue
-- The first queue after :after with something to take: one index seek, however many queues there are.
select min(queue) from holdfast_job where state = 0 and partition is null and queue > :after;

-- own: any_ready
select exists (select 1 from holdfast_job where state = 0 and partition is null and queue = :queue);

-- own: any_due
select exists (select 1 from holdfast_job where state in (1, 3) and queue = :queue and run_at <= :now)
    or exists (select 1 from holdfast_job where state = 4 and queue = :queue and run_at <= :now);

-- own: any_due_any_queue
select exists (select 1 from holdfast_job where state in (1, 3) and run_at <= :now)
    or exists (select 1 from holdfast_job where state = 4 and run_at <= :now);

-- own: promote_queue
update holdfast_job set state = 0, reason = case when state = 4 then null else reason end, run_at = run_at -- run_at: for the trigger
where seq in (
    select * from (
        select seq from holdfast_job where state in (1, 3) and queue = :queue and run_at <= :now order by run_at limit :limit)
    union all
    select * from (select seq from holdfast_job where state = 4 and queue = :queue and run_at <= :now order by run_at limit :limit)
    limit :limit
);

-- name: promote_any_queue
update holdfast_job set state = 0, reason = case when state = 4 then null else reason end, run_at = run_at -- run_at: for the trigger
where seq in (
    select * from (select seq from holdfast_job where state in (1, 3) and run_at <= :now order by run_at limit :limit)
    union all
    select * from (select seq from holdfast_job where state = 4 and run_at <= :now order by run_at limit :limit)
    limit :limit)
returning queue;

-- own: next_due
-- A waiting job without a deadline has the last instant of all (core.dependencies.NEVER_US).
select min(run_at) from (
    select min(run_at) as run_at from holdfast_job where state in (1, 3) and queue = :queue
    union all
    select min(run_at) from holdfast_job where state = 4 and queue = :queue and run_at < NEVER_US);

-- own: next_due_any_queue
select min(run_at) from (
    select min(run_at) as run_at from holdfast_job where state in (1, 3)
    union all
    select min(run_at) from holdfast_job where state = 4 and run_at < NEVER_US);

-- own: pick_ready
select -- include: claimed
from (
    select seq, id, task, queue, payload, claims, attempts, max_attempts, rank, lost_leases, run_at, created_at, options
    from holdfast_job where state = 0 and partition is null and min(lost_leases, 2) = 0 and queue = :queue and -- include: unexpired
    order by rank, run_at, seq limit :limit
) picked;

-- own: pick_with_suspects
-- The same with the jobs that lost their last lease, each in its place.
select -- include: claimed
from (
    select * from (
        select seq, id, task, queue, payload, claims, attempts, max_attempts, rank, lost_leases, run_at, created_at, options
        from holdfast_job where state = 0 and partition is null and min(lost_leases, 2) = 0 and queue = :queue and -- include: unexpired
        order by rank, run_at, seq limit :limit)
    union all
    select * from (
        select seq, id, task, queue, payload, claims, attempts, max_attempts, rank, lost_leases, run_at, created_at, options
        from holdfast_job where state = 0 and partition is null and min(lost_leases, 2) = 1 and queue = :queue
        order by rank, run_at, seq limit min(:limit, :max_must_start))
    order by rank, run_at, seq limit :limit
) picked;

-- own: pick_quarantined
-- Lost two leases in a row: to be run alone.
select -- include: claimed
from (
    select seq, id, task, queue, payload, claims, attempts, max_attempts, rank, lost_leases, run_at, created_at, options
    from holdfast_job where state = 0 and partition is null and min(lost_leases, 2) = 2 and queue = :queue
    order by rank, run_at, seq limit :limit
) picked;

-- own: tiers
-- Whether the queue has a quarantined job, and a suspect.
select exists (select 1 from holdfast_job where state = 0 and partition is null and min(lost_leases, 2) = 2 and queue = :queue),
    exists (select 1 from holdfast_job where state = 0 and partition is null and min(lost_leases, 2) = 1 and queue = :queue);

-- own: pick_ids
-- Of the jobs that lost their last lease the first :max_must_start.
select -- include: claimed
from (
    select * from (
        select j.seq, j.id, task, queue, payload, claims, attempts, max_attempts, rank, lost_leases, run_at, created_at, options,
            sum(j.lost_leases > 0) over (order by rank, run_at, j.seq) as suspects
        from json_each(:ids) d cross join holdfast_job j on j.id = d.value
        where +j.state = 0 and min(j.lost_leases, 2) <= :max_tier and j.partition is null
          and (:queue is null or j.queue = :queue) and j.queue not in (select value from json_each(:excluded))
          and -- include: unexpired
    )
    where lost_leases = 0 or suspects <= :max_must_start
    order by rank, run_at, seq limit :limit
) picked;

-- name: promote_ids
update holdfast_job set state = 0, reason = case when state = 4 then null else reason end, run_at = run_at -- run_at: for the trigger
where id in (select value from json_each(:ids)) and (+state in (1, 3) or +state = 4) and +run_at <= :now;

-- own: claim_picked
update holdfast_job
set state = 2, claims = claims + 1, attempts = attempts + 1, worker = :worker, lease_until = :until, started_at = :now
where seq in (select value from json_each(:seqs));

-- name: mark_unreadable
-- A claimed row that cannot be read.
update holdfast_job
set state = 6, reason = 'payload', error = :error, error_group = 'unreadable', ended_at = :now, lease_until = null
where seq = :seq
returning id, has_dependents;

-- own: begin_writing
-- Changes nothing, but waits for the write lock.
update holdfast_queue set paused = paused where false;

-- name: complete
-- The same as settle_succeeded for one job, on the connection of its handler.
update holdfast_job
set state = 5, ended_at = ?4, result = ?3, lease_until = null, lost_leases = 0, cancelling = 0, reason = null, error = null,
    error_group = null
where id = ?1 and +claims = ?2 and +state = 2 and +lease_until > ?4 and (?5 is null or +worker = ?5)
returning has_dependents;

-- name: tx_outcome
select state, claims from holdfast_job where id = ?;

-- name: settle_succeeded
-- Of one worker, and jobs on which none depends.
update holdfast_job
set state = 5, ended_at = :now, result = d.value ->> 2, lease_until = null, lost_leases = 0, cancelling = 0,
    reason = null, error = null, error_group = null
from json_each(:settlements) d
where holdfast_job.id = d.value ->> 0 and +holdfast_job.claims = d.value ->> 1
  and +holdfast_job.state = 2 and +holdfast_job.lease_until > :now and not holdfast_job.has_dependents
  and (:worker is null or +holdfast_job.worker = :worker);

-- fragment: has_open_waits
-- A job that runs is a receiver under its lease, or has children that have not ended.
(coalesce(waits, 0) > 0 and (
    exists (select 1 from holdfast_receiver r where r.seq = holdfast_job.seq and r.claims = holdfast_job.claims)
    or exists (select 1 from holdfast_dependency d where d.waiter = holdfast_job.seq and d.is_child and d.state = 0)))

-- own: settle_one
-- If a cancellation was asked for, an outcome that ends nothing (:state < 5) becomes cancelled: only this write can see the flag. A job that
-- is to wait, but for nothing, is due at once.
update holdfast_job
set state = case when cancelling and :state < 5 then 7
    when :state = 4 and not -- include: has_open_waits
    then 1 else :state end,
    reason = case when cancelling and :state < 5 then 'cancelled'
        when :state = 4 and not -- include: has_open_waits
        then null else :reason end,
    error = case when :state = 5 then null else coalesce(:error, error) end,
    error_group = case when :state = 5 then null else coalesce(:error_group, error_group) end,
    result = :result,
    run_at = case
        when :state = 4 and not cancelling then case when -- include: has_open_waits
            then coalesce(:now + :delay, NEVER_US) else :now end
        when :delay is null then run_at else :now + :delay end,
    attempts = max(0, attempts - :refund), -- another program may have set it to 0
    lost_leases = case when :lease_expired then lost_leases + 1 when :refund then lost_leases else 0 end,
    ended_at = case when :state >= 5 or cancelling then :now end,
    cancelling = 0,
    lease_until = null
where id = :id and +claims = :claims and +state = 2 and (+lease_until <= :now) = :lease_expired
  and (:worker is null or +worker = :worker)
returning seq, state, run_at, started_at, attempts, worker, queue, partition, has_dependents;

-- own: set_rank
update holdfast_job set rank = :rank where seq = :seq;

-- own: job_state
select state, run_at from holdfast_job where id = :id;

-- own: insert_attempt
insert into holdfast_attempt (job_seq, claims, attempt, worker, started_at, ended_at, state, reason, error, traceback)
values (:seq, :claims, :attempt, :worker, :started_at, :now, :state, :reason, :error, :traceback)
on conflict do nothing;

-- own: recordable
-- Which of the leases stand, and whose they are. That of a success does: no other worker can have written it.
select d.key, j.seq, j.attempts
from json_each(:leases) d cross join holdfast_job j on j.id = d.value ->> 0
where +j.claims = d.value ->> 1 and (+j.state = 2 and +j.lease_until > :now or +j.state = 5);

-- own: valid_leases
select d.key, j.seq
from json_each(:leases) d cross join holdfast_job j on j.id = d.value ->> 0
where +j.claims = d.value ->> 1 and +j.state = 2 and +j.lease_until > :now and j.worker = coalesce(d.value ->> 2, j.worker);

-- own: leased_job
select seq from holdfast_job
where id = ?1 and +claims = ?2 and +state = 2 and +lease_until > ?4 and worker = coalesce(?3, worker);

-- name: record_step
-- Only if the step before it, ?8, is there.
insert into holdfast_step (job_seq, name, number, is_ordered, claims, ended_at, result)
select ?1, ?2, ?3, ?4, ?5, ?6, ?7
where ?8 is null or exists (select 1 from holdfast_step where job_seq = ?1 and name = ?8)
on conflict do nothing
returning 1;

-- own: insert_step
insert into holdfast_step (job_seq, name, number, is_ordered, claims, ended_at, result)
values (?, ?, ?, ?, ?, ?, ?)
on conflict do update set claims = excluded.claims, ended_at = excluded.ended_at, result = excluded.result
where excluded.number = 0;

-- own: copy_step
-- Of a new job.
insert into holdfast_step (job_seq, name, number, is_ordered, claims, ended_at, result)
select seq, ?2, ?3, ?4, ?5, ?6, ?7 from holdfast_job where id = ?1;

-- name: steps
select name, number, is_ordered, claims, ended_at, result
from holdfast_step where job_seq = (select seq from holdfast_job where id = :id) order by number, name;

-- ── what jobs wait for ──────────────────────────────────────────────────────────────────────────────────────────────
-- own: mark_depended_on
-- From now on each end of these jobs looks for dependencies on them. Says also which are batches that will not succeed.
update holdfast_job set has_dependents = 1 where id in (select value from json_each(?1))
returning id, state, coalesce(failed, 0) > 0;

-- own: batch_states
-- Those that are stored; no state for a job that is no batch.
select id, case when members is not null then state end from holdfast_job where id in (select value from json_each(?1));

-- own: known_members
-- Those pairs [batch, job] of which the job is a member of the batch.
select m.value ->> 0, m.value ->> 1 from json_each(?1) m
where exists (
    select 1 from holdfast_dependency
    where waiter = (select seq from holdfast_job where id = m.value ->> 0) and job_id = m.value ->> 1);

-- own: init_batch
update holdfast_job
set state = 4, run_at = NEVER_US, reason = 'dependency', waits = 0, members = 0, failed = 0 where id = ?1;

-- own: add_members
-- Of a batch, unless it has ended. Each counts as open until the caller has resolved those that have ended.
insert into holdfast_dependency (waiter, job_id, condition, state, is_child)
select b.seq, m.value, 'success', 0, 0 from holdfast_job b cross join json_each(?2) m
where b.id = ?1 and b.members is not null and b.state = 4
on conflict do nothing
returning job_id;

-- own: add_member_count
update holdfast_job set members = members + ?2, waits = waits + ?2 where id = ?1;

-- own: set_waiting
update holdfast_job set state = ?2, run_at = ?3, waits = ?4, reason = ?5, error = ?6, ended_at = ?7 where id = ?1;

-- own: add_dependencies
-- Of one job: [job id, condition, state, holder] of each. One that is there is replaced: it is now a child.
insert into holdfast_dependency (waiter, job_id, condition, state, is_child, holder)
select j.seq, d.value ->> 0, d.value ->> 1, d.value ->> 2, ?3, d.value ->> 3 from holdfast_job j cross join json_each(?2) d where j.id = ?1
on conflict do update set condition = excluded.condition, state = excluded.state, is_child = excluded.is_child;

-- own: mark_earlier_children_met
-- A job waits for something else: the children of its earlier wait count as met.
update holdfast_dependency set state = 1 where waiter = ? and is_child and state = 0;

-- own: resolve_dependencies
-- Those on jobs that have ended: [id, how]; 'failing' is a batch that goes on, and will not succeed.
update holdfast_dependency
set state = case when condition = 'end' or (condition = 'success') = (d.value ->> 1 = 'succeeded') then 1 else 2 end
from json_each(?1) d
where holdfast_dependency.job_id = d.value ->> 0 and holdfast_dependency.state = 0
  and (condition = 'failure' or d.value ->> 1 <> 'failing')
returning waiter, state, job_id;

-- own: decrement_waits
-- [seq, number of dependencies that are met now]. A waiting job that waits for nothing any more is due.
update holdfast_job
set waits = max(0, waits - (d.value ->> 1)),
    reason = case when state = 4 and waits <= d.value ->> 1 then null else reason end,
    run_at = case when state = 4 and waits <= d.value ->> 1 then ?2 else run_at end,
    state = case when state = 4 and waits <= d.value ->> 1 then 1 else state end
from json_each(?1) d
where holdfast_job.seq = d.value ->> 0 and members is null
returning queue, state;

-- own: count_members
-- The same for batches: [seq, numbers of members that have succeeded and that have failed now]. Without others left, a batch ends.
update holdfast_job
set waits = d.left, failed = d.failures,
    state = case when d.is_over then case when d.failures = 0 then 5 else 6 end else state end,
    ended_at = case when d.is_over then ?2 else ended_at end,
    lost_leases = case when d.is_over then 0 else lost_leases end,
    reason = case when d.is_over and d.failures = 0 then null else reason end,
    error = case when d.is_over and d.failures > 0
        then d.failures || ' of ' || members || ' jobs of the batch have failed' else error end,
    error_group = case when d.is_over and d.failures > 0 then 'batch' else error_group end,
    result = case when d.is_over and d.failures = 0 then '{"members":' || members || '}' else result end
from (
    select seq, left, failures, left = 0 and state = 4 as is_over
    from (
        select b.seq, b.state, max(0, b.waits - (c.value ->> 1) - (c.value ->> 2)) as left, b.failed + (c.value ->> 2) as failures
        from json_each(?1) c cross join holdfast_job b
        where b.seq = c.value ->> 0 and b.members is not null)) d
where holdfast_job.seq = d.seq
returning seq, id, has_dependents, state, failed;

-- own: cancel_waiters
-- [seq, error].
update holdfast_job
set state = 7, reason = 'dependency', error = d.value ->> 1, ended_at = ?2, lost_leases = 0
from json_each(?1) d
where holdfast_job.seq = d.value ->> 0 and holdfast_job.state = 4 and holdfast_job.members is null
returning id, has_dependents;

-- own: renew_dependencies
-- Of replayed jobs. What is not met and has not ended holds them again.
update holdfast_dependency
set state = not exists (select 1 from holdfast_job j where j.id = holdfast_dependency.job_id and j.state < 5)
where waiter in (select value from json_each(?1)) and state <> 1;

-- own: wait_again
-- Those of them that something holds.
update holdfast_job
set waits = d.number, reason = case when d.number > 0 then 'dependency' end,
    run_at = case when d.number > 0 then NEVER_US else run_at end,
    state = case when d.number > 0 then 4 else state end
from (
    select w.value as seq, (select count(*) from holdfast_dependency o where o.waiter = w.value and o.state = 0) as number
    from json_each(?1) w) d
where holdfast_job.seq = d.seq
returning id, state;

-- own: reopen_dependencies
-- Those on replayed jobs, of jobs that no worker has taken, and that wait or were cancelled by one of their dependencies; and
-- of batches that were not cancelled themselves.
update holdfast_dependency set state = 0
where job_id in (select value from json_each(?1)) and not is_child and exists (
    select 1 from holdfast_job w where w.seq = holdfast_dependency.waiter and w.started_at is null
      and (w.state = 4 or w.members is not null and w.state < 7
        or w.state = 7 and w.reason = 'dependency' and json_extract(w.options, '$.unique') is null))
returning waiter;

-- own: reopen_waiters
update holdfast_job
set waits = (
        select count(*) from holdfast_dependency d
        where d.waiter = holdfast_job.seq and (d.state = 0 or d.state = 2 and holdfast_job.members is null)),
    failed = case when members is not null
        then (select count(*) from holdfast_dependency d where d.waiter = holdfast_job.seq and d.state = 2) end
where seq in (select value from json_each(?1));

-- own: restore_waiters
-- The cancelled ones, if none of their dependencies has failed now, and the batches that had ended.
update holdfast_job
set state = 4, run_at = NEVER_US, ended_at = null, error = null, error_group = null, result = null, expires_at = null,
    reason = 'dependency'
where seq in (select value from json_each(?1)) and state > 4
  and (members is not null
    or not exists (select 1 from holdfast_dependency d where d.waiter = holdfast_job.seq and d.state = 2))
returning id, has_dependents;

-- name: known_children
-- Of these children, those that a job has started before, and the jobs that stand for them.
select job_id, coalesce(holder, job_id) from holdfast_dependency
where waiter = ?1 and is_child and job_id in (select value from json_each(?2));

-- own: states_by_id
select id, state from holdfast_job where id in (select value from json_each(?1));

-- own: set_waits
update holdfast_job set waits = ?2 where seq = ?1;

-- name: batch
-- Its progress.
select members, members - waits, failed from holdfast_job where id = :id and members is not null;

-- own: dependencies
-- Of a job, and those on it.
select * from (
    select 0 as other, d.job_id as id, d.condition, d.state, d.is_child from holdfast_dependency d
    where d.waiter = (select seq from holdfast_job where id = :id) and d.holder is null order by d.job_id limit :limit)
union all
select * from (
    select 1, w.id, d.condition, d.state, d.is_child from holdfast_dependency d cross join holdfast_job w on w.seq = d.waiter
    where d.job_id = :id order by w.id limit :limit);

-- name: receiver
select r.topic, r.step, r.since, r.until from holdfast_job j cross join holdfast_receiver r on r.seq = j.seq
where j.id = :id and j.claims = r.claims and +j.state in (2, 4);

-- own: step_result
select result from holdfast_step where job_seq = ?1 and name = ?2;

-- own: take_signal
update holdfast_signal set job_id = ?2
where seq = (select min(seq) from holdfast_signal where topic = ?1 and job_id is null)
returning value;

-- own: receiver_deadline
select until, claims > 0 from holdfast_receiver where seq = ?1 and step = ?2;

-- own: set_receiver
-- A step that has waited before keeps its place.
insert into holdfast_receiver (seq, topic, step, number, is_ordered, claims, since, until) values (?, ?, ?, ?, ?, ?, ?, ?)
on conflict (seq) do update set topic = excluded.topic, step = excluded.step, number = excluded.number,
    is_ordered = excluded.is_ordered, claims = excluded.claims,
    since = case when step = excluded.step then since else excluded.since end, until = excluded.until;

-- own: detach_receiver
-- A job waits for something else; the deadline of the step stays.
update holdfast_receiver set claims = 0 where seq = ?;

-- own: delete_receiver
delete from holdfast_receiver where seq = ?;

-- own: find_signal
select job_id from holdfast_signal where id = ?;

-- own: next_receiver
select r.seq, j.id, r.step, r.number, r.is_ordered, r.claims
from holdfast_receiver r cross join holdfast_job j on j.seq = r.seq
where r.topic = ? and j.claims = r.claims and +j.state in (2, 4) order by r.since, r.seq limit 1;

-- own: count_signals
select count(*) from (select 1 from holdfast_signal where topic = ?1 and job_id is null limit ?2);

-- own: insert_signal
insert into holdfast_signal (id, topic, value, sent_at, job_id) values (?, ?, ?, ?, ?);

-- name: signals
select id, topic, value, sent_at from holdfast_signal where topic = :topic and job_id is null order by seq limit :limit;

-- name: all_signals
select id, topic, value, sent_at from holdfast_signal where job_id is null order by sent_at, seq limit :limit;

-- name: prune_signals
delete from holdfast_signal where seq in (
    select seq from holdfast_signal where sent_at <= :before order by sent_at limit :limit);

-- name: delete_steps
delete from holdfast_step
where job_seq in (select value from json_each(:seqs)) and (number >= :from or number = 0 and name = '#children');

-- own: delete_receivers
delete from holdfast_receiver where seq in (select value from json_each(:seqs)) and number >= :from;

-- own: insert_line
insert into holdfast_line (job_seq, claims, number, attempt, at, level, text, fields)
values (?, ?, ?, ?, ?, ?, ?, ?)
on conflict do nothing;

-- own: extend_leases
update holdfast_job set lease_until = :until
from json_each(:leases) d
where holdfast_job.id = d.value ->> 0 and +holdfast_job.claims = d.value ->> 1
  and +holdfast_job.state = 2 and +holdfast_job.lease_until > :now and +holdfast_job.worker = :worker;

-- own: lease_states
select j.lease_until, j.cancelling
from json_each(:leases) d
left join holdfast_job j on j.id = d.value ->> 0 and +j.claims = d.value ->> 1 and +j.state = 2 and +j.worker = :worker
order by d.key;

-- own: upsert_worker
insert into holdfast_worker
    (id, host, pid, queues, concurrency, running, succeeded, failed, version, memory, started_at, seen_at, alive_until)
values
    (:worker, :host, :pid, :queues, :concurrency, :running, :succeeded, :failed, :version, :memory, :now, :now, :until)
on conflict (id) do update set
    queues = excluded.queues, concurrency = excluded.concurrency, running = excluded.running,
    succeeded = excluded.succeeded + case when :has_deltas then succeeded else 0 end,
    failed = excluded.failed + case when :has_deltas then failed else 0 end, version = excluded.version, memory = excluded.memory,
    seen_at = excluded.seen_at, alive_until = excluded.alive_until
returning command;

-- own: any_worker_has_message
select exists (select 1 from holdfast_worker where command <> 'none' and id in (select value from json_each(:workers)))
    or exists (select 1 from holdfast_job where cancelling = 1 and worker in (select value from json_each(:workers)));

-- name: delete_worker
delete from holdfast_worker where id = :worker;

-- name: expired_leases
select -- include: job_json
from holdfast_job j where j.state = 2 and j.lease_until <= :now order by j.lease_until limit :limit;

-- fragment: prunable
-- No job that has not ended waits or waited for it, no parent died or was cancelled after :before, so that a replay may read it, and no
-- replay of a failed job brings it back.
not (has_dependents and exists (
    select 1 from holdfast_dependency d cross join holdfast_job w on w.seq = d.waiter
    where d.job_id = holdfast_job.id and (+w.state < 5 or d.is_child and +w.state > 5 and w.ended_at > :before)))
and not (reason is 'dependency' and :state = 7 and exists (
    select 1 from holdfast_dependency d cross join holdfast_job f on f.id = d.job_id
    where d.waiter = holdfast_job.seq and d.state = 2))

-- own: find_prunable
select seq from holdfast_job
where state >= 5 and state = :state and ended_at <= :before and -- include: prunable
order by ended_at limit :limit;

-- name: prune_jobs
-- Those of the found that may still go, now that no other program writes.
select seq, id, has_key from holdfast_job
where seq in (select value from json_each(:seqs)) and +state = :state and ended_at <= :before and -- include: prunable
order by ended_at;

-- name: delete_jobs
delete from holdfast_job where seq in (select value from json_each(:seqs));

-- name: delete_keys_of
-- Deleting a job frees its key; pruning leaves it until its own lifetime is over.
delete from holdfast_key
where job_id in (select value from json_each(:ids)) and coalesce(keep_until, 0) <= :before;

-- name: detach_expired_keys
-- Their lifetime is over and their job's row is not: from now on they die with it, and no sweep meets them again.
update holdfast_key set keep_until = null
where key in (
    select key from holdfast_key
    where keep_until <= :now and exists (select 1 from holdfast_job where id = holdfast_key.job_id) limit :limit
);

-- name: prune_keys
delete from holdfast_key where key in (
    select key from holdfast_key
    where keep_until <= :now and not exists (select 1 from holdfast_job where id = holdfast_key.job_id) limit :limit
);

-- name: prune_workers
delete from holdfast_worker where alive_until <= :before;

-- name: cancel_unstarted
update holdfast_job
set state = 7, reason = 'cancelled', error = coalesce(error, 'cancelled'), ended_at = :now, lost_leases = 0
where id in (select value from json_each(:ids)) and +state in (0, 1, 3, 4)
returning id, has_dependents;

-- name: cancel_running
update holdfast_job set cancelling = 1
where id in (select value from json_each(:ids)) and +state = 2
returning id, worker;

-- name: replay
update holdfast_job
set state = case when :after + d.key * :every > 0 then 1 else 0 end, attempts = 0, lost_leases = 0, reason = null, error = null,
    error_group = null, result = null, ended_at = null, expires_at = null, run_at = :now + :after + d.key * :every,
    payload = coalesce(:payload, payload)
from json_each(:ids) d
where holdfast_job.id = d.value and (+state in (3, 6, 7) or (:force and +state = 5)) and members is null
returning seq, id, queue, state, has_dependents, waits is not null and started_at is null;

-- name: unique_keys_of
-- The keys under policies of uniqueness that these jobs must have again to be replayed.
select id, json_extract(options, '$.unique') from holdfast_job
where id in (select value from json_each(:ids)) and (+state in (3, 6, 7) or (:force and +state = 5))
  and json_extract(options, '$.unique') is not null;

-- own: drop_payload
delete from holdfast_payload where seq = (select seq from holdfast_job where id = ?);

-- own: clear_inline_payload
update holdfast_job set payload = null where id = ?;

-- name: deletable
select seq, id, state, has_dependents from holdfast_job where id in (select value from json_each(:ids)) and +state <> 2
  and (:states is null or +state in (select value from json_each(:states)));

-- name: choose
-- Oldest first. Operations by filter go through the table in its own order; they are rare and bounded.
select j.id from holdfast_job j
where (j.cancelling = 0 or not :uncancelled) and -- include: matching
order by seq limit :limit;

-- name: choose_ended
-- The same for one of the states dead and cancelled, through their own index; with the place of each.
select j.seq, j.id from holdfast_job j
where j.state > 5 and j.state = :state and j.seq > 0 and -- include: matching
order by seq limit :limit;

-- name: choose_again
-- Those of the chosen that the filter still matches, now that no other program writes.
select j.id from json_each(:ids) d cross join holdfast_job j on j.id = d.value
where (j.cancelling = 0 or not :uncancelled) and -- include: matching
order by d.key;

-- name: states_of
select id, state from holdfast_job where id in (select value from json_each(:ids));

-- name: set_paused
insert into holdfast_queue (name, paused) values (:queue, :paused)
on conflict (name) do update set paused = excluded.paused;

-- name: set_command
update holdfast_worker set command = :command
where alive_until > :now and (:workers is null or id in (select value from json_each(:workers)))
returning id;

-- name: get
select -- include: job_json
from holdfast_job j where j.id = :id;

-- name: get_many
select -- include: job_json
from holdfast_job j where j.id in (select value from json_each(:ids));

-- name: summaries
-- `get` of many, without what may be large.
select json_array(
    j.id, j.task, j.queue, '{}', j.claims, j.attempts, j.max_attempts, -j.rank, j.lost_leases, j.run_at, j.created_at,
    json(j.options), json_extract(
        '["queued","scheduled","running","failed","waiting","succeeded","dead","cancelled"]', '$[' || j.state || ']'),
    j.worker, j.lease_until, j.started_at, j.ended_at, j.reason, j.error, null, null,
    json(case when j.cancelling then 'true' else 'false' end), j.partition, j.expires_at, j.error_group)
from holdfast_job j where j.id in (select value from json_each(:ids));

-- name: find
select j.seq, -- include: job_json
from holdfast_job j
where j.seq < :before and j.seq >= :after and -- include: matching
order by seq desc limit :limit;

-- own: newest_job
select coalesce(max(seq), 0) from holdfast_job;

-- name: find_ended
-- The same for one of the states dead and cancelled, through their own index: they are few among millions.
select j.seq, -- include: job_json
from holdfast_job j
where j.state > 5 and j.state = :state and j.seq < :before and -- include: matching
order by seq desc limit :limit;

-- name: find_tagged
-- The same for jobs with a tag, through the tags, which are in the order of the jobs.
select j.seq, -- include: job_json
from holdfast_tag t cross join holdfast_job j on j.seq = t.seq
where t.tag = :tag and t.seq < :before and -- include: matching
order by t.seq desc limit :limit;

-- name: find_unended
-- The same for states of jobs that have not ended, through the indexes of these states: at most :max_count of each.
with unended (seq) as materialized (
    select * from (
        select j.seq from (select 1 from json_each(:states) where value = 0 limit 1) wanted
            cross join holdfast_job j where j.state = 0 and j.partition is null and j.queue >= '' limit :max_count)
    union all select * from (
        select j.seq from (select 1 from json_each(:states) where value = 0 limit 1) wanted
            cross join holdfast_job j where j.state = 0 and j.partition is not null and j.queue >= '' limit :max_count)
    union all select * from (
        select j.seq from (select 1 from json_each(:states) where value in (1, 3) limit 1) wanted
            cross join holdfast_job j where j.state in (1, 3) and j.run_at >= 0 limit :max_count)
    union all select * from (
        select j.seq from (select 1 from json_each(:states) where value = 2 limit 1) wanted
            cross join holdfast_job j where j.state = 2 and j.lease_until >= 0 limit :max_count)
    union all select * from (
        select j.seq from (select 1 from json_each(:states) where value = 4 limit 1) wanted
            cross join holdfast_job j where j.state = 4 and j.run_at >= 0 limit :max_count)),
picked (seq) as materialized (
    select j.seq from unended cross join holdfast_job j on j.seq = unended.seq
    where j.seq < :before and -- include: matching
    order by j.seq desc limit :limit)
select j.seq, -- include: job_json
from picked cross join holdfast_job j on j.seq = picked.seq order by j.seq desc;

-- name: count_unended
-- Jobs through which find_unended would go, at most :max_count in each index.
select (select count(*) from (
        select 1 from (select 1 from json_each(:states) where value = 0 limit 1) wanted
            cross join holdfast_job j where j.state = 0 and j.partition is null and j.queue >= '' limit :max_count))
    + (select count(*) from (
        select 1 from (select 1 from json_each(:states) where value = 0 limit 1) wanted
            cross join holdfast_job j where j.state = 0 and j.partition is not null and j.queue >= '' limit :max_count))
    + (select count(*) from (
        select 1 from (select 1 from json_each(:states) where value in (1, 3) limit 1) wanted
            cross join holdfast_job j where j.state in (1, 3) and j.run_at >= 0 limit :max_count))
    + (select count(*) from (
        select 1 from (select 1 from json_each(:states) where value = 2 limit 1) wanted
            cross join holdfast_job j where j.state = 2 and j.lease_until >= 0 limit :max_count))
    + (select count(*) from (
        select 1 from (select 1 from json_each(:states) where value = 4 limit 1) wanted
            cross join holdfast_job j where j.state = 4 and j.run_at >= 0 limit :max_count));

-- name: count
select -- include: counted
from (
    select j.state, j.created_at from holdfast_job j
    where -- include: matching
    limit :limit) m;

-- name: count_tagged
-- The same for jobs with a tag, through the tags.
select -- include: counted
from (
    select j.state, j.created_at from holdfast_tag t cross join holdfast_job j on j.seq = t.seq
    where t.tag = :of_tag and -- include: matching
    limit :limit) m;

-- name: count_ended
select -- include: counted
from (
    select j.state, j.created_at from holdfast_job j
    where j.state > 5 and j.state = :state and -- include: matching
    limit :limit) m;

-- name: attempts
select json_array(
    claims, attempt, worker, started_at, ended_at,
    json_extract('["queued","scheduled","running","failed","waiting","succeeded","dead","cancelled"]', '$[' || state || ']'),
    reason, error, traceback)
from holdfast_attempt where job_seq = (select seq from holdfast_job where id = :id) order by claims;

-- name: logs
select claims, number, attempt, at, level, text, fields
from holdfast_line
where job_seq = (select seq from holdfast_job where id = :id) and (claims, number) > (:claims, :number)
order by claims, number limit :limit;

-- name: overview_queues
-- Every queue in which something waits, by skipping from one to the next.
with recursive named (queue) as (
    select min(queue) from (
        select min(queue) as queue from holdfast_job where state = 0 and partition is null
        union all select min(queue) from holdfast_job where state = 0 and partition is not null
        union all select min(queue) from holdfast_job where state in (1, 3)
        union all select min(queue) from holdfast_job where state = 4)
    union all
    select (select min(queue) from (
        select min(j.queue) as queue from holdfast_job j
        where j.state = 0 and j.partition is null and j.queue > named.queue
        union all select min(j.queue) from holdfast_job j
        where j.state = 0 and j.partition is not null and j.queue > named.queue
        union all select min(j.queue) from holdfast_job j where j.state in (1, 3) and j.queue > named.queue
        union all select min(j.queue) from holdfast_job j where j.state = 4 and j.queue > named.queue))
    from named where named.queue is not null)
select queue from named where queue is not null;

-- name: overview
-- Counts by queue and state, each of at most :max_count jobs. Of what has ended at the latest, and then how many did since
-- :since, and how long ago the first of them; :has_ended is 0 for dead ones only.
select q.value as queue, 0 as state,
    (select count(*) from (
        select 1 from holdfast_job j where j.state = 0 and j.partition is null and j.queue = q.value limit :max_count)) + (
    select count(*) from (
        select 1 from holdfast_job j where j.state = 0 and j.partition is not null and j.queue = q.value limit :max_count)) as number,
    0 as lately, 0 as age
from json_each(:queues) q
union all
select q.value, 4, (
    select count(*) from (select 1 from holdfast_job j where j.state = 4 and j.queue = q.value limit :max_count)), 0, 0
from json_each(:queues) q
union all
select q.value, s.value, (
    select count(*) from (
        select j.state from holdfast_job j where j.state in (1, 3) and j.queue = q.value limit :max_count) d
    where d.state = s.value), 0, 0
from json_each(:queues) q, json_each('[1,3]') s
union all
select queue, 2, count(*), 0, 0 from (
    select queue from holdfast_job where state = 2 and lease_until >= 0 limit :max_count) group by queue
union all
select queue, state, count(*), sum(ended_at >= :since), :now - min(ended_at) from (
    select * from (select queue, state, ended_at
        from holdfast_job where :has_ended and state >= 5 and state = 5 and ended_at > 0 order by ended_at desc limit :max_count)
    union all
    select * from (select queue, state, ended_at
        from holdfast_job where state >= 5 and state = 6 and ended_at > 0 order by ended_at desc limit :max_count)
    union all
    select * from (select queue, state, ended_at
        from holdfast_job where :has_ended and state >= 5 and state = 7 and ended_at > 0 order by ended_at desc limit :max_count)
) group by queue, state;

-- name: oldest_ready
-- The first of each tier and priority in use, found by skipping from one to the next: two seeks each, however many jobs
-- there are. Of jobs under limits, the first of each of a hundred partitions.
with recursive used (tier, rank) as (
    select t.value, (select min(j.rank) from holdfast_job j where j.state = 0 and j.partition is null and min(j.lost_leases, 2) = t.value and j.queue = :queue)
    from json_each('[0,1,2]') t
    union all
    select used.tier, (select min(j.rank) from holdfast_job j
        where j.state = 0 and j.partition is null and min(j.lost_leases, 2) = used.tier and j.queue = :queue and j.rank > used.rank)
    from used where used.rank is not null)
select min(run_at) from (select (select min(j.run_at) from holdfast_job j
    where j.state = 0 and j.partition is null and min(j.lost_leases, 2) = used.tier and j.queue = :queue and j.rank = used.rank) as run_at
from used
union all select (select j.run_at from holdfast_job j
    where j.state = 0 and j.partition is not null and j.queue = some.queue and j.partition = some.partition order by j.rank, j.run_at limit 1)
from (select queue, partition from holdfast_partition where queue = :queue limit 100) some);

-- name: known_queues
select name, paused from holdfast_queue;

-- name: workers
select id, host, pid, queues, concurrency, running, succeeded, failed, version, memory,
    started_at, seen_at, alive_until > :now, command
from holdfast_worker order by started_at;

-- name: stats
-- Of each index of states so many jobs at most, by what they have in common.
select queue, state, worker, attempts, run_at > :now and state in (1, 3), max(created_at, coalesce(started_at, 0), coalesce(ended_at, 0),
        case when claims > 0 and state in (0, 1, 3) then coalesce((
            select max(a.ended_at) from holdfast_attempt a where a.job_seq = seen.seq), 0) else 0 end) >= :since,
    count(*), total(ended_at - started_at) / 1000000, coalesce(max(ended_at - started_at), 0) / 1000000.0,
    coalesce(:now - min(ended_at), 0) / 1000000.0
from (
    select * from (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, seq
        from holdfast_job where state = 0 and partition is null and queue > '' order by queue, min(lost_leases, 2), rank, run_at limit :max_count)
    union all
    select * from (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, seq
        from holdfast_job where state = 0 and partition is not null and queue > '' order by queue, partition limit :max_count)
    union all
    select * from (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, seq
        from holdfast_job where state = 4 and queue > '' order by queue limit :max_count)
    union all
    select * from (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, seq
        from holdfast_job where state in (1, 3) and run_at > 0 order by run_at limit :max_count)
    union all
    select * from (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, seq
        from holdfast_job where state = 2 and lease_until > 0 order by lease_until limit :max_count)
    union all
    select * from (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, seq
        from holdfast_job where state >= 5 and state = 5 and ended_at > 0 order by ended_at desc limit :max_count)
    union all
    select * from (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, seq
        from holdfast_job where state >= 5 and state = 6 and ended_at > 0 order by ended_at desc limit :max_count)
    union all
    select * from (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, seq
        from holdfast_job where state >= 5 and state = 7 and ended_at > 0 order by ended_at desc limit :max_count)
) seen
group by 1, 2, 3, 4, 5, 6;

-- name: events
-- What ended behind a place, and the attempts after which a job went on.
select * from (
    select * from (
        select j.id, j.task, j.queue, j.state, j.claims, j.attempts, j.worker, j.started_at, j.ended_at, j.reason, j.error
        from holdfast_job j
        where j.state >= 5 and j.state = 5 and (j.ended_at, j.id, j.claims) > (:at, :job, :claims)
        order by j.ended_at, j.id, j.claims limit :limit)
    union all
    select * from (
        select j.id, j.task, j.queue, j.state, j.claims, j.attempts, j.worker, j.started_at, j.ended_at, j.reason, j.error
        from holdfast_job j
        where j.state >= 5 and j.state = 6 and (j.ended_at, j.id, j.claims) > (:at, :job, :claims)
        order by j.ended_at, j.id, j.claims limit :limit)
    union all
    select * from (
        select j.id, j.task, j.queue, j.state, j.claims, j.attempts, j.worker, j.started_at, j.ended_at, j.reason, j.error
        from holdfast_job j
        where j.state >= 5 and j.state = 7 and (j.ended_at, j.id, j.claims) > (:at, :job, :claims)
        order by j.ended_at, j.id, j.claims limit :limit)
    union all
    select * from (
        select j.id, j.task, j.queue, a.state, a.claims, a.attempt, a.worker, a.started_at, a.ended_at, a.reason, a.error
        from holdfast_attempt a cross join holdfast_job j on j.seq = a.job_seq
        where a.state < 5 and (a.ended_at, j.id, a.claims) > (:at, :job, :claims)
        order by a.ended_at, j.id, a.claims limit :limit)
) order by ended_at, id, claims limit :limit;

-- own: last_ended
select max(at) from (
    select (select ended_at from holdfast_job where state >= 5 and state = 5 and ended_at > 0 order by ended_at desc limit 1) as at
    union all select (select ended_at from holdfast_job where state >= 5 and state = 6 and ended_at > 0 order by ended_at desc limit 1)
    union all select (select ended_at from holdfast_job where state >= 5 and state = 7 and ended_at > 0 order by ended_at desc limit 1)
    union all select (select ended_at from holdfast_attempt where state < 5 and ended_at > 0 order by ended_at desc limit 1));

-- name: nameless_queue_jobs
-- Jobs that wait in a queue with an empty name, which only another program can have written.
select (select count(*) from holdfast_job where state = 0 and partition is null and queue = '')
    + (select count(*) from holdfast_job where state = 0 and partition is not null and queue = '')
    + (select count(*) from holdfast_job where state = 4 and queue = '')
    + (select count(*) from holdfast_job where state in (1, 3) and queue = '');

-- name: stuck
select count(*) from holdfast_job where state = 2 and lease_until <= :before;

-- ── schedules ──────────────────────────────────────────────────────────────────────────────────────────────────────
-- name: add_schedule
insert into holdfast_schedule (name, next_at, revision, document) values (:name, :next_at, :revision, :document)
on conflict do nothing returning revision;

-- name: replace_schedule
update holdfast_schedule set next_at = :next_at, revision = revision + 1, document = :document
where name = :name and :expected in (revision, -1) returning revision;

-- name: remove_schedule
delete from holdfast_schedule where name = :name and revision = :expected returning revision + 1;

-- name: schedule
select document, revision from holdfast_schedule where name = :name;

-- name: schedules
select document, revision from holdfast_schedule where name > :after order by name limit :limit;

-- name: due_schedules
select document, revision from holdfast_schedule where next_at <= :now order by next_at limit :limit;

-- name: next_schedule
select min(next_at) from holdfast_schedule where next_at > :now;

-- ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────
-- name: add_limit
insert into holdfast_limit (name, revision, document) values (:name, :revision, :document)
on conflict do nothing returning revision;

-- name: replace_limit
update holdfast_limit set revision = revision + 1, document = :document
where name = :name and :expected in (revision, -1) returning revision;

-- name: remove_limit
delete from holdfast_limit where name = :name and revision = :expected returning revision + 1;

-- name: limits
select document, revision from holdfast_limit order by name;

-- own: limits_version
-- Changes with every write of a limit; and whether there ever was a job under one.
select count(*), coalesce(sum(revision), 0), exists (select 1 from holdfast_limited_queue) from holdfast_limit;

-- own: limited_queues
select name from holdfast_limited_queue;

-- own: queues_under_limits
-- Whether a claim may find jobs under limits in a queue, and whether it has jobs without a partition.
select q.name,
    exists (select 1 from holdfast_partition p where p.queue = q.name)
    or exists (select 1 from holdfast_job j
        where j.state = 0 and j.partition is not null and j.lost_leases > 1 and j.queue = q.name),
    exists (select 1 from holdfast_job j where j.state = 0 and j.partition is null and j.queue = q.name)
from holdfast_limited_queue q where :every or q.name in (select value from json_each(:queues));

-- own: any_running_limited
select exists (select 1 from holdfast_job where state = 2 and partition > '');

-- own: add_limited_queue
insert or ignore into holdfast_limited_queue (name, virtual_time) values (?1, 0);

-- own: add_partition
-- A new partition starts at the virtual time of its queue.
insert or ignore into holdfast_partition (queue, partition, start_tag)
select ?1, ?2, virtual_time from holdfast_limited_queue where name = ?1;

-- own: any_open_partition
-- Whether a queue may have a job under limits to take.
select exists (select 1 from holdfast_partition indexed by holdfast_partition_start_tag where queue = :queue and blocked_until is null)
    or exists (select 1 from holdfast_partition where queue = :queue and blocked_until <= :now)
    or exists (select 1 from holdfast_job where state = 0 and partition is not null and lost_leases > 1 and queue = :queue);

-- own: next_unblocked
select min(blocked_until) from holdfast_partition where queue = :queue and blocked_until is not null;

-- own: unassigned_jobs
-- Ready jobs without a partition of a queue with a limit of its own.
select seq, task, queue, coalesce(payload, (select p.payload from holdfast_payload p where p.seq = j.seq)), id, null, null
from holdfast_job j where state = 0 and partition is null and queue = :queue order by min(lost_leases, 2), rank, run_at, seq limit :limit;

-- name: jobs_to_assign
-- Jobs of a queue or a task that have not ended, in the order of their ids.
select seq, task, queue, coalesce(payload, (select p.payload from holdfast_payload p where p.seq = j.seq)), id, partition, weights
from holdfast_job j where id > :after and +state < 5 and (queue = :queue or task = :task) order by id limit :limit;

-- own: partitions_of
-- The same of these jobs.
select seq, task, queue, coalesce(payload, (select p.payload from holdfast_payload p where p.seq = j.seq)), id, partition, weights
from holdfast_job j where id in (select value from json_each(:ids));

-- own: set_partition
update holdfast_job set partition = ?2, weights = ?3 where seq = ?1 and +state < 5;

-- own: running_partitions
select partition, weights, count(*)
from holdfast_job where state = 2 and partition > '' group by partition, weights;

-- name: count_unstarted
-- Jobs of each bucket that have not started, up to :max_count. It is the first of their buckets, or the second; a name that goes
-- on does so behind U+001F.
select (
    select count(*) from (
        select 1 from holdfast_job j
        where j.state <> 2 and j.state < 5 and j.partition is not null and j.partition >= b.value and j.partition < b.value || ' '
        limit :max_count)) + (
    select count(*) from (
        select 1 from holdfast_job j
        where j.state <> 2 and j.state < 5 and j.partition is not null and instr(j.partition, char(31)) > 0
          and substr(j.partition, instr(j.partition, char(31)) + 1) >= b.value
          and substr(j.partition, instr(j.partition, char(31)) + 1) < b.value || ' '
        limit :max_count))
from json_each(:buckets) b order by b.key;

-- own: unblock_partitions
-- One that was blocked keeps no earlier start tag: it goes on at the virtual time of its queue.
update holdfast_partition set blocked_until = null where queue = :queue and partition in (
    select partition from holdfast_partition where queue = :queue and blocked_until <= :now order by blocked_until limit :limit);

-- name: clamp_buckets
-- The buckets of a limit keep their tokens, at most the new burst: of the limit itself and, after "=", of its keys.
update holdfast_bucket set full_at = :now + :fill_time - min(:fill_time,
    cast(max(0, :old_fill_time - (full_at - :now)) * (:interval * 1.0 / :old_interval) as integer))
where full_at > :now and (name = :name or (name > :name || '=' and name < :name || '>'));

-- name: unblock_all_partitions
-- A limit has changed: those that wait for tokens are looked at again.
update holdfast_partition set blocked_until = null where blocked_until is not null;

-- own: next_partitions
-- Each with its first job, and the weights of that. Those of a closed bucket are passed over.
select page.partition, page.start_tag, j.seq, j.weights
from (
    select partition, start_tag, (
        select seq from holdfast_job
        where state = 0 and partition is not null and queue = named.queue and partition = named.partition and lost_leases < 2
          and -- include: unexpired
        order by rank, run_at, seq limit 1) as first
    from holdfast_partition named indexed by holdfast_partition_start_tag
    where queue = :queue and blocked_until is null and (start_tag, partition) > (:start_tag, :partition)
      and not exists (
        select 1 from json_each(:closed) closed
        where instr(char(31) || partition || char(31), char(31) || closed.value || char(31)))
    order by start_tag, partition limit :limit
) page left join holdfast_job j on j.seq = page.first order by page.start_tag, page.partition;

-- own: partition_jobs
select seq, weights from holdfast_job
where state = 0 and partition is not null and queue = :queue and partition = :partition and lost_leases < 2
  and -- include: unexpired
order by rank, run_at, seq limit :limit offset :offset;

-- own: limited_quarantined
select seq, partition, weights from holdfast_job
where state = 0 and partition is not null and lost_leases > 1 and queue = :queue
  and -- include: unexpired
order by lost_leases, rank, run_at, seq limit :limit;

-- own: any_limited_quarantined
select exists (select 1 from holdfast_job where state = 0 and partition is not null and lost_leases > 1 and queue = :queue);

-- own: pick_admitted
-- Jobs under limits that have been admitted, in the order in which they were.
select -- include: claimed
from (
    select j.seq, j.id, task, queue, payload, claims, attempts, max_attempts, rank, lost_leases, run_at, created_at, options
    from json_each(:seqs) d cross join holdfast_job j on j.seq = d.value order by d.key
) picked;

-- own: move_partition
update holdfast_partition set start_tag = ?3, blocked_until = ?4 where queue = ?1 and partition = ?2;

-- own: drop_partition
delete from holdfast_partition where queue = ?1 and partition = ?2;

-- own: queue_virtual_time
select virtual_time from holdfast_limited_queue where name = :queue;

-- own: set_virtual_time
update holdfast_limited_queue set virtual_time = ?2 where name = ?1;

-- own: buckets
select name, full_at, paused_until from holdfast_bucket where name in (select value from json_each(:names));

-- own: any_bucket
select exists (select 1 from holdfast_bucket);

-- own: set_bucket
insert into holdfast_bucket (name, full_at, paused_until) values (?1, ?2, ?3)
on conflict (name) do update set full_at = excluded.full_at, paused_until = excluded.paused_until;

-- name: prune_buckets
-- Those that are full and not paused.
delete from holdfast_bucket where name in (
    select name from holdfast_bucket where full_at <= :now and paused_until <= :now limit :limit);

-- own: limited_queues_of
-- The queues, among those of these jobs, whose jobs were under limits: room of theirs is free.
select distinct queue from holdfast_job where id in (select value from json_each(:ids)) and partition is not null;

-- name: history_mark
select number from holdfast_history where length = 0;

-- name: history_until
-- The instant up to which about :limit jobs of each state ended, and whether others have ended since.
select until, until < :before from (
    select min(:before,
        coalesce((select ended_at from holdfast_job where state = 5 and state >= 5 and ended_at > :counted_until
        order by ended_at limit 1 offset :limit - 1), :before),
        coalesce((select ended_at from holdfast_job where state = 6 and state >= 5 and ended_at > :counted_until
        order by ended_at limit 1 offset :limit - 1), :before),
        coalesce((select ended_at from holdfast_job where state = 7 and state >= 5 and ended_at > :counted_until
        order by ended_at limit 1 offset :limit - 1), :before)) as until);

-- name: history_add
with interval_counts as materialized (
    select ended_at - ended_at % 60000000 as start, queue, state, count(*) as number,
        sum(max(0, ended_at - coalesce(started_at, ended_at))) as run_us,
        max(max(0, ended_at - coalesce(started_at, ended_at))) as longest_us
    from holdfast_job where state in (5, 6, 7) and state >= 5 and ended_at > :counted_until and ended_at <= :until
    group by 1, queue, state
)
insert into holdfast_history (length, start, queue, state, number, run_us, longest_us)
select length.value, start - start % length.value, queue, state, sum(number), sum(run_us), max(longest_us)
from json_each('[60000000, 3600000000]') length cross join interval_counts
where true
group by 1, 2, queue, state
on conflict (length, start, queue, state) do update set number = number + excluded.number,
    run_us = run_us + excluded.run_us, longest_us = max(longest_us, excluded.longest_us);

-- name: history_move
insert into holdfast_history (length, start, queue, state, number, run_us, longest_us) values (0, 0, '', 0, :until, 0, 0)
on conflict (length, start, queue, state) do update set number = excluded.number;

-- name: prune_history
delete from holdfast_history where length = :length and start < :before;

-- name: history
select start, queue, state, number, run_us / 1e6, longest_us / 1e6 from holdfast_history
where length = :length and start >= :since order by start, queue, state;

-- name: failed_jobs
-- The jobs that died last, and those that wait for their next attempt after one of the latest failures.
select id, queue, task, error_group, true, ended_at from (
    select id, queue, task, error_group, ended_at from holdfast_job
    where state >= 5 and state = 6 and ended_at > 0 order by ended_at desc limit :limit)
where error_group is not null
union all
select j.id, j.queue, j.task, j.error_group, false, a.ended_at
from (
    select job_seq, claims, ended_at from holdfast_attempt
    where state < 5 and ended_at > 0 order by ended_at desc limit :limit) a
cross join holdfast_job j on j.seq = a.job_seq
where +j.state = 3 and j.claims = a.claims and j.error_group is not null;
