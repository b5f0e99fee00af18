-- expand. The first schema. `holdfast.` stands for the schema the store was given.

create table holdfast.job (
    id uuid primary key,
    seq bigint generated always as identity, -- submission order, the last word among equals
    run_at bigint not null,             -- instants are microseconds since 1970 UTC
    created_at bigint not null,
    claims bigint not null default 0 check (claims >= 0), -- the fence: only ever grows
    attempts bigint not null default 0 check (attempts >= 0),
    max_attempts bigint,                -- null: unlimited
    lease_until bigint,
    started_at bigint,
    ended_at bigint,
    rank integer not null check (rank between -1000000 and 1000000), -- negated priority: the ready index is ascending throughout
    losses integer not null default 0,  -- leases lost in a row
    state smallint not null check (state between 0 and 7), -- 0 queued 1 scheduled 2 running 3 failed 4 waiting 5 succeeded 6 dead 7 cancelled
    cancelling boolean not null default false,
    keyed boolean not null default false,
    tagged boolean not null default false,
    queue text collate "C" not null,
    task text collate "C" not null,
    payload text not null,
    options json,                       -- null for a plain job
    worker text collate "C",
    reason text collate "C",
    error text,
    result text,
    check (state <> 2 or lease_until is not null)
) with (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- A plain job is in at most one of these at a time.
create index job_ready on holdfast.job (queue, rank, run_at, seq) where state = 0 and losses = 0;
create index job_suspect on holdfast.job (queue, rank, run_at, seq) where state = 0 and losses = 1;
create index job_quarantined on holdfast.job (queue, rank, run_at, seq) where state = 0 and losses > 1;
create index job_due on holdfast.job (queue, run_at) where state in (1, 3);
create index job_due_anywhere on holdfast.job (run_at) where state in (1, 3);
create index job_lease on holdfast.job (lease_until) where state = 2;
create index job_unsuccessful on holdfast.job (state, id) where state > 5; -- the dead and the cancelled
create index job_ended on holdfast.job (state, ended_at) where state >= 5;

create table holdfast.tag (
    tag text collate "C" not null,
    job_id uuid not null,
    primary key (tag, job_id)
);
create index tag_of on holdfast.tag (job_id);

create table holdfast.key (
    key text collate "C" primary key,
    job_id uuid not null,
    keep_until bigint                   -- the key outlives its job's row until then; null: it dies with the row
);
create index key_of on holdfast.key (job_id);
create index key_over on holdfast.key (keep_until) where keep_until is not null;

create table holdfast.attempt (         -- attempts that did not succeed
    job_id uuid not null,
    claims bigint not null,
    attempt bigint not null,
    started_at bigint,
    ended_at bigint not null,
    state smallint not null,            -- where it left the job
    worker text,
    reason text,
    error text,
    traceback text,
    primary key (job_id, claims)
);

create table holdfast.queue (
    name text collate "C" primary key,
    paused boolean not null
);

create table holdfast.worker (
    id text collate "C" primary key,
    host text not null,
    pid bigint not null,
    queues text not null,
    concurrency bigint not null,
    running bigint not null,
    succeeded bigint not null,
    failed bigint not null,
    started_at bigint not null,
    seen_at bigint not null,
    alive_until bigint not null,
    ordered text not null default 'none' check (ordered in ('none', 'drain', 'stop'))
);

-- For people: the same with words and instants. The engine never reads it.
create view holdfast.jobs as
select
    id, queue, task, payload,
    (array['queued', 'scheduled', 'running', 'failed', 'waiting', 'succeeded', 'dead', 'cancelled'])[state + 1] as state,
    -rank as priority, attempts, max_attempts, worker, reason, error, result, options,
    to_timestamp(run_at / 1000000.0) as run_at, to_timestamp(created_at / 1000000.0) as created_at,
    to_timestamp(started_at / 1000000.0) as started_at, to_timestamp(ended_at / 1000000.0) as ended_at,
    to_timestamp(lease_until / 1000000.0) as lease_until
from holdfast.job;

-- One job after another, keys and tags included; the rows of `holdfast.submit` and of the store's keyed batches.
-- A key is free once its job's row is gone and its own lifetime is over. Each statement of a function sees what was
-- committed before it: who waited here for another transaction's key sees that transaction's job too.
create function holdfast.add_job(
    new_id uuid, new_queue text, new_task text, new_payload text, new_rank integer, new_run_at bigint, now_us bigint,
    new_max_attempts bigint, new_key text, new_keep_until bigint, new_options json, new_tags text[]
) returns table (job_id uuid, created boolean) language plpgsql as $$
declare
    owner uuid;
    kept bigint;
    added bigint;
begin
    if new_key is not null then
        insert into holdfast.key as k (key, job_id, keep_until) values (new_key, new_id, new_keep_until)
        on conflict do nothing;
        select k.job_id, coalesce(k.keep_until, 0) into owner, kept from holdfast.key k where k.key = new_key for update;
        if owner is null then
            raise exception 'the key % was freed just now', new_key using errcode = 'serialization_failure';
        end if;
        if owner <> new_id and kept <= now_us and not exists (select from holdfast.job j where j.id = owner) then
            update holdfast.key k set job_id = new_id, keep_until = new_keep_until where k.key = new_key;
            owner := new_id;
        end if;
        if owner <> new_id then
            return query select owner, false;
            return;
        end if;
    end if;
    insert into holdfast.job as j
        (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, keyed, tagged, options)
    values (new_id, new_queue, new_task, new_payload, case when new_run_at <= now_us then 0 else 1 end, new_rank,
        new_run_at, now_us, new_max_attempts, new_key is not null, new_tags is not null, new_options)
    on conflict do nothing;
    get diagnostics added = row_count;
    if added > 0 and new_tags is not null then
        insert into holdfast.tag (tag, job_id) select distinct t, new_id from unnest(new_tags) t on conflict do nothing;
    elsif added = 0 and new_key is not null then
        update holdfast.job j set keyed = true where j.id = new_id and not j.keyed;
    end if;
    return query select new_id, added > 0;
end
$$;
