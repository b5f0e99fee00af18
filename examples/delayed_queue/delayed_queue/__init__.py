"""Delayed Queue, jobs that run when they are due, on Redis alone, as an application of Holdfast."""
