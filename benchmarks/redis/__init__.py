"""The Redis store: one row to a module, on a server that writes its log to the disk every second, or for each write.

server.py    the servers, and an empty namespace for each measurement
peers/, peer_worker.py    those that work on Redis too
"""
