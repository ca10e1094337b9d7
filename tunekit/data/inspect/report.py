"""All that `tune data` shows of a config, put together."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.inspect import examples as sample
from tunekit.data.inspect.examples import ExampleSampler, ExampleView
from tunekit.data.inspect.stats import DatasetStats, compute_stats
from tunekit.data.preprocess.preprocess import read_bad_rows
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.readers.row_reader import BadRow
from tunekit.data.row_checks import CheckTarget, Finding, format_percent, run_data_checks
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError

PARTS = ("data", "eval_data")
BAD = 5  # bad rows that are told with their reasons
MakeTargets = Callable[[Any, Mapping[str, DataLoader], Tokenizer], list[CheckTarget]]


@dataclass(frozen=True)
class DataReport:
    """What a config trains on. `examples` are rows that findings name."""

    model: str
    tokenizer: Tokenizer
    figures: tuple[DatasetStats, ...]
    findings: tuple[Finding, ...]
    rows: tuple[ExampleView, ...]
    examples: tuple[ExampleView, ...]

    def plain(self) -> dict[str, Any]:
        """As data for programs."""
        return {
            "model": self.model,
            "parts": [one.plain() for one in self.figures],
            "findings": [asdict(one) for one in self.findings],
            "rows": [asdict(one) for one in self.rows],
        }


@runtime_checkable
class ReadsRows(Protocol):
    """A config of a recipe that reads rows."""

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer of the rows. Reads no weights."""
        ...


def build_report(cfg: Any, rows: int | list[str], make_targets: MakeTargets) -> DataReport:
    """Read and measure the data of a config, and show the first `rows` of each source, or the rows with these numbers.

    `make_targets` gives the data checks their input, as in training.
    """
    if not isinstance(cfg, ReadsRows):
        raise UserError("the recipe of this config reads no rows")
    words, told = cfg.open_tokenizer(), vars(cfg)
    mixes = {part: MixtureBase.of(told[part]) for part in PARTS if told.get(part) is not None}
    run = DistributedContext(told.get("seed", 0), "cpu")
    batch_size = told["global_batch_size" if "global_batch_size" in told else "batch_size"]
    micro = told.get("micro_batch_size", batch_size)
    loaders = {part: build_dataloader(lenient(mix), words, batch_size, micro, run) for part, mix in mixes.items()}
    seen = make_targets(cfg, loaders, words)
    samples = {
        part: [ExampleSampler(part, one, one.prepare(words)) for one in mix.sources] for part, mix in mixes.items()
    }
    shown = first(samples, rows) if isinstance(rows, int) else asked(samples, rows)
    measured = tuple(compute_stats(one, loaders[one.part], mixes[one.part], faults(loaders[one.part])) for one in seen)
    findings = [*bad_rows(mixes, loaders), *run_data_checks(*seen)]
    for loader in loaders.values():
        loader.close()
    return DataReport(told["model"], words, measured, tuple(findings), shown, tuple(examples(seen, findings, shown)))


def lenient(mix: MixtureBase) -> MixtureBase:
    """The same rows, of which bad ones are counted: here all of them are to be told, not the first."""
    parts = (
        replace(part, dataset=replace(part.dataset, on_bad_row="skip", max_bad_row_fraction=1.0))
        for part in mix.datasets
    )
    return replace(mix, datasets=tuple(parts))


def bad_rows(mixes: Mapping[str, MixtureBase], loaders: Mapping[str, DataLoader]) -> Iterator[Finding]:
    """Rows that cannot be learnt from: wrong, if the config does not say that they are skipped."""
    for part, mix in mixes.items():
        for choice, documents in zip(mix.sources, loaders[part].parts, strict=False):  # a stream has one for all
            count, rows = documents.prepared.skipped, documents.prepared.rows
            for first in islice(bad(documents), 1):
                fatal = choice.on_bad_row == "error" or count > choice.max_bad_row_fraction * rows
                mend = "mend them, or take them out" if fatal else "they are left out, as `on_bad_row: skip` says"
                allowed = (
                    f", `max_bad_row_fraction` allows {format_percent(choice.max_bad_row_fraction)}"
                    if choice.on_bad_row == "skip"
                    else ""
                )
                told = f"{count:,} of {rows:,} rows {'is' if count == 1 else 'are'} bad"
                says = f"{told} ({format_percent(count / rows)}{allowed}): {first.reason}"
                severity = "wrong" if fatal else "note"
                yield Finding(severity, "bad rows", part, says, mend, count, count / rows, (), (first.where,))


def faults(loader: DataLoader) -> tuple[BadRow, ...]:
    """The first rows that nothing can be learnt from."""
    return tuple(islice((fault for documents in loader.parts for fault in bad(documents)), BAD))


def bad(documents: TokenizedDataset) -> Iterator[BadRow]:
    file = documents.prepared.bad_rows
    if file is not None:
        yield from read_bad_rows(file)


def first(samples: Mapping[str, list[ExampleSampler]], count: int) -> tuple[ExampleView, ...]:
    """The first rows of each source that is learnt from."""
    return tuple(row for one in samples["data"] for row in one.first(count))


def asked(samples: Mapping[str, list[ExampleSampler]], names: list[str]) -> tuple[ExampleView, ...]:
    """Rows by number or place. A number is that of a row of what is learnt, and there of the first source."""
    found: dict[str, ExampleView] = {}
    for place, one in enumerate(one for group in samples.values() for one in group):
        found |= one.found([name for name in names if name not in found and (place == 0 or ":" in name)])
    if missing := [name for name in names if name not in found]:
        raise UserError(f"--row {missing[0]}: there is no such row; say its number, or its file and line (file:line)")
    return tuple(found[name] for name in names)


def examples(seen: list[CheckTarget], findings: list[Finding], shown: tuple[ExampleView, ...]) -> Iterator[ExampleView]:
    """The rows that findings name, those left out that are shown anyway."""
    subjects, known = {one.part: one for one in seen}, {(one.part, one.where) for one in shown}
    for finding in findings:
        for row, where in zip(finding.rows, finding.where, strict=False):
            if (finding.part, where) not in known:
                known.add((finding.part, where))
                yield sample.make_example(finding.part, *subjects[finding.part].place(row))
