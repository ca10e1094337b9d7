"""Metric logging to files and experiment trackers. The module of a tracker is imported only if it is used."""
