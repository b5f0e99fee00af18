"""The pure core: models, transitions, validation, events. No I/O, no store, no settings."""
