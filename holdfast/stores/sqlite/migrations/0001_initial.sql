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
    tier integer generated always as (min(lost_leases, 2)) virtual, -- 0 ready 1 suspect 2 quarantined
    cancelling integer not null default 0,
    keyed integer not null default 0,
    options text check (options is null or json_valid(options)), -- JSON; null for a plain job
    worker text,
    lease_until integer,
    started_at integer,
    ended_at integer,
    reason text,
    error text,
    result text,
    check (state <> 2 or lease_until is not null)
) strict;

-- A plain job is in at most one of these at a time.
create index holdfast_job_ready on holdfast_job (queue, tier, rank, run_at) where state = 0;
create index holdfast_job_waiting on holdfast_job (queue) where state = 4;
create index holdfast_job_due on holdfast_job (queue, run_at) where state in (1, 3);
create index holdfast_job_due_anywhere on holdfast_job (run_at) where state in (1, 3);
create index holdfast_job_lease on holdfast_job (lease_until) where state = 2;
create index holdfast_job_unsuccessful on holdfast_job (state) where state > 5; -- the dead and the cancelled, in order of seq
create index holdfast_job_ended on holdfast_job (state, ended_at) where state >= 5;

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

create index holdfast_attempt_setback on holdfast_attempt (ended_at) where state < 5; -- the job went on

-- What handlers log with their jobs.
create table holdfast_line (
    job_seq integer not null references holdfast_job (seq) on delete cascade,
    claims integer not null,            -- of the lease under which it was said
    number integer not null,            -- among the lines of its attempt
    attempt integer not null,
    at integer not null,
    level text not null,
    text text not null,
    fields text,                        -- JSON of an object
    primary key (job_seq, claims, number)
) strict, without rowid;

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
    started_at integer not null,
    seen_at integer not null,
    alive_until integer not null,
    ordered text not null default 'none' check (ordered in ('none', 'drain', 'stop'))
) strict, without rowid;
