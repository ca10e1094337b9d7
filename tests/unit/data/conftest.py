"""Fixtures of tokenizers and of fake runs."""

from tests.helpers.tokenizers import make_dist, nano, tokenizer_dirs

__all__ = ["make_dist", "nano", "tokenizer_dirs"]
