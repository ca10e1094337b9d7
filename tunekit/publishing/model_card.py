"""Model card (`README.md`): base model, usage, results, training settings, data and reproduction.

Secrets and local paths are removed by `tunekit.hub.redact`.
"""

import hashlib
import importlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from tunekit import __version__ as VERSION
from tunekit import env_info, system
from tunekit.checkpoint import atomic
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.final_checkpoint import CURVES, VERIFICATION
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.checkpoint.run_dir import EVALUATION, FINAL
from tunekit.config import dump
from tunekit.config.dump import format_option
from tunekit.config.secrets import escape_control
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.readers.open_dataset import find_data_files
from tunekit.data.tokenizer import Tokenizer
from tunekit.hub import redact
from tunekit.loggers import divergence, metrics_file
from tunekit.loggers.markdown import code_span, format_table
from tunekit.models.decoder import Decoder
from tunekit.publishing import snippets
from tunekit.publishing.base_model import (
    CARD,
    FRONT_MATTER,
    BaseModelInfo,
    read_base_model,
    read_card,
    read_front_matter,
)
from tunekit.publishing.snippets import UNKNOWN_FORMAT, PromptFormat
from tunekit.report.run_info import count_parameters
from tunekit.system import read_utf8
from tunekit.templates.render import render_template

Tree = Mapping[str, Any]
Lines = Sequence[Tree]
WARNING = "> **Not verified.**"
EVALUATION_MARKERS = ("<!-- evaluation -->", "<!-- /evaluation -->")
# Config keys that the training section lists, if a recipe has them.
CONFIG_KEYS = ("quantization", "loss", "optimizer", "lr_scheduler", "precision", "global_batch_size")
CONFIG_KEYS += ("micro_batch_size", "epochs", "max_steps", "max_grad_norm", "seed")
# Metrics of preference pairs and classes, whose loss is not per token.
ACCURACIES = {  # names of metrics in the card
    "eval/rewards/accuracies": "accuracy",
    "eval/accuracy": "accuracy",
    "eval/cosine_accuracy@1": "accuracy of the first document",
    "eval/cosine_ndcg@10": "NDCG@10",
    "eval/spearman_cosine": "Spearman correlation",
}
ANSWER_METRICS = ("exact_match", "regex_match", "json_schema_match")  # of `generation_eval`
UNTRAINED_MTP = (
    "the layers for multi-token prediction are those of the base, and may predict fewer tokens right in speculative "
    "decoding"
)


@dataclass(frozen=True)
class ModelCardInfo:
    """Facts about a training run for the card of its result."""

    recipe: str
    config: Tree  # resolved
    run: Path  # run directory
    source: HFCheckpoint
    model: Decoder
    loaders: Mapping[str, DataLoader | None]  # of training and held-out data, by config key
    device: torch.device

    @property
    def is_from_scratch(self) -> bool:
        """Whether the model was trained from random weights."""
        return self.config.get("init") == "random"

    @property
    def adapter_kind(self) -> str:
        """Kind of the adapter; `none` for full training."""
        return self.config["adapter"]["kind"] if "adapter" in self.config else "none"


def write_model_card(folder: Path, info: ModelCardInfo) -> None:
    """Write the card and the plot of the metrics into the checkpoint directory of a run."""
    lines, base, name = metrics_file.read_metrics(info.run), read_base_model(info.source), info.run.resolve().name
    importlib.import_module("tunekit.publishing.plots").plot_metrics(lines, folder / CURVES)
    sections = {
        "": summary_section(info, base) + snippets.describe_scores(folder),
        "Use": snippets.usage_snippet(folder, name, base, info.config.get("quantization"), detect_prompt_format(info)),
        "Results": divergence_warning(lines) + results_section(lines) + evaluation_section(info.run),
        "Training": training_section(info, lines, base),
        "Data": data_section(info),
        "Verification": verification_section(folder),
        "Repeat": reproduction_section(info),
    }
    tags = ["tunekit", info.recipe] + [info.adapter_kind] * (info.adapter_kind != "none")
    header = card_metadata(folder, None if info.is_from_scratch else base, tags, hub_datasets(info))
    write_card(folder, header, name, sections)


