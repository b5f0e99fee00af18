"""Holdfast inside other frameworks: one module a framework, each with an extra of its name."""
