"""Plans match real steps: memory measured with real tensors, communication and FLOPs compared with theory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.optimizer_step import step_optimizer
from tests.helpers.plan_workloads import build_workload, make_checkpoint
from tunekit import assets
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import recipe_loader
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.mixture import Mixture, MixtureMember
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.errors import UserError
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import MLP, Attention, Layer, MoE, Rope
from tunekit.optim.config import AdamW8bitConfig, MuonConfig, SGDConfig
from tunekit.plan import estimate, hardware, oom_report, report, search, suggestions
from tunekit.plan.hardware import GIB, KINDS, ClusterSpec
from tunekit.plan.layer_profile import CPU, ProbeStep, rows
from tunekit.plan.memory import build_memory_model
from tunekit.plan.memory_tracker import MemoryTracker
from tunekit.plan.num_steps import StepCount, count_steps
from tunekit.plan.workload import Workload, build_rank_model, list_omissions, profile_workload
from tunekit.quantization.config import NF4Config

ATTENTION = Attention(4, 2, 32, rope=Rope())
DENSE = Layer(ATTENTION, MLP(384))
SPARSE = Layer(ATTENTION, MoE(4, 2, 96))
H100 = ClusterSpec(8, 1, KINDS["h100"], 80 * GIB)


def llama_workload(name: str, **changes: object) -> Workload:
    source = HFCheckpoint.open(assets.PRESETS[f"tunekit/{name}"], name)
    return replace(
        build_workload(source, max_length=512, global_batch_size=16, micro_batch_size=1, random=False), **changes
    )


def measured_peak_bytes(task: Workload) -> int:
    """Peak bytes of tensors in the second of two real steps."""
    dist = DistributedContext(device="cpu")
    decoder = random_model(task)
    optimizer = task.optimizer.build(
        task.adapter.param_groups(decoder), [p for layer in decoder.layers for p in layer.parameters()]
    )
    train_optimizer = task.memory.wrap_optimizer(optimizer, dist)
    sizes = ParallelDims()
    step = random_batch(task, sizes)
    with MemoryTracker() as tracker:
        tracker.record([*decoder.parameters(), *decoder.buffers()])
        for _ in range(2):
            tracker.mark()
            for _ in range(task.num_micro_batches(sizes)):
                task.loss(decoder, step).backward()
            step_optimizer(train_optimizer, task.max_grad_norm)
    return tracker.peak


def random_model(task: Workload) -> Decoder:
    """Model with random weights."""
    decoder = build_rank_model(task, ParallelDims())
    task.memory.apply(decoder, CPU)
    decoder.to_empty(device="cpu")
    decoder.tie()
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02) if parameter.is_floating_point() else parameter.data.zero_()
    return decoder


def random_batch(task: Workload, sizes: ParallelDims) -> Batch:
    batch = rows(make_probe_step(task, sizes))
    tokens = torch.randint(0, task.source.spec.vocab, batch.tokens.shape)
    targets = tokens.clone()
    targets[:, 0] = -100
    return replace(batch, tokens=tokens, targets=targets, positions=torch.arange(task.max_length).expand_as(tokens))


def make_probe_step(task: Workload, sizes: ParallelDims) -> ProbeStep:
    return ProbeStep(
        task.adapter, task.memory, task.optimizer, task.loss, task.max_grad_norm, task.micro(sizes), task.max_length, 1
    )


CASES = {
    "full": (make_checkpoint(DENSE, DENSE, DENSE), {}),
    "one pass": (make_checkpoint(DENSE, DENSE, DENSE), {"global_batch_size": 2}),
    "recompute": (make_checkpoint(DENSE, DENSE, DENSE), {"memory": MemoryConfig(activation_checkpointing="full")}),
    "selective": (make_checkpoint(DENSE, DENSE, DENSE), {"memory": MemoryConfig(activation_checkpointing="selective")}),
    "8 bits": (make_checkpoint(DENSE, DENSE, DENSE), {"optimizer": AdamW8bitConfig()}),
    "muon": (make_checkpoint(DENSE, DENSE, DENSE), {"optimizer": MuonConfig()}),
    "sgd": (make_checkpoint(DENSE, DENSE, DENSE), {"optimizer": SGDConfig()}),
    "lora": (make_checkpoint(DENSE, DENSE, DENSE), {"adapter": LoRAConfig(), "random": True}),
    "qlora": (make_checkpoint(DENSE, DENSE, DENSE), {"adapter": LoRAConfig(), "quantization": NF4Config()}),
    "early": (
        make_checkpoint(DENSE, DENSE, DENSE),
        {"memory": MemoryConfig(optimizer_in_bwd=True), "max_grad_norm": 0.0, "global_batch_size": 2},
    ),
    "bf16": (make_checkpoint(DENSE, DENSE, DENSE), {"precision": PrecisionConfig("bf16", master_dtype="bf16")}),
    "tied": (make_checkpoint(DENSE, DENSE, DENSE, tied=True), {}),
    "experts": (make_checkpoint(DENSE, SPARSE, SPARSE), {"precision": PrecisionConfig("bf16", master_dtype="bf16")}),
}


@pytest.mark.parametrize("first", [False, True])
def test_initialization_is_part_of_the_cache_key(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded keep the dtype of the checkpoint if they are frozen."""
    monkeypatch.setattr("tunekit.plan.workload.PROFILES", {})
    task = build_workload(make_checkpoint(DENSE), adapter=LoRAConfig(4))
    profiles = {
        is_random: profile_workload(replace(task, random=is_random), ParallelDims()) for is_random in (first, not first)
    }
    assert profiles[True] != profiles[False]


