-- expand. The first schema. Every name begins with holdfast_: the file may hold its owner's tables too.

create table holdfast_job (
    seq integer primary key,            -- submission order; a rowid ends every index for free
    id text not null unique,            -- UUIDv7 in canonical form
    queue text not null,
    task text not null,
    payload text,                       -- null: a large one, kept in holdfast_payload, since each claim and settle rewrites this row
    state integer not null check (state between 0 and 7), -- 0 queued 1 scheduled 2 running 3 failed 4 waiting 5 succeeded 6 dead 7 cancelled
    rank integer not null check (rank between -1000000 and 1000000), -- negated priority: the ready index is ascending throughout
    run_at integer not null,            -- instants are microseconds since 1970 UTC
    created_at integer not null,
    max_attempts integer,               -- null: unlimited
    claims integer not null default 0 check (claims between 0 and 9007199254740991), -- the fence: only ever grows
    attempts integer not null default 0 check (attempts between 0 and 9007199254740991),
    lost_leases integer not null default 0,  -- leases lost in a row
    cancelling integer not null default 0,
    has_key integer not null default 0,
    options text check (options is null or json_valid(options)), -- JSON; null for most jobs
    worker text,
    lease_until integer,
    started_at integer,
    ended_at integer,
    reason text,
    error text,
    result text,
    expires_at integer,                 -- null without an expiry, and for a job that was replayed
    partition text,                     -- the buckets that a job under limits passes through; null: under no limit
    weights text,                       -- JSON: its weight in each; null: 1
    has_dependents integer not null default 0, -- jobs have depended on it
    waits integer,                      -- signals, children and dependencies that it waits for; null: it never waited
    members integer,                    -- of a batch: jobs that belong to it; null: no batch
    failed integer,                     -- of a batch: members that ended without success
    error_group text,                   -- core.error_groups; null where error is
    check (state <> 2 or lease_until is not null)
) strict;

-- A job without extras is in at most one of these at a time. Each write of a job computes the condition of each index, term by term until
-- one is false, so the term that is false for most jobs comes first. What is compared with a list of three or more builds a
-- table for it. An expression is computed only where the condition holds, a generated column always; min(lost_leases, 2) is
-- the tier of a job: 0 ready, 1 suspect, 2 quarantined.
create index holdfast_job_ready on holdfast_job (queue, min(lost_leases, 2), rank, run_at) where state = 0 and partition is null;
create index holdfast_job_waiting on holdfast_job (queue, run_at) where state = 4;
create index holdfast_job_waiting_any_queue on holdfast_job (run_at) where state = 4;
create index holdfast_job_due on holdfast_job (queue, run_at) where state in (1, 3);
create index holdfast_job_due_any_queue on holdfast_job (run_at) where state in (1, 3);
create index holdfast_job_lease on holdfast_job (lease_until) where state = 2;
create index holdfast_job_cancelling on holdfast_job (worker) where cancelling = 1;
create index holdfast_job_unsuccessful on holdfast_job (state) where state > 5; -- the dead and the cancelled, in order of seq
create index holdfast_job_ended on holdfast_job (state, ended_at, queue) where state >= 5; -- queue: counts read nothing else

-- Jobs under limits. What runs is counted from its rows: there is no counter that could be wrong.
create index holdfast_job_limited on holdfast_job (queue, partition, rank, run_at) where partition is not null and state = 0;
create index holdfast_job_limited_running on holdfast_job (partition) where partition is not null and state = 2;
create index holdfast_job_limited_quarantined on holdfast_job (queue, lost_leases, rank, run_at)
    where partition is not null and state = 0 and lost_leases > 1;
-- Depths by key: jobs of a bucket that have not started. It is the first bucket of their partition, or the second.
create index holdfast_job_unstarted on holdfast_job (partition) where partition is not null and state <> 2 and state < 5;
create index holdfast_job_unstarted_second on holdfast_job (substr(partition, instr(partition, char(31)) + 1))
    where partition is not null and instr(partition, char(31)) > 0 and state <> 2 and state < 5;

create table holdfast_payload (
    seq integer primary key references holdfast_job (seq) on delete cascade,
    payload text not null
) strict;

create table holdfast_tag (
    tag text not null,
    seq integer not null references holdfast_job (seq) on delete cascade,
    primary key (tag, seq)
) strict, without rowid;

create index holdfast_tag_of on holdfast_tag (seq);

create table holdfast_key (
    key text primary key,
    job_id text not null,
    keep_until integer                  -- the key outlives its job's row until then; null: it dies with the row
) strict, without rowid;

create index holdfast_key_of on holdfast_key (job_id);
create index holdfast_key_over on holdfast_key (keep_until) where keep_until is not null;

create table holdfast_attempt (         -- attempts that did not succeed
    job_seq integer not null references holdfast_job (seq) on delete cascade,
    claims integer not null,
    attempt integer not null,
    worker text,
    started_at integer,
    ended_at integer not null,
    state integer not null,             -- where it left the job
    reason text,
    error text,
    traceback text,
    primary key (job_seq, claims)
) strict, without rowid;

create index holdfast_attempt_retried on holdfast_attempt (ended_at) where state < 5; -- the job went on

-- What handlers log with their jobs.
create table holdfast_line (
    job_seq integer not null references holdfast_job (seq) on delete cascade,
    claims integer not null,            -- of the lease under which it was logged
    number integer not null,            -- among the lines of its attempt
    attempt integer not null,
    at integer not null,
    level text not null,
    text text not null,
    fields text,                        -- JSON of an object
    primary key (job_seq, claims, number)
) strict, without rowid;

