"""Which family a checkpoint belongs to, by the `model_type` of its config.json."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from tunekit.errors import UserError
from tunekit.models.families import llama, qwen
from tunekit.models.families.base import LLAMA, Config
from tunekit.models.spec import DecoderSpec
from tunekit.models.weights import Row


@dataclass(frozen=True)
class Family:
    """A function of config.json and a table of names: all that is particular to an architecture."""

    spec: Callable[[Config], DecoderSpec]
    table: tuple[Row, ...] = LLAMA


FAMILIES = {
    "llama": Family(llama.spec),
    "mistral": Family(llama.mistral),
    "qwen2": Family(qwen.qwen2),
    "qwen3": Family(qwen.qwen3),
}


def family(config: Config, where: str) -> tuple[Family, DecoderSpec]:
    """Family and spec of the config.json at `where`."""
    kind = config.get("model_type")
    if kind is None:
        raise UserError(f"{where}: no 'model_type', so the architecture is not known")
    if not isinstance(kind, str) or kind not in FAMILIES:
        near = difflib.get_close_matches(str(kind), FAMILIES, 1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{where}: model_type {kind!r} is not supported{hint} (supported: {', '.join(FAMILIES)})")
    if config.get("quantization_config"):
        raise UserError(f"{where}: the checkpoint is quantized; only plain weights can be read")
    found = FAMILIES[kind]
    try:
        return found, found.spec(config)
    except KeyError as error:
        raise UserError(f"{where}: {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
