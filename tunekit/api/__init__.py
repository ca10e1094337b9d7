"""The Python API: `tunekit.load`, `tunekit.finetune` and the other names of the package."""
