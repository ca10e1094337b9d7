"""Whether ranks that share a model train what one process does."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import SHAPES, build, save
from tests.layout.steps import Case, Outcome, several, trained_and_asked
from tests.parallel.ranks import on
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.optim.config import SGDConfig

# Steps in proportion to the gradient: Adam's are as long where it is nothing but rounding.
PROPORTIONAL = SGDConfig(lr=1.0)
# A vocabulary that two cannot share alike, fewer heads of keys, biases, and widths of whole blocks for each of two.
DENSE = {"model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
DENSE |= {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "pad_token_id": None}
SPARSE = {key: value for key, value in DENSE.items() if key not in ("attention_bias", "mlp_bias")}
SPARSE |= {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SPARSE |= {"shared_expert_intermediate_size": 128, "tie_word_embeddings": False}
ALONE: dict[str, Outcome] = {}
KINDS = {"dense": DENSE, "sparse": SPARSE}


def folder(root: Path, name: str, **changes: Any) -> Path:
    """A checkpoint of one of these kinds, or of the shapes of all families."""
    return save(build((KINDS | SHAPES)[name] | changes), root / name)


def alone(case: Case) -> Outcome:
    """What one process makes of it; once for all layouts."""
    if repr(case) not in ALONE:
        ALONE[repr(case)] = several([case])[0]
    return ALONE[repr(case)]


Asked = tuple[list[Path], ParallelConfig]
NOBODY: Asked = [], ParallelConfig()


def compare(
    count: int, cases: dict[str, Case], limit: float = 1e-5, drawn: Iterable[Case] = (), asked: Asked = NOBODY
) -> list[Any]:
    """Each case on so many ranks, against one process: losses, lengths of gradients, tensors.

    Of what is `drawn`, as dropout is, ranks must agree on what came of it. What those say who are `asked` is returned.
    """
    torch.set_num_threads(1)
    said = on(count, trained_and_asked, [*cases.values(), *drawn], *asked, limit=400)
    found, wrong = [one for one, _ in said], []
    for first, *others in zip(*found, strict=True):
        for name, tensor in first.tensors.items():
            assert all(torch.equal(tensor, other.tensors[name]) for other in others), name
    for number, (name, case) in enumerate(cases.items()):
        wanted = alone(replace(case, parallel=ParallelConfig()))
        for rank in range(count):
            apart = differences(found[rank][number], wanted)
            told = f"{name}, rank {rank}: losses {apart[0]:.1e}, norms {apart[1]:.1e}, tensors {apart[2]:.1e}"
            print(told)
            wrong += [] if max(apart) <= limit else [told]
    assert not wrong, "\n".join(wrong)
    return [answers for _, answers in said]


def differences(found: Outcome, wanted: Outcome) -> tuple[float, float, float]:
    """Relative to the largest number of each tensor."""
    assert found.tensors.keys() == wanted.tensors.keys()
    pairs = ((found.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    tensors = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    return furthest(found.losses, wanted.losses), furthest(found.norms, wanted.norms), tensors


def furthest(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
