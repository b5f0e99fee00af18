-- expand. The first schema. `holdfast.` stands for the schema the store was given.

create table holdfast.job (
    id uuid primary key,
    seq bigint generated always as identity, -- submission order, the last word among equals
    run_at bigint not null,             -- instants are microseconds since 1970 UTC
    created_at bigint not null,
    claims bigint not null default 0 check (claims >= 0), -- the fence: only ever grows
    attempts bigint not null default 0 check (attempts >= 0),
    max_attempts bigint,                -- null: unlimited
    lease_until bigint,
    started_at bigint,
    ended_at bigint,
    rank integer not null check (rank between -1000000 and 1000000), -- negated priority: the ready index is ascending throughout
    losses integer not null default 0,  -- leases lost in a row
    state smallint not null check (state between 0 and 7), -- 0 queued 1 scheduled 2 running 3 failed 4 waiting 5 succeeded 6 dead 7 cancelled
    cancelling boolean not null default false,
    keyed boolean not null default false,
    tagged boolean not null default false,
    queue text collate "C" not null,
    task text collate "C" not null,
    payload text not null,
    options json,                       -- null for a plain job
    worker text collate "C",
    reason text collate "C",
    error text,
    result text,
    check (state <> 2 or lease_until is not null)
) with (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- A plain job is in at most one of these at a time.
create index job_ready on holdfast.job (queue, rank, run_at, seq) where state = 0 and losses = 0;
create index job_suspect on holdfast.job (queue, rank, run_at, seq) where state = 0 and losses = 1;
create index job_quarantined on holdfast.job (queue, rank, run_at, seq) where state = 0 and losses > 1;
create index job_due on holdfast.job (queue, run_at) where state in (1, 3);
create index job_due_anywhere on holdfast.job (run_at) where (+state) in (1, 3); -- spelled apart, never to be taken for job_due
create index job_lease on holdfast.job (lease_until) where state = 2;
create index job_unsuccessful on holdfast.job (state, id) where (+state) > 5; -- the dead and the cancelled; never for job_ended
create index job_ended on holdfast.job (state, ended_at) where state >= 5;

create table holdfast.tag (
    tag text collate "C" not null,
    job_id uuid not null,
    primary key (tag, job_id)
);
create index tag_of on holdfast.tag (job_id);

create table holdfast.key (
    key text collate "C" primary key,
    job_id uuid not null,
    keep_until bigint                   -- the key outlives its job's row until then; null: it dies with the row
);
create index key_of on holdfast.key (job_id);
create index key_over on holdfast.key (keep_until) where keep_until is not null;

create table holdfast.attempt (         -- attempts that did not succeed
    job_id uuid not null,
    claims bigint not null,
    attempt bigint not null,
    started_at bigint,
    ended_at bigint not null,
    state smallint not null,            -- where it left the job
    worker text,
    reason text,
    error text,
    traceback text,
    primary key (job_id, claims)
);

create table holdfast.queue (
    name text collate "C" primary key,
    paused boolean not null
);

create table holdfast.worker (
    id text collate "C" primary key,
    host text not null,
    pid bigint not null,
    queues text not null,
    concurrency bigint not null,
    running bigint not null,
    succeeded bigint not null,
    failed bigint not null,
    started_at bigint not null,
    seen_at bigint not null,
    alive_until bigint not null,
    ordered text not null default 'none' check (ordered in ('none', 'drain', 'stop'))
);

-- For people: the same with words and instants. The engine never reads it.
create view holdfast.jobs as
select
    id, queue, task, payload,
    (array['queued', 'scheduled', 'running', 'failed', 'waiting', 'succeeded', 'dead', 'cancelled'])[state + 1] as state,
    -rank as priority, attempts, max_attempts, worker, reason, error, result, options,
    to_timestamp(run_at / 1000000.0) as run_at, to_timestamp(created_at / 1000000.0) as created_at,
    to_timestamp(started_at / 1000000.0) as started_at, to_timestamp(ended_at / 1000000.0) as ended_at,
    to_timestamp(lease_until / 1000000.0) as lease_until
from holdfast.job;

-- One job after another, keys and tags included; the rows of `holdfast.submit` and of the store's keyed batches.
-- A key is free once its job's row is gone and its own lifetime is over. Each statement of a function sees what was
-- committed before it: who waited here for another transaction's key sees that transaction's job too.
create function holdfast.add_job(
    new_id uuid, new_queue text, new_task text, new_payload text, new_rank integer, new_run_at bigint, now_us bigint,
    new_max_attempts bigint, new_key text, new_keep_until bigint, new_options json, new_tags text[]
) returns table (job_id uuid, created boolean) language plpgsql as $$
declare
    owner uuid;
    kept bigint;
    added bigint;
begin
    -- No lock on a key that stands for a job already: a caller's transaction may be long, and others ask for the same key.
    while new_key is not null loop
        insert into holdfast.key as k (key, job_id, keep_until) values (new_key, new_id, new_keep_until)
        on conflict do nothing;
        select k.job_id, coalesce(k.keep_until, 0) into owner, kept from holdfast.key k where k.key = new_key;
        continue when owner is null; -- freed just now
        exit when owner = new_id;
        if kept > now_us or exists (select from holdfast.job j where j.id = owner) then
            return query select owner, false;
            return;
        end if;
        update holdfast.key k set job_id = new_id, keep_until = new_keep_until where k.key = new_key and k.job_id = owner;
        exit when found; -- else somebody else was quicker
    end loop;
    insert into holdfast.job as j
        (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, keyed, tagged, options)
    values (new_id, new_queue, new_task, new_payload, case when new_run_at <= now_us then 0 else 1 end, new_rank,
        new_run_at, now_us, new_max_attempts, new_key is not null, new_tags is not null, new_options)
    on conflict do nothing;
    get diagnostics added = row_count;
    if added > 0 and new_tags is not null then
        insert into holdfast.tag (tag, job_id) select distinct t, new_id from unnest(new_tags) t on conflict do nothing;
    elsif added = 0 and new_key is not null then
        update holdfast.job j set keyed = true where j.id = new_id and not j.keyed;
    end if;
    return query select new_id, added > 0;
end
$$;

-- Which database this is: so that a connection to another one is told from ours, a copy's or another schema's included.
create table holdfast.identity (id uuid primary key);
insert into holdfast.identity values (gen_random_uuid());

-- ── inside the caller's transaction ──────────────────────────────────────────────────────────────────────────────────
-- Each function takes what it needs as one text of JSON, which every driver can send. None depends on the caller's
-- search_path or on how the session reads backslashes. `btrim('holdfast.', '".')` is the schema's name.

-- Say so, once this transaction is committed: the channel of what is ready, or of what has ended.
create function holdfast.tell(kind text, topics text[]) returns void language plpgsql as $$
declare
    heard text := (select string_agg(distinct t, chr(10)) from unnest(topics) t);
begin
    if octet_length(heard) > 7900 then
        heard := case kind when 'ready' then 'queue:*' || chr(10) || 'worker:*' else 'job:*' end;
    end if;
    perform pg_notify(btrim('holdfast.', '".') || '_' || kind, 'sql' || chr(10) || heard);
end
$$;

-- Submit jobs that the client has checked: {"at": null or microseconds, "jobs": [{"id", "queue", "task", "payload", …}]};
-- payload and options are text. Keyed jobs go in the order of their keys, so that two batches never wait for each other.
create function holdfast.enlist(batch text) returns table (turn bigint, job_id text, created boolean)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    now_us bigint := coalesce((batch::json ->> 'at')::bigint, (extract(epoch from statement_timestamp()) * 1000000)::bigint);
    topics text[] := '{}';
    new record;
begin
    for new in
        select d.*, b.turn
        from json_array_elements(batch::json -> 'jobs') with ordinality as b (job, turn)
        cross join lateral json_to_record(b.job) as d (id uuid, queue text, task text, payload text, rank integer,
            run_at bigint, delay bigint, max_attempts bigint, key text, keep_for bigint, options text, tags text[])
        order by d.key collate "C" nulls first, b.turn
    loop
        select new.turn, a.job_id::text, a.created into enlist.turn, enlist.job_id, enlist.created
        from holdfast.add_job(new.id, new.queue, new.task, new.payload, new.rank,
            greatest(now_us, coalesce(new.run_at, now_us + new.delay)), now_us, new.max_attempts, new.key,
            now_us + new.keep_for, new.options::json, new.tags) a;
        if enlist.created then
            topics := array_append(topics, 'queue:' || new.queue);
        end if;
        return next;
    end loop;
    if cardinality(topics) > 0 then
        perform holdfast.tell('ready', topics);
    end if;
end
$$;

-- A handler's own transaction ends its job: {"at": null or microseconds, "id", "claims", "result"}. The row stays locked
-- until that transaction ends, so nobody else can take the job meanwhile, whatever becomes of the lease.
create function holdfast.complete(done text) returns table (accepted boolean, state smallint)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    said json := done::json;
    job uuid := (said ->> 'id')::uuid;
    now_us bigint := coalesce((said ->> 'at')::bigint, (extract(epoch from statement_timestamp()) * 1000000)::bigint);
begin
    update holdfast.job j
    set state = 5, ended_at = now_us, result = said ->> 'result', lease_until = null, losses = 0, cancelling = false,
        reason = null, error = null
    where j.id = job and j.claims = (said ->> 'claims')::bigint and j.state + 0 = 2 and j.lease_until + 0 > now_us;
    accepted := found;
    state := (select j.state from holdfast.job j where j.id = job);
    if accepted then
        perform holdfast.tell('ended', array['job:' || job::text]);
    end if;
    return next;
end
$$;

-- ── submitting from SQL ──────────────────────────────────────────────────────────────────────────────────────────────
create function holdfast.refuse(turn bigint, field text, given text, remedy text) returns void language plpgsql as $$
begin
    raise exception using errcode = '22023', message = format('job %s: %s: %s is not valid; %s', turn, field,
        case when char_length(given) > 64 then left(given, 63) || '…' else coalesce(given, 'null') end, remedy);
end
$$;

-- A word of that pattern; null for null.
create function holdfast.checked_word(turn bigint, field text, given json, pattern text, remedy text) returns text
language plpgsql strict as $$
begin
    if json_typeof(given) <> 'null' and (json_typeof(given) <> 'string' or given #>> '{}' !~ pattern) then
        perform holdfast.refuse(turn, field, given::text, remedy);
    end if;
    return given #>> '{}';
end
$$;

-- Text as a key or a tag may be; null for null.
create function holdfast.checked_text(turn bigint, field text, given json, longest integer) returns text
language plpgsql strict as $$
declare
    checked text;
begin
    if json_typeof(given) = 'null' then
        return null;
    elsif json_typeof(given) <> 'string' then
        perform holdfast.refuse(turn, field, given::text, 'give text');
    end if;
    checked := given #>> '{}';
    if checked !~ '[^[:space:]]' or char_length(checked) > longest then
        perform holdfast.refuse(turn, field, given::text, format('give 1 to %s visible characters', longest));
    end if;
    if checked ~ ('[\u0001-\u001f\u007f-\u009f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f'
        '\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f'
        '\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]') then
        perform holdfast.refuse(turn, field, given::text, 'remove its control, bidirectional and invisible characters');
    end if;
    if checked ~ '^[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]' then
        perform holdfast.refuse(turn, field, given::text, 'do not begin with a combining mark');
    end if;
    return checked;
end
$$;

-- Seconds, or a span such as "30s", "5m", "2h" or "7d", as microseconds; null for null.
create function holdfast.checked_span(turn bigint, field text, given json, longest interval) returns bigint
language plpgsql strict as $$
declare
    said text := given #>> '{}';
    parts text[] := regexp_match(said, '^([0-9]{1,12}(?:[.][0-9]{1,9})?) *(ms|s|m|h|d)?$');
    us numeric;
begin
    if json_typeof(given) = 'null' then
        return null;
    end if;
    us := round(1000000 * parts[1]::numeric
        * case coalesce(parts[2], 's') when 'ms' then 0.001 when 's' then 1 when 'm' then 60 when 'h' then 3600 else 86400 end);
    if parts is null or us > extract(epoch from longest) * 1000000 then
        perform holdfast.refuse(turn, field, given::text,
            format('give seconds, or a span such as "30s" or "5m", of at most %s days', extract(day from longest)));
    end if;
    return us;
end
$$;

-- A whole number within its bounds; null for null.
create function holdfast.checked_count(turn bigint, field text, given json, least_one integer, most_one integer)
returns integer language plpgsql strict as $$
begin
    if json_typeof(given) = 'null' then
        return null;
    end if;
    if json_typeof(given) <> 'number' or given::text !~ '^-?[0-9]{1,6}$' or given::text::integer not between least_one and most_one
    then
        perform holdfast.refuse(turn, field, given::text, format('give a whole number from %s to %s', least_one, most_one));
    end if;
    return given::text::integer;
end
$$;

-- An aware instant as microseconds since 1970; null for null.
create function holdfast.checked_instant(turn bigint, field text, given json) returns bigint language plpgsql strict as $$
declare
    said text := upper(given #>> '{}');
    us bigint;
begin
    if json_typeof(given) = 'null' then
        return null;
    end if;
    if said ~ ('^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,9})?'
        '(Z|[+-][0-9]{2}:[0-5][0-9])$') then
        begin
            us := extract(epoch from said::timestamptz) * 1000000;
        exception when data_exception then
            us := null; -- the 30th of February
        end;
    end if;
    if us between 946684800000000 and 7258118399999999 then
        return us;
    end if;
    perform holdfast.refuse(turn, field, given::text,
        'give a date, a time and an offset, such as 2030-01-31T08:00:00Z, from the year 2000 to 2199');
end
$$;

-- A JSON object as a job's arguments or metadata may be.
create function holdfast.check_object(turn bigint, field text, given json, most_bytes integer) returns void
language plpgsql as $$
declare
    bare text;
begin
    if json_typeof(given) <> 'object' then
        perform holdfast.refuse(turn, field, given::text, 'give an object, such as {"name": "value"}');
    end if;
    if octet_length(given::text) > most_bytes then
        perform holdfast.refuse(turn, field, octet_length(given::text) || ' bytes', format('give at most %s bytes', most_bytes));
    end if;
    bare := regexp_replace(given::text, '"([^"\\]|\\.)*"', '', 'g');
    if length(bare) > 4300 and (select max(length(n)) from regexp_split_to_table(bare, '[^0-9-]+') n) > 4300 then
        perform holdfast.refuse(turn, field, 'a number of more than 4300 digits', 'send it as text');
    end if;
    bare := regexp_replace(bare, '[^][{}]+', '', 'g');
    for level in 1..64 loop
        exit when bare = '';
        bare := regexp_replace(bare, '[[]]|{}', '', 'g');
    end loop;
    if bare <> '' then
        perform holdfast.refuse(turn, field, 'a text that is nested deeper than 64 levels', 'nest at most 64 levels');
    end if;
end
$$;

-- A retry policy: {"base": 5, "factor": 2, "cap": 3600, "jitter": "full"}, {"delays": [1, 5, 25]}, or just [1, 5, 25].
create function holdfast.checked_retry(turn bigint, given json) returns text language plpgsql as $$
declare
    policy json := given;
    remedy text := 'give [1, 5, 25] or {"base": 5, "factor": 2, "cap": 3600, "offset": -1, "jitter": "full"}, times in seconds';
    known jsonb := '{"base": 31536000, "factor": 1000, "cap": 31536000, "offset": 100}';
    part record;
begin
    if json_typeof(given) = 'array' and json_array_length(given) > 0 then
        policy := json_build_object('delays', given, 'jitter', 'none');
    elsif json_typeof(given) <> 'object' then
        perform holdfast.refuse(turn, 'retry', given::text, remedy);
    end if;
    for part in
        select e.key, e.value, json_typeof(e.value) as kind, e.value #>> '{}' as said from json_each(policy) e
        union all
        select 'delay', d.value, json_typeof(d.value), d.value #>> '{}' from json_array_elements(
            case when json_typeof(policy -> 'delays') = 'array' then policy -> 'delays' else '[]' end) d
    loop
        if not coalesce(case
            when part.key = 'delays' then part.kind = 'array' and json_array_length(part.value) <= 100
            when part.key = 'delay' then part.kind = 'number' and length(part.said) < 20 and part.said::numeric between 0 and 31536000
            when part.key = 'jitter' then part.said ~ '^(none|full|add:[0-9.]{1,12}|scale:[0-9.]{1,12}:[0-9.]{1,12})$'
            when part.key = 'cap' and part.kind = 'null' then true
            when part.key = 'offset' then part.kind = 'number' and part.said ~ '^-?[0-9]{1,3}$' and abs(part.said::integer) <= 100
            else part.kind = 'number' and length(part.said) < 20 and part.said::numeric between 0 and (known ->> part.key)::numeric
        end, false) then
            perform holdfast.refuse(turn, 'retry.' || part.key, part.value::text, remedy);
        end if;
    end loop;
    return policy::text;
end
$$;

-- A UUIDv7: the millisecond, the job's place in its batch, and chance.
create function holdfast.new_id(now_us bigint, turn bigint) returns uuid language sql volatile as $$
    select (substr(h, 1, 8) || '-' || substr(h, 9, 4) || '-7' || substr(h, 13, 3) || '-' || substr(gen_random_uuid()::text, 20))::uuid
    from (select lpad(to_hex(((now_us / 1000) << 12) + turn), 15, '0')) as n (h)
$$;

-- What only some jobs carry, as text; null for a plain job.
create function holdfast.checked_options(turn bigint, job json) returns text language plpgsql as $$
declare
    field text;
    given json;
    parts text[] := '{}';
begin
    foreach field in array array['timeout', 'retry', 'metadata', 'tags'] loop
        given := job -> field;
        continue when given is null or json_typeof(given) = 'null';
        if field = 'timeout' then
            if coalesce(holdfast.checked_span(turn, field, given, '30 days'), 0) = 0 then
                perform holdfast.refuse(turn, field, given::text, 'give more than 0 seconds; leave it out for no timeout');
            end if;
            parts := array_append(parts, '"timeout":' || trim_scale(holdfast.checked_span(turn, field, given, '30 days') / 1000000.0));
        elsif field = 'retry' then
            parts := array_append(parts, '"retry":' || holdfast.checked_retry(turn, given));
        elsif field = 'metadata' then
            perform holdfast.check_object(turn, field, given, 16384);
            parts := array_append(parts, '"metadata":' || given::text);
        elsif json_typeof(given) <> 'array' or json_array_length(given) > 100
            or exists (select from json_array_elements(given) e where json_typeof(e) <> 'string') then
            perform holdfast.refuse(turn, field, given::text, 'give a list of at most 100 texts');
        elsif json_array_length(given) > 0 then
            parts := array_append(parts, '"tags":' || (
                select json_agg(t.tag order by t.place)::text from (
                    select holdfast.checked_text(turn, field, e.tag, 100) as tag, min(e.place) as place
                    from json_array_elements(given) with ordinality e (tag, place) group by 1) t));
        end if;
    end loop;
    return case when cardinality(parts) > 0 then '{' || array_to_string(parts, ',') || '}' end;
end
$$;

-- One job as `holdfast.enlist` takes it; an error that names the field, the value and the remedy for anything else.
create function holdfast.checked_job(turn bigint, job json, now_us bigint, nul text) returns json language plpgsql as $$
declare
    known text[] := array['task', 'payload', 'queue', 'priority', 'delay', 'run_at', 'key', 'key_for', 'max_attempts',
        'timeout', 'retry', 'tags', 'metadata', 'id'];
    field text;
    payload json;
    escape text := chr(92) || 'u0000';
    most integer;
    options text;
begin
    if json_typeof(job) <> 'object' then
        perform holdfast.refuse(turn, 'job', job::text, 'give an object, such as {"task": "email.send", "payload": {}}');
    end if;
    for field in select k from json_object_keys(job) k group by k having count(*) > 1 or k <> all (known) loop
        perform holdfast.refuse(turn, 'field', field, 'give each once of: ' || array_to_string(known, ', '));
    end loop;
    if job ->> 'task' is null then
        perform holdfast.refuse(turn, 'task', null, 'name a task, such as email.send');
    end if;
    if job ->> 'delay' is not null and job ->> 'run_at' is not null then
        perform holdfast.refuse(turn, 'run_at', job ->> 'run_at', 'give delay or run_at, not both');
    end if;
    payload := coalesce(job -> 'payload', '{}');
    perform holdfast.check_object(turn, 'payload', payload, 262144);
    options := holdfast.checked_options(turn, job);
    most := case when job -> 'max_attempts' is null then 5 when job ->> 'max_attempts' <> 'unlimited' then
        holdfast.checked_count(turn, 'max_attempts', job -> 'max_attempts', 1, 25) end; -- null: unlimited
    return json_build_object(
        'id', coalesce(holdfast.checked_word(turn, 'id', job -> 'id', '^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$',
            'give a UUID (or leave it out, and use a key for a name of your own)')::uuid, holdfast.new_id(now_us, turn)),
        'queue', coalesce(holdfast.checked_word(turn, 'queue', job -> 'queue', '^[a-z0-9][a-z0-9._-]{0,63}$',
            'use 1 to 64 of a-z 0-9 . _ - and begin with a letter or a digit'), 'default'),
        'task', holdfast.checked_word(turn, 'task', job -> 'task', '^[A-Za-z0-9_][A-Za-z0-9._:/-]{0,127}$',
            'use 1 to 128 of A-Z a-z 0-9 . _ - : / and begin with a letter, a digit or _'),
        -- As rows.py keeps texts: U+2400 stands there twice.
        'payload', replace(replace(payload::text, nul, escape), chr(9216), chr(9216) || chr(9216)),
        'rank', -coalesce(holdfast.checked_count(turn, 'priority', job -> 'priority', -100, 100), 0),
        'run_at', holdfast.checked_instant(turn, 'run_at', job -> 'run_at'),
        'delay', holdfast.checked_span(turn, 'delay', job -> 'delay', '64050 days'),
        'max_attempts', most, 'key', holdfast.checked_text(turn, 'key', job -> 'key', 512),
        'keep_for', holdfast.checked_span(turn, 'key_for', job -> 'key_for', '64050 days'),
        'options', replace(options, nul, escape), 'tags', options::json -> 'tags');
end
$$;

-- Submit a batch of jobs from any language, a trigger or a psql prompt, as part of the transaction at hand:
--     select * from holdfast.submit('[{"task": "email.send", "payload": {"to": "a@b.c"}, "delay": "5m"}]');
-- All of them or none. The answers come in the order of the jobs; `created` is false where the key or the id already
-- stood for a job. The payload is kept to the letter.
create function holdfast.submit(jobs json) returns table (id uuid, created boolean)
language plpgsql set search_path = pg_catalog, pg_temp set standard_conforming_strings = on as $$
#variable_conflict use_column
declare
    now_us bigint := (extract(epoch from statement_timestamp()) * 1000000)::bigint;
    escape text := chr(92) || 'u0000';
    nul text; -- stands for that escape meanwhile, at which PostgreSQL stumbles: another one, which is not in the text
    body json := jobs;
    batch text;
    detail text;
begin
    if jobs::text like '%u0000%' then
        nul := (select e from (select chr(92) || 'u' || lpad(to_hex(n), 4, '0') from generate_series(1, 31) n) s (e)
            where position(e in jobs::text) = 0 limit 1);
        body := replace(jobs::text, escape, nul)::json;
    end if;
    if json_typeof(body) is distinct from 'array' or json_array_length(body) > 10000 then
        raise exception using errcode = '22023', message =
            'jobs: this is not valid; give an array of at most 10000 objects, such as [{"task": "email.send", "payload": {}}]';
    end if;
    begin
        batch := json_build_object('at', now_us, 'jobs', (
            select coalesce(json_agg(holdfast.checked_job(j.turn, j.job, now_us, coalesce(nul, escape)) order by j.turn), '[]')
            from json_array_elements(body) with ordinality j (job, turn)))::text;
    exception when data_exception then -- said again from here: in one line, without the way it came
        get stacked diagnostics detail = pg_exception_detail;
        raise exception using errcode = '22023', message = case when sqlerrm like 'job %' then sqlerrm
            else concat('jobs: ', sqlerrm, '; ', detail) end;
    end;
    return query select e.job_id::uuid, e.created from holdfast.enlist(batch) e order by e.turn;
end
$$;
