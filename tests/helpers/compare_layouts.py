"""Compare training on several ranks with training on one process."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.helpers.random_checkpoints import SHAPES, build, save
from tests.helpers.ranks import run_ranks
from tests.helpers.training_steps import Case, Outcome, train_and_generate, train_cases
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.optim.config import SGDConfig

# SGD steps are proportional to the gradient. Adam would amplify gradients that are only rounding error.
PROPORTIONAL = SGDConfig(lr=1.0)
# The vocabulary is odd, there are fewer key-value heads than heads, biases, and widths that fit quantization blocks
# on both ranks.
DENSE = {"model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
DENSE |= {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "pad_token_id": None}
SPARSE = {key: value for key, value in DENSE.items() if key not in ("attention_bias", "mlp_bias")}
SPARSE |= {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SPARSE |= {"shared_expert_intermediate_size": 128, "tie_word_embeddings": False}
SINGLE_PROCESS_RESULTS: dict[str, Outcome] = {}
KINDS = {"dense": DENSE, "sparse": SPARSE}


def make_checkpoint_dir(root: Path, name: str, **changes: Any) -> Path:
    """Checkpoint with the shape KINDS[name] or SHAPES[name]."""
    return save(build((KINDS | SHAPES)[name] | changes), root / name)


def single_process_result(case: Case) -> Outcome:
    """Result of one process. Cached for all layouts."""
    if repr(case) not in SINGLE_PROCESS_RESULTS:
        SINGLE_PROCESS_RESULTS[repr(case)] = train_cases([case])[0]
    return SINGLE_PROCESS_RESULTS[repr(case)]


GenerationRequest = tuple[list[Path], ParallelConfig]
NO_GENERATION: GenerationRequest = [], ParallelConfig()


def compare(
    count: int,
    cases: dict[str, Case],
    limit: float = 1e-5,
    random_cases: Iterable[Case] = (),
    generation: GenerationRequest = NO_GENERATION,
) -> list[Any]:
    """Run each case on `count` ranks and compare losses, gradient norms and tensors with one process.

    Cases in `random_cases` use dropout: ranks must agree with each other only. Returns the answers of `generation`.
    """
    torch.set_num_threads(1)
    results = run_ranks(count, train_and_generate, [*cases.values(), *random_cases], *generation, limit=400)
    outcomes, failures = [outcome for outcome, _ in results], []
    for first, *others in zip(*outcomes, strict=True):
        for name, tensor in first.tensors.items():
            assert all(torch.equal(tensor, other.tensors[name]) for other in others), name
    for index, (name, case) in enumerate(cases.items()):
        expected = single_process_result(replace(case, parallel=ParallelConfig()))
        for rank in range(count):
            differences = relative_differences(outcomes[rank][index], expected)
            values = "losses {:.1e}, norms {:.1e}, tensors {:.1e}".format(*differences)
            line = f"{name}, rank {rank}: {values}"
            print(line)
            failures += [] if max(differences) <= limit else [line]
    assert not failures, "\n".join(failures)
    return [answers for _, answers in results]


def relative_differences(actual: Outcome, expected: Outcome) -> tuple[float, float, float]:
    """Maximum differences of losses, gradient norms and tensors, relative to the expected values."""
    assert actual.tensors.keys() == expected.tensors.keys()
    pairs = ((actual.tensors[name], tensor) for name, tensor in expected.tensors.items())
    tensors = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return (
        max_relative_difference(actual.losses, expected.losses),
        max_relative_difference(actual.norms, expected.norms),
        tensors,
    )


def max_relative_difference(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))