def write_minimal_card(
    folder: Path, source: HFCheckpoint | None = None, relation: str = "merge", about: str = ""
) -> None:
    """Write a card for a model without a run: its base, usage and verification."""
    base, name = None if source is None else read_base_model(source), folder.resolve().name.removesuffix(atomic.PARTIAL)
    origin = f"Written by tunekit {VERSION}." if base is None else f"Derived from {base.link} with tunekit {VERSION}."
    about = f"{origin}{snippets.describe_scores(folder)} {about}"
    usage = snippets.usage_snippet(folder, name, base)
    sections = {"": about, "Use": usage, "Verification": verification_section(folder)}
    write_card(folder, card_metadata(folder, base, ["tunekit"], [], relation), name, sections)


def write_merged_card(folder: Path, adapter: Path, source: HFCheckpoint) -> None:
    """Write a card for a merged adapter, with the results and training sections of the adapter's card."""
    text = read_card(adapter / CARD)
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    if not {"Training", "Repeat"} <= sections.keys():
        write_minimal_card(folder, source, about=mtp_sentence(source))
        return
    base, name = read_base_model(source), folder.resolve().name.removesuffix(atomic.PARTIAL)
    prompt_format = PromptFormat("apply_chat_template" in sections.get("Use", ""))
    about = f"A fine-tuned {base.link}: an adapter was merged into its weights with tunekit {VERSION}."
    about += mtp_sentence(source)
    new_sections = {"": about + snippets.describe_scores(folder)}
    new_sections["Use"] = snippets.usage_snippet(folder, name, base, prompt_format=prompt_format)
    new_sections |= {title: sections[title] for title in ("Results", "Training", "Data") if title in sections}
    new_sections |= {"Verification": verification_section(folder), "Repeat": sections["Repeat"]}
    front_matter = read_front_matter(text)
    tags, datasets = front_matter.get("tags", ["tunekit"]), front_matter.get("datasets", [])
    write_card(folder, card_metadata(folder, base, tags, datasets), name, new_sections)
    if (adapter / CURVES).is_file():
        shutil.copyfile(adapter / CURVES, folder / CURVES)


def add_unverified_warning(folder: Path) -> None:
    """Add a warning to a card that the files are published although they were not verified."""
    if not (folder / CARD).is_file():
        write_minimal_card(folder)
    text = read_utf8(folder / CARD)
    if WARNING in text:
        return
    reason = "these files were not compared with the model that they were saved from"
    if (folder / VERIFICATION).is_file():
        failed = "these files failed the comparison with the model that they were saved from"
        changed = "these files have changed since they were compared with the model"
        reason = changed if read_json(folder / VERIFICATION)["passed"] else failed
    warning = f"{WARNING} This model was published with --force: {reason}."
    section = re.compile(r"(?<=^## Verification\n\n).*?(?=\n^## |\Z)", re.M | re.S)
    text = section.sub(lambda _: f"{reason[0].upper()}{reason[1:]}.\n", text)
    body_start = front_matter.end() if (front_matter := FRONT_MATTER.match(text)) else 0
    (folder / CARD).write_text(f"{text[:body_start]}\n{warning}\n{text[body_start:]}", encoding="utf-8")


def add_evaluation(run: Path, data: str, results: Sequence[Tree], num_questions: int) -> None:
    """Save the results of `evaluate` in the run directory and in its card. No-op for models without a run."""
    if not (run / FINAL / CARD).is_file():
        return
    saved = []
    for result in results:
        numbers = {key: result[key] if math.isfinite(result[key]) else None for key in ("loss", "perplexity")}
        saved.append({"model": result["model"], "correct": result["correct"], "questions": num_questions} | numbers)
    atomic.write_text_atomic(run / EVALUATION, json.dumps({"data": data, "results": saved}, indent=2) + "\n")
    update_evaluation(run)


