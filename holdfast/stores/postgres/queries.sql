-- Every statement of the PostgreSQL store. Batches are arrays. `holdfast.` stands for the schema the store was given.
-- `column + 0` keeps the planner off a partial index that looks selective while few rows are in that
-- state; some indexes are defined on (+state): only statements that also write (+state) can use them. A range is written as a
-- comparison of rows, `(state, ended_at) <= (…)`: the planner then scans the index in its order instead of sorting. No clock function:
-- :now is the server's, one for each statement (encoding.py). Rows that are to be changed are locked `for no key update`:
-- a transaction that holds a key share, as one with a foreign key to a job does, does not block the job's lease.

-- States: 0 queued, 1 scheduled, 2 running, 3 failed, 4 waiting, 5 succeeded, 6 dead, 7 cancelled. Other codes are explained
-- at their columns, in migrations/0001_initial.sql.

-- A name stands for the same work in every SQL store; what only this one needs is its own. A fragment is no statement: it
-- stands, once, for what several have in common.

-- fragment: job_columns
-- A job as a reader sees it: the fields of Job (core/models.py) in their order.
j.id::text, j.task, j.queue, j.payload, j.claims, j.attempts, j.max_attempts, -j.rank, j.lost_leases, j.run_at,
j.created_at, j.options, j.state, j.worker, j.lease_until, j.started_at, j.ended_at, j.reason, j.error, j.result,
case when j.has_key then (select k.key from holdfast.key k where k.job_id = j.id and k.key > ' ' limit 1) end, j.cancelling,
j.partition, j.expires_at, j.error_group

-- fragment: claimed
-- What a claim delivers of a job: the first fields of Job (core/models.py).
id::text, task, queue, payload, claims, attempts, max_attempts, -rank as priority, lost_leases, run_at, created_at, options,
seq

-- fragment: unexpired
-- A job whose instant has passed is never started. One that a worker has taken before has begun, and does not expire.
(expires_at is null or expires_at > :now or started_at is not null)

-- fragment: claim_begin
-- The queues of a claim, and what is due in them after :skip_due_until; what was due before is locked (claiming.py).
-- A waiting job without a deadline (core.dependencies.NEVER_US) is not due.
with claimable_queue as materialized (
    select *
    from unnest(:queues::text[], :slots::int[], :ranks::int[], :run_ats::bigint[], :seqs::bigint[])
        with ordinality as w (queue, slots, rank, run_at, seq, ordinal)
    where not w.queue = any(array(select name from holdfast.queue where paused)) -- a join might change their order
      and not w.queue = any(array(select l.queue from holdfast.job_limit l where l.queue is not null))
), due as materialized (
    select min(n.run_at) as run_at, coalesce(bool_or(:promote and n.run_at <= n.now), false) as is_due
    from (
        select least(
                (select run_at from holdfast.job where state in (1, 3) and queue = w.queue and run_at > :skip_due_until::bigint
                 order by run_at limit 1),
                (select run_at from holdfast.job where state = 4 and queue = w.queue and run_at < NEVER_US and run_at > :skip_due_until
                 order by run_at limit 1)) as run_at, :now as now
        from unnest(:queues::text[]) w (queue) where not :any_queue
        union all
        select least(
                (select run_at from holdfast.job where (+state) in (1, 3) and run_at > :skip_due_until order by run_at limit 1),
                (select run_at from holdfast.job where (+state) = 4 and run_at < NEVER_US and run_at > :skip_due_until
                 order by run_at limit 1)), :now as now
        where :any_queue
    ) n

-- fragment: claim_update
update holdfast.job
    set state = 2, claims = claims + 1, attempts = attempts + 1, worker = :worker, started_at = :now,
        lease_until = :lease_for + :now

-- fragment: claim_end
-- The first row has the facts of the claim, the others have its jobs: facts in each row would cost a tenth of the claim.
select t.*, due.is_due, due.run_at - :now, :lease_for + :now,
    exists (select from claimable_queue w cross join lateral (
        select from holdfast.job j where j.state = 0 and j.tier = 2 and j.queue = w.queue limit 1) q),
    (select queue from stop_at order by ordinal desc limit 1),
    coalesce((select expires_at from holdfast.expiry order by expires_at limit 1) <= :now, false),
    has_suspects.found
from due cross join has_suspects left join taken t on false
union all (
    select t.*, null, null, null, null, null, null, null from taken t
    order by array_position(:queues, t.queue), t.priority desc, t.run_at, t.seq)

-- fragment: matching
-- What a filter says of a job; null leaves a condition out. Within a case, since the planner would else take a filter for
-- so selective that it sorts all that matches, instead of reading one page in the order asked for.
case when (:states::smallint[] is null or j.state = any(:states))
  and (:queue::text is null or j.queue = :queue)
  and (:tasks::text[] is null or j.task = any(:tasks))
  and (:tag::text is null or (j.tagged and (select true from holdfast.tag t where t.tag = :tag and t.job_id = j.id)))
  and (:reason::text is null or j.reason = :reason)
  and (:worker::text is null or j.worker = :worker)
  and (:error::text is null or position(:error in j.error) > 0)
  and (:error_group::text is null or j.error_group = :error_group)
  and (:created_after::bigint is null or j.created_at > :created_after)
  and (:created_before::bigint is null or j.created_at < :created_before)
  and (:not_started_after::bigint is null or j.started_at is null or j.started_at <= :not_started_after)
then true else false end

-- fragment: counted
-- Numbers of jobs by state, in the order of the states' codes, and the earliest creation.
count(*) filter (where m.state = 0), count(*) filter (where m.state = 1),
count(*) filter (where m.state = 2), count(*) filter (where m.state = 3),
count(*) filter (where m.state = 4), count(*) filter (where m.state = 5),
count(*) filter (where m.state = 6), count(*) filter (where m.state = 7),
min(m.created_at)

-- own: lock_dependencies
select l::text from holdfast.lock_dependencies(:ids) l;

-- own: lock_dependencies_inside
-- The same, and the next, for a caller's own transaction.
select l::text from holdfast.lock_dependencies(string_to_array(?, ',')::uuid[]) l;

-- own: lock_batches
select batch::text, job_id::text, state, is_known from holdfast.lock_batches(:members);

-- own: lock_batches_inside
select batch::text, job_id::text, state, is_known from holdfast.lock_batches(?);

-- own: wait_for_jobs_inside
select count(*) from holdfast.add_dependencies(?);

-- own: wait_for_jobs
select queue, job_id::text from holdfast.add_dependencies(:batch);

-- own: submit_batch
select job_id, created, changed from holdfast.submit_batch(?) order by ordinal;

-- own: set_expiries
select holdfast.set_expiries(?);

-- own: find_identity
-- Whether there is a queue of ours in this database that this role may use. No error on any server.
select current_database(), current_user, c.oid is not null, coalesce(
    has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select')
        and has_table_privilege(j.oid, 'insert') and has_table_privilege(j.oid, 'update')
        and has_sequence_privilege(q.oid, 'usage'), false)
from (select btrim('holdfast.', '".') as name) s
left join pg_catalog.pg_namespace n on n.nspname = s.name
left join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = 'identity'
left join pg_catalog.pg_class j on j.relnamespace = n.oid and j.relname = 'job'
left join pg_catalog.pg_class q on q.relnamespace = n.oid and q.relname = 'job_seq_seq';

-- own: identity
select i.id::text, d.datname, d.oid::text
from holdfast.identity i cross join pg_catalog.pg_database d where d.datname = current_database();

-- fragment: uniform
-- Plain jobs that differ in their payloads alone: each array costs as much as the row it goes to. All of them or, where
-- the id of one is known, an error: `on conflict` costs a quarter more, a look before each row and a log record after it.
-- `:rank::int`: a parameter of the column's domain is checked as it is read, which costs more than a row's check.
insert into holdfast.job (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, options, claims)
select d.id, :queue, :task, d.payload, case when n.run_at <= n.now then 0 else 1 end, :rank::int, greatest(n.now, n.run_at),
    n.now, :max_attempts, :options, case when :has_client_id then n.now else 0 end
from (select c.now, coalesce(:run_at, c.now + :delay, c.now) as run_at from (select :now as now offset 0) c offset 0) n
cross join

-- own: insert_uniform_jobs
-- include: uniform
unnest(:ids::uuid[], string_to_array(:payloads::text, chr(31))) as d (id, payload);

-- fragment: awaits_ready
-- Whether a process waits for ready jobs, and holds the lock that says so (listener_lock.py).
case when pg_try_advisory_lock(1215261799, hashtext('holdfast.'))
    then not pg_advisory_unlock(1215261799, hashtext('holdfast.')) else true end

-- own: acquire_ready_lock
select pg_advisory_lock_shared(1215261799, hashtext('holdfast.'));

-- own: release_ready_lock
select pg_advisory_unlock_shared(1215261799, hashtext('holdfast.'));

-- own: notify_ready
select pg_notify(:channel, :payload) where
-- include: awaits_ready
;

-- fragment: awaits_ended
-- Whether a process listens for ends of jobs.
case when pg_try_advisory_lock(1215261800, hashtext('holdfast.'))
    then not pg_advisory_unlock(1215261800, hashtext('holdfast.')) else true end

-- own: acquire_ended_lock
select pg_advisory_lock_shared(1215261800, hashtext('holdfast.'));

-- own: release_ended_lock
select pg_advisory_unlock_shared(1215261800, hashtext('holdfast.'));

-- own: notify_ended
select pg_notify(:channel, :payload) where
-- include: awaits_ended
;

-- own: notify
select pg_notify(:channel, :payload);

-- own: insert_one_job
-- If a process waits for ready jobs: with a channel it notifies in this transaction ('notified'); without one, the caller notifies after
-- the commit ('to notify'). Else 'no listener'.
-- include: uniform
(select :id::uuid, :payload::text) as d (id, payload)
returning created_at, case when
-- include: awaits_ready
then case when :channel::text is null then 'to notify' else 'notified' || pg_notify(:channel, :notification)::text end
else 'no listener' end;

-- own: insert_jobs
-- The jobs of a batch without keys and tags. Jobs under limits: tier + 3.
insert into holdfast.job (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, options, claims,
    partition, weights, tier)
select d.id, d.queue, d.task, d.payload,
    case when coalesce(d.run_at, d.delay) is null or coalesce(d.run_at, n.now + d.delay) <= n.now then 0 else 1 end,
    d.rank, greatest(n.now, coalesce(d.run_at, n.now + d.delay)), n.now, d.max_attempts, d.options,
    case when d.has_client_id then n.now else 0 end, d.partition, d.weights, case when d.partition is null then 0 else 3 end
from (select :now as now offset 0) n
cross join unnest(:ids::uuid[], :queues::text[], :tasks::text[], :payloads::text[], :ranks::int[], :run_ats::bigint[],
    :delays::bigint[], :max_attempts::bigint[], :options::json[], :have_client_ids::boolean[], :partitions::text[], :weights::text[])
    as d (id, queue, task, payload, rank, run_at, delay, max_attempts, options, has_client_id, partition, weights)
on conflict (id) do nothing
returning id::text;

-- own: insert_keyed_jobs
-- Any batch, job by job and in the order of their keys, so that two batches cannot deadlock; `seq`, the tie-breaker,
-- is that of their submission. Of a repeated id the first job counts. With two keys a job or an id there is no such order of
-- locks: a deadlock is retried (pool.py).
select d.ordinal, a.job_id::text, a.created, a.changed,
    case when a.changed or a.created and coalesce(d.expires_at, d.expires_in) is not null
        then holdfast.set_expiry(a.job_id, coalesce(d.expires_at, n.now + d.expires_in)) end,
    case when a.created then n.now end
from (select :now as now offset 0) n
cross join lateral (
    select * from (
        select u.*, nextval('holdfast.job_seq_seq') as seq,
            bool_or(u.key is not null and u.unique_key is not null) over () as has_two_keys
        from unnest(:ids::uuid[], :queues::text[], :tasks::text[], :payloads::text[], :ranks::int[],
            :run_ats::bigint[], :delays::bigint[], :max_attempts::bigint[], :options::json[], :have_client_ids::boolean[],
            :keys::text[], :key_for::bigint[], :tags::json[], :unique_keys::json[], :expires_ats::bigint[],
            :expires_ins::bigint[], :partitions::text[], :weights::text[], :are_waiting::boolean[]) with ordinality
            as u (id, queue, task, payload, rank, run_at, delay, max_attempts, options, has_client_id, key, key_for, tags, unique_key,
                expires_at, expires_in, partition, weights, is_waiting, ordinal)
        offset 0) d
    order by case when not has_two_keys then first_value(coalesce(key, unique_key ->> 'key')) over (partition by id order by ordinal)
        end collate "C" nulls first, ordinal
) d
cross join lateral holdfast.add_job(
    d.id, d.seq, d.queue, d.task, d.payload, d.rank, greatest(n.now, coalesce(d.run_at, n.now + d.delay)), n.now,
    d.max_attempts, d.key, n.now + d.key_for, d.options, d.has_client_id,
    case when d.tags is not null then array(select json_array_elements_text(d.tags)) end, d.unique_key, d.partition, d.weights,
    coalesce(d.is_waiting, false)) a;

-- name: key_holder
select job_id::text from holdfast.key where key = :key;

-- own: key_holders
select key, job_id::text from holdfast.key where key = any(:keys::text[]);

-- own: ready_queues
-- Every queue with ready jobs, by a loose index scan.
with recursive named (queue) as (
    (select queue from holdfast.job where state = 0 order by queue, tier, rank, run_at, seq limit 1)
    union all
    select (select j.queue from holdfast.job j where j.state = 0 and j.queue > named.queue
            order by j.queue, j.tier, j.rank, j.run_at, j.seq limit 1)
    from named where named.queue is not null
)
select queue from named where queue is not null;

-- own: claim
-- Takes of each queue up to its slots, from its cursor on, up to the first job on its last attempt beyond :max_must_start. Where
-- jobs are due and :promote asks for it, takes nothing: they are made ready first. Nor where a suspect can start: the
-- caller then runs claim_with_suspects. Returns at least one row, which names a queue at which a last attempt stopped the claim.
-- include: claim_begin
), has_suspects as materialized (
    select :max_must_start > 0 and not (select is_due from due) and exists (
        select from claimable_queue w cross join lateral (
            select from holdfast.job j where j.state = 0 and j.tier = 1 and j.queue = w.queue
            order by j.rank, j.run_at, j.seq limit 1) s) as found
), ready as materialized (
    select r.ctid, w.queue, r.attempts + 1 >= r.max_attempts as is_last_attempt
    from claimable_queue w cross join lateral (
        select j.ctid, j.attempts, j.max_attempts from holdfast.job j
        where j.state = 0 and j.tier = 0 and j.queue = w.queue and (j.rank, j.run_at, j.seq) > (w.rank, w.run_at, w.seq)
          and not (select is_due from due) and not (select found from has_suspects) and -- include: unexpired
        order by j.rank, j.run_at, j.seq limit w.slots for no key update skip locked) r
    limit :limit
), numbered as materialized ( -- nothing, where all can start
    select ctid, queue, is_last_attempt, row_number() over () as ordinal from ready
    where (select count(*) from ready where is_last_attempt) > :max_must_start
), stop_at as materialized (
    select l.queue, min(l.ordinal) as ordinal
    from (select queue, ordinal from numbered where is_last_attempt order by ordinal offset :max_must_start) l
    group by l.queue
), taken as (
    -- include: claim_update
    where ctid = any(array(
        select ctid from ready where not exists (select from numbered) union all
        select n.ctid from numbered n left join stop_at b on b.queue = n.queue where n.ordinal < coalesce(b.ordinal, n.ordinal + 1)))
    returning -- include: claimed
)
-- include: claim_end
;

