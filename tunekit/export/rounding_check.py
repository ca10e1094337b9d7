"""Checks a written GGUF file: its spec, its tokenizer and every value, against the exported model."""

from dataclasses import dataclass

from tqdm import tqdm

from tunekit.checkpoint.safetensors_io import TensorReader
from tunekit.errors import UserError
from tunekit.export.compatibility import check_spec_matches
from tunekit.export.gguf_reader import GGUFCheckpoint
from tunekit.export.quant_types import max_rounding_error
from tunekit.export.tensor_map import TensorMap
from tunekit.export.vocabulary import Vocabulary


@dataclass(frozen=True)
class RoundingError:
    """Number of tensors of one type, and their largest error relative to the allowed error."""

    count: int
    worst: float


def check_rounding(file: GGUFCheckpoint, plan: TensorMap, vocabulary: Vocabulary) -> dict[str, RoundingError]:
    """Rounding errors by type. Raises UserError if the file is wrong; it is not deleted."""
    check_spec_matches(plan.spec, file.spec, plan.arch.name, str(file.path))
    if Vocabulary.from_fields(file.config) != vocabulary:
        raise UserError(f"{file.path}: the tokenizer in the file differs from the written one")
    errors: dict[str, RoundingError] = {}
    with TensorReader(file.gguf_tensors) as tensors:
        for entry, tensor in tqdm(plan.tensors(), "checking", len(plan.entries), disable=None, leave=False):
            error = max_rounding_error(tensor, tensors[entry.name], entry.kind)
            if error > 1:
                problem = f"the rounding error is {error:.3g} times the maximum of {entry.kind.name}"
                raise UserError(f"{file.path}: {entry.name}: {problem}")
            previous = errors.get(entry.kind.name, RoundingError(0, 0.0))
            errors[entry.kind.name] = RoundingError(previous.count + 1, max(previous.worst, error))
    return errors
