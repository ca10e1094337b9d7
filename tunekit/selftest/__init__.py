"""Checks of an installation on the user's own machine: kernels, model, processes and speed (`tune selftest`)."""
