"""The web console: pages for browsers, over the operations of the HTTP API.

site.py        routes, access, and problems as pages
sessions.py    sign-in: signed session cookies, tokens against cross-site requests
visit.py       a request of a page: runs operations, renders templates, redirects
cached.py      reads that all pages share, and answers to pages that refresh themselves
rendering.py   Jinja2, filters of the templates, static files
wording.py     meanings of states, and texts for reason codes
overview.py    the overview, faults, workers and queues
job_pages.py   lists of jobs, one job
charts.py       bars of queues, and the chart of ended jobs
workflow_graph.py  the jobs and steps of a workflow as a graph and a table
batch_pages.py  batches, their jobs and callbacks
schedule_pages.py  schedules, their definitions, and runs of a past range
limit_pages.py  limits, with their changes
actions.py     changes of a job, queue or worker: each a POST, then a redirect
bulk_pages.py  changes of many jobs: a count first, one confirmation
"""

from __future__ import annotations

ROOT = "/console"
"""Path of the console below the API."""


def is_console_path(path: str) -> bool:
    """Returns True for a path of the console."""
    return path == ROOT or path.startswith(ROOT + "/")
