"""Executors: run, time out and kill a handler in the event loop, a thread, a process, or as a command.

An executor is awaited by the runner of a job. A timeout and a cancellation reach it as ``CancelledError`` in that
await: it then ends what it started, as far as that can be ended, and raises the error on.
"""
