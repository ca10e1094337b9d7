"""Environments that models act in: tools, observations and rewards; and a sandbox for code that models write."""