def update_evaluation(run: Path) -> None:
    """Replace the evaluation results between the markers in the card of a finished run."""
    file = run / FINAL / CARD
    before, _, tail = read_utf8(file).partition(EVALUATION_MARKERS[0])
    _, end_marker, after = tail.partition(EVALUATION_MARKERS[1])
    if end_marker:
        atomic.write_text_atomic(file, before + redact.redact_text(evaluation_section(run)) + after)


def write_card(folder: Path, header: ModelCardData, name: str, sections: Mapping[str, str]) -> None:
    """Write a card. The section without a title is the text below the name."""
    titled = {title: text for title, text in sections.items() if title}
    text = render_template("card.md.j2", header=header.to_yaml(), name=name, about=sections[""], sections=titled)
    (folder / CARD).write_text(escape_control(redact.redact_text(text)), encoding="utf-8")


def card_metadata(
    folder: Path, base: BaseModelInfo | None, tags: list[str], datasets: list[str], relation: str = "finetune"
) -> ModelCardData:
    """Front matter of a card for the Hub. Omits a base model that is not on the Hub."""
    is_adapter, repo = AdapterDir.is_adapter(folder), None if base is None else base.repo
    license = {} if base is None else base.license
    return ModelCardData(
        base_model=repo,
        base_model_relation=None if repo is None else "adapter" if is_adapter else relation,
        library_name=snippets.library_name(folder),
        pipeline_tag=snippets.pipeline_tag(folder),
        datasets=datasets or None,
        tags=tags,
        license=license.get("license"),
        license_name=license.get("license_name"),
        license_link=license.get("license_link"),
    )


def summary_section(info: ModelCardInfo, base: BaseModelInfo) -> str:
    subject = f"An adapter ({info.adapter_kind}) for" if info.adapter_kind != "none" else "A fine-tuned"
    subject = "A model trained from random weights with the architecture of" if info.is_from_scratch else subject
    about = f"{subject} {base.link}, trained with the recipe `{info.recipe}` of tunekit {VERSION}."
    return about + (mtp_sentence(info.source) if info.adapter_kind == "none" else "")


def mtp_sentence(source: HFCheckpoint) -> str:
    """Sentence about the layers for multi-token prediction, which training does not change; empty without any."""
    return f" {UNTRAINED_MTP[0].upper()}{UNTRAINED_MTP[1:]}." if source.has_untrained_mtp else ""


def detect_prompt_format(info: ModelCardInfo) -> PromptFormat:
    """Detect the format of the rows of a scoring model: chat if a row is not the tokenization of its plain text."""
    loader = info.loaders["data"]
    if info.source.spec.score is None or loader is None:
        return UNKNOWN_FORMAT
    ((_, document),) = loader.sample_documents(1)
    tokenizer, tokens = Tokenizer.open(info.source.tokenizer_path), document.tokens[:-1].tolist()
    text_tokens = tokenizer.encode_texts([tokenizer.decode(tokens)], True)[0][: len(tokens)]
    return PromptFormat(text_tokens != tokens, info.config["data"].get("step_separator", UNKNOWN_FORMAT.separator))


def find_divergence(lines: Lines) -> str | None:
    """Message if the last training losses of a run are far above the first one."""
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    return divergence.describe_divergence(losses[0], losses[1:]) if losses else None


def divergence_warning(lines: Lines) -> str:
    problem = find_divergence(lines)
    return f"> **Warning:** {problem}.\n\n" if problem else ""


