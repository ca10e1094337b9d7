"""Prompts of each optimizer step, with the columns that rewards and environments read."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.map_style import MapDataLoader
from tunekit.data.dataloader.prompt_data import PromptData, PromptDataset
from tunekit.data.dataloader.sampler import StepIndex
from tunekit.data.datasets import DatasetConfig
from tunekit.data.readers.row_reader import Row
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.policy.config import PolicyConfig
from tunekit.rewards.base import check_rewards
from tunekit.rollouts.prompts import make_prompt_row
from tunekit.rollouts.rollout import PromptRow
from tunekit.training.data_checks import check_columns
from tunekit.training.run_context import RunContext


class PromptLoader(MapDataLoader):
    """Prompts by optimizer step: `steps_per_prompt` adjacent steps train on the answers to the same prompts.

    All steps have the same number of prompts, so the last prompts of an epoch may be left out.
    """

    def __init__(self, loader: MapDataLoader, tokenizer: Tokenizer, seed: int, steps_per_prompt: int = 1) -> None:
        super().__init__(loader.mixture, loader.datasets, loader.collator, seed)
        self.tokenizer = loader.mixture.prepare_tokenizer(tokenizer)  # with the chat template of the prompts
        self.steps_per_prompt, size = steps_per_prompt, self.collator.global_batch_size
        self.step_index = StepIndex(lambda epoch: self.order.num_rows(epoch) // size * size, size)
        self.configs = [config for config in loader.mixture.dataset_configs if isinstance(config, PromptDataset)]
        self.columns = [read_columns(config) for config in self.configs]
        self.starts = np.cumsum([0, *map(len, self.datasets)]).tolist()

    def num_steps(self, epochs: int) -> int:
        return self.steps_per_prompt * super().num_steps(epochs)

    def document_indices(self, step: int) -> list[np.ndarray]:
        return super().document_indices(step // self.steps_per_prompt)

    def prompts(self, step: int) -> list[PromptRow]:
        """The prompts of a step, of all ranks, in the same order on all of them."""
        return [self.prompt(int(index)) for index in np.concatenate(self.document_indices(step))]

    def all_prompts(self) -> list[PromptRow]:
        """All prompts, in the order of the rows."""
        return [self.prompt(index) for index in range(len(self.documents))]

    def prompt(self, index: int) -> PromptRow:
        """The prompt of a document."""
        number, where = bisect_right(self.starts, index) - 1, self.documents.row_location(index)
        prompt = self.configs[number].read_prompt(self.columns[number][where])
        is_text = self.configs[number].is_plain_text(self.tokenizer, prompt)
        return make_prompt_row(where, prompt, self.documents[index].tokens.tolist(), is_text)

    def first_prompts(self) -> list[PromptRow]:
        """The first prompt of each dataset that has one."""
        return [self.prompt(start) for start, stop in pairwise(self.starts) if start < stop]


def read_columns(config: DatasetConfig) -> dict[str, dict[str, Any]]:
    """Columns of each row after its transforms, by location. Rows that a transform removes are left out."""
    rows = config.open_rows().rows
    columns = ((row.where, config.apply_transforms(row.fields)) for row in rows if isinstance(row, Row))
    return {where: fields for where, fields in columns if fields is not None}


def open_prompts(
    cfg: PolicyConfig, checkpoint: HFCheckpoint, tokenizer: Tokenizer, run: RunContext
) -> tuple[PromptLoader, PromptLoader | None]:
    """Tokenize `data` and `eval_data`, or read them from the cache. Raises UserError if prompts are unusable."""
    train_data = build_prompt_loader(cfg.data, tokenizer, cfg.num_prompts, run, steps=cfg.steps_per_prompt)
    eval_data = cfg.eval_data and build_prompt_loader(cfg.eval_data, tokenizer, 1, run, "eval")
    check_prompts(cfg, {"data": train_data, "eval_data": eval_data}, checkpoint, run.dist)
    return train_data, eval_data


def build_prompt_loader(
    data: PromptData, tokenizer: Tokenizer, num_prompts: int, run: RunContext, subdir: str = "", steps: int = 1
) -> PromptLoader:
    """Loader of prompts. `num_prompts` are used in each of `steps` adjacent steps.

    Raise UserError if the rows do not suffice for one step.
    """
    data = replace(data, packing=False)  # of answers, not of prompts
    loader = build_dataloader(data, tokenizer, num_prompts, 1, run.dist, run.dir / subdir, run.overwrite)
    assert isinstance(loader, MapDataLoader)
    prompts = PromptLoader(loader, tokenizer, run.dist.seed, steps)
    if not prompts.num_steps(1):
        problem = f"has {len(prompts.documents):,} prompts, but a step needs {num_prompts:,}"
        raise UserError(f"{subdir or 'data'}: {problem}. Add rows, lower global_batch_size, or raise num_generations.")
    return prompts


def check_prompts(
    cfg: PolicyConfig, loaders: Mapping[str, PromptLoader | None], checkpoint: HFCheckpoint, dist: DistributedContext
) -> None:
    """Log a summary of the prompts, and warnings about answers that have less than `max_new_tokens` of space.

    Raise UserError if a reward needs a column that the first row of a dataset does not have, or an environment a chat
    template.
    """
    max_new_tokens = cfg.sampling.max_new_tokens
    for key, loader in loaders.items():
        if loader is None:
            continue
        dist.log(f"{key}: {loader.summary}")
        if cfg.environment is not None and not loader.tokenizer.templates:
            raise UserError(f"{key}: turns of an environment need a chat template. Set {key}.chat_template.")
        if key == "data":
            dist.log(f"data: {cfg.generation_summary}")
        check_columns(cfg, key, loader, dist)
        for prompt in loader.first_prompts():
            check_rewards(cfg.rewards, prompt.columns)
        context = checkpoint.spec.context
        for name, limit in (("max_length", loader.mixture.max_length), ("model context", context)):
            if count := int((loader.documents.lengths + max_new_tokens > limit).sum()):
                dist.log(
                    f"doubtful: {key}: answers to {count:,} of {len(loader.documents):,} prompts may be cut off before "
                    f"sampling.max_new_tokens={max_new_tokens:,}: {name} is {limit:,} tokens with the prompt."
                )
