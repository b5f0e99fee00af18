-- expand. Limits: concurrency, rates and turns of partitions, decided by `claim_limited`. A job under limits has 3 added to its
-- tier, so that no statement for plain jobs finds it, nor does that of an older process.

alter table holdfast.job add column partition text collate "C"; -- null: a plain job; else its buckets, joined by U+001F
alter table holdfast.job add column weights text;               -- JSON: its weight in each bucket; null: 1 in each
alter table holdfast.job add constraint job_weights_check check (weights ~ '^\[[0-9]{1,9}(, ?[0-9]{1,9})*\]$') not valid;
alter table holdfast.job drop constraint job_tier_check;
alter table holdfast.job add constraint job_tier_check check (tier between 0 and 5) not valid;

create index job_partition_ready on holdfast.job (queue, partition, rank, run_at, seq) where state = 0 and tier in (3, 4);
create index job_partition_running on holdfast.job (partition) where (+state) = 2 and partition is not null; -- never to be taken for job_lease

create table holdfast.job_limit (
    name text collate "C" primary key,
    revision bigint not null,           -- grows with each write; begins at the clock
    queue text collate "C",
    task text collate "C",
    keyed boolean not null,             -- a bucket for each value of a key
    concurrency bigint,
    interval_us bigint,                 -- between two tokens; null: no rate
    burst bigint not null,
    shares json,                        -- turns by value of the key
    document text not null              -- JSON of core.limits.Limit, and all there is to it
);

-- Rows only while they say something. What runs is counted, not stored.
create table holdfast.bucket (
    name text collate "C" primary key,
    refilled_at bigint not null default 0,  -- the instant at which it has all its tokens again
    paused_until bigint not null default 0
) with (fillfactor = 50);

