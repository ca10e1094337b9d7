"""Strict configs: YAML and `key=value` become nested frozen dataclasses. All errors are reported together."""
