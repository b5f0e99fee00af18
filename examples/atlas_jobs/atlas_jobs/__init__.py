"""Atlas Jobs, a background job system on PostgreSQL, as an application of Holdfast."""
