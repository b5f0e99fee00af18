"""AtlasQueue, a task queue on PostgreSQL and Redis, as an application of Holdfast."""
