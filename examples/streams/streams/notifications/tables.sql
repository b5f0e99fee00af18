create table if not exists deliveries (
    job_id uuid primary key,
    email text not null,
    template text not null,
    message_id text not null,
    delivered_at timestamptz not null default now()
);
