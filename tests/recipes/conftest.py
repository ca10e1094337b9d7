"""Fixtures of recipe runs: a tiny checkpoint, and a directory in which `tune` runs."""

from tests.helpers.recipe_runs import forkserver_context, make_model, memorized_run, tiny_model, workspace

__all__ = ["forkserver_context", "make_model", "memorized_run", "tiny_model", "workspace"]
