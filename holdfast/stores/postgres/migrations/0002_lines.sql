-- expand. What handlers log with their jobs.

create table holdfast.line (
    job_id uuid not null,
    claims bigint not null,             -- of the lease under which it was said
    at bigint not null,
    attempt bigint not null,
    number integer not null,            -- among the lines of its attempt
    level text not null,
    text text not null,
    fields text,                        -- JSON of an object
    primary key (job_id, claims, number)
);
