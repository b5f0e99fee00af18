-- expand. Limits: how many jobs run at once, how often they start, and whose turn it is.

alter table holdfast_job add column partition text; -- the buckets that a job under limits passes through; null: a plain job
alter table holdfast_job add column weights text;   -- JSON: its weight in each; null: 1

-- Plain jobs, as before.
drop index holdfast_job_ready;
create index holdfast_job_ready on holdfast_job (queue, tier, rank, run_at) where state = 0 and partition is null;
-- Jobs under limits. What runs is counted from its rows: there is no counter that could be wrong.
create index holdfast_job_limited on holdfast_job (queue, partition, rank, run_at) where state = 0 and partition is not null;
create index holdfast_job_limited_running on holdfast_job (partition) where state = 2 and partition is not null;
create index holdfast_job_limited_quarantined on holdfast_job (queue, lost_leases, rank, run_at)
    where state = 0 and partition is not null and lost_leases > 1;

create table holdfast_limit (
    name text primary key,
    revision integer not null,          -- grows with each write; begins at the clock
    document text not null check (json_valid(document)) -- JSON of core.limits.Limit
) strict, without rowid;

create table holdfast_bucket (          -- tokens and pauses; a bucket without a row is full and not paused
    name text primary key,
    refilled_at integer not null,           -- when it has all its tokens again
    paused_until integer not null
) strict, without rowid;

create table holdfast_limited_queue (   -- queues that have had jobs under limits
    name text primary key,
    turn integer not null               -- the turn of the job served last
) strict, without rowid;

create table holdfast_partition (       -- partitions that may have ready jobs
    queue text not null,
    partition text not null,
    turn integer not null,              -- the lowest is served first
    blocked_until integer,              -- it waits for tokens or for the end of a pause
    primary key (queue, partition)
) strict, without rowid;

create index holdfast_partition_turn on holdfast_partition (queue, turn) where blocked_until is null;
create index holdfast_partition_blocked on holdfast_partition (queue, blocked_until) where blocked_until is not null;

-- A partition with a ready job has a row, whatever made the job ready. Submissions write it themselves: a trigger on each
-- insertion would cost plain jobs a third of theirs.
create trigger holdfast_partition_updated after update of state, queue, partition on holdfast_job
when new.partition is not null and new.state = 0
begin
    insert or ignore into holdfast_limited_queue (name, turn) values (new.queue, 0);
    insert or ignore into holdfast_partition (queue, partition, turn)
    select new.queue, new.partition, turn from holdfast_limited_queue where name = new.queue;
end;
