"""The demo: a whole standard library as jobs, a worker killed halfway, and every total checked. ``make demo`` runs it.

measure.py   what is counted in one source file
corpus.py    the files: the running Python's own library, and twenty broken ones
jobs.py      the application: its task, its settings
worker.py    one worker process
show.py      the run, and what it prints
report.py    what Holdfast says happened, beside the same figures computed directly
"""
