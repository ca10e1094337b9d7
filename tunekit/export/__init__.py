"""Checkpoints as files of llama.cpp (GGUF). The modules here need the `gguf` package, an extra, except `__init__`."""
