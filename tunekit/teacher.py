"""Where a teacher's view of rows comes from: a model that is asked in each step, or files that it has written once."""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tunekit import assemble, bundled, stored
from tunekit.checkpoint.score import insist_on_text
from tunekit.data.steps.batch import Batch
from tunekit.data.steps.loader import Loader
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError
from tunekit.formats import FP4, NF4, Float8, Plain
from tunekit.hub import fetch
from tunekit.kernels.divergence import Dense, likeliest
from tunekit.losses import likelihood
from tunekit.losses.divergence import Divergence, Figures
from tunekit.losses.likelihood import learnt
from tunekit.losses.tally import Tally
from tunekit.models.decoder import Decoder, Head
from tunekit.parallel.run import Run
from tunekit.precision import Precision


class View(ABC):
    """A teacher at work."""

    @abstractmethod
    def compare(self, loss: Divergence, model: Decoder, batch: Batch) -> tuple[Tensor, Figures]:
        """The loss of a student, and other figures, summed over the learnt tokens of a batch."""

    @torch.no_grad()
    def means(self, loss: Divergence, model: Decoder, data: Loader, run: Run) -> dict[str, float]:
        """The loss and other figures of a learnt token, over all rows and ranks."""
        tally, counts = Tally(), [0]

        def each(model: Decoder, batch: Batch) -> Tensor:
            found, figures = self.compare(loss, model, batch)
            tally.add(figures)
            counts.append(batch.learnt)
            return found

        found = likelihood.mean(each, model, data, run)
        return {"loss": found, **{name: float(value) for name, value in means(tally, run, sum(counts)).items()}}


def means(tally: Tally, run: Run, tokens: int) -> Figures:
    """Of a learnt token, where this rank had so many: ranks that share rows have added different ones."""
    return tally.means(run, run.total(tokens) / run.sizes.context)


@dataclass(frozen=True, kw_only=True)
class Teacher(ABC):
    """Which model it is, and how it is kept."""

    model: str  # folder of a checkpoint, an adapter or a run; a Hub name; tunekit/nano
    weights: Plain | NF4 | FP4 | Float8 = Plain()  # how its weights are stored
    precision: Precision = Precision()

    @abstractmethod
    def check(self, student: Tokenizer) -> None:
        """UserError if it is not there, writes no text, knows rows by other tokens than the student, or too few."""

    def shared(self, student: Tokenizer) -> int:
        """How many ids it and the student both embed. UserError if it is none to learn these rows from."""
        try:
            source, _, words = assemble.described(self.model, fetch.SMALL)
            insist_on_text(source, self.model)
        except UserError as error:
            raise UserError(f"teacher.model: {error}") from None
        compare(student, words, self.model)
        return ids_of_both(student, source.spec.vocab)

    def built(self, run: Run) -> Decoder:
        """The model, over devices as the student is."""
        try:
            return assemble.opened(self.model, self.precision, run, self.weights)[0].eval()
        except UserError as error:
            raise UserError(f"teacher.model: {error}") from None

    @abstractmethod
    def open(self, loss: Divergence, student: Decoder, words: Tokenizer, loaders: list[Loader], run: Run) -> View:
        """Ready to be compared with a student, on the rows of some loaders, which are written with these words."""


@dataclass(frozen=True, kw_only=True)
class Live(Teacher):
    """A model in memory beside the student, which each step asks. Of what it makes, only hidden states are kept.

    This is meant where no `kind` is written.
    """

    kind: ClassVar[str] = "live"
    usual: ClassVar = True

    top: int | None = None  # compare its likeliest tokens and all others as one; null: each token by itself

    def __post_init__(self) -> None:
        check_top(self.top)

    def check(self, student: Tokenizer) -> None:
        check_top(self.top, self.shared(student), "or null, for each token by itself")

    def open(self, loss: Divergence, student: Decoder, words: Tokenizer, loaders: list[Loader], run: Run) -> View:
        model = self.built(run)
        for loader in loaders:
            loader.check(model.spec.vocab)
        return Asked(model, self.top, common(student, model))


