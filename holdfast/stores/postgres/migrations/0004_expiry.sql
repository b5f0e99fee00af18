-- expand. Jobs that end by themselves unless they have begun by an instant.

alter table holdfast.job add column expires_at bigint; -- null for a plain job, and for one that was replayed

-- The instants in their order, one of each job that has one, until it has come.
create table holdfast.expiry (
    job_id uuid primary key,
    expires_at bigint not null
);
create index expiry_due on holdfast.expiry (expires_at);

create or replace view holdfast.jobs as
select
    id, queue, task, payload,
    (array['queued', 'scheduled', 'running', 'failed', 'waiting', 'succeeded', 'dead', 'cancelled'])[state + 1] as state,
    -rank as priority, attempts, max_attempts, worker, reason, error, result, options,
    to_timestamp(run_at / 1000000.0) as run_at, to_timestamp(created_at / 1000000.0) as created_at,
    to_timestamp(started_at / 1000000.0) as started_at, to_timestamp(ended_at / 1000000.0) as ended_at,
    to_timestamp(lease_until / 1000000.0) as lease_until, to_timestamp(expires_at / 1000000.0) as expires_at
from holdfast.job;

-- Sets the instant by which a job must have begun; null: it does not expire.
create function holdfast.set_expiry(job uuid, instant bigint) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    update holdfast.job j set expires_at = instant where j.id = job;
    if instant is null then
        delete from holdfast.expiry e where e.job_id = job;
    else
        insert into holdfast.expiry as e (job_id, expires_at) values (job, instant)
        on conflict (job_id) do update set expires_at = excluded.expires_at;
    end if;
    return true;
end
$$;

-- The same for jobs that were submitted inside a caller's transaction: {"at": null or microseconds, "jobs": [{"id", "created",
-- "expires_at", "expires_in"}]}. The span of a new job counts from the instant at which it was stored.
create function holdfast.set_expiries(batch text) returns bigint
language sql set search_path = pg_catalog, pg_temp as $$
    select count(holdfast.set_expiry(d.id, coalesce(d.expires_at, d.expires_in + case when d.created
        then (select j.created_at from holdfast.job j where j.id = d.id) else n.now_us end)))
    from (select coalesce((batch::json ->> 'at')::bigint,
        (extract(epoch from statement_timestamp()) * 1000000)::bigint) as now_us offset 0) n
    cross join json_to_recordset(batch::json -> 'jobs')
        as d (id uuid, created boolean, expires_at bigint, expires_in bigint)
$$;
