"""One file per training or evaluation method."""
