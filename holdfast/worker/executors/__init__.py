"""How a handler is run, timed out and killed: in the event loop, in a thread, in a process, as a command.

An executor is awaited by the runner of a job. A timeout and a cancellation reach it as ``CancelledError`` in that
await: it then ends what it started, as far as that can be ended, and raises the error on.
"""
