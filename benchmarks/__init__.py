"""Benchmarks: programs that measure Holdfast, and a peer in the same minutes, against stated targets.

``python -m benchmarks [store …] [row …] [--quick | --full]``. Machines differ, and one differs from hour to hour:
what counts is the ratio within one run, ours and theirs alternating.

harness.py      rounds, medians, tables, JSON       facts.py     the machine
application.py  the measured tasks                  worker.py    one worker process of ours, on any store
processes.py    the other side as a process         drained.py   several of them, emptying a store
limit_peers.py  limits of ours and of peers, on any server (limit_peer_worker.py: a peer's process)
console.py      pages of the console on a large store (content.py: what is in it)
sqlite/, postgres/, redis/   the rows of one store, with its peer
every other module: one row (due.py: one that each store has)
"""
