"""The whole system on this machine, without Docker and without root.

processes.py  child processes: start, wait until ready, stop, kill
servers.py    PostgreSQL and Redis, from binaries inside packages or on PATH
system.py     all parts on free ports
start.py      `start` and `stop`
note.py       streams.json: the process of `start`, for `stop`, `run` and `pending`
pending.py    entries of a stream that a worker has taken and not acknowledged
story.py      `story`: what happens when parts fail
report.py     the tables at its end
"""
