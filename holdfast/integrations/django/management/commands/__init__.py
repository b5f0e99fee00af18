"""The command ``holdfast`` of a project."""
