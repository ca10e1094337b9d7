"""The card of a model, `README.md`: what it was made of and how, how good it is, how to use and to repeat it.

Nothing in it tells a secret or where files lie on this machine; see `discreet`.
"""

import hashlib
import importlib
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from tunekit import __version__ as VERSION
from tunekit import env_info, system
from tunekit.checkpoint import atomic
from tunekit.checkpoint.final_checkpoint import CURVES, VERIFICATION
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.checkpoint.run_dir import EVALUATION, FINAL
from tunekit.config import dump
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.readers.open_dataset import find_data_files, parse_split
from tunekit.data.tokenizer import Tokenizer
from tunekit.hub import redact
from tunekit.loggers import metric_logger
from tunekit.models.decoder import TIED, Decoder
from tunekit.publishing import snippets
from tunekit.publishing.base_model import CARD, FRONT, BaseModelInfo, read_base_model, read_card, read_front_matter
from tunekit.publishing.snippets import PromptFormat

Tree = Mapping[str, Any]
Lines = Sequence[Tree]
WARNING = "> **Not verified.**"
EVALUATED = ("<!-- evaluation -->", "<!-- /evaluation -->")
# What of a config says how it was trained, where a recipe has it.
CHOICES = (
    "quantization",
    "loss",
    "optimizer",
    "lr_scheduler",
    "precision",
    "global_batch_size",
    "micro_batch_size",
    "epochs",
    "max_steps",
    "max_grad_norm",
    "seed",
)
# Of held-out rows, where there are answers that are compared or classes: their loss is not that of a token.
ACCURACIES = ("eval/rewards/accuracies", "eval/accuracy")
UNKNOWN = PromptFormat()
OFF = (None, False, 0, "none", "", (), [], {})


@dataclass(frozen=True)
class ModelCardInfo:
    """What only the run itself knows of a model: by which choices it was made, of what, and where."""

    recipe: str
    config: Tree  # resolved
    run: Path  # its folder
    source: HFCheckpoint
    model: Decoder
    rows: Mapping[str, DataLoader | None]  # what was learnt, and what was held out, by the config's keys
    device: torch.device

    @property
    def fresh(self) -> bool:
        """Whether nothing of the source is in the weights."""
        return self.config.get("init") == "random"

    @property
    def kind(self) -> str:
        """What was trained: `none`, or the kind of the adapter."""
        return self.config["adapter"]["kind"] if "adapter" in self.config else "none"


def write_model_card(folder: Path, made: ModelCardInfo) -> None:
    """Put the card and its picture beside a checkpoint that a run has written into `folder`."""
    lines, base, name = metric_logger.read_metrics(made.run), read_base_model(made.source), made.run.resolve().name
    importlib.import_module("tunekit.publishing.plots").plot_metrics(lines, folder / CURVES)
    sections = {
        "": summary(made, base) + snippets.describe_scores(folder),
        "Use": use(folder, name, base, made.config.get("quantization"), written(made)),
        "Results": results(lines) + evaluation(made.run),
        "Training": training(made, lines, base),
        "Data": data(made),
        "Verification": verification(folder),
        "Repeat": repeat(made),
    }
    tags = ["tunekit", made.recipe] + [made.kind] * (made.kind != "none")
    put(folder, head(folder, None if made.fresh else base, tags, hub_sets(made)), name, sections)


def write_minimal_card(
    folder: Path, source: HFCheckpoint | None = None, relation: str = "merge", about: str = ""
) -> None:
    """A card for a model that no run has described: its base, how to use it, how it was compared."""
    base, name = None if source is None else read_base_model(source), folder.resolve().name.removesuffix(atomic.PARTIAL)
    made = f"Written by tunekit {VERSION}." if base is None else f"Made of {base.link} with tunekit {VERSION}."
    about = f"{made}{snippets.describe_scores(folder)} {about}"
    sections = {"": about, "Use": use(folder, name, base), "Verification": verification(folder)}
    put(folder, head(folder, base, ["tunekit"], [], relation), name, sections)


