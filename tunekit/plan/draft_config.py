"""A config for a model, a dataset and a machine: the first one of a user, with comments on what to change."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.config.dump import to_yaml
from tunekit.data.chat_template.chat_format import find_split_markers, with_chat_format
from tunekit.data.datasets import ConversationDataset, DatasetConfig
from tunekit.data.readers.row_reader import BadRow
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError
from tunekit.plan.estimate import Estimate, estimate
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.memory_options import ADAMW_8BIT, FULL_CHECKPOINTING, NF4, MemoryOption, format_value
from tunekit.plan.num_steps import count_steps
from tunekit.plan.sample_rows import Lengths, RowSample, measure_lengths
from tunekit.plan.search import memory_limit
from tunekit.plan.workload import make_workload

LENGTHS = tuple(2**n for n in range(7, 18))  # values of max_length
DEFAULT_LENGTH = 2048
BATCH_SIZE = 16
RETRIEVAL_BATCH_SIZE = 128  # each query has 127 in-batch negatives
MIN_STEPS = 8  # minimum per epoch for packing or a larger batch
MAX_CLASSES = 1000  # larger integers are numbers, not classes
COVERED = 0.995  # fraction of the rows that `max_length` must cover
LONG_RUN_ROWS = 10_000  # rows from which one epoch is enough
MICRO_BATCHES = (16, 8, 4, 2)  # tried in addition to 1
PER_MESSAGE = {"train_on": "per_message"}  # key of `data` for messages with `train` or `weight`
MAX_LISTED = 3  # rows that cannot be used
# Learning rates of LoRA and of full training, for models of `REFERENCE_DIM`; smaller ones need higher rates.
LEARNING_RATES = {"sft": (2e-4, 2e-5), "preference": (2e-5, 1e-6), "reward": (1e-4, 1e-5), "embed": (1e-4, 1e-5)}
REFERENCE_DIM = 2048
LOSSES = {
    "unpaired_preference": "kto",
    "stepwise": "process_reward",
    "reranking": "binary_cross_entropy",
    "similarity": "cosent",
}
CHAT_KINDS = ("chat", "sharegpt", "instruct")
TEXT_PAIR_KINDS = ("retrieval", "similarity", "reranking", "reranking_pairs")  # a list in such a row is not a chat
LoadConfig = Callable[[dict[str, Any]], Any]
# Options that are tried, those that cost least time first.
LORA_OPTIONS = (), (FULL_CHECKPOINTING,), (NF4, FULL_CHECKPOINTING)
FULL_OPTIONS = (), (FULL_CHECKPOINTING,), (ADAMW_8BIT, FULL_CHECKPOINTING)


@dataclass
class Draft:
    """Keys of a config, a comment for some of them, and problems of the rows."""

    tree: dict[str, Any]
    comments: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    plan: Estimate | None = None

    def set(self, key: str, value: Any, comment: str = "") -> None:
        self.tree[key] = value
        self.comments |= {key: comment} if comment else {}

    def with_options(self, options: Sequence[MemoryOption]) -> "Draft":
        """A copy with options that use less memory, which need no plan, and comments on their effect."""
        draft = replace(self, tree=dict(self.tree), comments=dict(self.comments))
        for option in options:
            for key, value in option.overrides.items():
                section, _, name = key.partition(".")
                value = {name or "kind": format_value(value)}
                is_choice = not name and not isinstance(draft.tree.get(section), dict)
                value = value["kind"] if is_choice else draft.tree.get(section, {}) | value
                draft.set(section, value, f"To fit in memory: {option.effect}")
        draft.tree["output_dir"] = draft.tree.pop("output_dir")  # last
        return draft

    def format(self, heading: str) -> str:
        """YAML with one line for each key, after its comment."""
        lines = [f"# {heading}"]
        for key, value in self.tree.items():
            lines += [f"# {self.comments[key]}"] if key in self.comments else []
            lines.append(f"{key}: {to_flow_yaml(value)}")
        return "\n".join(lines) + "\n"


def to_flow_yaml(value: Any) -> str:
    """Value in YAML, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {to_flow_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_flow_yaml, value)) + "]"
    if isinstance(value, str) and set(value) & set("{}[],\n"):
        return json.dumps(value.replace("${", "\\${"), ensure_ascii=False)
    return to_yaml({"x": value}).removeprefix("x:").strip()


