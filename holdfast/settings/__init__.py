"""Settings: the table, types, sources and conflicts."""
