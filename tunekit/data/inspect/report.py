"""Report of `tune data`: statistics, findings, and example rows of the datasets of a config."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from tunekit.data.check_target import CheckTarget, Finding, format_percent
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.summary import format_count
from tunekit.data.datasets import DatasetConfig
from tunekit.data.inspect.examples import ExampleSampler, ExampleView, make_example
from tunekit.data.inspect.stats import DatasetStats, compute_stats
from tunekit.data.preprocess.preprocess import read_bad_rows
from tunekit.data.row_checks import run_data_checks
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError

MakeTargets = Callable[[Any, Mapping[str, DataLoader], Tokenizer], list[CheckTarget]]


@dataclass(frozen=True)
class DataReport:
    """Data of a config. `rows` are the requested rows; `examples` are further rows that findings refer to."""

    model: str
    tokenizer: Tokenizer
    stats: tuple[DatasetStats, ...]
    findings: tuple[Finding, ...]
    rows: tuple[ExampleView, ...]
    examples: tuple[ExampleView, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `tune data --json`."""
        return {
            "model": self.model,
            "datasets": [stats.to_dict() for stats in self.stats],
            "findings": [asdict(finding) for finding in self.findings],
            "rows": [asdict(example) for example in self.rows],
        }


@runtime_checkable
class TrainsOnRows(Protocol):
    """A config of a training recipe."""

    data: DatasetConfig | MixtureBase
    eval_data: DatasetConfig | MixtureBase | None
    global_batch_size: int
    micro_batch_size: int
    seed: int


@runtime_checkable
class SamplesAnswers(TrainsOnRows, Protocol):
    """A config of a training recipe whose rows are prompts."""

    @property
    def num_prompts(self) -> int:
        """Prompts of a generation."""
        ...

    @property
    def generation_summary(self) -> str:
        """Numbers of prompts, answers and steps of a generation."""
        ...


@runtime_checkable
class EvaluatesRows(Protocol):
    """A config of the recipe `evaluate`."""

    data: DatasetConfig | MixtureBase | None
    batch_size: int


def build_report(cfg: Any, rows: int | list[str], make_targets: MakeTargets) -> DataReport:
    """Tokenize the datasets of a config and run the data checks.

    `rows` is the number of rows to show of each dataset, or a list of row numbers and locations. `make_targets`
    prepares the input of the data checks, as in training.
    """
    data, batch_sizes, seed = find_datasets(cfg)
    tokenizer, dist = cfg.open_tokenizer(), DistributedContext(seed, "cpu")
    mixtures = {key: MixtureBase.from_config(config).resolve() for key, config in data.items() if config}
    loaders = {
        key: build_dataloader(skip_bad_rows(mixture), tokenizer, *batch_sizes, dist)
        for key, mixture in mixtures.items()
    }
    targets = make_targets(cfg, loaders, tokenizer)
    samplers = {
        key: [ExampleSampler(key, dataset, dataset.prepare_tokenizer(tokenizer)) for dataset in mixture.dataset_configs]
        for key, mixture in mixtures.items()
    }
    if isinstance(rows, int):
        shown = tuple(row for sampler in samplers["data"] for row in sampler.first_examples(rows))
    else:
        shown = find_examples(samplers, rows)
    stats = tuple(
        compute_stats(target, loaders[key], mixtures[key], describe_generation(cfg, loaders, key))
        for key, target in zip(loaders, targets, strict=True)
    )
    findings = [*find_bad_rows(mixtures, loaders), *run_data_checks(*targets)]
    for loader in loaders.values():
        loader.close()
    examples = tuple(examples_of_findings(targets, findings, shown, mixtures))
    return DataReport(cfg.model, tokenizer, stats, tuple(findings), shown, examples)