def write_merged_card(folder: Path, adapter: Path, source: HFCheckpoint) -> None:
    """A card for an adapter in the weights of its base. What a run has told of the adapter is told here too."""
    text = read_card(adapter / CARD)
    told = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    if not {"Training", "Repeat"} <= told.keys():
        write_minimal_card(folder, source)
        return
    base, name, known = (
        read_base_model(source),
        folder.resolve().name.removesuffix(atomic.PARTIAL),
        read_front_matter(text),
    )
    rows = PromptFormat("apply_chat_template" in told.get("Use", ""))
    kept = {title: told[title] for title in ("Results", "Training", "Data") if title in told}
    about = f"A fine-tuned {base.link}, made by an adapter that tunekit {VERSION} has merged into its weights."
    about, end = (
        about + snippets.describe_scores(folder),
        {"Verification": verification(folder), "Repeat": told["Repeat"]},
    )
    tags, sets = known.get("tags", ["tunekit"]), known.get("datasets", [])
    begin = {"": about, "Use": use(folder, name, base, rows=rows)}
    put(folder, head(folder, base, tags, sets), name, begin | kept | end)
    if (adapter / CURVES).is_file():
        shutil.copyfile(adapter / CURVES, folder / CURVES)


def add_unverified_warning(folder: Path) -> None:
    """Say in a card that the files are given away although they were not found to be what was meant."""
    if not (folder / CARD).is_file():
        write_minimal_card(folder)
    text = (folder / CARD).read_text("utf-8")
    if WARNING in text:
        return
    found = read_json(folder / VERIFICATION) if (folder / VERIFICATION).is_file() else None
    why = "nobody has compared these files with the model that they were made from"
    if found is not None:
        failed = "these files failed the comparison with the model that they were made from"
        why = "these files have changed since they were compared with the model" if found["passed"] else failed
    warning = f"{WARNING} This was pushed by force: {why}."
    section = re.compile(r"(?<=^## Verification\n\n).*?(?=\n^## |\Z)", re.M | re.S)
    text = section.sub(lambda _: f"{why[0].upper()}{why[1:]}.\n", text)
    top = end.end() if (end := FRONT.match(text)) else 0
    (folder / CARD).write_text(f"{text[:top]}\n{warning}\n{text[top:]}", encoding="utf-8")


def add_evaluation(run: Path, data: str, results: Sequence[Tree], questions: int) -> None:
    """Keep what `evaluate` has found with the run that it asked, and in its card. Models of no run keep nothing."""
    if not (run / FINAL / CARD).is_file():
        return
    kept = [
        {"model": one["model"], "correct": one["correct"], "questions": questions}
        | {key: one[key] if math.isfinite(one[key]) else None for key in ("loss", "perplexity")}
        for one in results
    ]
    atomic.write_text_atomic(run / EVALUATION, json.dumps({"data": data, "results": kept}, indent=2) + "\n")
    refresh(run)


def refresh(run: Path) -> None:
    """Bring what `evaluate` has found into the card of a finished run, if its marks still stand there."""
    file = run / FINAL / CARD
    before, _, rest = file.read_text("utf-8").partition(EVALUATED[0])
    _, there, after = rest.partition(EVALUATED[1])
    if there:
        atomic.write_text_atomic(file, before + redact.redact_text(evaluation(run)) + after)


def put(folder: Path, header: ModelCardData, name: str, sections: Tree) -> None:
    body = [
        f"## {title}\n\n{text.strip()}" if title else f"# {name}\n\n{text.strip()}" for title, text in sections.items()
    ]
    text = "\n\n".join([f"---\n{header.to_yaml()}\n---", *body]) + "\n"
    (folder / CARD).write_text(redact.redact_text(text), encoding="utf-8")


def head(
    folder: Path, base: BaseModelInfo | None, tags: list[str], sets: list[str], relation: str = "finetune"
) -> ModelCardData:
    """Metadata of the card for the Hub. A base model that the Hub does not have is not named."""
    adapter, repo = snippets.is_adapter(folder), None if base is None else base.repo
    licence = {} if base is None else base.licence
    return ModelCardData(
        base_model=repo,
        base_model_relation=None if repo is None else "adapter" if adapter else relation,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=snippets.pipeline_tag(folder),
        datasets=sets or None,
        tags=tags,
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    )


def summary(made: ModelCardInfo, base: BaseModelInfo) -> str:
    what = f"An adapter ({made.kind}) for" if made.kind != "none" else "A fine-tuned"
    what = "A model trained from random weights in the shape of" if made.fresh else what
    return f"{what} {base.link}, made by the recipe `{made.recipe}` of tunekit {VERSION}."


