"""Import configs and command lines of LLaMA-Factory."""
