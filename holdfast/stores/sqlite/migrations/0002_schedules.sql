-- expand. Recurring jobs.

create table holdfast_schedule (
    name text primary key,
    next_at integer,                    -- the tick a ticker waits for; null: paused, or no more ticks
    revision integer not null,          -- grows with each write; begins at the clock
    document text not null check (json_valid(document)) -- JSON of core.schedule.Schedule, and all there is to it
) strict, without rowid;

create index holdfast_schedule_due on holdfast_schedule (next_at) where next_at is not null;
