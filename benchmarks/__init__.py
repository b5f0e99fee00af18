"""Benchmarks: programs that measure Holdfast, and a peer in the same minutes, against stated targets.

``python -m benchmarks [row …] [--quick]``. Machines differ and one machine differs from hour to hour, so what counts is
the ratio within one run, ours and theirs alternating.

harness.py    rounds, medians, tables, JSON           facts.py     the machine
processes.py  the other side as a process             filling.py   files with many jobs, made at once
application.py, worker.py                ours          peer.py, peer_worker.py   Huey's
every other module: one row
"""
