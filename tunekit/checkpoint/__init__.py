"""Files of a run: run directory, training state, checkpoints and adapters."""
