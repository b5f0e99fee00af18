-- expand. What the feed of endings needs.

-- Set where a handler's own transaction ended the job: under a savepoint, `xmin` is the savepoint's number.
alter table holdfast.job add column ended_by xid8;

-- The whole number of the transaction that wrote a row, from its lower half; `top` is a number given out about then.
create function holdfast.written_by(lower_half xid, top bigint) returns xid8 language sql immutable as $$
    select (top - top % 4294967296 + lower_half::text::bigint
        - case when lower_half::text::bigint > top % 4294967296 and top >= 4294967296 then 4294967296 else 0 end)::text::xid8
$$;

create or replace function holdfast.complete(done text) returns table (accepted boolean, state smallint)
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    said json := done::json;
    job uuid := (said ->> 'id')::uuid;
    now_us bigint := coalesce((said ->> 'at')::bigint, (extract(epoch from statement_timestamp()) * 1000000)::bigint);
begin
    update holdfast.job j
    set state = 5, ended_at = now_us, result = said ->> 'result', lease_until = null, losses = 0, cancelling = false,
        reason = null, error = null, ended_by = pg_current_xact_id()
    where j.id = job and j.claims = (said ->> 'claims')::bigint and j.state + 0 = 2 and j.lease_until + 0 > now_us;
    accepted := found;
    state := (select j.state from holdfast.job j where j.id = job);
    if accepted then
        perform holdfast.tell('ended', array['job:' || job::text]);
    end if;
    return next;
end
$$;
