"""What a run will need, before it runs: memory, traffic and time of every rank, from shapes alone."""
