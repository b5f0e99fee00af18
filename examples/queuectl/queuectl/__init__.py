"""QueueCTL: a job queue for shell commands, run from the command line. A thin view over Holdfast.

cli.py        the command ``queuectl``: parse, ask the application, print
config.py     the settings, in a JSON file with QueueCTL's names
models.py     jobs as QueueCTL writes them: validation, states, columns
app.py        the application that all of it uses
"""
