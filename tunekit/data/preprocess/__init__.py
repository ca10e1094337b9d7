"""Rows tokenized by several processes and cached."""
