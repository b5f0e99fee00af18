"""The command line. One module per command group; each command reads its arguments, asks the application, prints.

program.py      ``main``: the whole tree, and what errors, Ctrl-C and a closed pipe come to
base.py         commands and groups that know the common options and their own examples
session.py      context of one call: application, store, settings file
loading.py      ``module:attribute`` to an application
show.py         printing: tables, JSON, and no control character that came from data
documents.py    jobs, attempts, workers as the JSON documents of ``--json``
choosing.py     which jobs: ids and filters
completing.py   what a shell is offered for a word
submitting.py   what may be said about a job to be submitted, and submitting it
"""

from holdfast.cli.main import main

__all__ = ["main"]
