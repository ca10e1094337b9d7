"""Import configs and command lines of TRL."""
