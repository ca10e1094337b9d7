"""A small recipe config with all kinds of fields that are supported."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal

import pytest

from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.errors import FieldError

BASE = "model: m\ndata: {source: s}\nout: o\n"


@dataclass(frozen=True)
class Rows:
    """Source of training examples."""

    source: str  # path or Hub name
    length: int = 2048  # tokens in a row | at most
    pack: bool = False


@dataclass(frozen=True)
class Full:
    pass


@dataclass(frozen=True)
class LoRA:
    """Low-rank update of a weight."""

    rank: int = 8  # width of the update
    alpha: float = 16.0
    # which layers: a word,
    # or names
    targets: str | tuple[str, ...] = "all"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise FieldError("rank", "must be 1 or more")
        if self.alpha < 0:
            raise ValueError("alpha is negative")


@dataclass(frozen=True)
class DoRA(LoRA):
    magnitude: bool = True  # noqa


@dataclass(frozen=True)
class AdamW:
    lr: float = 1e-4  # learning rate
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True)
class SGD:
    lr: float = 1e-2
    momentum: float | None = None


@dataclass(frozen=True)
class TensorBoard:
    pass


@dataclass(frozen=True)
class WandB:
    project: str = "tunekit"


@dataclass(frozen=True)
class Log:
    every: int = 1
    to: tuple[TensorBoard | WandB, ...] = ()


@dataclass(frozen=True)
class Loss:
    weights: tuple[float, ...] = (1.0, 2.0)
    parts: tuple[LoRA, ...] = (LoRA(rank=2), LoRA(rank=3))
    terms: tuple[LoRA | SGD, ...] = (LoRA(rank=5),)


@dataclass(frozen=True)
class SFT:
    """All options of this recipe."""

    model: str  # directory or Hub name
    data: Rows
    out: str
    adapter: Full | LoRA | DoRA = Full()
    optimizer: AdamW | SGD = AdamW(lr=3e-4)
    validation: Rows | None = None
    other: LoRA | DoRA | None = None
    log: Log = Log()
    loss: Loss = Loss()
    batch: int = 64
    clip: float | None = 1.0
    dtype: Literal["bf16", "fp32"] = "bf16"
    compile: bool = False
    size: int | str = "auto"
    name: str | None = None
    words: dict[str, str] = field(default_factory=dict)
    rates: dict[str, SGD] = field(default_factory=dict)


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """This module. Test files import it as `house`."""
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "house", module)
    return module


@pytest.fixture
def sft(tree: ModuleType) -> Callable[..., SFT]:
    """Load YAML after the three required keys."""
    return lambda text="", *overrides, **more: load_config(SFT, BASE + text, overrides, **more)


@pytest.fixture
def errors(tree: ModuleType) -> Callable[..., list[str]]:
    """Error lines for YAML after the three required keys. It starts in line 4."""

    def lines(text: str = "", *overrides: str, base: str = BASE, **more: object) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config(SFT, base + text, overrides, **more)
        assert str(caught.value) == "\n".join(caught.value.lines)
        return [*caught.value.lines]

    return lines
