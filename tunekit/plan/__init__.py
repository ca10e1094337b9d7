"""Estimates of memory, communication and time of each rank before a run."""
