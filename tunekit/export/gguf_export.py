"""A model to a GGUF file, all in its order: merge, plan, write, read again, check."""

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
from tunekit.export.quant_types import ENCODINGS, parse_quant_type, type_name_of
from tunekit.export.rounding_check import RoundingError, check_rounding
from tunekit.export.tensor_map import build_tensor_map
from tunekit.export.tokenizer import read_vocabulary
from tunekit.publishing.base_model import read_base_model

GENERAL = Keys.General
LICENCE = {GENERAL.LICENSE: "license", GENERAL.LICENSE_NAME: "license_name", GENERAL.LICENSE_LINK: "license_link"}


@dataclass(frozen=True)
class ExportResult:
    """A file that was written, read again, and holds what it should."""

    file: GGUFCheckpoint
    word: str  # the type
    strays: dict[str, RoundingError]  # by the types of its tensors
    notes: tuple[str, ...]  # what people should know
    drift: float  # by how much its logits may differ on average, in standard deviations


def export(
    source: HFCheckpoint, adapter: NoAdapter | LoRAConfig, tokenizer: Tokenizer, out: Path, word: str | None, name: str
) -> ExportResult:
    """Everything that can be refused is refused before the first byte is written."""
    whole = source if adapter.adapter_path is None else LazyMergedCheckpoint.of(source, Path(adapter.adapter_path))
    word = type_name_of(source.dtypes[EMBED]) if word is None else word
    plan = build_tensor_map(whole, parse_quant_type(word))
    words, notes = read_vocabulary(tokenizer, plan.spec.vocab, str(source.path))
    write_gguf(out, plan, about(source, name, whole is not source) | words.said())
    file = GGUFCheckpoint.open(out)
    strays = check_rounding(file, plan, words)
    exact = all(stray.worst == 0 for stray in strays.values())
    rounded = (
        [parse_quant_type(type_name_of(source.dtypes[EMBED])).drift] if whole is not source else []
    )  # merging rounds
    drift = max([ENCODINGS["f32"].drift if exact else ENCODINGS[word].drift, *rounded])
    return ExportResult(file, word, strays, (*plan.notes, *notes), drift)


def about(source: HFCheckpoint, name: str, derived: bool) -> dict[str, Any]:
    """Name, licence and where the weights come from."""
    base = read_base_model(source)
    said: dict[str, Any] = {GENERAL.NAME: name}
    said |= {key: base.licence[word] for key, word in LICENCE.items() if word in base.licence}
    if base.repo is not None:
        link = f"https://huggingface.co/{base.repo}"
        model = {GENERAL.BASE_MODEL_NAME.format(id=0): base.name, GENERAL.BASE_MODEL_REPO_URL.format(id=0): link}
        said |= {GENERAL.BASE_MODEL_COUNT: 1} | model if derived else {GENERAL.SOURCE_REPO_URL: link}
    return said
