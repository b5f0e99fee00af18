-- expand. Depths by key: jobs of a bucket that have not started are counted. It is the first bucket of their partition, or the
-- second.
create index holdfast_job_unstarted on holdfast_job (partition) where state in (0, 1, 3, 4) and partition is not null;
create index holdfast_job_unstarted_second on holdfast_job (substr(partition, instr(partition, char(31)) + 1))
    where state in (0, 1, 3, 4) and instr(partition, char(31)) > 0;
