"""Programs for the developers of Holdfast."""
