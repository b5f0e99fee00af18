"""Adapters: one for each database library."""
