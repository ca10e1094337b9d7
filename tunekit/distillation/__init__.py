"""Distillation: online and offline teachers, and on-policy sampling."""