-- own: claim_with_suspects
-- The same with the suspects, each in its place; those beyond :max_must_start are left.
-- include: claim_begin
), has_suspects as materialized (
    select false as found
), suspect as materialized (
    select s.ctid, w.queue, w.ordinal, w.slots, true as suspect, true as must_start, s.rank, s.run_at, s.seq
    from claimable_queue w cross join lateral (
        select j.ctid, j.rank, j.run_at, j.seq from holdfast.job j
        where j.state = 0 and j.tier = 1 and j.queue = w.queue and not (select is_due from due)
        order by j.rank, j.run_at, j.seq limit least(w.slots, :max_must_start) for no key update skip locked) s
    limit :max_must_start
), ready as materialized (
    select r.ctid, w.queue, w.ordinal, w.slots, false as suspect, r.attempts + 1 >= r.max_attempts as must_start,
        r.rank, r.run_at, r.seq
    from claimable_queue w cross join lateral (
        select j.ctid, j.attempts, j.max_attempts, j.rank, j.run_at, j.seq from holdfast.job j
        where j.state = 0 and j.tier = 0 and j.queue = w.queue and (j.rank, j.run_at, j.seq) > (w.rank, w.run_at, w.seq)
          and not (select is_due from due) and -- include: unexpired
        order by j.rank, j.run_at, j.seq limit w.slots for no key update skip locked) r
    limit :limit
), candidate as materialized (
    select m.*, row_number() over (partition by ordinal order by rank, run_at, seq) as position
    from (select * from suspect union all select * from ready) m
), within_slots as materialized (
    select ctid, queue, ordinal, suspect, must_start, position,
        count(*) filter (where must_start) over (order by ordinal, position) as must_start_count
    from candidate where position <= slots order by ordinal, position limit :limit
), stop_at as materialized (
    select queue, ordinal, min(position) as position from within_slots
    where must_start and not suspect and must_start_count > :max_must_start group by queue, ordinal
), taken as (
    -- include: claim_update
    where ctid = any(array(
        select f.ctid from within_slots f left join stop_at b on b.ordinal = f.ordinal
        where f.position < coalesce(b.position, f.position + 1) and (not f.suspect or f.must_start_count <= :max_must_start)))
    returning -- include: claimed
)
-- include: claim_end
;

-- own: claimed_between
select id::text, claims from holdfast.job
where state = 2 and worker = :worker and started_at > :since and started_at < :before;

-- own: claim_quarantined
with claimable_queue as materialized (
    select queue from unnest(:queues::text[]) w (queue)
    where not exists (select from holdfast.queue p where p.name = w.queue and p.paused)
      and not w.queue = any(array(select l.queue from holdfast.job_limit l where l.queue is not null))
), taken as (
    update holdfast.job
    set state = 2, claims = claims + 1, attempts = attempts + 1, worker = :worker, started_at = :now,
        lease_until = :lease_for + :now
    where id = any(array(
        select s.id from claimable_queue w cross join lateral (
            select id from holdfast.job where state = 0 and tier = 2 and queue = w.queue
            order by rank, run_at, seq limit 1 for no key update skip locked) s
        limit 1))
    returning -- include: claimed
)
select t.*, :lease_for + :now
from taken t;

