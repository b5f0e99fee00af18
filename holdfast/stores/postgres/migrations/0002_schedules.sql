-- expand. Recurring jobs.

create table holdfast.schedule (
    name text collate "C" primary key,
    next_at bigint,                     -- the tick a ticker waits for; null: paused, or no more ticks
    revision bigint not null,           -- grows with each write; begins at the clock
    document text not null              -- JSON of core.schedule.Schedule, and all there is to it
);

create index schedule_due on holdfast.schedule (next_at) where next_at is not null;
