-- expand. What a transport's lists of dead letters are made of: of each queue those that ended last.

create index if not exists job_dead on holdfast.job (queue, ended_at, id) where (+state) = 6; -- never to be taken for others
