"""Shows whether a worker in another language keeps the worker protocol: ``python -m tools.worker_protocol``."""
