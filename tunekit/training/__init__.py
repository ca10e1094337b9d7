"""Config, run context, step guard, data and packing checks, and export of training recipes."""
