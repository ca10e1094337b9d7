"""Rows of a dataset to micro-batches of tokens."""
