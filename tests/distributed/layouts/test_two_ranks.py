"""Families, adapters and quantization on two ranks match one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.compare_layouts import PROPORTIONAL, compare, make_checkpoint_dir
from tests.helpers.random_checkpoints import relative_error
from tests.helpers.training_steps import Case, generate_answers
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.memory.config import MemoryConfig
from tunekit.quantization.config import NF4Config

TENSOR, CONTEXT, EXPERT = ParallelConfig(tp=2), ParallelConfig(cp=2), ParallelConfig(ep=2)
# These families cover sliding windows, softcaps, sinks, chunks, latent attention, delta nets, gates, shared keys,
# parallel blocks, short convolutions and Mamba 2.
FAMILIES = ["gemma2", "gpt-oss", "deepseek-v3", "qwen3.5", "qwen3-next", "llama4", "gemma4", "gemma4-moe-shared"]
FAMILIES += ["cohere2", "lfm2-biases", "falcon-h1", "nemotron-h", "granite4"]
TP_FAMILIES = [*FAMILIES, "gemma3", "deepseek-v3-plain", "granite-moe", "phi4-mini", "llama-biases"]
CP_FAMILIES = [*FAMILIES, "phi4-mini", "ministral3-sliding", "olmo3", "smollm2"]
EXPERT_LORA = LoRAConfig(4, 8.0, target_modules=("attn", "experts"))


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_match_one_process(tmp_path: Path) -> None:
    """With dropout, ranks agree with each other. Both ranks generate the same answers."""
    dense, sparse = make_checkpoint_dir(tmp_path, "dense"), make_checkpoint_dir(tmp_path, "sparse")
    case = Case(dense, optimizer=PROPORTIONAL, steps=2, micro_batch=4)
    tensor = replace(case, parallel=TENSOR)
    dropout_cases = [replace(tensor, folder=sparse, adapter=LoRAConfig(4, dropout=0.3))]
    dropout_cases += [replace(tensor, adapter=DoRAConfig(4, dropout=0.3))]
    cases = tensor_parallel_cases(tensor, sparse) | context_parallel_cases(replace(case, parallel=CONTEXT), sparse)
    cases |= expert_parallel_cases(replace(case, parallel=EXPERT, folder=sparse)) | family_cases(tmp_path, case)
    checkpoints = [dense, make_checkpoint_dir(tmp_path / "again", "qwen3.5")]
    expected = generate_answers(checkpoints, ParallelConfig())
    for answers in compare(2, cases, random_cases=dropout_cases, generation=(checkpoints, TENSOR)):
        for (logits, tokens), (expected_logits, expected_tokens) in zip(answers, expected, strict=True):
            assert relative_error(logits, expected_logits) < 1e-5
            assert tokens == expected_tokens


def tensor_parallel_cases(case: Case, sparse: Path) -> dict[str, Case]:
    """Layers that are sharded over two ranks: heads, channels and vocabulary. Two cases have several micro-batches."""
    all_layers = LoRAConfig(4, 8.0, target_modules=("all-linear", "embed"), bias="all", modules_to_save="norms")
    optimizer_in_bwd = MemoryConfig(optimizer_in_bwd=True)
    return {
        "layers": replace(case, steps=3, micro_batch=1),
        "layers, packed": replace(case, packed=True, micro_batch=2),
        "layers, lora": replace(case, adapter=all_layers),
        "layers, head": replace(
            case, folder=sparse, adapter=LoRAConfig(4, target_modules=("all-linear", "head", "experts"), bias="all")
        ),
        "layers, dora": replace(case, adapter=DoRAConfig(4, bias="all")),
        "layers, pissa": replace(case, adapter=LoRAConfig(4, init="pissa")),
        "layers, qlora": replace(case, folder=sparse, adapter=EXPERT_LORA, weights=NF4Config()),
        "layers, qdora": replace(case, adapter=DoRAConfig(4), weights=NF4Config()),
        "layers, run again": replace(
            case, folder=sparse, memory=MemoryConfig(activation_checkpointing="full"), packed=True
        ),
        "layers, moved early": replace(case, memory=optimizer_in_bwd, clip=0.0, steps=1),
    }


def context_parallel_cases(case: Case, sparse: Path) -> dict[str, Case]:
    """Rows that are sharded over two ranks. Two cases have several micro-batches."""
    lora = LoRAConfig(4, target_modules=("attn", "experts", "head"))
    return {
        "rows": replace(case, steps=3, micro_batch=1),
        "rows, odd": replace(case, packed=True, micro_batch=2, length=23),
        "rows, dora": replace(case, adapter=DoRAConfig(4), packed=True),
        "rows, qlora": replace(case, adapter=LoRAConfig(4, 8.0), weights=NF4Config()),
        "rows, sparse": replace(case, folder=sparse, packed=True, adapter=lora),
    }


def expert_parallel_cases(case: Case) -> dict[str, Case]:
    """Experts that are distributed over two ranks. Three cases have several micro-batches."""
    return {
        "experts": replace(case, steps=3, micro_batch=1),
        "experts, lora": replace(case, adapter=EXPERT_LORA, packed=True),
        "experts, qlora": replace(case, adapter=EXPERT_LORA, weights=NF4Config()),
        "experts and rows": replace(case, parallel=ParallelConfig(cp=2, ep=2), packed=True, micro_batch=2),
        "experts, few tokens": replace(case, length=2, micro_batch=1),
    }


def family_cases(root: Path, case: Case) -> dict[str, Case]:
    one_step = replace(case, steps=1, vocab=67, packed=True)
    odd_length = replace(one_step, parallel=CONTEXT, length=23)
    checkpoints = {name: make_checkpoint_dir(root, name) for name in dict.fromkeys([*TP_FAMILIES, *CP_FAMILIES])}
    cases = {f"layers, {name}": replace(one_step, folder=checkpoints[name], parallel=TENSOR) for name in TP_FAMILIES}
    cases |= {f"rows, {name}": replace(odd_length, folder=checkpoints[name]) for name in CP_FAMILIES}
    expert_changes = {"gpt-oss": {"num_local_experts": 4}, "deepseek-v3": {}, "llama4": {"num_local_experts": 4}}
    for name, changes in expert_changes.items():
        checkpoint = make_checkpoint_dir(root / "even", name, **changes)
        cases[f"experts, {name}"] = replace(one_step, folder=checkpoint, parallel=EXPERT)
    return cases
