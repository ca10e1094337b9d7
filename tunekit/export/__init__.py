"""Export to GGUF files for llama.cpp and to bitsandbytes checkpoints. GGUF modules require the package `gguf`."""
