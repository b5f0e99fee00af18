"""The pure core: models, transitions, validation, events. No store, no settings, and no I/O but the environment
variable and the signals of ``fault_points``, the threads of ``portal``, and logging."""
