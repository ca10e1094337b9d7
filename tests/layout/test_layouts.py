"""One table: every layout gives the numbers of one process, whatever is trained and however weights are kept.

One start of ranks does all that it can, for a start takes longer than the steps.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import build, save
from tests.layout.steps import Case, Outcome, several
from tests.parallel.ranks import on
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import Float8Config, NF4Config

DENSE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SPARSE = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EVERYWHERE = ("attn", "experts")
# A step of Adam is as long where the gradient is nearly zero, and then rounding decides its direction: a larger
# epsilon leaves it in proportion.
STEADY = AdamWConfig(lr=0.1, eps=0.1)
ADAPTED = {
    "full": {},
    "lora": {"adapter": LoRAConfig(4)},
    "dora": {"adapter": DoRAConfig(4)},
    "qlora": {"adapter": LoRAConfig(4), "weights": NF4Config()},
    "qdora": {"adapter": DoRAConfig(4), "weights": NF4Config()},
    "lora, 8 bits": {"adapter": LoRAConfig(4), "weights": Float8Config()},
}
EXPERTS = {
    "full": {},
    "lora": {"adapter": LoRAConfig(4, target_modules=EVERYWHERE)},
    "qlora": {"adapter": LoRAConfig(4, target_modules=EVERYWHERE), "weights": NF4Config()},
    "lora, 8 bits": {"adapter": LoRAConfig(4, target_modules=EVERYWHERE), "weights": Float8Config()},
}
TWO = {
    "fsdp 2": ParallelConfig(),
    "copies 2": ParallelConfig(dp_replicate=2),
    "tensor 2": ParallelConfig(tp=2),
    "context 2": ParallelConfig(cp=2),
}
FOUR = {
    "fsdp 4": ParallelConfig(),
    "hsdp 2 x 2": ParallelConfig(dp_replicate=2),
    "tensor 2 x fsdp 2": ParallelConfig(tp=2),
}
SPARSE_TWO = {"fsdp 2": ParallelConfig(), "expert 2": ParallelConfig(ep=2)}
SPARSE_FOUR = {"expert 2 x fsdp 2": ParallelConfig(ep=2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense checkpoint and one with experts."""
    shapes = {"dense": DENSE, "sparse": SPARSE}
    return {name: save(build(shape), tmp_path_factory.mktemp(name)) for name, shape in shapes.items()}


ALONE: dict[str, Outcome] = {}


def alone(case: Case) -> Outcome:
    """What one process makes of it; asked for by every layout, and computed once."""
    case = replace(case, parallel=ParallelConfig())
    if repr(case) not in ALONE:
        ALONE[repr(case)] = several([case])[0]
    return ALONE[repr(case)]


def furthest(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def differences(found: Outcome, wanted: Outcome) -> tuple[float, float, float]:
    """Of losses, lengths of gradients, and tensors, relative to the largest number of each."""
    assert found.tensors.keys() == wanted.tensors.keys()
    apart = [((found.tensors[n] - t).abs().max() / t.abs().max()).item() for n, t in wanted.tensors.items()]
    return furthest(found.losses, wanted.losses), furthest(found.norms, wanted.norms), max(apart)


def compare(count: int, rows: list[tuple[str, str, Case]], limit: float) -> None:
    """Each row on so many ranks, against one process."""
    torch.set_num_threads(1)
    results = on(count, several, [case for *_, case in rows])
    table, wrong = [], []
    for number, (layout, kind, case) in enumerate(rows):
        wanted = alone(case)
        for rank, result in enumerate(results):
            apart = differences(result[number], wanted)
            told = (
                f"{layout:18} {kind:14} rank {rank}: losses {apart[0]:.1e} norms {apart[1]:.1e} weights {apart[2]:.1e}"
            )
            table.append(told)
            wrong += [told] if not max(apart) <= limit else []
    print("\n".join(table))
    assert not wrong, "\n".join(wrong)


def cases(folder: Path, layouts: dict[str, ParallelConfig], kinds: dict[str, dict], **more: object) -> list:
    base = Case(folder, optimizer=STEADY)
    return [
        (layout, kind, replace(base, parallel=parallel, **choices, **more))
        for layout, parallel in layouts.items()
        for kind, choices in kinds.items()
    ]


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("count", "layouts"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_dense(count: int, layouts: dict[str, ParallelConfig], folders: dict[str, Path]) -> None:
    compare(count, cases(folders["dense"], layouts, ADAPTED), 1e-5)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("count", "layouts"), [(2, SPARSE_TWO), (4, SPARSE_FOUR)], ids=["2", "4"])
def test_experts(count: int, layouts: dict[str, ParallelConfig], folders: dict[str, Path]) -> None:
    compare(count, cases(folders["sparse"], layouts, EXPERTS), 1e-5)


@pytest.mark.multi
@pytest.mark.slow
def test_what_a_layout_may_be_told(folders: dict[str, Path]) -> None:
    """Packed rows, rows in several passes or one, and weights that travel in other ways."""
    rows = cases(folders["dense"], {"fsdp 2": ParallelConfig()}, {"full": {}}, packed=True, micro_batch=2)
    rows += cases(
        folders["dense"], {"kept whole": ParallelConfig(reshard_after_forward=False, prefetch_layers=2)}, {"full": {}}
    )
    rows += cases(
        folders["dense"],
        {"nested": ParallelConfig()},
        {"qdora": {"adapter": DoRAConfig(4), "weights": NF4Config(double_quant=True)}},
    )
    rows += cases(folders["dense"], {"pissa": ParallelConfig()}, {"lora": {"adapter": LoRAConfig(4, init="pissa")}})
    compare(2, rows, 1e-5)
