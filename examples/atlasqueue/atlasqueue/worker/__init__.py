"""The worker: who runs the jobs.

handlers.py   what runs a job of which type
limiter.py    how many may begin a second, over all workers
main.py       the application of a worker, with all its handlers
"""
