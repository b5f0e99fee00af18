"""The worker: who runs the jobs.

handlers.py   what runs a job of which type
main.py       the application of a worker, with all its handlers
"""