-- Partitions that may have ready jobs. A claim adds and removes them; a submission holds a key share of the row it relies on.
create table holdfast.partition (
    queue text collate "C" not null,
    name text collate "C" not null,
    turn bigint not null,               -- virtual time of its next start
    blocked_until bigint,               -- its first job has to wait for tokens or a pause
    primary key (queue, name)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
create index bucket_idle on holdfast.bucket (greatest(refilled_at, paused_until));
create index partition_turn on holdfast.partition (queue, turn, name) where blocked_until is null;
create index partition_blocked on holdfast.partition (queue, blocked_until) where blocked_until is not null;

-- Partitions with new ready jobs that were not listed; the next claim of their queue lists them.
create table holdfast.partition_inbox (
    queue text collate "C" not null,
    name text collate "C" not null
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
create index partition_inbox_name on holdfast.partition_inbox (queue, name);

create table holdfast.limited_queue (
    queue text collate "C" primary key,
    turn bigint not null                -- virtual time: of the latest start
) with (fillfactor = 50);

-- Everything that admits jobs or changes limits does so in turn.
create function holdfast.lock_limits() returns void language sql set search_path = pg_catalog, pg_temp as $$
    select pg_advisory_xact_lock(1215261797, hashtext('holdfast.'))
$$;

-- A job under limits is ready: its partition must be listed, or be in the inbox. Waits for no other transaction. A locked row
-- may be about to go. Where a snapshot lasts for the whole transaction no row can be relied on.
create function holdfast.list_partition() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if new.tier < 3 then -- an older process wrote it
        update holdfast.job j set tier = new.tier + 3 where j.id = new.id and j.state + 0 = 0 and j.tier < 3;
    end if;
    if current_setting('transaction_isolation') = 'read committed' then
        perform from holdfast.partition p where p.queue = new.queue and p.name = new.partition for key share skip locked;
        if found then
            return null;
        end if;
        perform from holdfast.partition_inbox i where i.queue = new.queue and i.name = new.partition
        limit 1 for key share skip locked;
        if found then
            return null;
        end if;
    end if;
    insert into holdfast.partition_inbox (queue, name) values (new.queue, new.partition);
    return null;
end
$$;
create trigger list_new_partition after insert on holdfast.job for each row
    when (new.partition is not null and new.state = 0) execute function holdfast.list_partition();
-- Of these columns each statement that makes jobs ready sets one; a claim and a success, which would pay for it, none.
create trigger list_partition after update of run_at, queue, partition on holdfast.job for each row
    when (new.partition is not null and new.state = 0) execute function holdfast.list_partition();

-- ── the claim ────────────────────────────────────────────────────────────────────────────────────────────────────────
-- Weight of the running jobs of each bucket.
create function holdfast.running_weights() returns table (bucket text, used bigint)
language sql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
    select b.name, sum(coalesce(b.weight, 1))::bigint
    from holdfast.job j cross join lateral unnest(string_to_array(j.partition, chr(31)),
        translate(j.weights, '[] ', '{}')::bigint[]) as b (name, weight)
    where (+j.state) = 2 and j.partition is not null
    group by b.name
$$;

create function holdfast.has_ready(of_queue text, of_partition text) returns boolean
language plpgsql stable as $$
begin
    return exists (select from holdfast.job j
        where j.state = 0 and j.tier in (3, 4) and j.queue = of_queue and j.partition = of_partition limit 1);
end
$$;

-- Takes up to `room` jobs under limits of these queues, in turn, as core.limits.Admission decides; `isolated`: one quarantined
-- job. Always answers with one row at least. Takes nothing where jobs are due (`due`) or a limited queue has jobs without
-- a partition (`unassigned`), if the caller asks for that. One claim at a time; each statement sees what was committed
-- before it, so the counts are exact. The instant is taken after the count: no job starts before the end that made room.
create function holdfast.claim_limited(
    at bigint, queues text[], slots int[], room int, worker_id text, lease_for bigint, promote boolean, anywhere boolean,
    assign boolean, isolated boolean
) returns table (
    id text, task text, queue text, payload text, claims bigint, attempts bigint, max_attempts bigint, priority integer,
    lost_leases integer, run_at bigint, created_at bigint, options json, seq bigint,
    now_us bigint, due boolean, due_in bigint, unassigned text[], quarantined boolean
) language plpgsql
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    most_parked constant int := 200; -- partitions parked, and freed again, by one claim of a queue
    most_kept constant int := 20;
    separator constant text := chr(31);
    candidates cursor (of_queue text, full_names text[], after_turn bigint, after_name text) for
        select p.name, p.turn from holdfast.partition p
        where p.queue = of_queue and p.blocked_until is null and (p.turn, p.name) > (after_turn, after_name)
          and not exists (
            select from unnest(string_to_array(p.name, separator)) b (name)
            where b.name in (select unnest(full_names)))
        order by p.turn, p.name;
    chosen uuid[] := '{}';
    used_names text[] := '{}';          -- buckets in which something runs
    used_weights bigint[] := '{}';
    full_names text[] := '{}';          -- buckets without room for a job of weight 1
    b_name text[] := '{}';              -- buckets that were looked at
    b_known boolean[]; b_shared boolean[]; b_used bigint[]; b_concurrency bigint[]; b_interval bigint[]; b_burst bigint[];
    b_full_at bigint[]; b_was bigint[]; b_paused bigint[]; b_reserved bigint[];
    s_name text[]; s_turn bigint[]; s_until bigint[]; s_step bigint[]; -- partitions of the queue that were looked at
    s_rank int[]; s_run_at bigint[]; s_seq bigint[];
    r_place int[]; r_start bigint[]; r_first int; -- those that were served, by their next start
    number int; drained int; place int; left_slots int; taken int; parked int; i int; k int;
    c_turn bigint; c_name text;          -- the candidate that was looked at last
    t_queue text[] := '{}'; t_name text[] := '{}'; idle tid[]; -- partitions of all queues that were looked at
    of_queue text; names text[]; weights bigint[]; weight bigint;
    v bigint; start bigint; free_at bigint; light_at bigint; after bigint; space bigint; least_due bigint;
    kept int := 0;                      -- partitions that lack tokens of a key for a heavy job and keep their turns
    is_full boolean; is_closed boolean; of_keys boolean; tokens_of_keys boolean; ends boolean; exhausted boolean;
    waiting record; job record; facts record;
begin
    perform holdfast.lock_limits();
    if exists (select from holdfast.job_limit l where l.concurrency is not null) then
        select coalesce(array_agg(u.bucket), '{}'), coalesce(array_agg(u.used), '{}') into used_names, used_weights
        from holdfast.running_weights() u;
        full_names := array(
            select u.name from unnest(used_names, used_weights) u (name, used)
            join holdfast.job_limit l on l.name = split_part(u.name, '=', 1) where u.used >= l.concurrency);
    end if;
    now_us := coalesce(at, (extract(epoch from clock_timestamp()) * 1000000)::bigint); -- a clock: after a lock
    due := promote and case when anywhere
        then exists (select from holdfast.job j where (+j.state) in (1, 3) and j.run_at <= now_us order by j.run_at limit 1)
        else exists (select from unnest(queues) w (queue) cross join lateral (
            select from holdfast.job j where j.state in (1, 3) and j.queue = w.queue and j.run_at <= now_us
            order by j.run_at limit 1) d)
        end;
    unassigned := case when not assign then '{}' else array(
        select w.queue from unnest(queues) w (queue) cross join lateral (
            select from holdfast.job j where j.state = 0 and j.queue = w.queue and j.tier < 3
            order by j.tier, j.rank, j.run_at, j.seq limit 1) f
        where exists (select from holdfast.job_limit l where l.queue = w.queue)) end;
    quarantined := exists (select from unnest(queues) w (queue) cross join lateral (
        select from holdfast.job j where j.state = 0 and j.tier = 5 and j.queue = w.queue limit 1) q);
    if due or cardinality(unassigned) > 0 then
        return next;
        return;
    end if;
    for number in 1 .. cardinality(queues) loop
        of_queue := queues[number];
        left_slots := least(slots[number], room - cardinality(chosen));
        continue when left_slots <= 0 or exists (select from holdfast.queue p where p.name = of_queue and p.paused);
        v := coalesce((select q.turn from holdfast.limited_queue q where q.queue = of_queue), 0);
        if not isolated then
            with news as (
                delete from holdfast.partition_inbox i where i.ctid = any(array(
                    select n.ctid from holdfast.partition_inbox n where n.queue = of_queue
                    order by n.queue, n.name limit 1000 for update skip locked))
                returning i.name)
            select count(*), array_agg(distinct n.name) into drained, names from news n;
            insert into holdfast.partition (queue, name, turn) select of_queue, n.name, v from unnest(names) n (name)
            on conflict do nothing;
            if drained < 1000 then -- what is left is locked by submissions that rely on it
                insert into holdfast.partition (queue, name, turn)
                select distinct of_queue, i.name, v from (
                    select n.name from holdfast.partition_inbox n where n.queue = of_queue order by n.name limit 1000) i
                on conflict do nothing;
            end if;
            update holdfast.partition p set blocked_until = null
            where p.queue = of_queue and p.name = any(array(
                select f.name from holdfast.partition f
                where f.queue = of_queue and f.blocked_until is not null and f.blocked_until <= now_us
                order by f.blocked_until limit most_parked));
        end if;
        s_name := '{}'; s_turn := '{}'; s_until := '{}'; s_step := '{}'; s_rank := '{}'; s_run_at := '{}'; s_seq := '{}';
        r_place := '{}'; r_start := '{}'; r_first := 1;
        taken := 0; parked := 0; ends := false; exhausted := isolated; waiting := null; free_at := null;
        if not isolated then
            c_turn := -1; c_name := '';
            open candidates (of_queue, full_names, c_turn, c_name);
        end if;
        while taken < left_slots and not ends loop
            -- The partition with the earliest start: a candidate, or one that was served already.
            if isolated then
                select j.id, j.partition, j.rank, j.run_at, j.seq, j.weights into job from holdfast.job j
                where j.state = 0 and j.tier = 5 and j.queue = of_queue and j.partition is not null
                  and (j.rank, j.run_at, j.seq) > (
                    coalesce(s_rank[cardinality(s_rank)], -2147483648), coalesce(s_run_at[cardinality(s_rank)], 0),
                    coalesce(s_seq[cardinality(s_rank)], 0))
                order by j.rank, j.run_at, j.seq limit 1 for no key update skip locked;
                exit when not found or cardinality(s_name) >= most_parked;
                place := cardinality(s_name) + 1;
                s_name[place] := job.partition;
                start := v;
            else
                if waiting is null and not exhausted then
                    fetch candidates into waiting;
                    exhausted := not found;
                end if;
                if not exhausted and (r_first > cardinality(r_place) or greatest(waiting.turn, v) <= r_start[r_first]) then
                    start := greatest(waiting.turn, v);
                    place := cardinality(s_name) + 1;
                    s_name[place] := waiting.name;
                    s_turn[place] := waiting.turn; s_until[place] := null; s_step[place] := null;
                    s_rank[place] := -2147483648; s_run_at[place] := 0; s_seq[place] := 0;
                    c_turn := waiting.turn; c_name := waiting.name;
                    waiting := null;
                elsif r_first <= cardinality(r_place) then
                    place := r_place[r_first];
                    start := r_start[r_first];
                    r_first := r_first + 1;
                else
                    exit;
                end if;
                select j.id, j.rank, j.run_at, j.seq, j.weights into job from holdfast.job j
                where j.state = 0 and j.tier in (3, 4) and j.queue = of_queue and j.partition = s_name[place]
                  and (j.rank, j.run_at, j.seq) > (s_rank[place], s_run_at[place], s_seq[place])
                  and (j.expires_at is null or j.expires_at > now_us or j.started_at is not null)
                order by j.rank, j.run_at, j.seq limit 1 for no key update skip locked;
                if not found then
                    v := greatest(v, start); -- it is forgotten, and comes anew at this turn
                    continue;
                end if;
            end if;
            s_rank[place] := job.rank; s_run_at[place] := job.run_at; s_seq[place] := job.seq;
            names := string_to_array(s_name[place], separator);
            weights := translate(job.weights, '[] ', '{}')::bigint[];
            free_at := now_us; light_at := now_us; -- for a job of weight 1
            is_full := false; is_closed := false; of_keys := false; tokens_of_keys := false;
            for k in 1 .. cardinality(names) loop
                i := array_position(b_name, names[k]);
                if i is null then
                    i := cardinality(b_name) + 1;
                    select l.name is not null as known, coalesce(l.queue = of_queue and not l.keyed, false) as shared,
                        l.concurrency, l.interval_us, l.burst, coalesce(b.refilled_at, 0) as refilled_at,
                        coalesce(b.paused_until, 0) as paused_until
                    into facts
                    from (select 1) one
                    left join holdfast.job_limit l on l.name = split_part(names[k], '=', 1)
                    left join holdfast.bucket b on b.name = names[k];
                    b_name[i] := names[k]; b_known[i] := facts.known; b_shared[i] := facts.shared;
                    b_used[i] := coalesce(used_weights[array_position(used_names, names[k])], 0);
                    b_concurrency[i] := facts.concurrency; b_interval[i] := facts.interval_us; b_burst[i] := facts.burst;
                    b_full_at[i] := facts.refilled_at; b_was[i] := facts.refilled_at; b_paused[i] := facts.paused_until;
                    b_reserved[i] := 0;
                end if;
                weight := coalesce(weights[k], 1);
                free_at := greatest(free_at, b_paused[i]);
                light_at := greatest(light_at, b_paused[i]);
                ends := ends or (b_shared[i] and b_paused[i] > now_us);
                continue when not b_known[i];
                space := b_concurrency[i] - b_used[i] - b_reserved[i];
                if space < least(weight, b_concurrency[i]) then
                    is_full := true;
                    is_closed := is_closed or space < 1;
                    of_keys := of_keys or position('=' in names[k]) > 0;
                    ends := ends or (b_shared[i] and space < 1);
                    if space < 1 and not b_name[i] = any(full_names) and not exhausted then
                        full_names := full_names || b_name[i]; -- passed over from here on
                        close candidates;
                        waiting := null;
                        open candidates (of_queue, full_names, c_turn, c_name);
                    end if;
                end if;
                if b_interval[i] is not null then
                    after := greatest(b_full_at[i], now_us) + (least(b_reserved[i], b_burst[i]) - b_burst[i]) * b_interval[i];
                    tokens_of_keys := tokens_of_keys
                        or (after + least(weight, b_burst[i]) * b_interval[i] > now_us and position('=' in names[k]) > 0);
                    free_at := greatest(free_at, after + least(weight, b_burst[i]) * b_interval[i]);
                    light_at := greatest(light_at, after + b_interval[i]);
                    ends := ends or (b_shared[i] and after + b_interval[i] > now_us);
                end if;
            end loop;
            if (is_full or free_at > now_us) and not (is_closed or light_at > now_us or isolated) then
                -- Only its weight is in the way: later jobs leave what it needs, in the buckets of its keys until it fits them.
                for k in 1 .. cardinality(names) loop
                    i := array_position(b_name, names[k]);
                    if weights[k] > 1 and (position('=' in names[k]) > 0 or not (of_keys or tokens_of_keys)) then
                        b_reserved[i] := b_reserved[i] + weights[k];
                    end if;
                end loop;
            end if;
            if free_at > now_us then
                if cardinality(names) > 1 and light_at > now_us then -- then it has its turn, before lighter ones
                    free_at := light_at;
                elsif cardinality(names) > 1 and tokens_of_keys then
                    kept := kept + 1;
                end if;
                least_due := least(least_due, free_at);
                if not isolated and not ends and (cardinality(names) = 1 or light_at > now_us or kept > most_kept) then
                    s_until[place] := free_at;
                    parked := parked + 1;
                    ends := parked >= most_parked;
                    least_due := case when ends then now_us else least_due end; -- the next claim goes on from here
                end if;
            elsif not is_full then
                for k in 1 .. cardinality(names) loop
                    i := array_position(b_name, names[k]);
                    continue when not b_known[i];
                    weight := coalesce(weights[k], 1);
                    b_used[i] := b_used[i] + weight;
                    if b_interval[i] is not null then
                        b_full_at[i] := greatest(b_full_at[i], now_us) + least(weight, b_burst[i]) * b_interval[i];
                    end if;
                end loop;
                chosen := chosen || job.id;
                taken := taken + 1;
                exit when isolated;
                if s_step[place] is null then
                    s_step[place] := 1000000 / coalesce((
                        select (l.shares ->> substr(n.name, position('=' in n.name) + 1))::bigint
                        from unnest(names) with ordinality n (name, turn)
                        join holdfast.job_limit l on l.name = split_part(n.name, '=', 1)
                        where position('=' in n.name) > 0
                          and l.shares ->> substr(n.name, position('=' in n.name) + 1) is not null
                        order by n.turn limit 1), 1);
                end if;
                v := greatest(v, start);
                s_turn[place] := start + s_step[place];
                i := cardinality(r_place) + 1; -- almost always the last: the start of the next served is no earlier
                while i > r_first and r_start[i - 1] > s_turn[place] loop
                    r_place[i] := r_place[i - 1];
                    r_start[i] := r_start[i - 1];
                    i := i - 1;
                end loop;
                r_place[i] := place;
                r_start[i] := s_turn[place];
            end if;
        end loop;
        continue when isolated;
        close candidates;
        if cardinality(s_name) > 0 then
            for place in 1 .. cardinality(s_name) loop -- joined, a planner might read all of the queue
                continue when s_step[place] is null and s_until[place] is null;
                update holdfast.partition p set turn = s_turn[place], blocked_until = s_until[place]
                where p.queue = of_queue and p.name = s_name[place];
            end loop;
            insert into holdfast.limited_queue as q (queue, turn) values (of_queue, v)
            on conflict (queue) do update set turn = excluded.turn where q.turn <> excluded.turn;
        end if;
        least_due := least(least_due, (
            select min(p.blocked_until) from holdfast.partition p where p.queue = of_queue and p.blocked_until is not null));
        t_queue := t_queue || array_fill(of_queue, array[cardinality(s_name)]);
        t_name := t_name || s_name;
    end loop;
    if cardinality(b_name) > 0 then
        insert into holdfast.bucket as b (name, refilled_at)
        select n.name, n.refilled_at from unnest(b_name, b_full_at, b_was) n (name, refilled_at, was) where n.refilled_at <> n.was
        order by n.name
        on conflict (name) do update set refilled_at = excluded.refilled_at;
    end if;
    due_in := case when least_due is not null then greatest(0, least_due - now_us) end; -- else a worker would ask at once
    return query
        update holdfast.job j
        set state = 2, claims = j.claims + 1, attempts = j.attempts + 1, worker = worker_id, started_at = now_us,
            lease_until = lease_for + now_us
        where j.id = any(chosen)
        returning j.id::text, j.task, j.queue, j.payload, j.claims, j.attempts, j.max_attempts, -j.rank, j.lost_leases, j.run_at,
            j.created_at, j.options, j.seq, now_us, due, due_in, unassigned, quarantined;
    if not found then
        return next;
    end if;
    -- Partitions without ready jobs are not listed any longer once their turn has come: else a key whose jobs come one by
    -- one would go first each time. Those that a submission relies on are locked, and stay.
    idle := array(
        select l.ctid from unnest(t_queue, t_name) t (queue, name) cross join lateral (
            select p.ctid from holdfast.partition p
            where p.queue = t.queue and p.name = t.name and not holdfast.has_ready(p.queue, p.name)
              and p.turn <= (select q.turn from holdfast.limited_queue q where q.queue = p.queue)
            for update skip locked) l);
    if cardinality(idle) > 0 then
        delete from holdfast.partition p where p.ctid = any(idle) and not holdfast.has_ready(p.queue, p.name);
    end if;
end
$$;

-- ── buckets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
-- Takes tokens, or says after how many microseconds they can be taken. Those that a claim takes too are taken in its turn.
create function holdfast.take_tokens(at bigint, bucket_name text, tokens bigint) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    rule record;
    state record;
    now_us bigint;
    after bigint;
    free_at bigint;
begin
    select l.queue, l.task, l.interval_us, l.burst into rule
    from holdfast.job_limit l where l.name = split_part(bucket_name, '=', 1);
    if not found then
        return 0;
    end if;
    if coalesce(rule.queue, rule.task) is not null then
        perform holdfast.lock_limits();
    end if;
    insert into holdfast.bucket (name) values (bucket_name) on conflict do nothing;
    select b.refilled_at, b.paused_until into state from holdfast.bucket b where b.name = bucket_name for no key update;
    now_us := coalesce(at, (extract(epoch from clock_timestamp()) * 1000000)::bigint); -- a clock: after a lock
    free_at := coalesce(state.paused_until, 0);
    if rule.interval_us is not null then
        after := greatest(coalesce(state.refilled_at, 0), now_us) + least(tokens, rule.burst) * rule.interval_us;
        free_at := greatest(free_at, after - rule.burst * rule.interval_us);
    end if;
    if free_at > now_us then
        return free_at - now_us;
    end if;
    update holdfast.bucket b set refilled_at = after where b.name = bucket_name and after is not null;
    return 0;
end
$$;

-- Forgets buckets that are as new, and partitions without ready jobs; lists those whose jobs an older process made ready.
create function holdfast.prune_limits(at bigint, most integer) returns void
language plpgsql set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set enable_hashjoin = off set enable_mergejoin = off as $$
declare
    now_us bigint;
    idle tid[];
begin
    perform holdfast.lock_limits();
    now_us := coalesce(at, (extract(epoch from clock_timestamp()) * 1000000)::bigint); -- a clock: after a lock
    delete from holdfast.bucket b where b.ctid = any(array(
        select o.ctid from holdfast.bucket o where greatest(o.refilled_at, o.paused_until) <= now_us
        order by greatest(o.refilled_at, o.paused_until) limit most for update skip locked));
    idle := array(
        select p.ctid from holdfast.partition p
        where p.ctid = any(array(
            select q.ctid from holdfast.partition q where q.blocked_until is null
            order by q.queue, q.turn, q.name limit most)) and not holdfast.has_ready(p.queue, p.name)
        for update skip locked);
    if cardinality(idle) > 0 then
        delete from holdfast.partition p where p.ctid = any(idle) and not holdfast.has_ready(p.queue, p.name);
    end if;
    with recursive ready (queue, name, turn) as (
        (select j.queue, j.partition, 1 from holdfast.job j where j.state = 0 and j.tier in (3, 4)
         order by j.queue, j.partition, j.rank, j.run_at, j.seq limit 1)
        union all
        select f.queue, f.partition, r.turn + 1
        from ready r cross join lateral (
            select j.queue, j.partition from holdfast.job j
            where j.state = 0 and j.tier in (3, 4) and (j.queue, j.partition) > (r.queue, r.name)
            order by j.queue, j.partition, j.rank, j.run_at, j.seq limit 1) f
        where r.turn < most)
    insert into holdfast.partition (queue, name, turn)
    select r.queue, r.name, coalesce((select q.turn from holdfast.limited_queue q where q.queue = r.queue), 0) from ready r
    on conflict do nothing;
    delete from holdfast.limited_queue q where not exists (select from holdfast.partition p where p.queue = q.queue);
end
$$;

-- ── submission and completion ────────────────────────────────────────────────────────────────────────────────────────
-- As before, with the partition of a job under limits.
drop function holdfast.add_job;
create function holdfast.add_job(
    new_id uuid, new_seq bigint, new_queue text, new_task text, new_payload text, new_rank integer, new_run_at bigint, now_us bigint,
    new_max_attempts bigint, new_key text, new_keep_until bigint, new_options json, given boolean, new_tags text[], policy json,
    new_partition text default null, new_weights text default null
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
                rank = case when policy ->> 'on_conflict' = 'replace' then new_rank else j.rank end,
                partition = case when policy ->> 'on_conflict' = 'replace' then new_partition else j.partition end,
                weights = case when policy ->> 'on_conflict' = 'replace' then new_weights else j.weights end,
                tier = j.tier % 3 + case
                    when case when policy ->> 'on_conflict' = 'replace' then new_partition else j.partition end is null
                    then 0 else 3 end
            where j.id = owner and j.state + 0 in (0, 1, 3) and policy ->> 'on_conflict' in ('replace', 'reschedule');
            return query select owner, false, found;
            return;
        end if;
    end if;
    insert into holdfast.job as j
        (id, seq, queue, task, payload, state, rank, run_at, created_at, max_attempts, keyed, tagged, options, claims,
         partition, weights, tier)
    values (new_id, new_seq, new_queue, new_task, new_payload, case when new_run_at <= now_us then 0 else 1 end, new_rank,
        new_run_at, now_us, new_max_attempts, new_key is not null or policy is not null, new_tags is not null, new_options,
        case when given then now_us else 0 end, new_partition, new_weights, case when new_partition is null then 0 else 3 end)
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

-- As before, with the partitions of jobs under limits.
create or replace function holdfast.enlist(batch text) returns table (turn bigint, job_id text, created boolean, changed boolean)
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
                tags text[], policy json, partition text, weights text)) o
        order by case when not o.mixed then coalesce(o.key, o.policy ->> 'key') end collate "C" nulls first,
            o.turn
    loop
        select a.* into answer
        from holdfast.add_job(new.id, new.seq, new.queue, new.task, new.payload, new.rank,
            greatest(now_us, coalesce(new.run_at, now_us + new.delay)), now_us, new.max_attempts, new.key,
            now_us + new.keep_for, new.options::json, new.given, new.tags, new.policy,
            new.partition, new.weights) a;
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

-- As before; the end of a job under limits makes room for others.
create or replace function holdfast.complete(done text) returns table (accepted boolean, state smallint)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    said json := done::json;
    job uuid := (said ->> 'id')::uuid;
    now_us bigint := coalesce((said ->> 'at')::bigint, (extract(epoch from statement_timestamp()) * 1000000)::bigint);
begin
    update holdfast.job j
    set state = 5, ended_at = now_us, result = said ->> 'result', lease_until = null, lost_leases = 0, tier = 0,
        cancelling = false,
        reason = null, error = null, ended_by = pg_current_xact_id()
    where j.id = job and j.claims = (said ->> 'claims')::bigint and j.state + 0 = 2 and j.lease_until + 0 > now_us;
    accepted := found;
    state := (select j.state from holdfast.job j where j.id = job);
    if accepted then
        perform holdfast.tell('ended', array['job:' || job::text]);
        perform holdfast.tell('ready', array['queue:' || j.queue, 'due:' || j.queue]) from holdfast.job j
        where j.id = job and j.partition is not null;
    end if;
    return next;
end
$$;
