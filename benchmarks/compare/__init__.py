"""Compares this checkout with an older revision."""
