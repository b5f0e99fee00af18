"""A shop on Django whose orders are confirmed by jobs."""
