"""Fine-tuning for PyTorch: readable recipes, one decoder for every family, checkpoints that the Hub understands."""

__version__ = "0.1.0"
