-- expand. Jobs that end by themselves unless they have begun by an instant.

alter table holdfast_job add column expires_at integer; -- null for a plain job, and for one that was replayed

-- The instants in their order, one of each job that has one, until it has come.
create table holdfast_expiry (
    seq integer primary key references holdfast_job (seq) on delete cascade,
    expires_at integer not null
) strict;

create index holdfast_expiry_due on holdfast_expiry (expires_at);