@pytest.mark.parametrize("name", CASES)
def test_estimated_memory_matches_a_real_step(name: str) -> None:
    source, changes = CASES[name]
    workload = build_workload(source, **changes)
    plan = estimate.estimate(workload, ClusterSpec())
    moments = (plan.memory.phases[phase] for phase in ("forward", "backward", "step"))
    planned = max(moment.total - moment.parts["process"] for moment in moments)
    assert planned == pytest.approx(measured_peak_bytes(workload), rel=0.03)


def test_sharding_divides_memory_by_the_number_of_ranks() -> None:
    workload = llama_workload("llama3_1_8b", global_batch_size=8)
    single, sharded = (estimate.estimate(workload, replace(H100, devices=n, memory=None)) for n in (1, 8))
    for name in ("weights", "gradients", "optimizer"):
        full, shard = (plan.memory.phases["step"].parts[name] for plan in (single, sharded))
        assert shard == pytest.approx(full / 8, rel=1e-3)
    assert sharded.memory.phases["backward"].parts["gathered"] > 0


def test_communication_volume_matches_theory() -> None:
    workload = llama_workload("llama3_1_8b", global_batch_size=8)
    plan = estimate.estimate(workload, H100)
    weights = 8_030_261_248 * 4
    sent = {flow.tensors: flow.bytes for flow in plan.step_time.comm_volumes}
    assert sent["weights, forward"] == pytest.approx(weights * 7 / 8, rel=1e-3)
    assert sent["gradients"] == pytest.approx(weights * 7 / 8, rel=1e-3)
    root = 2 * 128256 * 4096 * 4
    assert sent["weights, backward"] == pytest.approx((weights - root) * 7 / 8, rel=1e-3)
    assert plan.step_time.flops == pytest.approx(6 * (8.03e9 - 128256 * 4096) * 512, rel=0.1)


def test_context_parallel_does_not_change_flops() -> None:
    two, flops = replace(H100, devices=2), []
    for parallel in (ParallelConfig(dp_shard=2), ParallelConfig(cp=2)):
        flops.append(
            estimate.estimate(
                build_workload(make_checkpoint(DENSE), max_length=4096, parallel=parallel), two
            ).step_time.flops
        )
    assert flops[0] == pytest.approx(flops[1])


def test_expert_parallel_does_not_change_flops() -> None:
    two, flops = replace(H100, devices=2), []
    for expert in (1, 2):
        layer = Layer(ATTENTION, MoE(2, 2, 96))
        flops.append(
            estimate.estimate(
                build_workload(make_checkpoint(layer), parallel=ParallelConfig(ep=expert)), two
            ).step_time.flops
        )
    assert flops[0] == pytest.approx(flops[1])


def test_replicas_all_reduce_over_nodes() -> None:
    plan = estimate.estimate(
        llama_workload("llama3_1_8b", parallel=ParallelConfig(dp_replicate=2)), replace(H100, devices=16, hosts=2)
    )
    (flow,) = (flow for flow in plan.step_time.comm_volumes if flow.kind == "all-reduce")
    assert flow.ranks == 2 and flow.stride == 8
    assert plan.machine.bandwidth(flow.ranks, flow.stride) == KINDS["h100"].far * 1e9


def test_tp_and_ep_divide_the_parameters() -> None:
    total = count_parameters(build_workload(make_checkpoint(DENSE)), ParallelDims())
    assert count_parameters(build_workload(make_checkpoint(DENSE)), ParallelDims(tp=2)) == pytest.approx(
        total / 2, rel=0.01
    )  # norms are replicated
    for sizes in (
        ParallelDims(dp_shard=2),
        ParallelDims(dp_shard=2, ep=2),
    ):  # by rows or by experts, each rank has half of them
        assert weight_bytes(build_workload(make_checkpoint(SPARSE)), sizes) == pytest.approx(
            weight_bytes(build_workload(make_checkpoint(SPARSE)), ParallelDims()) / 2, rel=0.01
        )


