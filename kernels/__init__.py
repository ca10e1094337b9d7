"""One file per operation: a torch reference, and a fast version (Triton, C++) where it was measured to be faster."""
