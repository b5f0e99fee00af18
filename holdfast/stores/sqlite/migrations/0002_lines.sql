-- expand. What handlers log with their jobs.

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
