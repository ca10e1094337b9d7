"""The environment of calls from Python: what the `tune` command sets once, and this process gets back."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tunekit.cli.main import set_torch_env

NO_WIDGETS = "IProgress not found"  # of tqdm when it is imported in a notebook; progress is shown without widgets
SET_BY_RUNS = ("CUBLAS_WORKSPACE_CONFIG",)  # with deterministic=true


@contextmanager
def torch_environment() -> Iterator[None]:
    """Set the variables that torch reads when it is imported and when it compiles, unless the user has set them."""
    before = dict(os.environ)
    set_torch_env()
    added = {*os.environ, *SET_BY_RUNS} - before.keys()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_WIDGETS)
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)
