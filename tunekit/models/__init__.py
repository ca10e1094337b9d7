"""Decoder of all families: spec (data), modules, weight maps and families (checkpoint names)."""
