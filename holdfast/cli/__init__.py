"""The command line. One module per command group; each command reads its arguments, asks the application, prints.

main.py             ``main``: the whole tree, and the exit codes of errors, Ctrl-C and a closed pipe
base.py             commands and groups that know the common options and their own examples
context.py          context of one call: application, store, settings file
loading.py          ``module:attribute`` to an application
output.py           printing: tables, JSON, and no control character that came from data
filter_options.py   selections of jobs: ids and filters
shell_completion.py names that a shell completes
submission.py       options of a job to be submitted, submitting it, waiting for it
"""

from holdfast.cli.main import main

__all__ = ["main"]