def draft_config(
    model: str, source: HFCheckpoint, sample: RowSample, full: bool, load: LoadConfig, cluster: ClusterSpec
) -> Draft:
    """Config that trains `model` on the rows of `sample` and fits `cluster`. Raise UserError if nothing fits.

    `source` is the checkpoint, or its shape if its files are not on this machine.
    """
    draft = Draft({"recipe": sample.task, "model": model})
    if loss := sample.loss or LOSSES.get(sample.row_format.kind, label_loss(sample)):
        draft.set("loss", loss)
    add_data(draft, source, sample, load)
    scale = max(1.0, REFERENCE_DIM / source.spec.dim)
    if not full:
        draft.set("adapter", "lora", "Trains LoRA of rank 16 on all linear layers. `none` trains all weights")
    draft.set("optimizer", {"kind": "adamw", "lr": round_rate(LEARNING_RATES[sample.task][full] * scale)})
    draft.set("lr_scheduler", {"kind": "cosine", "warmup_steps": 0.03})
    if sample.row_format.kind == "retrieval" and sample.count >= MIN_STEPS * RETRIEVAL_BATCH_SIZE:
        comment = "Rows per step. The documents of all other rows are negatives of a query"
        draft.set("global_batch_size", RETRIEVAL_BATCH_SIZE, comment)
    num_rows = draft.tree.get("global_batch_size", BATCH_SIZE)
    draft.set("micro_batch_size", 1, f"Rows in a forward pass, at most as many as fit; a step has {num_rows}")
    if sample.count < LONG_RUN_ROWS and sample.task == "sft":
        draft.set("epochs", 3)
    draft.set("output_dir", f"runs/{draft_name(model, sample.source)}")
    return fit_draft(draft, lambda tree: load(tree | {"model": source.name}), cluster)


def draft_name(model: str, data: str, task: str | None = None) -> str:
    """Name for a config and its run, from the last components of both names, and the task if it is given."""
    names = Path(model.rstrip("/")).name, Path(data.rstrip("/")).name.partition(".")[0], task
    return "-".join(filter(None, names)).lower()


def label_loss(sample: RowSample) -> str | dict[str, Any] | None:
    """Loss for labels: of classes, unless they are no small integers."""
    if sample.row_format.kind != "labeled":
        return None
    if sample.class_names:
        return "classification"
    classes = [label for label in sample.labels if isinstance(label, int) and 0 <= label < MAX_CLASSES]
    is_class = len(classes) == len(sample.labels)
    return {"kind": "classification", "num_labels": max(classes) + 1} if is_class else "regression"


def round_rate(rate: float) -> float:
    return float(f"{rate:.1g}")


def add_data(draft: Draft, source: HFCheckpoint, sample: RowSample, load: LoadConfig) -> None:
    """Add training and held-out rows, with a chat template if the model has none."""
    data, length = dict(sample.data), f"{sample.count:,} rows: {sample.row_format.description}"
    length += ", and other formats" if sample.is_mixed else ""
    max_length, packing = min(DEFAULT_LENGTH, source.spec.context), False
    if source.has_tokenizer:
        tokenizer = Tokenizer.open(source.tokenizer_path)
        data |= add_template(draft, tokenizer, sample)
        tokenizer = source.with_new_tokens((), draft.tree.get("new_special_tokens", ())).chat_tokenizer or tokenizer
        longest = draft.tree | {"data": data | {"max_length": source.spec.context}, "output_dir": "runs"}
        options, (lengths, bad_rows) = find_row_options(longest, tokenizer, sample, load)
        data |= options
        draft.problems = list_problems(sample, options, bad_rows)
        mean, covered = sum(lengths) / len(lengths), lengths[int(COVERED * (len(lengths) - 1))]
        num_tokens = sum(lengths) / sample.num_read * sample.count
        length += f". Tokens: {mean:,.0f} on average, {lengths[-1]:,} at most"
        max_length = min(next((n for n in LENGTHS if n >= covered), LENGTHS[-1]), source.spec.context)
        if truncated := sum(n > max_length for n in lengths):
            length += f"; {truncated / len(lengths):.1%} are truncated"
        has_fixed_rows = sample.row_format.kind == "retrieval"  # packed, the number of in-batch negatives would vary
        is_large = num_tokens / max_length >= MIN_STEPS * BATCH_SIZE
        packing = mean < max_length / 2 and is_large and not has_fixed_rows
    else:
        length += ". Lengths are unknown without the tokenizer: check max_length with `tune data`"
    train = data | ({"split": sample.split} if sample.split != "train" else {}) | {"max_length": max_length}
    draft.set("data", train | ({"packing": True} if packing else {}), "\n# ".join([length, *draft.problems]))
    if sample.eval_split is not None:
        draft.set("eval_data", data | {"split": sample.eval_split, "max_length": max_length})


