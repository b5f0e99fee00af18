-- expand. What the feed finds failed attempts by. Apart, so that nobody waits for a lock on jobs while it is built.

create index if not exists attempt_setback on holdfast.attempt (ended_at) where state < 5; -- the job went on
