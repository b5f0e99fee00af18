"""The PostgreSQL store, with PgQueuer and bare loops as its peers: one row to a module, on one durable server.

server.py      the server, and a new database for each measurement     filling.py   millions of jobs, made at once
peer.py, peer_worker.py     PgQueuer      bare.py     statements in a loop, no queue: what the hardware allows
writer.py                   a process that only submits
"""