-- What handlers have done, step by step.
create table holdfast_step (
    job_seq integer not null references holdfast_job (seq) on delete cascade,
    name text not null,
    number integer not null,            -- of its call, from 1
    is_ordered integer not null,          -- the code fixes the position of its call: a replay checks it
    claims integer not null,            -- of the lease under which it ended
    ended_at integer not null,
    result text,                        -- JSON; null for None
    primary key (job_seq, name)
) strict;

-- What jobs wait for: the ends of other jobs, and signals.
create table holdfast_dependency (
    waiter integer not null references holdfast_job (seq) on delete cascade,
    job_id text not null,               -- of the job whose end is awaited; it may be gone
    condition text not null check (condition in ('success', 'failure', 'end')),
    state integer not null,             -- 0 open 1 met 2 failed
    is_child integer not null,          -- the waiting job has started it
    holder text,                        -- of a child that was not stored: the job that holds its key and stands for it
    primary key (waiter, job_id)
) strict, without rowid;

create index holdfast_dependency_on on holdfast_dependency (job_id);

create table holdfast_receiver (        -- jobs that wait for a signal
    seq integer primary key references holdfast_job (seq) on delete cascade,
    topic text not null,
    step text not null,                 -- whose result the signal is; its number and is_ordered as in holdfast_step
    number integer not null,
    is_ordered integer not null,
    claims integer not null,            -- of the lease under which it waits: under no other it receives one; 0: it waits for something else
    since integer not null,
    until integer not null
) strict;

create index holdfast_receiver_of on holdfast_receiver (topic, since);

create table holdfast_signal (
    seq integer primary key,
    id text not null unique,
    topic text not null,
    value text not null,                -- JSON
    sent_at integer not null,
    job_id text                         -- its receiver; null: none yet
) strict;

create index holdfast_signal_kept on holdfast_signal (topic) where job_id is null;
create index holdfast_signal_unreceived on holdfast_signal (sent_at) where job_id is null;
create index holdfast_signal_sent on holdfast_signal (sent_at);

create table holdfast_queue (
    name text primary key,
    paused integer not null
) strict, without rowid;

create table holdfast_worker (
    id text primary key,
    host text not null,
    pid integer not null,
    queues text not null,
    concurrency integer not null,
    running integer not null,
    succeeded integer not null,
    failed integer not null,
    version text,
    memory integer,                      -- resident bytes of the process
    started_at integer not null,
    seen_at integer not null,
    alive_until integer not null,
    command text not null default 'none' check (command in ('none', 'drain', 'stop'))
) strict, without rowid;

-- The instants in their order, one of each job that has one, until it has come.
create table holdfast_expiry (
    seq integer primary key references holdfast_job (seq) on delete cascade,
    expires_at integer not null
) strict;

create index holdfast_expiry_due on holdfast_expiry (expires_at);

-- Recurring jobs.
create table holdfast_schedule (
    name text primary key,
    next_at integer,                    -- the tick a ticker waits for; null: paused, or no more ticks
    revision integer not null,          -- grows with each write; begins at the clock
    document text not null check (json_valid(document)) -- JSON of core.schedule.Schedule, and all there is to it
) strict, without rowid;

create index holdfast_schedule_due on holdfast_schedule (next_at) where next_at is not null;

-- ── limits: how many jobs run at once, how often they start, and which is served next is ────────────────────────────────────────
create table holdfast_limit (
    name text primary key,
    revision integer not null,          -- grows with each write; begins at the clock
    document text not null check (json_valid(document)) -- JSON of core.limits.Limit
) strict, without rowid;

create table holdfast_bucket (          -- tokens and pauses; a bucket without a row is full and not paused
    name text primary key,
    full_at integer not null,           -- the instant at which all tokens are back (GCRA's TAT)
    paused_until integer not null
) strict, without rowid;

create table holdfast_limited_queue (   -- queues that have had limits, or jobs under limits
    name text primary key,
    virtual_time integer not null       -- start tag of the job served last
) strict, without rowid;

create table holdfast_partition (       -- partitions that may have ready jobs
    queue text not null,
    partition text not null,
    start_tag integer not null,         -- the lowest is served first
    blocked_until integer,              -- it waits for tokens or for the end of a pause
    primary key (queue, partition)
) strict, without rowid;

create index holdfast_partition_start_tag on holdfast_partition (queue, start_tag) where blocked_until is null;
create index holdfast_partition_blocked on holdfast_partition (queue, blocked_until) where blocked_until is not null;

-- A partition with a ready job has a row, whatever made the job ready. Submissions write it themselves: a trigger on each
-- insertion would cost jobs under no limit a third of theirs.
-- Of these columns each statement that makes jobs ready sets one; a claim and a success, which would pay for it, none.
create trigger holdfast_partition_updated after update of run_at, queue, partition on holdfast_job
when new.partition is not null and new.state = 0
begin
    insert or ignore into holdfast_limited_queue (name, virtual_time) values (new.queue, 0);
    insert or ignore into holdfast_partition (queue, partition, start_tag)
    select new.queue, new.partition, virtual_time from holdfast_limited_queue where name = new.queue;
end;

-- How many jobs ended, by the interval in which they did (core.history). With the length 0 the instant up to which they are counted.
create table holdfast_history (
    length integer not null,              -- in microseconds: a minute or an hour
    start integer not null,
    queue text not null,
    state integer not null,
    number integer not null,
    run_us integer not null,            -- of the last attempts, in all
    longest_us integer not null,
    primary key (length, start, queue, state)
) without rowid;
