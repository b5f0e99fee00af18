"""Executors: run, time out and kill a handler in the event loop, a thread, a process, or as a command.

The runner of a job awaits an executor. A timeout or a cancellation arrives as ``CancelledError``: the executor then
ends the handler, if it can be ended, and re-raises the error.
"""
