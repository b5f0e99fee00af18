"""The Redis store: all of a job's life in Redis or Valkey, moved by Lua scripts. Its keys: docs/redis-keys.md."""
