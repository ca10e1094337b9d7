"""All layouts give the results of one process, for each kind of adapter and quantization.

Ranks start once for many cases, since starting them takes longer than the steps. FSDP runs with all methods. The other
layouts run with those that `test_two_ranks` and `test_four_ranks` leave out.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.random_checkpoints import build, save
from tests.helpers.ranks import run_ranks
from tests.helpers.training_steps import Case, Outcome, train_cases
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
ATTENTION_AND_EXPERTS = ("attn", "experts")
# Adam amplifies gradients near zero, whose direction is rounding error. A larger epsilon makes its steps
# proportional to the gradient.
STEADY = AdamWConfig(lr=0.1, eps=0.1)
# Some methods accumulate the gradients of several micro-batches.
METHODS = {
    "full": {"micro_batch": 1},
    "lora": {"adapter": LoRAConfig(4)},
    "dora": {"adapter": DoRAConfig(4)},
    "qlora": {"adapter": LoRAConfig(4), "weights": NF4Config(), "micro_batch": 1},
    "qdora": {"adapter": DoRAConfig(4), "weights": NF4Config(), "micro_batch": 1},
    "lora, 8 bits": {"adapter": LoRAConfig(4), "weights": Float8Config()},
}
EXPERTS = {
    "full": {"micro_batch": 1},
    "lora": {"adapter": LoRAConfig(4, target_modules=ATTENTION_AND_EXPERTS)},
    "qlora": {"adapter": LoRAConfig(4, target_modules=ATTENTION_AND_EXPERTS), "weights": NF4Config()},
    "lora, 8 bits": {"adapter": LoRAConfig(4, target_modules=ATTENTION_AND_EXPERTS), "weights": Float8Config()},
}
# Layouts and their methods.
Layouts = dict[str, tuple[ParallelConfig, tuple[str, ...]]]
TWO: Layouts = {
    "fsdp 2": (ParallelConfig(), (*METHODS,)),
    "copies 2": (ParallelConfig(dp_replicate=2), ("full", "qdora", "lora, 8 bits")),
    "tensor 2": (ParallelConfig(tp=2), ("qlora", "lora, 8 bits")),
    "context 2": (ParallelConfig(cp=2), ("lora, 8 bits",)),
}
FOUR: Layouts = {
    "fsdp 4": (ParallelConfig(), ("full", "qdora", "lora, 8 bits")),
    "hsdp 2 x 2": (ParallelConfig(dp_replicate=2), ("full", "lora", "qlora")),
    "tensor 2 x fsdp 2": (ParallelConfig(tp=2), ("dora", "lora, 8 bits")),
}
SPARSE_TWO: Layouts = {"fsdp 2": (ParallelConfig(), (*EXPERTS,)), "expert 2": (ParallelConfig(ep=2), ("lora, 8 bits",))}
SPARSE_FOUR: Layouts = {"expert 2 x fsdp 2": (ParallelConfig(ep=2), ("full", "lora, 8 bits"))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense and a mixture-of-experts checkpoint."""
    shapes = {"dense": DENSE, "sparse": SPARSE}
    return {name: save(build(shape), tmp_path_factory.mktemp(name)) for name, shape in shapes.items()}


SINGLE_PROCESS_RESULTS: dict[str, Outcome] = {}


def single_process_result(case: Case) -> Outcome:
    """Result of one process. Cached for all layouts."""
    case = replace(case, parallel=ParallelConfig())
    if repr(case) not in SINGLE_PROCESS_RESULTS:
        SINGLE_PROCESS_RESULTS[repr(case)] = train_cases([case])[0]
    return SINGLE_PROCESS_RESULTS[repr(case)]


def max_relative_difference(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


def relative_differences(actual: Outcome, expected: Outcome) -> tuple[float, float, float]:
    """Maximum differences of losses, gradient norms and tensors, relative to the expected values."""
    assert actual.tensors.keys() == expected.tensors.keys()
    tensors = [((actual.tensors[n] - t).abs().max() / t.abs().max()).item() for n, t in expected.tensors.items()]
    return (
        max_relative_difference(actual.losses, expected.losses),
        max_relative_difference(actual.norms, expected.norms),
        max(tensors),
    )


def compare(count: int, rows: list[tuple[str, str, Case]], limit: float) -> None:
    """Compare each row, run on `count` ranks, with one process."""
    torch.set_num_threads(1)
    results = run_ranks(count, train_cases, [case for *_, case in rows])
    table, failures = [], []
    for number, (layout, kind, case) in enumerate(rows):
        expected = single_process_result(case)
        for rank, result in enumerate(results):
            differences = relative_differences(result[number], expected)
            values = "losses {:.1e} norms {:.1e} weights {:.1e}".format(*differences)
            line = f"{layout:18} {kind:14} rank {rank}: {values}"
            table.append(line)
            failures += [line] if not max(differences) <= limit else []
    print("\n".join(table))
    assert not failures, "\n".join(failures)


def make_case(folder: Path, **options: Any) -> Case:
    return replace(Case(folder, optimizer=STEADY, steps=2, micro_batch=2), **options)


def make_cases(folder: Path, layouts: Layouts, methods: dict[str, dict]) -> list[tuple[str, str, Case]]:
    return [
        (layout, kind, make_case(folder, parallel=parallel, **methods[kind]))
        for layout, (parallel, kinds) in layouts.items()
        for kind in kinds
    ]


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("count", "layouts"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_dense_model_matches_one_process(count: int, layouts: Layouts, folders: dict[str, Path]) -> None:
    compare(count, make_cases(folders["dense"], layouts, METHODS), 1e-5)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("count", "layouts"), [(2, SPARSE_TWO), (4, SPARSE_FOUR)], ids=["2", "4"])
def test_experts_match_one_process(count: int, layouts: Layouts, folders: dict[str, Path]) -> None:
    compare(count, make_cases(folders["sparse"], layouts, EXPERTS), 1e-5)


@pytest.mark.multi
@pytest.mark.slow
def test_layout_options_match_one_process(folders: dict[str, Path]) -> None:
    """Packed rows, one or several micro-batches, and options for gathering weights."""
    case = make_case(folders["dense"])
    unresharded, nested = ParallelConfig(reshard_after_forward=False, prefetch_layers=2), NF4Config(double_quant=True)
    rows = [
        ("packed", "full", replace(case, packed=True)),
        ("not resharded", "full", replace(case, parallel=unresharded, micro_batch=1)),
        ("nested", "qdora", replace(case, adapter=DoRAConfig(4), weights=nested)),
        ("pissa", "lora", replace(case, adapter=LoRAConfig(4, init="pissa"))),
    ]
    compare(2, rows, 1e-5)
