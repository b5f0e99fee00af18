"""Shows whether a worker in another language keeps the worker protocol: ``python -m holdfast.web.conformance``."""