-- own: claim_ids
-- Takes of the delivered what is ready, of each queue up to its slots and to the first job on its last attempt beyond
-- :max_must_start, and says which of the rest is ready too. Makes nothing ready, but says when the next falls due. Always answers
-- with one row at least.
with paused as materialized (
    select name from holdfast.queue where paused
), candidate as materialized (
    select id, queue, tier, attempts + 1 >= max_attempts as is_last_attempt, rank, run_at, seq from holdfast.job
    where id = any(:ids::uuid[]) and state + 0 = 0 and tier + 0 <= :max_tier
      and not queue = any(array(select l.queue from holdfast.job_limit l where l.queue is not null)) and -- include: unexpired
    for no key update skip locked
), unpaused as materialized (
    select s.*, row_number() over (partition by s.tier order by s.rank, s.run_at, s.seq) as ordinal
    from candidate s where not s.queue = any(array(select name from paused))
), ranked as materialized (
    select e.*, row_number() over (partition by q.queue order by e.rank, e.run_at, e.seq) as position,
        coalesce(q.slots, :others) as slots -- unlisted queues, without a row of q, share theirs
    from unpaused e left join unnest(:queues::text[], :slots::int[]) q (queue, slots) on q.queue = e.queue
    where e.tier = 0 or e.ordinal <= :max_must_start
), within_slots as materialized (
    select w.*, count(*) filter (where w.tier > 0 or w.is_last_attempt)
        over (order by w.tier = 0, w.rank, w.run_at, w.seq) as must_start_count
    from ranked w where w.position <= w.slots
), stop_at as materialized (
    select queue, min(position) as position from within_slots
    where is_last_attempt and must_start_count > :max_must_start group by queue
), chosen as materialized (
    select f.id from within_slots f left join stop_at b on b.queue = f.queue
    where f.tier > 0 or f.position < coalesce(b.position, f.position + 1)
    order by f.rank, f.run_at, f.seq limit :limit
), due as materialized (
    select min(n.run_at) as run_at from (
        select least(
                (select run_at from holdfast.job where state in (1, 3) and queue = w.queue order by run_at limit 1),
                (select run_at from holdfast.job where state = 4 and queue = w.queue and run_at < NEVER_US
                 order by run_at limit 1)) as run_at
        from unnest(:queues::text[]) w (queue) where not :any_queue
        union all
        select least(
                (select run_at from holdfast.job where (+state) in (1, 3) order by run_at limit 1),
                (select run_at from holdfast.job where (+state) = 4 and run_at < NEVER_US order by run_at limit 1))
        where :any_queue
    ) n
), taken as (
    update holdfast.job
    set state = 2, claims = claims + 1, attempts = attempts + 1, worker = :worker, started_at = :now,
        lease_until = :lease_for + :now
    where id = any(array(select id from chosen))
    returning -- include: claimed
)
select t.*, due.run_at - :now, :lease_for + :now,
    exists (select from unnest(:queues::text[]) w (queue) cross join lateral (
        select from holdfast.job j where j.state = 0 and j.tier = 2 and j.queue = w.queue limit 1) q
        where not :any_queue and not w.queue = any(array(select name from paused)))
    or exists (select from holdfast.job j where j.state = 0 and j.tier = 2 and :any_queue
        and not j.queue = any(array(select name from paused))),
    array(select s.id::text from candidate s where not s.id = any(array(select id from chosen)) and s.tier < 2
        order by s.rank, s.run_at, s.seq),
    array(select s.queue from candidate s where not s.id = any(array(select id from chosen)) and s.tier < 2
        order by s.rank, s.run_at, s.seq),
    array(select name from paused),
    exists (select from stop_at),
    coalesce((select true from holdfast.partition p order by p.queue, p.name limit 1), false)
    or coalesce((select true from holdfast.partition_inbox i order by i.queue, i.name limit 1), false)
    or coalesce((select true from holdfast.job j where j.state = 0 and j.tier = 5 -- quarantined: not registered
        order by j.queue, j.rank, j.run_at, j.seq limit 1), false)
    or exists (select from holdfast.job_limit l where l.queue is not null),
    coalesce((select expires_at from holdfast.expiry order by expires_at limit 1) <= :now, false)
from due left join taken t on true
order by t.priority desc, t.run_at, t.seq;

-- own: promote_queues
update holdfast.job set state = 0, partition = partition, reason = case when state = 4 then null else reason end -- fires register_partition
where id = any(array(
    select d.id from (
        select u.id, u.run_at from unnest(:queues::text[]) w (queue) cross join lateral (
            select id, run_at from holdfast.job where state in (1, 3) and queue = w.queue and run_at <= :now
            order by run_at limit :limit for no key update skip locked) u
        union all
        select u.id, u.run_at from unnest(:queues::text[]) w (queue) cross join lateral (
            select id, run_at from holdfast.job where state = 4 and queue = w.queue and run_at <= :now
            order by run_at limit :limit for no key update skip locked) u) d
    order by d.run_at limit :limit))
returning queue, rank, run_at, id::text;

-- name: promote_any_queue
-- (4, 4): of a list the planner expects as many rows as of (1, 3), and does not sort them all for a few.
update holdfast.job set state = 0, partition = partition, reason = case when state = 4 then null else reason end -- fires register_partition
where id = any(array(
    select d.id from (
        select * from (
            select id, run_at from holdfast.job where (+state) in (1, 3) and run_at <= :now
            order by run_at limit :limit for no key update skip locked) u
        union all
        select * from (
            select id, run_at from holdfast.job where (+state) in (4, 4) and run_at <= :now
            order by run_at limit :limit for no key update skip locked) u) d
    order by d.run_at limit :limit))
returning queue, rank, run_at, id::text;

-- name: promote_ids
update holdfast.job set state = 0, partition = partition, reason = case when state = 4 then null else reason end -- fires register_partition
where id = any(array(
    select id from holdfast.job where id = any(:ids::uuid[]) and (state + 0) in (1, 3, 4) and run_at + 0 <= :now
    order by id for no key update skip locked));

-- name: mark_unreadable
-- A claimed row that cannot be read, if that claim still has it. Returns what resolving its dependents changed.
with marked as (
    update holdfast.job set state = 6, reason = 'payload', error = :error, error_group = 'unreadable',
        ended_at = :now, lease_until = null
    where id = :id and (state + 0) = 2 and claims = :claims
    returning id
)
select d.queue, d.job_id::text
from (select array_agg(id) as ids from marked) e
cross join lateral holdfast.resolve_dependencies(e.ids, :now, false) d;

-- fragment: succeed
-- Rows that others have locked are not waited for: no open transaction keeps a batch of others' jobs. Awaited jobs are
-- left to settle_with_dependents.
update holdfast.job j
set state = 5, ended_at = :now, result = d.result, lease_until = null, lost_leases = 0, tier = 0, cancelling = false,
    reason = null, error = null, error_group = null
from unnest(:ids::uuid[], :claims::bigint[], :results::text[]) as d (id, claims, result)
where j.id = d.id and j.claims = d.claims and j.state + 0 = 2 and j.lease_until + 0 > :now
  and (:worker::text is null or j.worker = :worker) and not j.has_dependents
  and (select set_config('lock_timeout', '250ms', true)) is not null

-- name: settle_succeeded
-- include: succeed
returning j.id::text;

-- own: settle_limited_succeeded
-- The same with the queues and partitions in which there is room again.
-- include: succeed
returning j.id::text, case when j.partition is not null then j.queue end, j.partition;

-- name: complete
select accepted, state from holdfast.complete(?);

-- name: tx_outcome
-- No row: it is gone, or its handler's transaction holds it.
select state, claims from holdfast.job where id = :id for no key update skip locked;

-- fragment: settle
-- What is no ending (state < 5) becomes one when a cancellation was asked for: only this write can see the flag. A job that
-- would wait, and has nothing to wait for, is due.
update holdfast.job j
    set state = case when j.cancelling and d.state < 5 then 7
            when d.state = 4 and not holdfast.has_waits(j.id, j.claims, j.waits) then 1 else d.state end,
        reason = case when j.cancelling and d.state < 5 then 'cancelled'
            when d.state = 4 and not holdfast.has_waits(j.id, j.claims, j.waits) then null else d.reason end,
        error = case when d.state = 5 then null else coalesce(d.error, j.error) end,
        error_group = case when d.state = 5 then null else coalesce(d.error_group, j.error_group) end,
        result = d.result,
        run_at = case when d.state = 4 and not j.cancelling and not holdfast.has_waits(j.id, j.claims, j.waits) then :now
            when d.delay is not null then d.delay + :now
            when d.state = 4 and not j.cancelling then NEVER_US else j.run_at end,
        attempts = greatest(0, j.attempts - case when d.refund then 1 else 0 end), -- another program may have set it to 0
        lost_leases = case when d.lease_expired then j.lost_leases + 1 when d.refund then j.lost_leases else 0 end,
        tier = case when d.lease_expired then least(j.lost_leases + 1, 2) when d.refund then j.tier % 3 else 0 end
            + case when j.partition is null then 0 else 3 end,
        ended_at = case when d.state >= 5 or j.cancelling then :now end,
        cancelling = false,
        lease_until = null

-- fragment: settle_guard
    from unnest(:ids::uuid[], :claims::bigint[], :states::smallint[], :reasons::text[], :results::text[],
        :errors::text[], :error_groups::text[], :tracebacks::text[], :delays::bigint[], :refunds::boolean[], :lease_expireds::boolean[],
        :workers::text[])
        with ordinality as d (id, claims, state, reason, result, error, error_group, traceback, delay, refund, lease_expired,
            worker, ordinal)
    where j.id = d.id and j.claims = d.claims and j.state + 0 = 2 and (d.worker is null or j.worker = d.worker)
      and (j.lease_until <= :now) = d.lease_expired
      and (select set_config('lock_timeout', '250ms', true)) is not null

