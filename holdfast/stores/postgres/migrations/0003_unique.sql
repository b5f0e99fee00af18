-- expand. Uniqueness: keys that a job holds while it waits, while it is active or for a time.

-- A key for a job, unless another job holds it: {"key", "during", "window_us", "on_conflict"}, as core.models.UniqueKey. Answers
-- the job that has it. Each statement of a function sees what was committed before it: who waited here for another
-- transaction's key sees that transaction's job too.
create function holdfast.take_unique(new_id uuid, policy json, now_us bigint) returns uuid
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    unique_key text := policy ->> 'key';
    owner uuid;
    kept bigint;
begin
    loop
        insert into holdfast.key as k (key, job_id, keep_until)
        values (unique_key, new_id, now_us + (policy ->> 'window_us')::bigint)
        on conflict do nothing;
        select k.job_id, coalesce(k.keep_until, 0) into owner, kept from holdfast.key k where k.key = unique_key;
        continue when owner is null; -- freed just now
        exit when owner = new_id;
        if kept > now_us or exists (
            select from holdfast.job j
            where j.id = owner and (policy ->> 'during' is not null and j.state in (0, 1, 3, 4)
                or policy ->> 'during' = 'active' and j.state = 2)
        ) then
            return owner;
        end if;
        update holdfast.key k set job_id = new_id, keep_until = now_us + (policy ->> 'window_us')::bigint
        where k.key = unique_key and k.job_id = owner;
        exit when found; -- else another transaction was quicker
    end loop;
    return new_id;
end
$$;

-- As before, and: a job whose unique key another holds is not stored; `changed`: the other one waits, and was replaced or
-- rescheduled instead. The policy stands in the options too, in which no function looks: they may hold what `->` refuses.
drop function holdfast.add_job;
create function holdfast.add_job(
    new_id uuid, new_seq bigint, new_queue text, new_task text, new_payload text, new_rank integer, new_run_at bigint, now_us bigint,
    new_max_attempts bigint, new_key text, new_keep_until bigint, new_options json, given boolean, new_tags text[], policy json
) returns table (job_id uuid, created boolean, changed boolean) language plpgsql as $$
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
            return query select owner, false, false;
            return;
        end if;
        update holdfast.key k set job_id = new_id, keep_until = new_keep_until where k.key = new_key and k.job_id = owner;
        exit when found; -- else another transaction was quicker
    end loop;
    if policy is not null and not exists (select from holdfast.job j where j.id = new_id) then
        owner := holdfast.take_unique(new_id, policy, now_us);
        if owner <> new_id then
            delete from holdfast.key k where k.key = new_key and k.job_id = new_id;
            update holdfast.job j
            set state = case when new_run_at <= now_us then 0 else 1 end, run_at = new_run_at,
                payload = case when policy ->> 'on_conflict' = 'replace' then new_payload else j.payload end,
                rank = case when policy ->> 'on_conflict' = 'replace' then new_rank else j.rank end
            where j.id = owner and j.state + 0 in (0, 1, 3) and policy ->> 'on_conflict' in ('replace', 'reschedule');
            return query select owner, false, found;
            return;
        end if;
    end if;
    insert into holdfast.job as j
        (id, seq, queue, task, payload, state, rank, run_at, created_at, max_attempts, keyed, tagged, options, claims)
    values (new_id, new_seq, new_queue, new_task, new_payload, case when new_run_at <= now_us then 0 else 1 end, new_rank,
        new_run_at, now_us, new_max_attempts, new_key is not null or policy is not null, new_tags is not null, new_options,
        case when given then now_us else 0 end)
    on conflict do nothing;
    get diagnostics added = row_count;
    if added > 0 and new_tags is not null then
        insert into holdfast.tag (tag, job_id) select distinct t, new_id from unnest(new_tags) t on conflict do nothing;
    elsif added = 0 and new_key is not null then
        update holdfast.job j set keyed = true where j.id = new_id and not j.keyed;
    end if;
    return query select new_id, added > 0, false;
end
$$;

-- As before, in the order of unique keys too, unless a job has both.
drop function holdfast.enlist;
create function holdfast.enlist(batch text) returns table (turn bigint, job_id text, created boolean, changed boolean)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    now_us bigint := coalesce((batch::json ->> 'at')::bigint, (extract(epoch from statement_timestamp()) * 1000000)::bigint);
    topics text[] := '{}';
    new record;
    answer record;
begin
    for new in
        select o.* from (
            select d.*, b.turn, b.seq, bool_or(d.key is not null and d.policy is not null) over () as mixed
            from (
                select j.job, j.turn, nextval('holdfast.job_seq_seq') as seq
                from json_array_elements(batch::json -> 'jobs') with ordinality as j (job, turn) offset 0) b
            cross join lateral json_to_record(b.job) as d (id uuid, queue text, task text, payload text, rank integer,
                run_at bigint, delay bigint, max_attempts bigint, key text, keep_for bigint, options text, given boolean,
                tags text[], policy json)) o
        order by case when not o.mixed then coalesce(o.key, o.policy ->> 'key') end collate "C" nulls first,
            o.turn
    loop
        select a.* into answer
        from holdfast.add_job(new.id, new.seq, new.queue, new.task, new.payload, new.rank,
            greatest(now_us, coalesce(new.run_at, now_us + new.delay)), now_us, new.max_attempts, new.key,
            now_us + new.keep_for, new.options::json, new.given, new.tags, new.policy) a;
        if answer.created or answer.changed then
            topics := array_append(topics, 'queue:' || new.queue);
        end if;
        turn := new.turn;
        job_id := answer.job_id::text;
        created := answer.created;
        changed := answer.changed;
        return next;
    end loop;
    if cardinality(topics) > 0 then
        perform holdfast.tell('ready', topics);
    end if;
end
$$;
