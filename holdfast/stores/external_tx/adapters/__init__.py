"""One adapter for each database library."""