-- fragment: settle_end
returning d.ordinal, j.id, j.claims, j.state, j.run_at, j.queue, j.attempts, j.worker, j.started_at, d.reason, d.error,
        d.traceback, d.refund, j.partition
), inserted_attempt as (
    insert into holdfast.attempt (job_id, claims, attempt, worker, started_at, ended_at, state, reason, error, traceback)
    select id, claims, attempts, worker, started_at, :now, state, reason, error, traceback
    from settled where not refund and state <> 5
    on conflict do nothing
)

-- own: settle_rest
-- Settlements that are no success under a valid lease, set no new priority and end no job with dependents.
with settled as (
    -- include: settle
    -- include: settle_guard
      and not j.has_dependents
    -- include: settle_end
select ordinal, state, run_at, queue, partition from settled;

-- own: settle_reprioritized
-- Failures that give their jobs another priority. Of jobs with dependents a cancelled one is left to settle_with_dependents.
with settled as (
    -- include: settle
        , rank = case when j.cancelling then j.rank else (:ranks::integer[])[d.ordinal] end
    -- include: settle_guard
      and not (j.has_dependents and j.cancelling)
    -- include: settle_end
select ordinal, state, run_at, queue, partition from settled;

-- own: settle_with_dependents
-- Settles jobs with dependents and resolves their dependencies: also returns queues with jobs that are due now, and jobs that ended.
-- Jobs with a common dependent are settled one after the other, so the lock timeout for rows of dependents is longer.
with settled as (
    -- include: settle
    -- include: settle_guard
      and j.has_dependents
    -- include: settle_end
, resolved as materialized (
    select d.queue, d.job_id
    from (select array_agg(id) as ids, set_config('lock_timeout', '2s', true) from settled where state >= 5) e
    cross join lateral holdfast.resolve_dependencies(e.ids, :now, false) d
)
select ordinal, state, run_at, queue, partition, null as ended from settled
union all
select null, null, null, queue, null, job_id::text from resolved;

-- own: unlocked
-- Jobs that no other transaction has locked, and whose waiting dependents none has locked.
with free as materialized (
    select id, has_dependents from holdfast.job where id = any(:ids::uuid[]) order by id for no key update skip locked
), waiting as materialized (
    select d.job_id, d.waiter from free f join holdfast.dependency d on d.job_id = f.id where f.has_dependents and d.state = 'open'
), free_waiting as materialized (
    select id from holdfast.job where id = any(array(select waiter from waiting)) order by id for no key update skip locked
)
select f.id::text from free f
where not f.has_dependents or not exists (
    select from waiting w where w.job_id = f.id and not w.waiter = any(array(select id from free_waiting)));

-- own: resolve_ended
select queue, job_id::text from holdfast.resolve_dependencies(:ids, :now, :deleted);

-- own: recorded_outcomes
-- State of each job, and the recorded outcome of its attempt under this lease.
select d.ordinal, j.state, j.claims, j.run_at, a.state, a.reason, a.error
from unnest(:ids::uuid[], :claims::bigint[]) with ordinality as d (id, claims, ordinal)
left join holdfast.job j on j.id = d.id
left join holdfast.attempt a on a.job_id = d.id and a.claims = d.claims;

-- own: append_logs
-- Stores lines of valid leases, and returns these leases. The lease of a job that has succeeded is still valid: only its worker can
-- have settled it. The deletion of a job waits, and deletes these lines too.
with valid_lease as materialized (
    select d.ordinal, j.id, j.claims, j.attempts
    from unnest(:ids::uuid[], :claims::bigint[]) with ordinality as d (id, claims, ordinal)
    join holdfast.job j on j.id = d.id
    where j.claims = d.claims and (j.state + 0 = 2 and j.lease_until + 0 > :now or j.state + 0 = 5)
    order by j.id for key share of j
), inserted_line as (
    insert into holdfast.line (job_id, claims, number, attempt, at, level, text, fields)
    select s.id, s.claims, d.number, s.attempts, :now - d.ago, d.level, d.text, d.fields
    from unnest(:ordinals::bigint[], :numbers::integer[], :agos::bigint[], :levels::text[], :texts::text[],
        :fields::text[]) as d (ordinal, number, ago, level, text, fields)
    join valid_lease s on s.ordinal = d.ordinal
    on conflict do nothing
)
select ordinal from valid_lease;

-- own: save_steps
-- Stores steps of valid leases, and returns these leases. Settling or deleting the job waits; a later claim reads the steps.
with valid_lease as materialized (
    select d.ordinal, j.id, j.claims
    from unnest(:ids::uuid[], :claims::bigint[], :workers::text[]) with ordinality as d (id, claims, worker, ordinal)
    cross join lateral ( -- offset 0: a plan for a small table would scan it for each step
        select k.id, k.claims from holdfast.job k
        where k.id = d.id and k.claims = d.claims and k.state + 0 = 2 and k.lease_until + 0 > :now
          and k.worker = coalesce(d.worker, k.worker)
        offset 0 for share) j
), saved_step as (
    insert into holdfast.step (job_id, ended_at, claims, number, is_ordered, name, result)
    select h.id, :now, h.claims, d.number, d.is_ordered, d.name, d.result
    from unnest(:numbers::integer[], :are_ordered::boolean[], :names::text[], :results::text[])
        with ordinality as d (number, is_ordered, name, result, ordinal)
    join valid_lease h on h.ordinal = d.ordinal
    order by h.id, d.name
    on conflict (job_id, name) do update set claims = excluded.claims, ended_at = excluded.ended_at, result = excluded.result
    where excluded.number = 0
)
select ordinal from valid_lease;

-- own: save_step
-- The same for one step: most workflows take one at a time, and arrays cost as much as the rest.
with valid_lease as materialized (
    select k.id, k.claims from holdfast.job k
    where k.id = :id and k.claims = :claims and k.state + 0 = 2 and k.lease_until + 0 > :now
      and k.worker = coalesce(:worker, k.worker)
    for share
), saved_step as (
    insert into holdfast.step (job_id, ended_at, claims, number, is_ordered, name, result)
    select h.id, :now, h.claims, :number::integer, :is_ordered::boolean, :name::text, :result::text
    from valid_lease h
    on conflict (job_id, name) do update set claims = excluded.claims, ended_at = excluded.ended_at, result = excluded.result
    where excluded.number = 0
)
select 1 from valid_lease;

-- own: copy_steps
-- Of a new job.
insert into holdfast.step (job_id, ended_at, claims, number, is_ordered, name, result)
select :id, d.ended_at, d.claims, d.number, d.is_ordered, d.name, d.result
from unnest(:names::text[], :numbers::integer[], :are_ordered::boolean[], :claims::bigint[], :ended_ats::bigint[], :results::text[])
    as d (name, number, is_ordered, claims, ended_at, result);

-- name: record_step
-- On the connection of its handler, behind the step that must be there. No other worker takes the job before that ends.
with step as materialized (
    select cast(g.step ->> 'id' as uuid) as id, cast(g.step ->> 'claims' as bigint) as claims, g.step ->> 'worker' as worker,
        cast(g.step ->> 'number' as integer) as number, cast(g.step ->> 'is_ordered' as boolean) as is_ordered,
        g.step ->> 'name' as name, g.step ->> 'result' as result, g.step ->> 'previous' as previous,
        coalesce(cast(g.step ->> 'at' as bigint), cast(extract(epoch from statement_timestamp()) * 1000000 as bigint)) as at
    from (select cast(cast(? as text) as json) as step) g
), valid_lease as materialized (
    select j.id, j.claims from step g join holdfast.job j on j.id = g.id
    where j.claims = g.claims and j.state + 0 = 2 and j.lease_until + 0 > g.at and j.worker = coalesce(g.worker, j.worker)
    for share of j
), recorded_step as (
    insert into holdfast.step (job_id, ended_at, claims, number, is_ordered, name, result)
    select h.id, g.at, h.claims, g.number, g.is_ordered, g.name, g.result
    from valid_lease h cross join step g
    where g.previous is null
        or exists (select from holdfast.step s where s.job_id = h.id and s.name = g.previous)
    on conflict do nothing
    returning 1
)
select exists (select from valid_lease), exists (select from recorded_step);

-- name: delete_steps
-- And what their jobs wait for.
with deleted_receivers as (delete from holdfast.receiver where job_id = any(:ids::uuid[]) and number >= :from_step)
delete from holdfast.step
where job_id = any(:ids::uuid[]) and (number >= :from_step or number = 0 and name = '#children');

-- name: steps
select name, number, is_ordered, claims, ended_at, result from holdfast.step where job_id = :id order by number, name;

-- own: receive_signal
select has_lease, result, time_left from holdfast.receive_signal(
    :at, :id, :claims, :worker, :step, :number, :is_ordered, :topic, :timeout);

-- own: send_signal
select is_new, job_id, ready_queue, is_full from holdfast.send_signal(:at, :signal, :topic, :value, :max_signals);

-- name: signals
select id, topic, value, sent_at from holdfast.signal
where topic = :topic and job_id is null order by ordinal limit :limit;

-- name: all_signals
select id, topic, value, sent_at from holdfast.signal
where job_id is null and ordinal > 0 order by ordinal limit :limit;

-- name: prune_signals
delete from holdfast.signal where id = any(array(
    select id from holdfast.signal where sent_at <= :now - :span::bigint
    order by sent_at limit :limit for update skip locked));

-- own: lock_children
-- Before their parent, as their ends do.
select id from holdfast.job where id = any(:ids::uuid[]) order by id for no key update;

-- own: lock_leased_job
select id from holdfast.job
where id = :id and claims = :claims and state + 0 = 2 and lease_until + 0 > :now and worker = :worker
for no key update;

-- name: known_children
-- Of these children, those that a job has started before, and the jobs that stand for them.
select job_id::text, coalesce(holder, job_id)::text from holdfast.dependency
where waiter = :id and is_child and job_id = any(:ids::uuid[]);

-- own: await_children
select job_id, state from holdfast.await_children(:id, :ids, :jobs);

-- name: receiver
select r.topic, r.step, r.begun_at, r.deadline
from holdfast.receiver r join holdfast.job j on j.id = r.job_id
where r.job_id = :id and r.is_listed and r.claims = j.claims and j.state + 0 in (2, 4);

-- name: batch
-- Its progress.
select members, members - waits, failed from holdfast.job where id = :id and members is not null;

-- own: dependencies_of
select job_id::text, condition, state, is_child from holdfast.dependency where waiter = :id and holder is null order by job_id limit :limit;

-- own: dependents_of
select d.waiter::text, d.condition, d.state, d.is_child
from unnest(array['open', 'met', 'failed']) s (state) cross join lateral (
    select waiter, condition, state, is_child from holdfast.dependency
    where job_id = :id and state = s.state order by waiter limit :limit) d
order by d.waiter limit :limit;

-- name: states_of
select id::text, state, claims from holdfast.job where id = any(:ids::uuid[]);

-- own: heartbeat
-- Locked rows are skipped: a lease whose handler is settling it in its own transaction is answered `locked` and not extended, and
-- the worker's own row is written by a later heartbeat.
with known as materialized (
    select id from holdfast.worker where id = :worker for no key update skip locked
), renewed as (
    update holdfast.worker w set
        queues = :queues, concurrency = :concurrency, running = :running,
        succeeded = :succeeded + case when :has_deltas then w.succeeded else 0 end,
        failed = :failed + case when :has_deltas then w.failed else 0 end,
        version = :version, memory = :memory, seen_at = :now, alive_until = :alive_for + :now
    from known where w.id = known.id
), registered as (
    insert into holdfast.worker
        (id, host, pid, queues, concurrency, running, succeeded, failed, version, memory, started_at, seen_at, alive_until)
    select :worker, :host, :pid, :queues, :concurrency, :running, :succeeded, :failed, :version, :memory,
        n.now, n.now, n.now + :alive_for
    from (select :now as now offset 0) n
    where not exists (select from known)
    on conflict do nothing
), renewable as materialized (
    select j.id
    from unnest(:ids::uuid[], :claims::bigint[]) as d (id, claims) join holdfast.job j on j.id = d.id
    where j.claims = d.claims and j.worker = :worker and j.state + 0 = 2 and j.lease_until + 0 > :now
    order by j.id for no key update of j skip locked
), extended as (
    update holdfast.job j set lease_until = :lease_for + :now
    where j.id = any(array(select id from renewable)) and j.state + 0 = 2)
select w.command, case when d.id is null then null when j.id is null then 'lost'
    when j.id not in (select id from renewable) then 'locked' when j.cancelling then 'cancel' else 'held' end
from (select coalesce((select command from holdfast.worker where id = :worker), 'none') as command) w
left join unnest(:ids::uuid[], :claims::bigint[]) with ordinality as d (id, claims, ordinal) on true
left join holdfast.job j on j.id = d.id and j.claims = d.claims and j.worker = :worker and j.state + 0 = 2
    and j.lease_until + 0 > :now
order by d.ordinal;

-- name: delete_worker
delete from holdfast.worker where id = :worker;

-- name: expired_leases
-- A row that another transaction holds is left alone: its own handler is about to end the job.
select -- include: job_columns
from holdfast.job j where j.state = 2 and j.lease_until <= :now
order by j.lease_until limit :limit for no key update skip locked;

-- name: prune_jobs
-- Not those that `is_needed` finds, nor those that a replay of a failed job brings back.
select id::text, has_key, has_dependents from holdfast.job
where state >= 5 and (state, ended_at) >= (:state::smallint, 0::bigint)
  and (state, ended_at) <= (:state::smallint, :now - :span::bigint)
  and not (has_dependents and holdfast.is_needed(id, :now - :span::bigint))
  and not (reason is not distinct from 'dependency' and :state::smallint = 7 and holdfast.has_failed_dependency(id))
order by state, ended_at limit :limit for update skip locked;

-- own: prunable
-- The same once they are locked: a submission that waits for one of them may have been committed meanwhile.
select id::text from holdfast.job where id = any(:ids::uuid[]) and not holdfast.is_needed(id, :now - :span::bigint);

-- name: delete_jobs
with deleted as (
    delete from holdfast.job where id = any(:ids::uuid[])
    returning id, tagged, expires_at, waits
), deleted_tags as (
    delete from holdfast.tag where job_id = any(array(select id from deleted where tagged))
), deleted_expiries as (
    delete from holdfast.expiry where job_id = any(array(select id from deleted where expires_at is not null))
), deleted_lines as (
    delete from holdfast.line where job_id = any(array(select id from deleted))
), deleted_steps as (
    delete from holdfast.step where job_id = any(array(select id from deleted))
), deleted_waits as (
    delete from holdfast.dependency where waiter = any(array(select id from deleted where waits is not null))
), deleted_receivers as (
    delete from holdfast.receiver where job_id = any(array(select id from deleted where waits is not null))
)
delete from holdfast.attempt where job_id = any(array(select id from deleted));

-- name: delete_keys_of
-- Deleting a job frees its key; pruning leaves it until its own lifetime is over.
delete from holdfast.key where job_id = any(:ids::uuid[]) and (:ignore_lifetime or coalesce(keep_until, 0) <= :now);

-- name: detach_expired_keys
-- Keys whose lifetime is over and whose job is still stored: from now on they are deleted with it, and no sweep reads them again.
with expired_key as materialized (
    select key, job_id from holdfast.key
    where keep_until <= :now order by keep_until limit :limit for update skip locked
)
update holdfast.key set keep_until = null
where key = any(array(
    select key from expired_key where (select j.id from holdfast.job j where j.id = expired_key.job_id) is not null));

-- name: prune_keys
-- Keys without a job, those whose lifetime ended first; `detach_expired_keys` has detached those with one.
with expired_key as materialized (
    select key, job_id from holdfast.key
    where keep_until <= :now order by keep_until limit :limit for update skip locked
)
delete from holdfast.key where key = any(array(
    select key from expired_key where (select j.id from holdfast.job j where j.id = expired_key.job_id) is null));

-- name: prune_workers
delete from holdfast.worker where alive_until <= :now - :span::bigint;

-- name: expire_jobs
-- Expires due jobs that no worker has taken. Returns them with the number of due rows, then the changes for jobs that wait for them.
-- Rows that other transactions have locked are left for the next call.
with due as materialized (
    select job_id from holdfast.expiry where expires_at <= :now
    order by expires_at limit :limit for update skip locked
), locked as materialized (
    select id, (state + 0) in (0, 1, 3, 4) and started_at is null and expires_at <= :now as ends from holdfast.job
    where id = any(array(select job_id from due)) order by id for no key update skip locked
), deleted_expiry as (
    delete from holdfast.expiry e
    where e.job_id = any(array(select job_id from due)) and (e.job_id = any(array(select id from locked))
        or not exists (select from holdfast.job j where j.id = e.job_id))
), expired as (
    update holdfast.job
    set state = 7, reason = 'expired', error = coalesce(error, 'expired: no worker began it in time'), lost_leases = 0, tier = 0,
        ended_at = :now
    where id = any(array(select id from locked where ends)) and (state + 0) in (0, 1, 3, 4)
    returning id, task, queue, has_dependents
), resolved as materialized (
    select d.queue, d.job_id
    from (select array_agg(id) as ids, set_config('lock_timeout', '2s', true) from expired where has_dependents) e
    cross join lateral holdfast.resolve_dependencies(e.ids, :now, false) d
)
select n.number, expired.id::text, expired.task, expired.queue, null as due, null as cancelled
from (select count(*) as number from due) n left join expired on true
union all
select 0, null, null, null, queue, job_id::text from resolved;

-- name: rewrite_unstarted
-- An edit of a job that waits. Null leaves a value as it is.
update holdfast.job j
set queue = coalesce(:queue, j.queue), rank = coalesce(:rank, j.rank), payload = coalesce(:payload, j.payload),
    run_at = case when j.state = 4 then j.run_at else coalesce(d.run_at, j.run_at) end,
    state = case when d.run_at is null or j.state = 4 then j.state when d.run_at <= :now then 0 else 1 end,
    options = case when :retagged then :options else j.options end,
    tagged = case when :retagged then :tags::text[] <> '{}' else j.tagged end
from (select case when n.run_at is not null then greatest(:now, n.run_at) end as run_at
      from (select coalesce(:run_at::bigint, :now + :delay::bigint) as run_at offset 0) n) d
where j.id = :id and (j.state + 0) in (0, 1, 3, 4) and (not :will_expire or j.started_at is null)
returning j.id::text, j.state, j.queue;

-- name: drop_tags
delete from holdfast.tag where job_id = :id::uuid and not tag = any(:tags::text[]);

-- own: add_tags
insert into holdfast.tag (tag, job_id) select distinct t, :id::uuid from unnest(:tags::text[]) t on conflict do nothing;

-- name: set_expiry
select holdfast.set_expiry(:id, coalesce(:expires_at::bigint, :now + :expires_in::bigint));

-- name: cancel_unstarted
update holdfast.job
set state = 7, reason = 'cancelled', error = coalesce(error, 'cancelled'), lost_leases = 0, tier = 0, ended_at = :now
where id = any(:ids::uuid[]) and (state + 0) in (0, 1, 3, 4)
returning id::text, has_dependents;

-- name: cancel_running
update holdfast.job set cancelling = true
where id = any(:ids::uuid[]) and state + 0 = 2
returning id::text, worker;

-- name: replay
update holdfast.job j
set state = case when d.later > 0 then 1 else 0 end, attempts = 0, lost_leases = 0,
    tier = case when j.partition is null then 0 else 3 end, reason = null, error = null, error_group = null,
    result = null, ended_at = null, ended_by = null, expires_at = null, payload = coalesce(:payload, j.payload),
    run_at = d.later + :now
from unnest(:ids::uuid[], :laters::bigint[]) as d (id, later)
where j.id = d.id and ((j.state + 0) in (3, 6, 7) or (:force and j.state + 0 = 5)) and j.members is null
returning j.id::text, j.queue, j.state, j.has_dependents or j.waits is not null;

-- own: renew_waits
select r::text from holdfast.reopen_dependencies(:ids) r;

-- name: unique_keys_of
-- The keys under policies of uniqueness that these jobs must have again to be replayed.
select id::text, options::text from holdfast.job
where id = any(:ids::uuid[]) and (state + 0 in (3, 6, 7) or (:force and state + 0 = 5))
  and options::text like '%"unique"%';

-- own: take_unique_keys
-- In the order of the keys, so that two calls never wait for each other.
select d.id::text, holdfast.take_unique(d.id, d.unique_key, :now)::text
from (
    select * from unnest(:ids::uuid[], :unique_keys::json[]) as u (id, unique_key)
    order by (u.unique_key ->> 'key') collate "C" offset 0) d;

-- name: deletable
select id::text, state, has_dependents from holdfast.job
where id = any(:ids::uuid[]) and state + 0 <> 2 and (:states::smallint[] is null or state + 0 = any(:states)) for update;

-- name: choose
-- Oldest first. Operations by filter go through the table in its own order; they are rare and bounded.
select j.id::text from holdfast.job j
where (not j.cancelling or not :uncancelled) and -- include: matching
order by j.id limit :limit;

-- name: choose_ended
-- The same for one of the states dead and cancelled, through their own index.
select j.id::text from holdfast.job j
where (+j.state) > 5 and (j.state, j.id) >= (:state::smallint, '00000000-0000-0000-0000-000000000000'::uuid)
  and (j.state, j.id) <= (:state::smallint, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid) and -- include: matching
order by j.state, j.id limit :limit;

-- name: choose_again
-- Those of the chosen that the filter still matches, and no other can change before this transaction ends.
select j.id::text from holdfast.job j
where j.id = any(:ids::uuid[]) and (not j.cancelling or not :uncancelled) and -- include: matching
order by j.id for update;

-- own: lock_jobs
select id::text from holdfast.job where id = any(:ids::uuid[]) order by id for update;

-- own: queues_and_states
select id::text, queue, state from holdfast.job where id = any(:ids::uuid[]);

-- own: depths
-- Ready jobs of each queue, up to a number.
select w.queue, (
    select count(*) from (
        select from holdfast.job where state = 0 and queue = w.queue and tier < 2
        order by tier, rank, run_at, seq limit w.max_count
    ) r)
from unnest(:queues::text[], :max_counts::int[]) w (queue, max_count);

-- own: oldest
select o.id::text from (
    select * from (
        (select id, rank, run_at, seq from holdfast.job where state = 0 and tier = 0 and queue = :queue
         order by rank, run_at, seq limit :limit)
        union all
        (select id, rank, run_at, seq from holdfast.job where state = 0 and tier = 1 and queue = :queue
         order by rank, run_at, seq limit :limit)
    ) r order by rank, run_at, seq limit :limit
) o where o.run_at <= :now - :aged::bigint
order by o.rank, o.run_at, o.seq;

-- own: overtaken
-- Ready jobs of a queue that were ready :margin before the first of :ids: the oldest of each priority in use (a loose index scan).
-- A rescued job keeps its run_at, but has been ready only since its last start.
with recursive oldest_start (since) as (
    select min(greatest(run_at, started_at)) - :margin::bigint from holdfast.job
    where id = any(:ids::uuid[]) and state + 0 = 0 and queue = :queue
), used (tier, rank) as (
    select t.tier, (select j.rank from holdfast.job j where j.state = 0 and j.tier = t.tier and j.queue = :queue
                    order by j.rank, j.run_at, j.seq limit 1)
    from unnest('{0,1}'::smallint[]) t (tier)
    union all
    select used.tier, (select j.rank from holdfast.job j
            where j.state = 0 and j.tier = used.tier and j.queue = :queue and j.rank > used.rank
            order by j.rank, j.run_at, j.seq limit 1)
    from used where used.rank is not null
), overtaken_job as (
    select o.* from unnest('{0,1}'::smallint[]) t (tier) cross join lateral (
        select o.* from (select rank from used where used.tier = t.tier limit :limit) r cross join lateral (
            select j.id, j.run_at, j.started_at from holdfast.job j
            where j.state = 0 and j.tier = t.tier and j.queue = :queue and j.rank = r.rank
              and j.run_at < (select since from oldest_start)
            order by j.rank, j.run_at, j.seq limit :limit) o
        limit :limit) o
)
select j.id::text, o.since, :now from overtaken_job j, oldest_start o where greatest(j.run_at, j.started_at) < o.since;

-- own: dead_queues
-- Every queue with dead letters, by skipping from one to the next.
with recursive named (queue) as (
    (select queue from holdfast.job where (+state) = 6 order by queue, ended_at, id limit 1)
    union all
    select (select j.queue from holdfast.job j where (+j.state) = 6 and j.queue > named.queue
            order by j.queue, j.ended_at, j.id limit 1)
    from named where named.queue is not null
)
select queue from named where queue is not null;

-- own: newest_dead
select j.id::text from holdfast.job j where (+j.state) = 6 and j.queue = :queue
order by j.queue desc, j.ended_at desc, j.id desc limit :limit;

-- name: set_paused
insert into holdfast.queue (name, paused) values (:queue, :paused)
on conflict (name) do update set paused = excluded.paused;

-- name: set_command
update holdfast.worker set command = :command
where alive_until > :now
  and (:workers::text[] is null or id = any(:workers))
returning id;

-- name: get
select -- include: job_columns
from holdfast.job j where j.id = :id;

-- name: get_many
select -- include: job_columns
from holdfast.job j where j.id = any(:ids::uuid[]);

-- name: summaries
-- `get` of many, without what may be large.
select j.id::text, j.task, j.queue, '{}', j.claims, j.attempts, j.max_attempts, -j.rank, j.lost_leases, j.run_at, j.created_at,
    j.options, j.state, j.worker, j.lease_until, j.started_at, j.ended_at, j.reason, j.error, null, null, j.cancelling,
    j.partition, j.expires_at, j.error_group
from holdfast.job j where j.id = any(:ids::uuid[]);

-- name: find
select -- include: job_columns
from holdfast.job j
where j.id < :before and j.id >= :after and -- include: matching
order by j.id desc limit :limit;

-- own: part_start
select id from holdfast.job where id < :before order by id desc limit 1 offset :size;

-- name: find_ended
-- The same for one of the states dead and cancelled, through their own index: they are few among millions.
select -- include: job_columns
from holdfast.job j
where (+j.state) > 5 and (j.state, j.id) < (:state::smallint, :before::uuid)
  and (j.state, j.id) >= (:state::smallint, '00000000-0000-0000-0000-000000000000'::uuid) and -- include: matching
order by j.state desc, j.id desc limit :limit;

-- name: find_tagged
-- The same for jobs with a tag, through the tags, which are in the order of the jobs.
select -- include: job_columns
from holdfast.tag t cross join lateral (select * from holdfast.job where id = t.job_id offset 0) j
where (t.tag, t.job_id) < (:tag::text, :before::uuid)
  and (t.tag, t.job_id) >= (:tag::text, '00000000-0000-0000-0000-000000000000'::uuid) and -- include: matching
order by t.tag desc, t.job_id desc limit :limit;

-- name: find_unended
-- The same for states of jobs that have not ended, through the indexes of these states: at most :max_count of each.
select -- include: job_columns
from (
    select j.* from (
        (select * from holdfast.job where state = 0 and 0 = any(:states::smallint[])
            order by queue, tier, rank, run_at, seq limit :max_count)
        union all
        (select * from holdfast.job where (+state) in (1, 3) and :states::smallint[] && '{1,3}' order by run_at limit :max_count)
        union all
        (select * from holdfast.job where state = 2 and 2 = any(:states::smallint[]) order by lease_until limit :max_count)
        union all
        (select * from holdfast.job where (+state) = 4 and 4 = any(:states::smallint[]) order by run_at limit :max_count)) j
    where j.id < :before and -- include: matching
    order by j.id desc limit :limit) j
order by j.id desc;

-- name: count_unended
-- Jobs through which find_unended would go, at most :max_count in each index.
select (select count(*) from (
        select from holdfast.job where state = 0 and 0 = any(:states::smallint[])
        order by queue, tier, rank, run_at, seq limit :max_count) r)
    + (select count(*) from (
        select from holdfast.job where (+state) in (1, 3) and :states::smallint[] && '{1,3}' order by run_at limit :max_count) r)
    + (select count(*) from (
        select from holdfast.job where state = 2 and 2 = any(:states::smallint[]) order by lease_until limit :max_count) r)
    + (select count(*) from (
        select from holdfast.job where (+state) = 4 and 4 = any(:states::smallint[]) order by run_at limit :max_count) r);

-- name: count
select -- include: counted
from (
    select j.state, j.created_at from holdfast.job j
    where -- include: matching
    limit :limit) m;

-- name: count_tagged
-- The same for jobs with a tag, through the tags.
select -- include: counted
from (
    select j.state, j.created_at
    from holdfast.tag t cross join lateral (select * from holdfast.job where id = t.job_id offset 0) j
    where (t.tag, t.job_id) >= (:of_tag::text, '00000000-0000-0000-0000-000000000000'::uuid)
      and (t.tag, t.job_id) <= (:of_tag::text, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid) and -- include: matching
    order by t.tag, t.job_id limit :limit) m;

-- name: count_ended
select -- include: counted
from (
    select j.state, j.created_at from holdfast.job j
    where (+j.state) > 5 and (j.state, j.id) >= (:state::smallint, '00000000-0000-0000-0000-000000000000'::uuid)
      and (j.state, j.id) <= (:state::smallint, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid) and -- include: matching
    order by j.state, j.id limit :limit) m;

-- name: attempts
select claims, attempt, worker, started_at, ended_at, state, reason, error, traceback
from holdfast.attempt where job_id = :id order by claims;

-- name: logs
select claims, number, attempt, at, level, text, fields
from holdfast.line
where job_id = :id::uuid and (claims, number) > (:claims::bigint, :number::integer)
order by claims, number limit :limit;

-- name: overview_queues
-- Every queue in which something waits, by skipping from one to the next.
with recursive named (queue) as (
    (select least(
        (select queue from holdfast.job where state = 0 order by queue, tier, rank, run_at, seq limit 1),
        (select queue from holdfast.job where state in (1, 3) order by queue, run_at limit 1),
        (select queue from holdfast.job where state = 4 order by queue limit 1)))
    union all
    (select least(
        (select queue from holdfast.job where state = 0 and queue > named.queue
         order by queue, tier, rank, run_at, seq limit 1),
        (select queue from holdfast.job where state in (1, 3) and queue > named.queue
         order by queue, run_at limit 1),
        (select queue from holdfast.job where state = 4 and queue > named.queue order by queue limit 1))
     from named where named.queue is not null)
)
select queue from named where queue is not null;

-- name: overview
-- Counts by queue and state, each of which looks at so many jobs at most. Of what has ended at the latest, and then how many did
-- within :recent, and how long ago the first of them. The last limit is a subquery for the same reason as in figures.
select w.queue, counted.state, counted.number, 0::bigint as lately, 0::bigint as age
from unnest(:queues::text[], :max_counts::int[]) w (queue, max_count) cross join lateral (
    select 0::smallint as state, count(*) as number from (
        select from holdfast.job where state = 0 and queue = w.queue
        order by tier, rank, run_at, seq limit w.max_count) r
    union all
    select 4::smallint, count(*) from (
        select from holdfast.job where state = 4 and queue = w.queue order by queue limit w.max_count) r
    union all
    select d.state, count(*) from (
        select j.state from holdfast.job j where j.state in (1, 3) and j.queue = w.queue
        order by j.run_at limit w.max_count) d
    group by d.state) counted
union all
select r.queue, 2::smallint, count(*), 0, 0 from (
    select queue from holdfast.job where state = 2 order by lease_until limit :max_count) r
group by r.queue
union all
select e.queue, e.state, count(*), count(*) filter (where e.ended_at >= :now - :recent::bigint), :now - min(e.ended_at)
from unnest(:ended::smallint[]) s (code) cross join lateral (
    select j.queue, j.state, j.ended_at from holdfast.job j
    where j.state >= 5 and (j.state, j.ended_at) >= (s.code, 0::bigint) and (j.state, j.ended_at) <= (s.code, 9223372036854775807)
    order by j.state desc, j.ended_at desc limit (select :max_count::bigint)) e
group by e.queue, e.state;

-- name: oldest_ready
-- For each of these queues the first of each tier and priority in use, found by skipping from one to the next: two seeks each,
-- however many jobs there are.
select w.queue, oldest.run_at - :now
from unnest(:queues::text[]) w (queue) cross join lateral (
    with recursive used (tier, rank) as (
        select s.tier, (select j.rank from holdfast.job j where j.state = 0 and j.tier = s.tier and j.queue = w.queue
                        order by j.rank, j.run_at, j.seq limit 1)
        from unnest('{0,1,2,3,4,5}'::smallint[]) s (tier)
        union all
        select used.tier, (select j.rank from holdfast.job j
                where j.state = 0 and j.tier = used.tier and j.queue = w.queue and j.rank > used.rank
                order by j.rank, j.run_at, j.seq limit 1)
        from used where used.rank is not null)
    select min((select j.run_at from holdfast.job j
                where j.state = 0 and j.tier = used.tier and j.queue = w.queue and j.rank = used.rank
                order by j.rank, j.run_at, j.seq limit 1)) as run_at
    from used
) oldest;

-- name: known_queues
select name, paused from holdfast.queue;

-- name: workers
select id, host, pid, queues, concurrency, running, succeeded, failed, version, memory,
    started_at, seen_at, alive_until > :now, command
from holdfast.worker order by started_at;

-- own: ended_or_deleted
-- Jobs that have ended or were deleted.
select d.id::text from unnest(:ids::uuid[]) as d (id) left join holdfast.job j on j.id = d.id
where j.id is null or j.state + 0 >= 5;

-- own: snapshot
-- Which transactions are over.
select pg_current_snapshot()::text;

-- own: assign_xid
-- A transaction's number that no other has, and an instant before: every lower one was given out by then.
select :now, pg_current_xact_id()::text::bigint;

-- own: running_transactions
-- Of the running ones, as far as this role may see them, when each began.
select holdfast.written_by(backend_xid, :top::bigint)::text::bigint, (extract(epoch from xact_start) * 1000000)::bigint
from pg_stat_activity where backend_xid is not null and xact_start is not null;

-- name: stats
-- Of each index of states so many jobs at most, by what they have in common. The limit is a subquery, for one that the planner knew
-- to be above its guess of the rows would have it sort them all.
select seen.queue, seen.state, seen.worker, seen.attempts, seen.run_at > :now and seen.state in (1, 3) as later,
    greatest(seen.created_at, seen.started_at, seen.ended_at, case when seen.claims > 0 and seen.state in (0, 1, 3) then (
        select max(a.ended_at) from holdfast.attempt a where a.job_id = seen.id) end) >= :now - :recent::bigint as recent,
    count(*), coalesce(sum(seen.ended_at - seen.started_at), 0)::float8 / 1000000,
    coalesce(max(seen.ended_at - seen.started_at), 0)::float8 / 1000000,
    coalesce(:now - min(seen.ended_at), 0)::float8 / 1000000
from (
    (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, id
     from holdfast.job where state = 0 order by queue, tier, rank, run_at, seq limit (select :max_count::bigint))
    union all
    (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, id
     from holdfast.job where state = 4 order by queue limit (select :max_count::bigint))
    union all
    (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, id
     from holdfast.job where (+state) in (1, 3) order by run_at limit (select :max_count::bigint))
    union all
    (select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, id
     from holdfast.job where state = 2 order by lease_until limit (select :max_count::bigint))
    union all
    (select e.* from unnest('{5,6,7}'::smallint[]) s (code) cross join lateral (
        select queue, state, worker, attempts, claims, run_at, created_at, started_at, ended_at, id
        from holdfast.job where state >= 5 and (state, ended_at) >= (s.code, 0::bigint) and (state, ended_at) <= (s.code, 9223372036854775807)
        order by state desc, ended_at desc limit (select :max_count::bigint)) e)
) seen
group by 1, 2, 3, 4, 5, 6;

-- name: events
-- What ended, and the attempts after which a job went on: what could be seen in the snapshot `shown`, but not in `seen`,
-- behind a place and not before `low`.
select * from (
    (select e.* from unnest('{5,6,7}'::smallint[]) s (code) cross join lateral (
        select j.id::text, j.task, j.queue, j.state, j.claims, j.attempts, j.worker, j.started_at, j.ended_at, j.reason, j.error
        from holdfast.job j
        where j.state >= 5 and (j.state, j.ended_at) >= (s.code, :low::bigint) and (j.state, j.ended_at) <= (s.code, 9223372036854775807)
          and case when (j.ended_at, j.id, j.claims) > (:at::bigint, :job::uuid, :claims::bigint)
            and not pg_visible_in_snapshot(coalesce(j.ended_by, holdfast.written_by(j.xmin, :top::bigint)), (select (:seen::text)::pg_snapshot))
            and pg_visible_in_snapshot(coalesce(j.ended_by, holdfast.written_by(j.xmin, :top)), (select (:shown::text)::pg_snapshot))
          then true else false end
        order by j.state, j.ended_at, j.id, j.claims limit :limit) e)
    union all
    (select a.job_id::text, (select j.task from holdfast.job j where j.id = a.job_id),
        (select j.queue from holdfast.job j where j.id = a.job_id),
        a.state, a.claims, a.attempt, a.worker, a.started_at, a.ended_at, a.reason, a.error
     from holdfast.attempt a
     where a.state < 5 and a.ended_at >= :low
       and case when (a.ended_at, a.job_id, a.claims) > (:at, :job, :claims)
         and not pg_visible_in_snapshot(holdfast.written_by(a.xmin, :top), (select (:seen::text)::pg_snapshot))
         and pg_visible_in_snapshot(holdfast.written_by(a.xmin, :top), (select (:shown::text)::pg_snapshot))
       then true else false end
     order by a.ended_at, a.job_id, a.claims limit :limit)
) found
order by ended_at, id, claims limit :limit;

-- name: nameless_queue_jobs
-- Jobs that wait in a queue with an empty name, which only another program can have written.
select (select count(*) from holdfast.job where state = 0 and queue = '')
    + (select count(*) from holdfast.job where state = 4 and queue = '')
    + (select count(*) from holdfast.job where state in (1, 3) and queue = '');

-- name: stuck
select count(*) from holdfast.job where state = 2 and lease_until <= :now - 60000000;

-- own: server_time
select :now;

-- ── schedules ──────────────────────────────────────────────────────────────────────────────────────────────────────
-- name: add_schedule
insert into holdfast.schedule (name, next_at, revision, document) values (:name, :next_at, :now, :document)
on conflict do nothing
returning revision;

-- name: replace_schedule
update holdfast.schedule set next_at = :next_at, revision = revision + 1, document = :document
where name = :name and :expected::bigint in (revision, -1)
returning revision;

-- name: remove_schedule
delete from holdfast.schedule where name = :name and revision = :expected
returning revision + 1;

-- own: bound_lock_wait
-- The other schedules of the ticker wait as long as this one does.
select set_config('lock_timeout', '500ms', true);

-- name: schedule
select document, revision from holdfast.schedule where name = :name;

-- name: schedules
select document, revision from holdfast.schedule where name > :after order by name limit :limit;

-- name: due_schedules
select document, revision from holdfast.schedule where next_at <= :now order by next_at limit :limit;

-- name: next_schedule
select :now, (select min(next_at) from holdfast.schedule where next_at > :now);

-- ── limits ─────────────────────────────────────────────────────────────────────────────────────────────────────────
-- own: claim_limited
select * from holdfast.claim_limited(:at, :queues, :slots, :max_jobs, :worker, :lease_for, :promote, :any_queue, :assign, :isolated,
    :skip_due_until)
order by array_position(:queues::text[], queue), priority desc, run_at, seq;

-- own: any_limited
-- Whether one of these queues may have jobs under limits.
select exists (select from unnest(:queues::text[]) w (queue) where
        (select true from holdfast.partition p where p.queue = w.queue order by p.name limit 1)
        or (select true from holdfast.partition_inbox i where i.queue = w.queue order by i.name limit 1)
        or not exists (select from holdfast.queue q where q.name = w.queue and q.paused) and (
            select true from holdfast.job j where j.state = 0 and j.queue = w.queue and j.tier = 5 -- quarantined: not registered
            order by j.rank, j.run_at, j.seq limit 1)
        or exists (select from holdfast.job_limit l where l.queue = w.queue) and (
            select true from holdfast.job j where j.state = 0 and j.queue = w.queue
            order by j.queue, j.tier, j.rank, j.run_at, j.seq limit 1));

-- own: jobs_without_partition
-- Ready jobs without a partition, of queues that have a limit.
select j.id::text
from unnest(:queues::text[]) w (queue) cross join lateral (
    select r.id from holdfast.job r where r.state = 0 and r.queue = w.queue and r.tier < 3
    order by r.tier, r.rank, r.run_at, r.seq limit :limit) j
limit :limit;

-- name: jobs_to_assign
-- Jobs that have not ended. Rare and bounded, and through the table in its own order.
select j.id::text, j.queue
from holdfast.job j
where j.id > :after
  and case when (j.state + 0) < 5 and (:queue::text is null or j.queue = :queue) and (:task::text is null or j.task = :task) then true else false end
order by j.id limit :limit;

-- own: partition_facts
select j.id::text, j.xmin::text, j.task, j.queue, j.payload, j.partition, j.weights
from holdfast.job j where j.id = any(:ids::uuid[]) and (j.state + 0) < 5;

-- own: lock_limits_shared
-- Until the end of the transaction no limit is written: a job gets no partition by limits that were replaced meanwhile.
lock table holdfast.job_limit in share mode;

-- own: set_partitions
-- `version`: nothing has changed the job since it was read. Those that other transactions hold are left.
with free as materialized (
    select l.id, d.partition, d.weights
    from unnest(:ids::uuid[], :versions::text[], :partitions::text[], :weights::text[]) as d (id, version, partition, weights)
    join holdfast.job l on l.id = d.id
    where l.xmin::text = d.version and (l.state + 0) < 5
    order by l.id for no key update of l skip locked
)
update holdfast.job j
set partition = f.partition, weights = f.weights, tier = j.tier % 3 + case when f.partition is null then 0 else 3 end
from free f where j.id = f.id
returning j.id::text;

-- own: lock_limits
select holdfast.lock_limits()::text;

-- name: limits
select document, revision from holdfast.job_limit order by name;

-- own: limits_and_isolation
-- The same, with the isolation of the transaction, also where there are none.
select l.document, l.revision, t.isolation
from (select current_setting('transaction_isolation') as isolation) t left join holdfast.job_limit l on true;

-- name: add_limit
insert into holdfast.job_limit (name, revision, queue, task, per_key, concurrency, interval_us, burst, shares, document)
values (:name, :now, :queue, :task, :per_key, :concurrency, :interval_us, :burst, :shares, :document)
on conflict do nothing
returning revision;

-- name: replace_limit
update holdfast.job_limit
set revision = revision + 1, queue = :queue, task = :task, per_key = :per_key, concurrency = :concurrency,
    interval_us = :interval_us, burst = :burst, shares = :shares, document = :document
where name = :name and :expected::bigint in (revision, -1)
returning revision;

-- name: remove_limit
delete from holdfast.job_limit where name = :name and revision = :expected
returning revision + 1;

-- name: clamp_buckets
-- The buckets of a limit keep their tokens, at most the new burst: of the limit itself and, after "=", of its keys.
update holdfast.bucket set full_at = :now + :fill_time::bigint - least(:fill_time::bigint,
    trunc(greatest(0, :old_fill_time::bigint - (full_at - :now))::numeric * :interval::bigint / :old_interval::bigint)::bigint)
where full_at > :now and (name = :name or (name > :name || '=' and name < :name || '>'));

-- name: unblock_all_partitions
-- Values that hold no longer may have throttled them.
update holdfast.partition set blocked_until = null where blocked_until is not null;

-- own: bucket_use
select coalesce(u.used, 0), coalesce(b.full_at, 0), coalesce(b.paused_until, 0), :now
from unnest(:buckets::text[]) with ordinality as d (name, ordinal)
left join (select r.bucket, r.used from holdfast.running_weights() r) u on u.bucket = d.name
left join holdfast.bucket b on b.name = d.name
order by d.ordinal;

-- name: count_unstarted
select * from holdfast.count_unstarted(:buckets, :max_count);

-- own: take_tokens
select holdfast.take_tokens(:at, :bucket, :tokens);

-- own: pause_buckets
insert into holdfast.bucket as b (name, paused_until)
select d.name, :now + :span::bigint from (select distinct unnest(:buckets::text[]) as name order by 1) d
on conflict (name) do update
    set paused_until = case :span::bigint when 0 then :now else greatest(b.paused_until, excluded.paused_until) end;

-- name: prune_buckets
select holdfast.prune_limits(:at, :limit)::text;

-- name: history_mark
-- None while another sweeper counts.
select number from holdfast.history where length = 0 for no key update skip locked;

-- own: history_begin
insert into holdfast.history (length, start, queue, state, number, run_us, longest_us)
values (0, 0, '', 0, :now - :first, 0, 0) on conflict do nothing;

-- name: history_until
-- The instant up to which about :limit jobs of each state ended, and whether others have ended since.
select until, until < :now - :lag from (
    select least(:now - :lag,
        (select ended_at from holdfast.job where state = 5 and ended_at > :counted_until and ended_at <= :now - :lag
        order by ended_at limit 1 offset :limit - 1),
        (select ended_at from holdfast.job where state = 6 and ended_at > :counted_until and ended_at <= :now - :lag
        order by ended_at limit 1 offset :limit - 1),
        (select ended_at from holdfast.job where state = 7 and ended_at > :counted_until and ended_at <= :now - :lag
        order by ended_at limit 1 offset :limit - 1)) as until) found;

-- name: history_add
with interval_counts as materialized (
    select ended_at - ended_at % 60000000 as start, queue, state, count(*) as number,
        sum(greatest(0, ended_at - coalesce(started_at, ended_at))) as run_us,
        max(greatest(0, ended_at - coalesce(started_at, ended_at))) as longest_us
    from holdfast.job where state in (5, 6, 7) and ended_at > :counted_until and ended_at <= :until
    group by 1, queue, state
)
insert into holdfast.history as h (length, start, queue, state, number, run_us, longest_us)
select length, start - start % length, queue, state, sum(number), sum(run_us), max(longest_us)
from unnest('{60000000, 3600000000}'::bigint[]) length cross join interval_counts
group by 1, 2, queue, state
on conflict (length, start, queue, state) do update set number = h.number + excluded.number,
    run_us = h.run_us + excluded.run_us, longest_us = greatest(h.longest_us, excluded.longest_us);

-- name: history_move
update holdfast.history set number = :until where length = 0;

-- name: prune_history
delete from holdfast.history where (length, start) >= (:length, 0) and (length, start) < (:length, :now - :retention);

-- name: history
select start, queue, state, number, run_us / 1e6::float8, longest_us / 1e6::float8
from holdfast.history
where length = :length and start >= :since order by start, queue, state;

-- name: failed_jobs
-- The jobs that died last, and those that wait for their next attempt after one of the latest failures.
select id::text, queue, task, error_group, true, ended_at from (
    select id, queue, task, error_group, ended_at from holdfast.job
    where state >= 5 and (state, ended_at) >= (6::smallint, 0::bigint) and (state, ended_at) <= (6::smallint, 9223372036854775807)
    order by state desc, ended_at desc limit (select :limit::bigint)) d
where error_group is not null
union all
select j.id::text, j.queue, j.task, j.error_group, false, a.ended_at
from (
    select job_id, claims, ended_at from holdfast.attempt
    where state < 5 and ended_at > 0 order by ended_at desc limit (select :limit::bigint)) a
cross join lateral (
    select j.id, j.queue, j.task, j.error_group from holdfast.job j
    where j.id = a.job_id and j.claims = a.claims and j.state + 0 = 3 and j.error_group is not null offset 0) j;
