"""A model to a GGUF file, all in its order: merge, plan, write, read again, check."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import Keys

from tunekit.adapters import Full, LoRA
from tunekit.checkpoint.folder import EMBED, Folder
from tunekit.data.tokenizer import Tokenizer
from tunekit.export.check import Stray, check
from tunekit.export.encoding import ENCODINGS, encoding, stored_as
from tunekit.export.merged import Merged
from tunekit.export.plan import planned
from tunekit.export.reading import Exported
from tunekit.export.tokenizer import vocabulary
from tunekit.export.write import write
from tunekit.origin import origin

GENERAL = Keys.General
LICENCE = {GENERAL.LICENSE: "license", GENERAL.LICENSE_NAME: "license_name", GENERAL.LICENSE_LINK: "license_link"}


@dataclass(frozen=True)
class Result:
    """A file that was written, read again, and holds what it should."""

    file: Exported
    word: str  # the type
    strays: dict[str, Stray]  # by the types of its tensors
    notes: tuple[str, ...]  # what people should know
    drift: float  # by how much its logits may differ on average, in standard deviations


def export(
    source: Folder, adapter: Full | LoRA, tokenizer: Tokenizer, out: Path, word: str | None, name: str
) -> Result:
    """Everything that can be refused is refused before the first byte is written."""
    whole = source if adapter.start is None else Merged.of(source, Path(adapter.start))
    word = stored_as(source.dtypes[EMBED]) if word is None else word
    plan = planned(whole, encoding(word))
    words, notes = vocabulary(tokenizer, plan.spec.vocab, str(source.path))
    write(out, plan, about(source, name, whole is not source) | words.said())
    file = Exported.open(out)
    strays = check(file, plan, words)
    exact = all(stray.worst == 0 for stray in strays.values())
    rounded = [encoding(stored_as(source.dtypes[EMBED])).drift] if whole is not source else []  # merging rounds
    drift = max([ENCODINGS["f32"].drift if exact else ENCODINGS[word].drift, *rounded])
    return Result(file, word, strays, (*plan.notes, *notes), drift)


def about(source: Folder, name: str, derived: bool) -> dict[str, Any]:
    """Name, licence and where the weights come from."""
    base = origin(source)
    said: dict[str, Any] = {GENERAL.NAME: name}
    said |= {key: base.licence[word] for key, word in LICENCE.items() if word in base.licence}
    if base.repo is not None:
        link = f"https://huggingface.co/{base.repo}"
        model = {GENERAL.BASE_MODEL_NAME.format(id=0): base.name, GENERAL.BASE_MODEL_REPO_URL.format(id=0): link}
        said |= {GENERAL.BASE_MODEL_COUNT: 1} | model if derived else {GENERAL.SOURCE_REPO_URL: link}
    return said