def find_row_options(
    tree: dict[str, Any], tokenizer: Tokenizer, sample: RowSample, load: LoadConfig
) -> tuple[dict[str, Any], Lengths]:
    """Keys of `data` with which most rows can be used, and the lengths of these. Raise UserError if none can."""
    config, results = load(tree).data, []
    for options in ({}, PER_MESSAGE) if isinstance(config, ConversationDataset) else ({},):
        results.append((options, measure_lengths(replace(config, **options), tokenizer, sample)))
        if not results[-1][1].bad_rows:
            break
    options, lengths = min(results, key=lambda result: len(result[1].bad_rows))  # the first of equal ones
    if not lengths.tokens:
        row = results[0][1].bad_rows[0]
        raise UserError(f"{row.where}: {row.reason}")
    return options, lengths


def list_problems(sample: RowSample, options: Mapping[str, Any], bad_rows: Sequence[BadRow]) -> list[str]:
    """Problems of the rows, with those that cannot be used: training stops at the first one."""
    problems = [f"columns have other names. Check that these are meant: {sample.row_format.description}"]
    problems = problems if sample.is_guess else []
    if options == PER_MESSAGE:
        problems.append("some messages have `train` or `weight`, so `train_on` is per_message")
    if bad_rows:
        fraction = len(bad_rows) / sample.num_read
        limit = math.ceil(20 * fraction) / 20  # of all rows, which may have more of them than the first ones
        remedy = f" and max_bad_row_fraction: {limit:g}" if fraction > DatasetConfig.max_bad_row_fraction else ""
        count = (
            f"{len(bad_rows):,} of {sample.num_read:,} rows cannot be used. Fix them, or set on_bad_row: skip{remedy}"
        )
        problems += [count, *(f"{row.where}: {row.reason}" for row in bad_rows[:MAX_LISTED])]
    return problems


def add_template(draft: Draft, tokenizer: Tokenizer, sample: RowSample) -> dict[str, str]:
    """Chat template for messages if the tokenizer has none, with its markers as new tokens."""
    has_lists = any(isinstance(value, list) for value in sample.rows[0].values())
    has_messages = sample.row_format.kind in CHAT_KINDS or (sample.row_format.kind not in TEXT_PAIR_KINDS and has_lists)
    if tokenizer.templates or not has_messages:
        return {}
    if markers := find_split_markers(with_chat_format(tokenizer, "chatml", {})):
        comment = "The model has no chat template: ChatML, whose markers become tokens"
        draft.set("new_special_tokens", markers, comment)
    return {"chat_template": "chatml"}


def fit_draft(draft: Draft, load: LoadConfig, cluster: ClusterSpec) -> Draft:
    """The draft with the first options that fit, and with the largest micro-batch."""
    for options in LORA_OPTIONS if "adapter" in draft.tree else FULL_OPTIONS:
        candidate = draft.with_options(options)
        plan = plan_micro_batch(candidate, load, cluster, 1)
        if plan is not None:
            max_rows = plan.workload.rows(plan.dims)
            larger = (plan_micro_batch(candidate, load, cluster, rows) for rows in MICRO_BATCHES if rows <= max_rows)
            plan = next(filter(None, larger), plan)
            candidate.set("micro_batch_size", plan.workload.micro_batch_size)
            candidate.plan = replace(plan, step_count=count_steps(load(candidate.tree), plan.workload.source))
            return candidate
    raise UserError(
        f"nothing fits: {cluster.label} has too little memory for this model. Pass --nproc-per-node and --gpu-type of "
        "a larger machine, or use `tune plan --auto`, which also shards layers over GPUs and offloads weights"
    )


def plan_micro_batch(draft: Draft, load: LoadConfig, cluster: ClusterSpec, micro_batch_size: int) -> Estimate | None:
    """Plan with this micro-batch size; None if it does not fit, or if the options are not compatible."""
    try:
        workload = make_workload(load(draft.tree | {"micro_batch_size": micro_batch_size}), cluster)
        plan = estimate(workload, cluster)
    except FieldError:
        return None
    return plan if plan.peak.total <= memory_limit(cluster) else None
