"""The environment of calls from Python: what the `tune` command sets once, and this process gets back."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tunekit.cli.main import set_torch_env


@contextmanager
def torch_environment() -> Iterator[None]:
    """Set the variables that torch reads when it is imported and when it compiles, unless the user has set them."""
    before = dict(os.environ)
    set_torch_env()
    added = {name: value for name, value in os.environ.items() if name not in before}
    try:
        yield
    finally:
        for name, value in added.items():
            if os.environ.get(name) == value:
                del os.environ[name]
