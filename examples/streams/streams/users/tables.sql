create table if not exists users (
    id uuid primary key default gen_random_uuid(),
    email text not null unique,
    name text not null,
    status text not null default 'created',
    created_at timestamptz not null default now()
);

create table if not exists accounts (
    user_id uuid primary key references users,
    quota_mib int not null
);
