"""Strict configs: YAML and `key=value` become nested frozen dataclasses, or every mistake is named at once."""
