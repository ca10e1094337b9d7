"""A GGUF file read again: its fields, its tokenizer and every number against what they were made of."""

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
    """Tensors of one type: how many there are, and the largest error as a share of what the type allows."""

    count: int
    worst: float


def check_rounding(
    file: GGUFCheckpoint, plan: TensorMap, vocabulary: Vocabulary, quiet: bool = False
) -> dict[str, RoundingError]:
    """Errors by type. UserError for anything that is not as it should be; the file stays."""
    check_spec_matches(plan.spec, file.spec, plan.arch.name, str(file.path))
    if Vocabulary.from_fields(file.config) != vocabulary:
        raise UserError(f"{file.path}: the tokenizer in the file is not the one that was written")
    errors: dict[str, RoundingError] = {}
    with TensorReader(file.gguf_tensors) as tensors:
        for entry, tensor in tqdm(plan.tensors(), "checking", len(plan.entries), disable=quiet or None, leave=False):
            error = max_rounding_error(tensor, tensors[entry.name], entry.kind)
            if error > 1:
                problem = f"{error:.3g} times as far from the checkpoint as {entry.kind.name} may be"
                raise UserError(f"{file.path}: {entry.name} is {problem}")
            previous = errors.get(entry.kind.name, RoundingError(0, 0.0))
            errors[entry.kind.name] = RoundingError(previous.count + 1, max(previous.worst, error))
    return errors
