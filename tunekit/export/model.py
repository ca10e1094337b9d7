"""A checkpoint to a GGUF file, all in its order: plan, write, read again, check."""

from dataclasses import dataclass
from pathlib import Path

from tunekit.checkpoint.folder import EMBED, Folder
from tunekit.data.tokenizer import Tokenizer
from tunekit.export.check import Stray, check
from tunekit.export.encoding import ENCODINGS, encoding, stored_as
from tunekit.export.plan import planned
from tunekit.export.reading import Exported
from tunekit.export.tokenizer import vocabulary
from tunekit.export.write import write


@dataclass(frozen=True)
class Result:
    """A file that was written, read again, and holds what it should."""

    file: Exported
    word: str  # the type
    strays: dict[str, Stray]  # by the types of its tensors
    notes: tuple[str, ...]  # what people should know

    @property
    def drift(self) -> float:
        """By how much its logits may differ on average, in standard deviations."""
        exact = all(stray.worst == 0 for stray in self.strays.values())
        return 1e-4 if exact else ENCODINGS[self.word].drift


def export(source: Folder, tokenizer: Tokenizer, out: Path, word: str | None, said: dict[str, str]) -> Result:
    """Everything that can be refused is refused before the first byte is written. `said` are fields beside ours."""
    word = stored_as(source.dtypes[EMBED]) if word is None else word
    plan = planned(source, encoding(word))
    words, notes = vocabulary(tokenizer, plan.spec.vocab, str(source.path))
    write(out, plan, said | words.said())
    file = Exported.open(out)
    return Result(file, word, check(file, plan, words), (*plan.notes, *notes))