def use(
    folder: Path, name: str, base: BaseModelInfo | None, weights: Tree | None = None, rows: PromptFormat = UNKNOWN
) -> str:
    """Code for people who use it."""
    there = "" if base is None else base.repo or base.name
    return snippets.usage_snippet(folder, name, there, base is None or base.repo is not None, weights, rows)


def written(made: ModelCardInfo) -> PromptFormat:
    """How its rows were written: a text is what its words alone become."""
    loader = made.rows["data"]
    if made.source.spec.score is None or loader is None:
        return UNKNOWN
    ((_, document),) = loader.sample(1)
    tokenizer, tokens = Tokenizer.open(made.source.tokenizer), document.tokens[:-1].tolist()
    again = tokenizer.encode_texts([tokenizer.decode(tokens)], True)[0][: len(tokens)]
    return PromptFormat(again != tokens, made.config["data"].get("step_separator", UNKNOWN.separator))


def results(lines: Lines) -> str:
    """The loss on held-out rows before and after, and the curves."""
    held = [(line["step"], line["eval/loss"]) for line in lines if line.get("eval/loss") is not None]
    picture = f"![loss, learning rate and gradient norm]({CURVES})\n\n"
    if not held:
        return picture
    shown = [held[0], held[-1]] if held[0][0] == 0 and len(held) > 1 else held[-1:]
    steps = ["before training" if step == 0 else f"after step {step:,}" for step, _ in shown]
    told = {line["step"]: line[name] for line in lines for name in ACCURACIES if line.get(name) is not None}
    if told:
        rows = [["loss on held-out rows", *(f"{loss:.4f}" for _, loss in shown)]]
        rows.append(["accuracy", *(f"{told[step]:.1%}" if step in told else "" for step, _ in shown)])
    else:
        rows = [["loss on held-out rows, in nats per learnt token", *(f"{loss:.4f}" for _, loss in shown)]]
        rows.append(["perplexity", *(f"{math.exp(min(loss, 700)):.4g}" for _, loss in shown)])
    return f"{table(['', *steps], rows)}\n\n{picture}"


def evaluation(run: Path) -> str:
    """What `evaluate` has found about the run's model, between two marks that are not seen."""
    file = run / EVALUATION
    if not file.is_file():
        return "\n".join(EVALUATED)
    told = read_json(file)
    rows = [
        [
            redact.redact_path(one["model"]),
            "-" if one["loss"] is None else f"{one['loss']:.4f}",
            "-" if one["perplexity"] is None else f"{one['perplexity']:.4g}",
            share(one["correct"], one["questions"]),
        ]
        for one in told["results"]
    ]
    found = table([f"on {redact.redact_path(told['data'])}", "loss", "perplexity", "exact_match"], rows)
    return f"{EVALUATED[0]}\n\n{found}\n\n{EVALUATED[1]}"


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} ({part} of {whole})" if whole else "-"


def training(made: ModelCardInfo, lines: Lines, base: BaseModelInfo) -> str:
    """What was trained by which choices, for how long, on what."""
    steps = [line for line in lines if "loss" in line]
    tokens, targets = (max((line[key] for line in steps), default=0) for key in ("num_tokens", "num_target_tokens"))
    starts = [0, *(line["step"] for line in steps)]
    seconds = sum(line["step_time"] * (line["step"] - start) for start, line in zip(starts, steps, strict=False))
    peak = max((line["peak_memory"] for line in steps if "peak_memory" in line), default=0)
    facts = {
        "base model" if not made.fresh else "shape": base.link,
        "trained": trained(made),
        "steps": f"{max((line['step'] for line in steps), default=0):,}",
        "tokens": f"{tokens:,}, of which {targets:,} are target tokens",
        "time": f"{timedelta(seconds=round(seconds))} ({tokens / max(seconds, 1e-9):,.0f} tokens per second)",
        "hardware": env_info.describe_hardware(made.device),
        "peak memory": system.format_bytes(peak),
        "versions": ", ".join(f"{name} {version}" for name, version in env_info.package_versions().items()),
    }
    choices = {key.replace("_", "-"): words(made.config[key]) for key in CHOICES if made.config.get(key) is not None}
    return table(["", ""], [[key, text] for key, text in (facts | choices).items() if text])