class Asked(View):
    """A model that is asked in each step."""

    def __init__(self, model: Decoder, top: int | None, ids: int) -> None:
        self.model, self.top, self.ids = model, top, ids

    def compare(self, loss: Divergence, model: Decoder, batch: Batch) -> tuple[Tensor, Figures]:
        """The student runs inside the teacher's pass, where the weights of the teacher's head are whole."""
        found, wanted = [], torch.is_grad_enabled()

        def read(hidden: Tensor, head: Head) -> Tensor:
            states = hidden.flatten(0, 1)
            if self.top is None:
                teacher = Dense(states, head)
            else:
                teacher = likeliest(states, head, learnt(model, batch)[1], self.top, loss.temperature, self.ids)
            with torch.set_grad_enabled(wanted):
                found.append(loss(model, batch, teacher))
            return hidden[:0]

        with torch.no_grad():
            self.model(batch.tokens, batch.positions, batch.layout, read=read, part=True)
        return found[0]


@dataclass(frozen=True, kw_only=True)
class Stored(Teacher):
    """Files in a folder. Where they lack these rows the model is loaded first and writes them; a later run needs none.

    For each learnt token they hold 8 bytes for each of the likeliest tokens; all others count as one.
    """

    kind: ClassVar[str] = "stored"
    folder: str  # of the files
    top: int = 64  # tokens that are kept

    def __post_init__(self) -> None:
        check_top(self.top)

    def check(self, student: Tokenizer) -> None:
        """Whoever has written files for this vocabulary was compared with it then, and need not be here."""
        words = digest(student)
        own = (found for found in self.known() if unpinned(found["model"]) == unpinned(self.model))
        vocab = next((found["total"] for found in own if found["words"] == words), None)
        check_top(self.top, self.shared(student) if vocab is None else ids_of_both(student, vocab))

    def known(self) -> list[dict[str, Any]]:
        """What whole sets of files say of themselves."""
        places = sorted(file.parent for file in Path(self.folder).expanduser().glob(f"*/{stored.ABOUT}"))
        return [stored.about(place) for place in places if stored.whole(place)]

    def open(self, loss: Divergence, student: Decoder, words: Tokenizer, loaders: list[Loader], run: Run) -> View:
        places = [self.place(loss, student, loader) for loader in loaders]
        now = run.shared(lambda: seen(self.model))
        kept = run.shared(lambda: self.there(places, now, run))
        if kept is None:
            run.tell(f"{self.folder}: what is wanted of some rows is not there yet: asking {self.model}")
            self.shared(words)
            model = self.built(run)
            kept = stored.Kept(self.top, loss.temperature, common(student, model), model.spec.vocab)
            about = {**asdict(kept), "model": self.model, "words": digest(words), "seen": now}
            for place, loader in zip(places, loaders, strict=True):
                loader.check(model.spec.vocab)
                stored.write(place, about, kept, model, loader, run)
        return Read(stored.Stored(places, kept))

    def place(self, loss: Divergence, student: Decoder, loader: Loader) -> Path:
        """Where the files for some rows are: what decides their numbers is their name."""
        how = str(self.weights), str(self.precision), self.top, loss.temperature, student.spec.vocab
        told = json.dumps([unpinned(self.model), loader.digest, *how])
        return Path(self.folder).expanduser() / hashlib.sha256(told.encode()).hexdigest()[:16]

    def there(self, places: list[Path], now: dict[str, Any], run: Run) -> stored.Kept | None:
        """What is kept in all of these folders; None if one is not whole. `now`: what is `seen` of the model."""
        whole = all(stored.whole(place) for place in places)
        abouts = {place: stored.about(place) for place in places if (place / stored.ABOUT).is_file()}
        others = {place: about for place, about in abouts.items() if now and about["seen"] not in ({}, now)}
        if others:
            run.tell(self.other(others, now, whole))
        if not whole:
            return None
        return stored.Kept(*(abouts[places[0]][name] for name in ("top", "temperature", "ids", "total")))

    def other(self, abouts: dict[Path, dict[str, Any]], now: dict[str, Any], whole: bool) -> str:
        """A line on files of another commit, where a run may go on with them: a branch moves, and a run that was
        stopped must not end there. UserError where they would be mixed with those of the commit that is there now."""
        commits = {about["seen"].get("commit") for about in abouts.values()}
        places, mend = ", ".join(map(str, abouts)), "give another teacher.folder, or delete them"
        if None in commits or "commit" not in now:
            raise UserError(f"{places}: another {self.model} wrote these files: {mend}")
        was, name = " and ".join(sorted(commits)), unpinned(self.model)
        told = f"{places}: {self.model} is at {now['commit']}, and these files are of {was}"
        if whole and all(self.model in (name, about["model"]) for about in abouts.values()):
            return f"{told}: going on with them"
        raise UserError(f"{told}: {mend}; a new run may go on with them as teacher.model={name}@{min(commits)}")


