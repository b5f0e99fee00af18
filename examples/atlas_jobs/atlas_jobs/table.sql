-- Atlas Jobs' table `jobs`, column by column, as a view of Holdfast's.
create or replace view jobs as
select
    j.id as job_id,
    case j.state
        when 'running' then 'RUNNING'
        when 'succeeded' then 'SUCCEEDED'
        when 'dead' then 'DEAD_LETTERED'
        when 'cancelled' then 'CANCELLED'
        else 'QUEUED' -- failed and to be retried, or not due yet: next_run_at says when; or waiting for others
    end as status,
    j.task as job_type,
    case when j.payload::json -> 'payload' is null then j.payload else j.payload::json ->> 'payload' end as payload,
    greatest(0, j.attempts - case when j.state in ('running', 'succeeded') then 1 else 0 end) as attempt_count,
    j.max_attempts,
    (select k.key from holdfast.key k where k.job_id = j.id limit 1) as idempotency_key,
    -- Holdfast says the type of the exception first; its own texts have none.
    regexp_replace(
        j.error, '^(?!timeout: still running after |expired: no worker began it in time)[[:alpha:]_]\w*: ', ''
    ) as last_error,
    case when j.state <> 'waiting' then j.run_at end as next_run_at, -- what waits for others has no time
    j.worker as worker_id,
    j.created_at,
    greatest(j.created_at, j.started_at, j.ended_at, (
        select to_timestamp(max(a.ended_at) / 1000000.0) from holdfast.attempt a where a.job_id = j.id
    )) as updated_at
from holdfast.jobs j;
