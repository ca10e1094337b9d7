"""Two ranks that share a model: what families, adapters and formats do to it gives the numbers of one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import relative_error
from tests.layout.compared import PROPORTIONAL, compare, folder
from tests.layout.steps import Case, answers
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.memory.config import MemoryConfig
from tunekit.quantization.config import NF4Config

TENSOR, CONTEXT, EXPERT = ParallelConfig(tp=2), ParallelConfig(cp=2), ParallelConfig(ep=2)
# One pass of each thing that families do: windows, caps, sinks, chunks, latents, states, gates, lent keys, twins.
FAMILIES = ["gemma2", "gpt-oss", "deepseek-v3", "qwen3.5", "qwen3-next", "llama4", "gemma4", "gemma4-moe-shared"]
SHARED = [*FAMILIES, "gemma3", "deepseek-v3-plain", "granite-moe", "phi4-mini", "llama-biases"]
ROWS = [*FAMILIES, "phi4-mini", "ministral3-sliding", "olmo3", "smollm2"]
EXPERTS = LoRAConfig(4, 8.0, target_modules=("attn", "experts"))


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """And with dropout they agree, and what they say is said by both."""
    dense, sparse = folder(tmp_path, "dense"), folder(tmp_path, "sparse")
    case = Case(dense, optimizer=PROPORTIONAL, steps=3)
    tensor = replace(case, parallel=TENSOR)
    drawn = [replace(tensor, folder=sparse, adapter=LoRAConfig(4, dropout=0.3))]
    drawn += [replace(tensor, adapter=DoRAConfig(4, dropout=0.3))]
    cases = layers(tensor, sparse) | rows(replace(case, parallel=CONTEXT), sparse)
    cases |= experts(replace(case, parallel=EXPERT, folder=sparse)) | families(tmp_path, case)
    places = [dense, folder(tmp_path / "again", "qwen3.5")]
    wanted = answers(places, ParallelConfig())
    for found in compare(2, cases, drawn=drawn, asked=(places, TENSOR)):
        for (logits, texts), (right, known) in zip(found, wanted, strict=True):
            assert relative_error(logits, right) < 1e-5
            assert texts == known


def layers(case: Case, sparse: Path) -> dict[str, Case]:
    """Layers that both share: each has some heads, a part of the width and of the ids."""
    every = LoRAConfig(4, 8.0, target_modules=("all-linear", "embed"), bias="all", modules_to_save="norms")
    early = MemoryConfig(optimizer_in_bwd=True)
    return {
        "layers": replace(case, steps=5),
        "layers, packed": replace(case, packed=True, micro_batch=2),
        "layers, lora": replace(case, adapter=every),
        "layers, head": replace(
            case, folder=sparse, adapter=LoRAConfig(4, target_modules=("all-linear", "head", "experts"), bias="all")
        ),
        "layers, dora": replace(case, adapter=DoRAConfig(4, bias="all")),
        "layers, pissa": replace(case, adapter=LoRAConfig(4, init="pissa")),
        "layers, qlora": replace(case, folder=sparse, adapter=EXPERTS, weights=NF4Config()),
        "layers, qdora": replace(case, adapter=DoRAConfig(4), weights=NF4Config()),
        "layers, run again": replace(
            case, folder=sparse, memory=MemoryConfig(activation_checkpointing="full"), packed=True
        ),
        "layers, moved early": replace(case, memory=early, clip=0.0, micro_batch=4, steps=1),
    }


def rows(case: Case, sparse: Path) -> dict[str, Case]:
    """Rows that both share."""
    some = LoRAConfig(4, target_modules=("attn", "experts", "head"))
    return {
        "rows": replace(case, steps=5),
        "rows, odd": replace(case, packed=True, micro_batch=2, length=23),
        "rows, dora": replace(case, adapter=DoRAConfig(4), packed=True),
        "rows, qlora": replace(case, adapter=LoRAConfig(4, 8.0), weights=NF4Config()),
        "rows, sparse": replace(case, folder=sparse, packed=True, adapter=some),
    }


def experts(case: Case) -> dict[str, Case]:
    """Experts that live here or there."""
    return {
        "experts": replace(case, steps=5),
        "experts, lora": replace(case, adapter=EXPERTS, packed=True),
        "experts, qlora": replace(case, adapter=EXPERTS, weights=NF4Config()),
        "experts and rows": replace(case, parallel=ParallelConfig(cp=2, ep=2), packed=True),
        "experts, few tokens": replace(case, length=2),
    }


def families(root: Path, case: Case) -> dict[str, Case]:
    once = replace(case, steps=1, vocab=67, packed=True)
    odd = replace(once, parallel=CONTEXT, micro_batch=2, length=23)
    places = {name: folder(root, name) for name in dict.fromkeys([*SHARED, *ROWS])}
    found = {f"layers, {name}": replace(once, folder=places[name], parallel=TENSOR) for name in SHARED}
    found |= {f"rows, {name}": replace(odd, folder=places[name]) for name in ROWS}
    changed = {"gpt-oss": {"num_local_experts": 4}, "deepseek-v3": {}, "llama4": {"num_local_experts": 4}}
    for name, changes in changed.items():
        place = folder(root / "even", name, **changes)
        found[f"experts, {name}"] = replace(once, folder=place, parallel=EXPERT)
    return found
