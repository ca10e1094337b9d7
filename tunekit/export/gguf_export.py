"""Exports a model to a GGUF file: merge the adapter, plan the tensors, write the file, and check it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter, Keys
from tqdm import tqdm

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.atomic import atomic_file, check_free_space
from tunekit.checkpoint.hf_checkpoint import EMBED, HFCheckpoint
from tunekit.checkpoint.merge import MergedCheckpoint
from tunekit.checkpoint.safetensors_io import TensorReader
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.export.compatibility import check_spec_matches
from tunekit.export.gguf_plan import GGUFPlan, build_gguf_plan
from tunekit.export.gguf_reader import GGUFCheckpoint
from tunekit.export.quant_types import (
    QUANT_TYPES,
    encode_tensor,
    max_rounding_error,
    parse_quant_type,
    tensor_bytes,
    type_name_of,
)
from tunekit.export.tokenizer import read_vocabulary
from tunekit.export.vocabulary import Vocabulary
from tunekit.publishing.base_model import read_base_model

GENERAL = Keys.General
TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
TYPES |= {str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}
LICENSE_FIELDS = {GENERAL.LICENSE: "license", GENERAL.LICENSE_NAME: "license_name"}
LICENSE_FIELDS |= {GENERAL.LICENSE_LINK: "license_link"}


@dataclass(frozen=True)
class RoundingError:
    """Number of tensors of one type, and their largest error relative to the allowed error."""

    count: int
    worst: float


@dataclass(frozen=True)
class ExportResult:
    """An exported file that was checked."""

    file: GGUFCheckpoint
    quant_type: str  # name of the type
    rounding_errors: dict[str, RoundingError]  # by the types of its tensors
    notes: tuple[str, ...]  # warnings for the user
    drift: float  # maximum mean difference of its logits, in standard deviations


def export_gguf(
    source: HFCheckpoint, adapter: NoAdapter | LoRAConfig, tokenizer: Tokenizer, out: Path, type_name: str | None,
    name: str,
) -> ExportResult:  # fmt: skip
    """Export a model, with its adapter merged, to a GGUF file. Raises UserError before writing if unsupported."""
    model = MergedCheckpoint.with_adapter(source, adapter)
    type_name = type_name_of(source.dtypes[EMBED]) if type_name is None else type_name
    plan = build_gguf_plan(model, parse_quant_type(type_name))
    vocabulary, notes = read_vocabulary(tokenizer, plan.spec.vocab, str(source.path))
    write_gguf(out, plan, source_fields(source, name, model is not source) | vocabulary.to_fields())
    file = GGUFCheckpoint.open(out)
    errors = check_rounding(file, plan, vocabulary)
    exact = all(error.worst == 0 for error in errors.values())
    drift = QUANT_TYPES["f32" if exact else type_name].drift
    if model is not source:  # merging rounds
        drift = max(drift, QUANT_TYPES[type_name_of(source.dtypes[EMBED])].drift)
    return ExportResult(file, type_name, errors, (*plan.notes, *notes), drift)


def source_fields(source: HFCheckpoint, name: str, derived: bool) -> dict[str, Any]:
    """Fields for the name, license and origin of the weights."""
    base = read_base_model(source)
    fields: dict[str, Any] = {GENERAL.NAME: name}
    fields |= {key: base.license[entry] for key, entry in LICENSE_FIELDS.items() if entry in base.license}
    if base.repo is not None:
        link = f"https://huggingface.co/{base.repo}"
        model = {GENERAL.BASE_MODEL_NAME.format(id=0): base.name, GENERAL.BASE_MODEL_REPO_URL.format(id=0): link}
        fields |= {GENERAL.BASE_MODEL_COUNT: 1} | model if derived else {GENERAL.SOURCE_REPO_URL: link}
    return fields


def write_gguf(out: Path, plan: GGUFPlan, fields: Mapping[str, Any]) -> None:
    """Write a file atomically. `fields` are added to those of the plan."""
    if out.is_dir():
        raise UserError(f"{out}: is a directory. Specify a file, such as {out / 'model.gguf'}.")
    check_free_space(out, plan.num_bytes())
    with atomic_file(out) as partial:
        alignment = write_header(partial, plan, plan.fields() | dict(fields))
        progress = tqdm(total=plan.num_bytes(), desc="writing", unit="B", unit_scale=True, disable=None, leave=False)
        with partial.open("ab") as file, progress:
            for entry, tensor in plan.tensors():
                write_padding(file, alignment)
                file.write(encode_tensor(tensor, entry.kind).data)
                progress.update(tensor_bytes(entry.kind, entry.shape))
            write_padding(file, alignment)


def write_header(file: Path, plan: GGUFPlan, fields: Mapping[str, Any]) -> int:
    """Write everything before the tensor data. Returns the alignment of tensors in bytes."""
    writer = GGUFWriter(file, plan.arch.name)
    for key, value in fields.items():
        writer.add_key_value(key, value, TYPES[type(value)])
    for entry in plan.entries:
        writer.add_tensor_info(
            entry.name, entry.shape, np.dtype(np.float32), tensor_bytes(entry.kind, entry.shape), entry.kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return writer.data_alignment


def write_padding(file: IO[bytes], alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def check_rounding(file: GGUFCheckpoint, plan: GGUFPlan, vocabulary: Vocabulary) -> dict[str, RoundingError]:
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