def results_section(lines: Lines) -> str:
    """Metrics of held-out rows and of answers before and after training, and the plot of the metrics."""
    picture = f"![loss, learning rate and gradient norm]({CURVES})\n\n"
    # The last line is about the saved weights. A loss that is not finite is null.
    evaluated = [line for line in lines if line["step"] <= lines[-1]["step"] and has_evaluation(line)]
    if not evaluated:
        return picture
    points = [evaluated[0], evaluated[-1]] if evaluated[0]["step"] == 0 and len(evaluated) > 1 else evaluated[-1:]
    steps = ["before training" if line["step"] == 0 else f"after step {line['step']:,}" for line in points]
    rows = [
        [title, *("" if line.get(name) is None else number_format(line[name]) for line in points)]
        for name, title, number_format in result_rows(evaluated)
        if any(line.get(name) is not None for line in points)
    ]
    return f"{format_table(['', *steps], rows)}\n\n{picture}"


def has_evaluation(line: Mapping[str, Any]) -> bool:
    return any(value is not None for name, value in line.items() if name.startswith("eval/"))


def result_rows(lines: Lines) -> Iterator[tuple[str, str, Callable[[float], str]]]:
    """Metric, title and number format of the rows of the table of results."""
    has_accuracy = any(name in line for line in lines for name in ACCURACIES)
    yield "eval/loss", "loss on held-out rows" + ("" if has_accuracy else ", in nats per target token"), "{:.4f}".format
    if not has_accuracy:
        yield "eval/loss", "perplexity", lambda loss: f"{math.exp(min(loss, 700)):.4g}"
    yield from ((name, title, "{:.1%}".format) for name, title in ACCURACIES.items())
    yield from ((f"eval/{name}", f"{name} of answers", "{:.1%}".format) for name in ANSWER_METRICS)
    yield "eval/reward", "mean reward of held-out prompts", "{:.3f}".format


def evaluation_section(run: Path) -> str:
    """Results of `evaluate`, between two invisible markers."""
    file = run / EVALUATION
    if not file.is_file():
        return "\n".join(EVALUATION_MARKERS)
    evaluation = read_json(file)
    rows = []
    for result in evaluation["results"]:
        loss = "-" if result["loss"] is None else f"{result['loss']:.4f}"
        perplexity = "-" if result["perplexity"] is None else f"{result['perplexity']:.4g}"
        correct, total = result["correct"], result["questions"]
        exact_match = f"{correct / total:.1%} ({correct} of {total})" if total else "-"
        rows.append([redact.redact_path(result["model"]), loss, perplexity, exact_match])
    markdown = format_table([f"on {redact.redact_path(evaluation['data'])}", "loss", "perplexity", "exact_match"], rows)
    return f"{EVALUATION_MARKERS[0]}\n\n{markdown}\n\n{EVALUATION_MARKERS[1]}"


def training_section(info: ModelCardInfo, lines: Lines, base: BaseModelInfo) -> str:
    """Table of training settings, duration and hardware."""
    steps = [line for line in lines if "loss" in line]
    tokens, targets = (max((line[key] for line in steps), default=0) for key in ("num_tokens", "num_target_tokens"))
    starts = [0, *(line["step"] for line in steps)]
    seconds = sum(line["step_time"] * (line["step"] - start) for start, line in zip(starts, steps, strict=False))
    last_step, saved_step = max((line["step"] for line in steps), default=0), lines[-1]["step"] if lines else 0
    best = f"; the weights are those after step {saved_step:,}, the best evaluation" if saved_step < last_step else ""
    peak = max((line["peak_memory"] for line in steps if "peak_memory" in line), default=0)
    facts = {
        "base model" if not info.is_from_scratch else "architecture": base.link,
        "trained": describe_parameters(info),
        "steps": f"{last_step:,}{best}",
        "tokens": f"{tokens:,}, of which {targets:,} are target tokens",
        "time": f"{timedelta(seconds=round(seconds))} ({tokens / max(seconds, 1e-9):,.0f} tokens per second)",
        "hardware": env_info.describe_hardware(info.device),
        "peak memory": system.format_bytes(peak),
        "versions": ", ".join(f"{name} {version}" for name, version in env_info.package_versions().items()),
    }
    keys = [key for key in CONFIG_KEYS if info.config.get(key) is not None]
    options = {key.replace("_", "-"): format_option(info.config[key]) for key in keys}
    return format_table(["", ""], [[key, text] for key, text in (facts | options).items() if text])