def find_datasets(
    cfg: Any,
) -> tuple[dict[str, DatasetConfig | MixtureBase | None], tuple[int, int], int]:
    """Datasets of a config by key, the rows of a step and of a micro-batch, and the seed."""
    if isinstance(cfg, SamplesAnswers):  # packing is of answers
        data = {"data": cfg.data, "eval_data": cfg.eval_data}
        unpacked = {key: config and replace(config, packing=False) for key, config in data.items()}
        return unpacked, (cfg.num_prompts, 1), cfg.seed
    if isinstance(cfg, TrainsOnRows):
        sizes = cfg.global_batch_size, cfg.micro_batch_size
        return {"data": cfg.data, "eval_data": cfg.eval_data}, sizes, cfg.seed
    if isinstance(cfg, EvaluatesRows):
        return {"data": cfg.data}, (cfg.batch_size, cfg.batch_size), 0
    raise UserError("the recipe of this config does not train on data")


def describe_generation(cfg: Any, loaders: Mapping[str, DataLoader], key: str) -> str:
    """Answers that are sampled for the prompts of one key; empty for other rows."""
    if not isinstance(cfg, SamplesAnswers):
        return ""
    if key != "data":
        return "an evaluation samples one answer to each prompt"
    count = format_count(loaders[key].summary.rows // cfg.num_prompts, "generation")
    return f"{cfg.generation_summary}; {count} per epoch"


def skip_bad_rows(mixture: MixtureBase) -> MixtureBase:
    """Return a mixture that skips bad rows, so that all of them are reported and not only the first one."""
    members = (
        replace(member, dataset=replace(member.dataset, on_bad_row="skip", max_bad_row_fraction=1.0))
        for member in mixture.datasets
    )
    return replace(mixture, datasets=tuple(members))


def find_bad_rows(mixtures: Mapping[str, MixtureBase], loaders: Mapping[str, DataLoader]) -> Iterator[Finding]:
    """Yield a finding for the bad rows of each dataset: an error, or a note if the config skips them."""
    for key, mixture in mixtures.items():
        # A stream has one TokenizedDataset for all of its datasets.
        for dataset, documents in zip(mixture.dataset_configs, loaders[key].datasets, strict=False):
            count, rows = documents.summary.skipped, documents.summary.rows
            for bad_row in islice(read_bad_rows(documents.summary.bad_rows), 1):
                is_error = dataset.on_bad_row == "error" or count > dataset.max_bad_row_fraction * rows
                hint = "Fix or remove them" if is_error else "They are skipped (`on_bad_row: skip`)"
                limit = f", `max_bad_row_fraction` allows {format_percent(dataset.max_bad_row_fraction)}"
                allowed = limit if dataset.on_bad_row == "skip" else ""
                summary = f"{count:,} of {rows:,} rows {'is' if count == 1 else 'are'} bad"
                reason = bad_row.reason.removesuffix(".")  # findings add the period
                message = f"{summary} ({format_percent(count / rows)}{allowed}): {reason}"
                severity = "wrong" if is_error else "note"
                yield Finding(severity, "bad rows", key, message, hint, count, count / rows, (), (bad_row.where,))


def find_examples(samplers: Mapping[str, list[ExampleSampler]], names: list[str]) -> tuple[ExampleView, ...]:
    """Return rows by number or location. Numbers refer to the first training dataset."""
    examples: dict[str, ExampleView] = {}
    for index, sampler in enumerate(sampler for group in samplers.values() for sampler in group):
        missing = [name for name in names if name not in examples and (index == 0 or ":" in name)]
        examples |= sampler.find_examples(missing)
    if missing := [name for name in names if name not in examples]:
        raise UserError(f"--row {missing[0]}: no such row. Pass a row number, or a file and line (file:line).")
    return tuple(examples[name] for name in names)


def examples_of_findings(
    targets: list[CheckTarget],
    findings: list[Finding],
    shown: tuple[ExampleView, ...],
    mixtures: Mapping[str, MixtureBase],
) -> Iterator[ExampleView]:
    """Yield the rows that findings refer to, except those that are shown already."""
    targets_by_key = {target.config_key: target for target in targets}
    seen = {(example.config_key, example.location) for example in shown}
    for finding in findings:
        key = finding.config_key
        for row, where in zip(finding.documents, finding.row_locations, strict=False):
            if (key, where) not in seen:
                seen.add((key, where))
                yield make_example(key, *targets_by_key[key].documents.locate(row), mixtures[key].has_targets)
