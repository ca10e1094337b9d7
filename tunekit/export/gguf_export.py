"""Exports a model to a GGUF file: merge the adapter, plan the tensors, write the file, and check it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import Keys

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import EMBED, HFCheckpoint
from tunekit.data.tokenizer import Tokenizer
from tunekit.export.gguf_reader import GGUFCheckpoint
from tunekit.export.gguf_writer import write_gguf
from tunekit.export.lazy_merge import LazyMergedCheckpoint
from tunekit.export.quant_types import QUANT_TYPES, parse_quant_type, type_name_of
from tunekit.export.rounding_check import RoundingError, check_rounding
from tunekit.export.tensor_map import build_tensor_map
from tunekit.export.tokenizer import read_vocabulary
from tunekit.publishing.base_model import read_base_model

GENERAL = Keys.General
LICENSE_FIELDS = {GENERAL.LICENSE: "license", GENERAL.LICENSE_NAME: "license_name"}
LICENSE_FIELDS |= {GENERAL.LICENSE_LINK: "license_link"}


@dataclass(frozen=True)
class ExportResult:
    """An exported file that was checked."""

    file: GGUFCheckpoint
    quant_type: str  # name of the type
    rounding_errors: dict[str, RoundingError]  # by the types of its tensors
    notes: tuple[str, ...]  # warnings for the user
    drift: float  # maximum mean difference of its logits, in standard deviations


def export(
    source: HFCheckpoint, adapter: NoAdapter | LoRAConfig, tokenizer: Tokenizer, out: Path, type_name: str | None,
    name: str,
) -> ExportResult:  # fmt: skip
    """Export a model, with its adapter merged, to a GGUF file. Raises UserError before writing if unsupported."""
    model = LazyMergedCheckpoint.with_adapter(source, adapter)
    type_name = type_name_of(source.dtypes[EMBED]) if type_name is None else type_name
    plan = build_tensor_map(model, parse_quant_type(type_name))
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