def describe_parameters(info: ModelCardInfo) -> str:
    trained, total = count_parameters(info.model)
    if info.adapter_kind == "none":
        return f"all {total:,} parameters"
    adapter = format_option(info.config["adapter"])
    return f"{adapter}: {trained:,} parameters in addition to the {total:,} of the base ({trained / total:.2%})"


def data_section(info: ModelCardInfo) -> str:
    """Tables of the rows and tokens of an epoch, and of the hashes of its data files."""
    counts, hashes = [], []
    for key, loader in open_loaders(info).items():
        for config, source_stats in zip(dataset_configs(info.config[key]), loader.summary.datasets, strict=True):
            source, split = config["source"], config["split"]
            numbers = source_stats.rows, source_stats.tokens, source_stats.num_target_tokens
            numbers = ["a stream", "", ""] if loader.summary.is_streaming else [f"{number:,}" for number in numbers]
            counts.append([key, code_span(redact.redact_path(source)), split, *numbers])
            if loader.summary.is_streaming:  # not read completely
                continue
            files = find_data_files(source, split)
            hashes += [[key, code_span(file.name), f"`{hash_file(file)}`"] for file in files or ()]
            if not files:  # a remote dataset may change
                hashes.append([key, "all tokens", f"`{loader.fingerprint}`"])
    sources = format_table(["", "source", "split", "rows", "tokens", "target tokens"], counts)
    return f"{sources}\n\n{format_table(['', 'file', 'SHA-256'], hashes)}"


def dataset_configs(data: Tree) -> list[Tree]:
    """Dataset configs of a `data` section: one, or those of a mixture."""
    return [source["dataset"] for source in data["datasets"]] if "datasets" in data else [data]


def open_loaders(info: ModelCardInfo) -> dict[str, DataLoader]:
    return {key: loader for key, loader in info.loaders.items() if loader is not None}


def hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hub_datasets(info: ModelCardInfo) -> list[str]:
    """Names of the datasets on the Hub."""
    configs = [choice for key in open_loaders(info) for choice in dataset_configs(info.config[key])]
    local_files = {c["source"]: find_data_files(c["source"], c["split"]) for c in configs}
    return list(dict.fromkeys(re.split("[:@]", name)[0] for name, files in local_files.items() if files is None))


def verification_section(folder: Path) -> str:
    """Comparison of the saved files with the model in memory."""
    if not (folder / VERIFICATION).is_file():
        return "These files were not compared with the model that they were saved from."
    verification = read_json(folder / VERIFICATION)
    verdict = "passed" if verification["passed"] else "**failed**"
    noun = "scores" if verification.get("scores") else "logits"
    rows = [
        [f"mean difference of the {noun}", format_number(verification["mean"])],
        ["largest difference", format_number(verification["largest"])],
        ["mean difference not due to rounding", format_number(verification["unexplained"])],
    ]
    if not verification.get("scores"):
        rows.append(["top-1 agreement", f"{verification['top1']:.1%} of {verification['tokens']}"])
    return (
        "After saving, the files were loaded and compared with the model in memory on short prompts. "
        f"This check {verdict}. Differences are in standard deviations of the {noun}.\n\n{format_table(['', ''], rows)}"
    )


def format_number(value: float | None) -> str:
    """Format a value of verification.json, where null means non-finite."""
    return "not finite" if value is None else f"{value:.2g}"


def reproduction_section(info: ModelCardInfo) -> str:
    # Other users cannot upload to the same repository.
    config = {key: value for key, value in info.config.items() if key != "push_to_hub"}
    text = dump.to_yaml(redact.redact_tree(config))
    return (
        f"```sh\ntune run {info.recipe} config.yaml\n```\n\nwith this config. Paths are shortened to their last "
        f"component.\n\n<details>\n<summary>config.yaml</summary>\n\n```yaml\n{text}```\n\n</details>"
    )
