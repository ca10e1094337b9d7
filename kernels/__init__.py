"""One file per operation: a plain torch reference, and a fast version where one was measured to be faster."""
