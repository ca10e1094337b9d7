"""Reward functions: config choices that score sampled answers."""
