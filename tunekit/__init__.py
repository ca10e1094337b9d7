"""Fine-tuning for PyTorch: readable recipes, one decoder for every family, checkpoints that the Hub understands.

    import tunekit

    run = tunekit.finetune("tunekit/nano", rows, max_steps=20)
    run.model.chat("Hello!")

`import tunekit` imports nothing else: a name is imported when it is first used. See docs/python_api.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunekit.api.evaluate import evaluate
    from tunekit.api.generate import generate
    from tunekit.api.model import Model, load
    from tunekit.api.result import Run
    from tunekit.api.train import finetune, run
    from tunekit.config.errors import ConfigError
    from tunekit.errors import UserError

__version__ = "0.1.0"
__all__ = ["ConfigError", "Model", "Run", "UserError", "__version__", "evaluate", "finetune", "generate", "load", "run"]

_MODULES = {
    "ConfigError": "tunekit.config.errors",
    "Model": "tunekit.api.model",
    "Run": "tunekit.api.result",
    "UserError": "tunekit.errors",
    "evaluate": "tunekit.api.evaluate",
    "finetune": "tunekit.api.train",
    "generate": "tunekit.api.generate",
    "load": "tunekit.api.model",
    "run": "tunekit.api.train",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with import_module("tunekit.api.environment").torch_environment():  # torch reads it when it is imported
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
