"""The command line. One module per command group; each command reads its arguments, asks the application, prints.

main.py             ``main``: the whole tree, and the exit codes of errors, Ctrl-C and a closed pipe
base.py             commands and groups with the common options, and what a shell completes
context.py          context of one call: application, store, settings file
loading.py          ``module:attribute`` to an application
output.py           printing: tables, JSON, and no control character that came from data
submission.py       options of a submission and of a filter, submitting, waiting for a job
"""

from holdfast.cli.main import main

__all__ = ["main"]
