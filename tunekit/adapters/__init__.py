"""LoRA, DoRA and PiSSA."""
