"""The number of steps that is planned from a sample of rows is that of the data loader."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tunekit import build
from tunekit.cli import recipe_loader
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.sft_datasets import AutoDataset
from tunekit.distributed.context import DistributedContext
from tunekit.hub import download
from tunekit.plan.num_steps import count_steps
from tunekit.policy.prompt_loader import PromptLoader


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_words", "is_exact"),
    [(40, 30, True), (300, 30, False), (4, 10_000, False), (2, 60_000, False)],
    ids=["all rows", "a sample", "few long rows", "longer than the sample"],
)
def test_split_and_packed_rows_are_counted(
    tmp_path: Path, packing: bool, num_rows: int, num_words: int, is_exact: bool
) -> None:
    file = tmp_path / "rows.jsonl"
    texts = (f"{i} " + "The cat. " * (num_words * (1 + i % 5) // 5) for i in range(num_rows))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = AutoDataset(str(file), max_length=64, packing=packing)
    cfg = recipe_loader.load_recipe_config(recipe_loader.load_recipe("sft"), "nano/tools_lora", ["epochs=2"], [])
    source = build.resolve_checkpoint("tunekit/nano", download.SMALL)[0]
    dist = DistributedContext(device="cpu")
    loader = build_dataloader(data, build.open_tokenizer(source), cfg.global_batch_size, 1, dist)
    count = count_steps(replace(cfg, data=data), source)
    assert count is not None and count.exact == is_exact and count.tokens is not None
    tolerance = 0 if is_exact else 0.1
    assert count.steps == pytest.approx(loader.num_steps(2), rel=tolerance, abs=0)
    assert count.tokens == pytest.approx(2 * loader.summary.tokens, rel=tolerance, abs=0)


@pytest.mark.parametrize("options", [["global_batch_size=128"], ["steps_per_generation=3", "num_iterations=2"]])
def test_steps_of_policy_recipes_are_counted_in_prompts(options: list[str]) -> None:
    overrides = ["max_steps=null", "epochs=2", "global_batch_size=64", *options]
    cfg = recipe_loader.load_recipe_config(recipe_loader.load_recipe("grpo"), "nano/grpo", overrides, [])
    tokenizer = build.open_tokenizer(build.resolve_checkpoint("tunekit/nano", download.SMALL)[0])
    data = replace(cfg.data, packing=False)  # of answers
    loader = build_dataloader(data, tokenizer, cfg.num_prompts, 1, DistributedContext(device="cpu"))
    count = count_steps(cfg)
    assert count is not None and count.exact
    assert count.steps == PromptLoader(loader, tokenizer, 0, cfg.steps_per_prompt).num_steps(2)
