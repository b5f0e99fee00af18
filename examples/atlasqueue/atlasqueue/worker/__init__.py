"""The worker: who runs the jobs.

handlers.py    what runs a job of which type
limiter.py     how many may begin a second, over all workers
completion.py  the success of a job together with the job that follows it
main.py        the application of a worker, with all its handlers
"""
