"""Documents to the micro-batches of a step: a pure function of (seed, step, rank)."""
