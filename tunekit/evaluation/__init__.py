"""Evaluation: loss and completions on held-out rows, tasks by name, and significance tests between two models."""
