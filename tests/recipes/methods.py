"""Every method with every adapter, as recipes take their steps. Lean: every rank imports it."""

import importlib
import json
from pathlib import Path
from typing import NamedTuple

import torch

from tunekit.config import load
from tunekit.loggers import metric_logger
from tunekit.training import config as training

# What a config says beside what all of them say: of which recipe, and which rows it reads.
CHATS = "data: {{kind: chat, source: {folder}/chats.jsonl, max_length: 64, packing: {pack}}}"
PAIRS = "data: {{kind: preference, source: {folder}/pairs.jsonl, max_length: 64, packing: {pack}}}"
METHODS = {
    "sft": ("sft", CHATS),
    "dpo": ("preference", PAIRS),
    "simpo": ("preference", PAIRS + "\nloss: simpo"),
    "orpo": ("preference", PAIRS + "\nloss: orpo"),
    "kto": ("preference", PAIRS + "\nloss: kto"),
    "reward": ("reward", PAIRS),
    "distill": ("distill", CHATS + "\nteacher: {{model: {folder}/teacher/model, precision: {{compute_dtype: fp32}}}}"),
}
ADAPTERS = {
    "full": "adapter: none",
    "lora": "adapter: {kind: lora, rank: 4}",
    "dora": "adapter: {kind: dora, rank: 4}",
    "qlora": "adapter: {kind: lora, rank: 4}\nquantization: nf4",
}
# All rows are one step, so that packing does not change what a step is. A large epsilon of Adam keeps steps in
# proportion where gradients are nearly zero and rounding would decide their direction.
CONFIG = """\
model: {model}
{rows}
{adapter}
output_dir: {out}
precision: {{compute_dtype: fp32, master_dtype: fp32, frozen_dtype: fp32}}
optimizer: {{kind: adamw, lr: 0.01, eps: 0.1}}
lr_scheduler: constant
device: cpu
global_batch_size: 64
micro_batch_size: 3
max_steps: 3
"""


class Case(NamedTuple):
    """One run."""

    method: str
    adapter: str
    packed: bool


CASES = [Case(method, adapter, packed) for method in METHODS for adapter in ADAPTERS for packed in (False, True)]


def write_rows(folder: Path) -> None:
    """Conversations, and pairs of answers, of many lengths."""
    asked = [f"What is {n} plus {n * n}?" for n in range(7)]
    told = [(f"It is {n + n * n}" + "!" * n, "I " + "do " * (7 - n) + "not know") for n in range(7)]
    turns = [([("user", q), ("assistant", a)], r) for q, (a, r) in zip(asked, told, strict=True)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn, _ in turns]
    pairs = [{"prompt": q, "chosen": a, "rejected": r} for q, (a, r) in zip(asked, told, strict=True)]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(case: Case, folder: Path, model: Path, out: Path) -> str:
    recipe, rows = METHODS[case.method]
    rows = rows.format(folder=folder, model=model, pack=str(case.packed).lower())
    return f"recipe: {recipe}\n" + CONFIG.format(model=model, rows=rows, adapter=ADAPTERS[case.adapter], out=out)


def stepped(folder: Path, model: Path, out: str) -> list[dict[str, list[float]]]:
    """What each case has shown in its steps, by the name of the figure. Nothing is saved and nothing verified."""
    torch.set_num_threads(1)
    training.export_final = lambda job, steps: None  # type: ignore[assignment]
    return [shown(case, folder, model, folder / out / str(number)) for number, case in enumerate(CASES)]


def shown(case: Case, folder: Path, model: Path, out: Path) -> dict[str, list[float]]:
    recipe = importlib.import_module(f"tunekit.recipes.{METHODS[case.method][0]}")
    recipe.main(load.load_config(recipe.CONFIG, config(case, folder, model, out)))
    found = [line for line in metric_logger.read_metrics(out) if "loss" in line]
    return {name: [line[name] for line in found] for name in found[0] if timeless(name)}


def timeless(name: str) -> bool:
    """Whether a figure says what was learnt, and not how long that took."""
    return name in ("loss", "grad_norm", "kl", "entropy") or "/" in name
