"""The Redis store: one row to a module, on one server that writes its log to the disk every second.

server.py    the server, and an empty namespace for each measurement
"""