def trained(made: ModelCardInfo) -> str:
    shapes = {name: shape for name, shape in made.model.shapes.items() if not (made.model.spec.tied and name == TIED)}
    whole = sum(math.prod(shape) for shape in shapes.values())
    part = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    if made.kind == "none":
        return f"all {whole:,} parameters"
    return f"{words(made.config['adapter'])}: {part:,} parameters beside the {whole:,} of the base ({part / whole:.2%})"


def words(value: Any) -> str:
    """A choice in a line: its kind, then its options as far as they are on."""
    if isinstance(value, Mapping):
        options = [f"{key} {words(child)}" for key, child in value.items() if key != "kind" and child not in OFF]
        return ", ".join(([str(value["kind"])] if "kind" in value else []) + options)
    if isinstance(value, list | tuple):
        return " ".join(map(words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def data(made: ModelCardInfo) -> str:
    """What an epoch holds, and hashes of the files that it comes from."""
    counts, hashes = [], []
    for key, loader in opened(made).items():
        for choice, share in zip(choices(made.config[key]), loader.report.shares, strict=True):
            source, split = choice["source"], choice["split"]
            numbers = [f"{number:,}" for number in (share.rows, share.tokens, share.learnt)]
            numbers = ["a stream", "", ""] if loader.report.streamed else numbers
            counts.append([key, f"`{redact.redact_path(source)}`", split, *numbers])
            if loader.report.streamed:  # nobody has read all of it
                continue
            files = find_data_files(source, parse_split(split).name)
            hashes += [[key, f"`{file.name}`", f"`{sha256(file)}`"] for file in files or ()]
            if not files:  # others may change what they have under a name
                hashes.append([key, "all tokens", f"`{loader.digest}`"])
    about = table(["", "source", "split", "rows", "tokens", "learnt"], counts)
    return f"{about}\n\n{table(['', 'file', 'SHA-256'], hashes)}"


def choices(data: Tree) -> list[Tree]:
    """The sources of `data:`, one or those of a mix."""
    return [part["dataset"] for part in data["datasets"]] if "datasets" in data else [data]


def opened(made: ModelCardInfo) -> dict[str, DataLoader]:
    return {key: loader for key, loader in made.rows.items() if loader is not None}


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hub_sets(made: ModelCardInfo) -> list[str]:
    """Data sets that the Hub knows, by name."""
    found = [choice for key in opened(made) for choice in choices(made.config[key])]
    hub = [c["source"] for c in found if find_data_files(c["source"], parse_split(c["split"]).name) is None]
    return list(dict.fromkeys(re.split("[:@]", name)[0] for name in hub))


def verification(folder: Path) -> str:
    """How the written files compare with what they were written from."""
    if not (folder / VERIFICATION).is_file():
        return "Nobody has compared these files with the model that they were made from."
    found = read_json(folder / VERIFICATION)
    how = "passed" if found["passed"] else "**failed**"
    named = "scores" if found.get("scores") else "logits"
    rows = [
        [f"mean difference of the {named}", number(found["mean"])],
        ["largest difference", number(found["largest"])],
        ["mean difference that rounding does not explain", number(found["unexplained"])],
    ]
    if not found.get("scores"):
        rows.append(["same likeliest token", f"{found['top1']:.1%} of {found['tokens']}"])
    return (
        "After they were written, the files were read again and compared with the model itself on short prompts. "
        f"This check {how}. Differences are in standard deviations of the {named}.\n\n{table(['', ''], rows)}"
    )


def number(value: float | None) -> str:
    """A figure; what was not finite stands as null in a file."""
    return "not a number" if value is None else f"{value:.2g}"


def repeat(made: ModelCardInfo) -> str:
    config = {
        key: value for key, value in made.config.items() if key != "push_to_hub"
    }  # others have no right to push there
    text = dump.to_yaml(redact.redact_tree(config))
    return (
        f"```sh\ntune run {made.recipe} config.yaml\n```\n\nwith this config. Paths in it are shortened to their last "
        f"names.\n\n<details>\n<summary>config.yaml</summary>\n\n```yaml\n{text}```\n\n</details>"
    )


def table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )
