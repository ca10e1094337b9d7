"""Train configs that were imported from other trainers, with tiny models and rows in the format that they expect."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from tests.helpers.chat_families import write_family
from tests.helpers.random_checkpoints import SHAPES, build
from tunekit.cli import recipe_loader
from tunekit.config.load import load_config
from tunekit.importers.draft import Draft
from tunekit.loggers import metrics_file

TEXTS = ("What is 2 + 2?", "It is 4.", "Hello there.", "Thanks; and now?")
TEMPLATE_NAMES = re.compile(r"\{\{ *\(?(?:\"[^\"]*\" ~ )?(\w+)|\{% (?:el)?if (\w+)")


def write_model(directory: Path, tokenizer: str = "llama3", shape: str = "llama") -> Path:
    """A tiny random model with the tokenizer and the chat template of a family."""
    directory.mkdir(parents=True)
    write_family(directory, tokenizer)
    size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    options = next(shape_options for shape_options in SHAPES.values() if shape_options["model_type"] == shape)
    build({**options, "vocab_size": size, "max_position_embeddings": 512, "pad_token_id": None}).save_pretrained(
        directory
    )
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory


def make_row(data: dict[str, Any], i: int) -> dict[str, Any]:
    """A row with the columns that a dataset reads."""
    texts = [f"{TEXTS[(i + k) % 4]} {i}" for k in range(3)]

    def name(role: str, default: str) -> str:
        return data.get("columns", {}).get(role) or default

    names: list[str] = []
    for transform in data.get("transforms") or []:
        for text in (transform["columns"] if transform["kind"] == "render_columns" else {}).values():
            names += [first or second for first, second in TEMPLATE_NAMES.findall(text)]
        names += transform.get("column_mapping", {})
    row = {column: f"{TEXTS[k % 4]} {i} {k}" for k, column in enumerate(dict.fromkeys(names))}
    chat = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    shared = [{"from": "human", "value": texts[0]}, {"from": "gpt", "value": texts[1]}]
    by_kind: dict[str, dict[str, Any]] = {
        "chat": {name("messages", "messages"): chat},
        "sharegpt": {name("conversations", "conversations"): shared},
        "instruct": {name("prompt", "instruction"): texts[0], name("completion", "output"): texts[1]},
        "completion": {name("prompt", "prompt"): texts[0], name("completion", "completion"): f" {texts[1]}"},
        "text": {name("text", "text"): texts[0]},
        "preference": {name("prompt", "prompt"): texts[0], name("chosen", "chosen"): texts[1],
                       name("rejected", "rejected"): texts[2]},
        "unpaired_preference": {name("prompt", "prompt"): texts[0], name("completion", "completion"): f" {texts[1]}",
                                name("label", "label"): bool(i % 2)},
        "segments": {name("segments", "segments"): [{"text": texts[0], "train": False},
                                                    {"text": texts[1], "train": True}]},
        "stepwise": {"prompt": texts[0], "completions": texts[1:], "labels": [True, False]},
    }  # fmt: skip
    prompt = {name("prompt", "prompt"): texts[0], "answer": "4"}
    is_prompt = "prompt_format" in data or "prompt" in data.get("columns", {})
    return by_kind.get(data.get("kind", ""), prompt if is_prompt else {"messages": chat}) | row


def localize(data: dict[str, Any] | None, directory: Path) -> dict[str, Any] | None:
    """A dataset whose rows are in a local file."""
    if data is None:
        return None
    if data.get("kind") == "mixture":
        parts = [{**part, "dataset": localize(part["dataset"], directory)} for part in data["datasets"]]
        return {**data, "max_length": 256, "datasets": parts}
    path = directory / f"rows{len(list(directory.glob('rows*')))}.jsonl"
    path.write_text("".join(json.dumps(make_row(data, i)) + "\n" for i in range(30)))
    length = {"max_length": 256} if "max_length" in data else {}
    return {**data, "source": str(path), "num_proc": 0, **length}


def shrink(draft: Draft, model: Path, directory: Path, localizes: bool) -> dict[str, Any]:
    """The config with a tiny model and local rows, for two steps on the CPU."""
    tree = yaml.safe_load(draft.format("test"))
    tree |= {"model": str(model), "output_dir": str(directory / "run"), "device": "cpu", "report_to": []}
    if localizes:
        tree |= {key: localize(tree[key], directory) for key in ("data", "eval_data") if tree.get(key)}
    in_backward = tree.get("memory", {}).get("optimizer_in_bwd", False)
    tree |= {"max_steps": 2, "log_every": 1, "global_batch_size": 2, "micro_batch_size": 2 if in_backward else 1}
    tree |= {"compile": False, "data_checks": "warn", "precision": {"compute_dtype": "fp32"}}
    if "teacher" in tree:
        tree["teacher"]["model"] = str(model)
    if "rewards" in tree:
        tree |= {"rewards": [{"kind": "length", "min_tokens": 2}], "sampling": {"max_new_tokens": 4}}
    if "num_mini_batches" in tree:
        tree["num_mini_batches"] = 1
    for key in ("parallel", "push_to_hub", "engine", "tokenizer"):
        tree.pop(key, None)
    return tree


def train(draft: Draft, model: Path, directory: Path, localizes: bool = True) -> list[dict[str, Any]]:
    """Train two steps, and return their metrics. `localizes`: with rows that are made for the config."""
    tree = shrink(draft, model, directory, localizes)
    recipe = recipe_loader.load_recipe(tree["recipe"])
    cfg = load_config(recipe.CONFIG, yaml.safe_dump(tree, sort_keys=False))
    recipe.check(cfg)
    recipe.main(cfg)
    return [line for line in metrics_file.read_metrics(Path(cfg.output_dir)) if "loss" in line]
