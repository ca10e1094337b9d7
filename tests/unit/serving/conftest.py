"""Fixtures of tokenizers."""

from tests.helpers.tokenizers import tokenizer_dirs

__all__ = ["tokenizer_dirs"]
