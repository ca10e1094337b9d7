"""Process groups, sharding, parallelism, launching, and heartbeats."""
