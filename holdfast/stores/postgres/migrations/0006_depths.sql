-- expand. Depths by key: jobs of a bucket that have not started are counted. It is the first bucket of their partition, or the
-- second.

create index job_unstarted on holdfast.job (partition) where (state + 0) in (0, 1, 3, 4) and partition is not null;
create index job_unstarted_second on holdfast.job (substr(partition, strpos(partition, chr(31)) + 1))
    where (state + 0) in (0, 1, 3, 4) and strpos(partition, chr(31)) > 0;

-- How many jobs of each bucket have not started, up to `most` in each place. A name that goes on does so behind U+001F.
create function holdfast.count_waiting(buckets text[], most bigint) returns setof bigint
language plpgsql stable set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
    bucket text collate "C";
begin
    foreach bucket in array buckets loop
        return next (
            select count(*) from (
                select from holdfast.job j
                where (j.state + 0) in (0, 1, 3, 4) and j.partition >= bucket and j.partition < bucket || ' '
                order by j.partition limit most) f
        ) + (
            select count(*) from (
                select from holdfast.job j
                where (j.state + 0) in (0, 1, 3, 4) and strpos(j.partition, chr(31)) > 0
                  and substr(j.partition, strpos(j.partition, chr(31)) + 1) >= bucket
                  and substr(j.partition, strpos(j.partition, chr(31)) + 1) < bucket || ' '
                order by substr(j.partition, strpos(j.partition, chr(31)) + 1) limit most) s);
    end loop;
end
$$;