class Read(View):
    """Files that are read in each step."""

    def __init__(self, files: stored.Stored) -> None:
        self.files = files

    def compare(self, loss: Divergence, model: Decoder, batch: Batch) -> tuple[Tensor, Figures]:
        return loss(model, batch, self.files.of(model, batch))


def check_top(top: int | None, ids: int | None = None, other: str = "") -> None:
    """FieldError for less than a token; UserError for more than the `ids` that are common, once these are known."""
    if top is not None and top < 1:
        raise FieldError("top", f"must be 1 or more tokens, not {top}")
    if top is not None and ids is not None and top > ids:
        told = f"{top:,} tokens are more than the {ids:,} of the vocabulary that student and teacher share"
        raise UserError(f"teacher.top: {told}: say {ids} at most{f', {other}' * bool(other)}")


def ids_of_both(student: Tokenizer, vocab: int) -> int:
    """Ids that a student of this tokenizer and a teacher of so many embed."""
    return vocab if student.vocab is None else min(student.vocab, vocab)


def common(student: Decoder, teacher: Decoder) -> int:
    """Ids that both embed: behind the tokens that a tokenizer knows, a model may be padded."""
    return min(student.spec.vocab, teacher.spec.vocab)


def seen(name: str) -> dict[str, Any]:
    """What tells a model from a later one of its name: its commit on the Hub; of a folder its files, their sizes and
    when they were written. Nothing of one that cannot be found, or that ships with the package."""
    try:
        folder = fetch.resolve(name, fetch.SMALL)
    except UserError:
        return {}
    if folder == bundled.model(name):
        return {}
    if (commit := fetch.commit(folder)) is not None:
        return {"commit": commit}
    done = assemble.finished(folder)
    files = sorted([*done.glob("*config.json"), *done.glob("*.safetensors")])
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def unpinned(name: str) -> str:
    """A name on the Hub without its revision: which commit it is stands in what was `seen`. Any other as it is."""
    parts = fetch.parted(name)
    return name if parts is None else parts[0]


def digest(tokenizer: Tokenizer) -> str:
    """A name for what all ids stand for."""
    return hashlib.sha256(json.dumps(sorted(names(tokenizer).items())).encode()).hexdigest()


def compare(student: Tokenizer, teacher: Tokenizer, name: str) -> None:
    """UserError if an id is one token for the student and another for its teacher."""
    ours, theirs = (names(one) for one in (student, teacher))
    both = ours.keys() & theirs.keys()
    apart = sorted(token for token in both if ours[token] != theirs[token])
    least = min(max(one, default=-1) for one in (ours, theirs))
    apart += sorted(token for token in ours.keys() ^ theirs.keys() if token <= least)
    if apart:
        first = apart[0]
        raise UserError(
            f"teacher.model: {name} has another vocabulary than the student: the token {first} is "
            f"{theirs.get(first)!r} there and {ours.get(first)!r} here ({len(apart):,} of {len(ours):,} differ); both "
            "must expect the same tokens: choose a teacher that shares the student's tokenizer"
        )


def names(tokenizer: Tokenizer) -> dict[int, str]:
    """What each id stands for."""
    return {token: text for text, token in tokenizer.model.get_vocab(with_added_tokens=True).items()}