def count_parameters(task: Workload, sizes: ParallelDims) -> int:
    return sum(p.numel() for p in build_rank_model(task, sizes).parameters())


def weight_bytes(task: Workload, sizes: ParallelDims) -> int:
    return build_memory_model(task, sizes).weights


@pytest.mark.parametrize(
    ("changes", "devices", "expected"),
    [
        ({"parallel": ParallelConfig(tp=3)}, 3, "parallel.tp: 4 heads .* 3 devices"),
        ({"parallel": ParallelConfig(ep=2)}, 2, "no experts"),
        ({"parallel": ParallelConfig(dp_shard=3)}, 8, "number of processes, 8"),
    ],
)
def test_indivisible_models_are_errors(changes: dict, devices: int, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        estimate.estimate(build_workload(make_checkpoint(DENSE), **changes), replace(H100, devices=devices))


def test_savings_match_the_plan_of_the_change() -> None:
    plan = estimate.estimate(llama_workload("llama3_2_1b"), replace(H100, devices=1))
    changes = {change.words: change for change in suggestions.suggest_changes(plan)}
    assert {"optimizer=adamw8bit", "precision.master_dtype=bf16", "adapter=lora"} <= set(changes)
    change_to_bf16 = changes["precision.master_dtype=bf16"]
    assert change_to_bf16.saves == plan.peak.total - change_to_bf16.plan.peak.total > 6 * GIB


def test_search_finds_overrides_that_fit() -> None:
    slow = replace(KINDS["h100"], tflops=1)  # a fast GPU would be limited by kernel launches of the host
    workload, machine = (
        build_workload(make_checkpoint(DENSE), max_length=4096, micro_batch_size=4, global_batch_size=4),
        replace(H100, devices=1, kind=slow),
    )
    plan = estimate.estimate(workload, machine)
    plan = estimate.estimate(workload, replace(machine, memory=plan.peak.total - 50 * 2**20))
    assert plan.fits is False
    result = search.search_config(plan)
    assert plan.machine.memory is not None and result.plan.peak.total <= 0.97 * plan.machine.memory
    assert any(override.startswith("micro_batch_size=") for override in result.words)
    with pytest.raises(UserError, match="nothing fits"):
        search.search_config(
            estimate.estimate(
                build_workload(make_checkpoint(DENSE), micro_batch_size=1, compile=True),
                replace(H100, devices=1, memory=GIB // 2),
            )
        )


def test_cpu_offload_is_suggested_only_if_needed() -> None:
    workload, machine = (
        build_workload(
            make_checkpoint(*[DENSE] * 8), max_length=512, global_batch_size=2, micro_batch_size=1, compile=True
        ),
        replace(H100, devices=2),
    )
    result = search.search_config(estimate.estimate(workload, machine))
    assert not any(word.startswith(("parallel.cpu_offload", "parallel.tp")) for word in result.words)
    offloaded = estimate.estimate(replace(workload, parallel=ParallelConfig(cpu_offload=True)), machine)
    smallest_peak = min(
        estimate.estimate(replace(workload, parallel=ParallelConfig(tp=2)), machine).peak.total, result.plan.peak.total
    )
    assert offloaded.memory.host > 0 and offloaded.peak.total < smallest_peak
    with pytest.raises(UserError, match="parallel.cpu_offload: device cpu"):
        estimate.estimate(replace(workload, parallel=ParallelConfig(cpu_offload=True)), ClusterSpec(2))


def test_activation_offloading_is_searched_only_if_needed() -> None:
    machine = replace(H100, devices=1, kind=replace(KINDS["h100"], tflops=1))  # checkpointing takes time
    checkpoint = make_checkpoint(*[DENSE] * 8)
    workload = build_workload(checkpoint, max_length=4096, global_batch_size=1, micro_batch_size=1)
    faster, full, offloaded = (
        estimate.estimate(replace(workload, memory=MemoryConfig(mode, offload)), machine)
        for mode, offload in (("none", True), ("full", False), ("full", True))
    )
    assert offloaded.peak.total < full.peak.total < faster.peak.total
    for plan, offload in ((faster, False), (full, False), (offloaded, True)):
        available = replace(machine, memory=int(plan.peak.total / (1 - search.MEMORY_MARGIN)) + 2**10)
        memory = search.search_config(estimate.estimate(workload, available)).plan.task.memory
        assert memory == MemoryConfig("full", offload)
    large = replace(offloaded, memory=replace(offloaded.memory, host=3000 * GIB))
    assert "warning" in report.format_memory(large) and "warning" not in report.format_memory(offloaded)


def test_report_is_complete_and_at_most_120_columns_wide() -> None:
    plan = replace(
        estimate.estimate(llama_workload("llama3_2_1b"), replace(H100, price=2.0)),
        step_count=StepCount(10_000, 160_000),
    )
    text = report.format_report(plan, suggestions.suggest_changes(plan))
    assert max(map(len, text.splitlines())) <= 120
    for word in (
        "forward pass",
        "does not fit" if not plan.fits else "fits",
        "all-gather",
        "s a step",
        "10,000 steps (1 epoch of 160,000 rows), at most 81,920,000 tokens",
        "costs",
    ):
        assert word in text
    data = report.report_json(plan, [], None)
    assert data["peak"] == plan.peak.total and data["seconds"] == plan.step_time.seconds


@pytest.mark.parametrize(
    ("config", "overrides", "omitted"),
    [
        ("sft nano/tools_lora", [], []),
        ("sft nano/tools_lora", ["cuda_graph=true"], ["cuda_graph"]),
        ("sft nano/tools_lora", ["forgetting={data: {source: rows.jsonl}}"], ["forgetting"]),
        ("sft nano/tools_lora", ["generation_eval={prompts: [hello]}"], ["generation_eval"]),
        ("preference nano/dpo", [], ["shared prompts"]),
        ("distill nano/distill", ["on_policy.lmbda=0.5", "on_policy.max_new_tokens=9"], ["student"]),
        ("distill nano/distill", ["on_policy.lmbda=0"], []),
    ],
)
def test_plan_lists_what_it_does_not_include(config: str, overrides: list[str], omitted: list[str]) -> None:
    recipe, name = config.split()
    cfg = recipe_loader.load_recipe_config(recipe_loader.load_recipe(recipe), name, overrides, [])
    messages = list(list_omissions(cfg))
    assert len(messages) == len(omitted)
    assert all(word in message for word, message in zip(omitted, messages, strict=True))


def test_step_count_matches_a_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "{"word " * 20}"}}\n' for _ in range(90)))

    class Config:
        def __init__(self, **options: object) -> None:
            vars(self).update({"global_batch_size": 4, "epochs": 2, "max_steps": None, **options})

    rows = TextDataset(str(file), excess_length_strategy="truncate")
    mixture = Mixture((MixtureMember(rows), MixtureMember(rows, max_samples_per_epoch=10)))
    for data, count in ((rows, 90), (replace(rows, split="train[:10]"), 10), (mixture, 100)):
        assert count_steps(Config(data=data)) == StepCount(2 * -(-count // 4), count, 2)
    packed = count_steps(Config(data=replace(rows, packing=True, max_length=100)))
    assert packed is not None and not packed.exact and 0 < packed.steps < 46
    assert count_steps(Config(data=TextDataset("owner/name"))) is None and count_steps(
        Config(data=TextDataset("owner/name"), max_steps=7)
    ) == StepCount(7)


def test_hardware_options() -> None:
    assert hardware.parse_memory_size("80G") == 80 * GIB and hardware.parse_memory_size("24000MiB") == 24000 * 2**20
    with pytest.raises(UserError, match="such as 80G"):
        hardware.parse_memory_size("eighty")
    with pytest.raises(UserError, match="did you mean h100"):
        hardware.gpu_by_name("h1000")
    assert hardware.gpu_by_memory(141 * GIB) == KINDS["h200"]


def test_oom_report() -> None:
    recipe = recipe_loader.load_recipe("sft")
    cfg = recipe_loader.load_recipe_config(recipe, "nano/tools_full", ["micro_batch_size=1", "data.max_length=64"], [])
    text = oom_report.format_oom_report(cfg, CPU)
    assert "out of memory: a step needs about" in text and "optimizer=adamw8bit" in text
    assert text.count("\n") < 15
    assert oom_report.is_oom(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert oom_report.is_oom(torch.OutOfMemoryError("CUDA out of memory")) and not oom_report.is_oom(RuntimeError("no"))


def test_plan_on_one_rank_needs_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that runs out of memory writes the report while the other ranks are in the middle of a step."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert (
        estimate.estimate(build_workload(make_checkpoint(DENSE), max_length=96), replace(H100, devices=2)).peak.total
        > 0
    )


def test_workload_profile_is_cached() -> None:
    workload = build_workload(make_checkpoint(DENSE, DENSE))
    assert profile_workload(workload, ParallelDims()) is profile_workload(workload, ParallelDims())


def test_unquantized_embedding_is_not_widened_while_loading() -> None:
    """Only 4-bit weights are read in fp32."""
    plan = estimate.estimate(llama_workload("llama3_2_1b", quantization=NF4Config(), adapter=LoRAConfig()), H100)
    embedding = 128_256 * 2048 * 2
    assert plan.memory.phases["load"].parts["other"] == embedding
