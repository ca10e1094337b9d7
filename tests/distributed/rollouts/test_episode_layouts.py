"""Episodes on two ranks are those of one process: replicated, sharded and tensor parallel weights."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.ranks import run_ranks
from tunekit.assets import BUNDLED
from tunekit.build import load_for_inference
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.environments.base import Environment
from tunekit.environments.config import GridWorldConfig
from tunekit.errors import UserError
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.rollouts.episodes import generate_rollouts
from tunekit.rollouts.rollout import PromptRow

GRIDS = (["S.#", "..G"], ["S..", "##G"], ["SG"])
SAMPLING = SamplingConfig(temperature=1.5, max_new_tokens=60, stop_strings=("e",), seed=3)
LAYOUTS = {
    "replicated": ParallelConfig(dp_replicate=2, dp_shard=1),
    "sharded": ParallelConfig(dp_shard=2),
    "tensor": ParallelConfig(dp_replicate=1, dp_shard=1, tp=2),
}
Tokens = dict[int, list[list[int]]]


class RankWorld(GridWorldConfig):
    """Its observations name the rank whose environment ran, to show that ranks with the same rows share one."""

    def create(self) -> Environment:
        environment = super().create()
        environment.step = lambda answer: f"rank {os.environ.get('RANK', 0)}"  # type: ignore[method-assign]
        return environment


class FailingWorld(GridWorldConfig):
    """Its environments raise in a method on one rank."""

    def __init__(self, method: str, rank: int, **options: Any) -> None:
        super().__init__(**options)
        vars(self).update(method=method, is_failing=os.environ["RANK"] == str(rank))

    def create(self) -> Environment:
        environment = super().create()
        if vars(self)["is_failing"]:
            vars(environment)[vars(self)["method"]] = self.fail
        return environment

    def fail(self, *args: Any, **columns: Any) -> None:
        raise RuntimeError("broken")


def save_model(path: Path) -> None:
    """A random model whose heads two ranks can split, with the tokenizer of the bundled model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED / "model")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer) + len(tokenizer) % 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def sample(
    model_path: str, parallel: ParallelConfig, rows: Sequence[Sequence[int]], with_environment: bool = True
) -> Tokens:
    """Tokens of the rollouts of the rows of this rank, by row. All rows have the same location."""
    with DistributedContext(0, "cpu", parallel) as dist:
        model, tokenizer = load_for_inference(model_path, PrecisionConfig(compute_dtype="fp32"), dist)
        messages = [{"role": "user", "content": "Which way?"}]
        tokens = encode_conversation(tokenizer, messages)
        prompts = {n: PromptRow("rows:1", messages, tokens, {"grid": GRIDS[n]}) for n in rows[dist.dp_rank]}
        engine = GenerationEngine(model, 3, 512, dist)
        config = RankWorld(max_turns=3) if with_environment else None
        if parallel.tp == 2:  # both ranks know what the other one does: no communication besides that of the model
            vars(dist)["max_over_ranks"] = None
        rollouts = generate_rollouts(engine, tokenizer, prompts, 2, SAMPLING, config, 7)
    result: Tokens = {}
    for rollout in rollouts:
        result.setdefault(rollout.group, []).append(rollout.tokens.tolist())
    return result


def fail(model_path: str, parallel: ParallelConfig, method: str, failing_rank: int) -> str:
    """The error on this rank, if a method of the environments of one rank raises."""
    with DistributedContext(0, "cpu", parallel) as dist:
        model, tokenizer = load_for_inference(model_path, PrecisionConfig(compute_dtype="fp32"), dist)
        messages = [{"role": "user", "content": "Which way?"}]
        tokens = encode_conversation(tokenizer, messages)
        prompts = {n: PromptRow(f"rows:{n}", messages, tokens, {"grid": GRIDS[n]}) for n in range(3)}
        engine = GenerationEngine(model, 2, 512, dist)
        config = FailingWorld(method, failing_rank, max_turns=3)
        generate = partial(generate_rollouts, engine, tokenizer, prompts, 2, SAMPLING, config, 7)
        try:
            dist.run_on_all(generate) if parallel.dp_replicate == 2 else generate()
        except UserError as error:
            dist.barrier()
            return str(error)
    return "no error"


def sample_layouts(model_path: str) -> tuple[dict[str, tuple[Tokens, Tokens]], dict[str, list[str]]]:
    """Samples and errors of this rank, by layout."""
    results, errors = {}, {}
    for name, parallel in LAYOUTS.items():
        rows = [[0, 1, 2]] if name == "tensor" else [[0, 1], [2]]  # ranks have different numbers of rows
        results[name] = sample(model_path, parallel, rows), sample(model_path, parallel, rows, with_environment=False)
        failing_rank = 0 if name == "tensor" else 1
        errors[name] = [fail(model_path, parallel, method, failing_rank) for method in ("reset", "step")]
    return results, errors


def test_samples_do_not_depend_on_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    ranks = run_ranks(2, sample_layouts, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    single = ParallelConfig(dp_replicate=1, dp_shard=1)
    expected, expected_alone = (sample(str(tmp_path), single, [[0, 1, 2]], flag) for flag in (True, False))
    assert all(expected[row] != expected_alone[row] for row in expected)  # there are observations
    assert len({str(answer) for answers in expected_alone.values() for answer in answers}) == 6
    for name in LAYOUTS:
        for rank in range(2):
            with_environment, alone = ranks[rank][0][name]
            assert alone == {row: expected_alone[row] for row in alone}, (name, rank)
            if name == "tensor":
                assert with_environment == expected  # both ranks have what the first one's environment said
            else:
                assert with_environment.keys() == ({0, 1} if rank == 0 else {2})
        if name != "tensor":
            assert ranks[0][0][name][0] == {row: expected[row] for row in ranks[0][0][name][0]}
        for errors in ranks[0][1][name], ranks[1][1][name]:
            assert [text.split(": ")[1:] for text in errors] == [
                [f"environment GridWorld.{method}", "RuntimeError", "broken. Fix the row or the environment."]
                for method in ("reset", "step")
            ]
        assert ranks[0][1][name] == ranks[1][1][name]
