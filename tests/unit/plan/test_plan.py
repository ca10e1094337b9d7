"""Plans match real steps: memory measured with real tensors, communication and FLOPs compared with theory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.optimizer_step import step_optimizer
from tests.helpers.plan_workloads import build_workload, make_checkpoint
from tunekit import assets
from tunekit.adapters.config import LoRAConfig, NoAdapter
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
from tunekit.plan import estimate, hardware, memory_options, oom_report, report, search
from tunekit.plan.hardware import GIB, GPUS, ClusterSpec
from tunekit.plan.layer_profile import CPU, ProbeStep, rows
from tunekit.plan.memory import build_memory_model
from tunekit.plan.memory_tracker import MemoryTracker
from tunekit.plan.num_steps import StepCount, count_steps
from tunekit.plan.workload import Workload, build_rank_model, list_omissions, profile_workload
from tunekit.quantization.config import NF4Config

ATTENTION = Attention(4, 2, 32, rope=Rope())
DENSE = Layer(ATTENTION, MLP(384))
SPARSE = Layer(ATTENTION, MoE(4, 2, 96))
OPTIONS = memory_options.SINGLE_DEVICE_OPTIONS + memory_options.MULTI_DEVICE_OPTIONS
H100 = ClusterSpec(8, 1, GPUS["h100"], 80 * GIB)


def llama_workload(name: str, **changes: object) -> Workload:
    source = HFCheckpoint.open(assets.PRESETS[f"tunekit/{name}"], name)
    return replace(
        build_workload(source, max_length=512, global_batch_size=16, micro_batch_size=1, random_init=False), **changes
    )


def measured_peak_bytes(workload: Workload) -> int:
    """Peak bytes of tensors in the second of two real steps."""
    dist = DistributedContext(device="cpu")
    decoder = random_model(workload)
    optimizer = workload.optimizer.build(
        workload.adapter.param_groups(decoder), [p for layer in decoder.layers for p in layer.parameters()]
    )
    train_optimizer = workload.memory.wrap_optimizer(optimizer, dist)
    dims = ParallelDims()
    step = random_batch(workload, dims)
    with MemoryTracker() as tracker:
        tracker.record([*decoder.parameters(), *decoder.buffers()])
        for _ in range(2):
            tracker.mark()
            for _ in range(workload.num_micro_batches(dims)):
                workload.loss(decoder, step).backward()
            step_optimizer(train_optimizer, workload.max_grad_norm)
    return tracker.peak


def random_model(workload: Workload) -> Decoder:
    """Model with random weights."""
    decoder = build_rank_model(workload, ParallelDims())
    workload.memory.apply(decoder, CPU)
    decoder.to_empty(device="cpu")
    decoder.tie()
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02) if parameter.is_floating_point() else parameter.data.zero_()
    return decoder


def random_batch(workload: Workload, dims: ParallelDims) -> Batch:
    batch = rows(make_probe_step(workload, dims))
    tokens = torch.randint(0, workload.source.spec.vocab, batch.tokens.shape)
    targets = tokens.clone()
    targets[:, 0] = -100
    return replace(batch, tokens=tokens, targets=targets, positions=torch.arange(workload.max_length).expand_as(tokens))


def make_probe_step(workload: Workload, dims: ParallelDims) -> ProbeStep:
    return ProbeStep(
        workload.adapter,
        workload.memory,
        workload.optimizer,
        workload.loss,
        workload.max_grad_norm,
        workload.micro_batch_rows(dims),
        workload.max_length,
        1,
    )


CASES = {
    "full": (make_checkpoint(DENSE, DENSE, DENSE), {}),
    "one pass": (make_checkpoint(DENSE, DENSE, DENSE), {"global_batch_size": 2}),
    "recompute": (make_checkpoint(DENSE, DENSE, DENSE), {"memory": MemoryConfig(activation_checkpointing="full")}),
    "selective": (make_checkpoint(DENSE, DENSE, DENSE), {"memory": MemoryConfig(activation_checkpointing="selective")}),
    "8 bits": (make_checkpoint(DENSE, DENSE, DENSE), {"optimizer": AdamW8bitConfig()}),
    "muon": (make_checkpoint(DENSE, DENSE, DENSE), {"optimizer": MuonConfig()}),
    "sgd": (make_checkpoint(DENSE, DENSE, DENSE), {"optimizer": SGDConfig()}),
    "lora": (make_checkpoint(DENSE, DENSE, DENSE), {"adapter": LoRAConfig(), "random_init": True}),
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
    workload = build_workload(make_checkpoint(DENSE), adapter=LoRAConfig(4))
    profiles = {
        is_random: profile_workload(replace(workload, random_init=is_random), ParallelDims())
        for is_random in (first, not first)
    }
    assert profiles[True] != profiles[False]


@pytest.mark.parametrize("name", CASES)
def test_estimated_memory_matches_a_real_step(name: str) -> None:
    source, changes = CASES[name]
    workload = build_workload(source, **changes)
    plan = estimate.estimate(workload, ClusterSpec())
    peaks = (plan.memory.phases[phase] for phase in ("forward", "backward", "optimizer_step"))
    planned = max(peak.total - peak.components["runtime"] for peak in peaks)
    assert planned == pytest.approx(measured_peak_bytes(workload), rel=0.03)


def test_sharding_divides_memory_by_the_number_of_ranks() -> None:
    workload = llama_workload("llama3_1_8b", global_batch_size=8)
    single, sharded = (estimate.estimate(workload, replace(H100, devices=n, memory=None)) for n in (1, 8))
    for name in ("weights", "gradients", "optimizer_states"):
        full, shard = (plan.memory.phases["optimizer_step"].components[name] for plan in (single, sharded))
        assert shard == pytest.approx(full / 8, rel=1e-3)
    assert sharded.memory.phases["backward"].components["all_gathered"] > 0


def test_communication_volume_matches_theory() -> None:
    workload = llama_workload("llama3_1_8b", global_batch_size=8)
    plan = estimate.estimate(workload, H100)
    weights = 8_030_261_248 * 4
    sent = {volume.tensors: volume.bytes for volume in plan.step_time.comm_volumes}
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
        llama_workload("llama3_1_8b", parallel=ParallelConfig(dp_replicate=2)), replace(H100, devices=16, num_nodes=2)
    )
    (volume,) = (volume for volume in plan.step_time.comm_volumes if volume.collective == "all-reduce")
    assert volume.ranks == 2 and volume.stride == 8
    assert plan.cluster.bandwidth(volume.ranks, volume.stride) == GPUS["h100"].inter_node_bandwidth * 1e9


def test_tp_and_ep_divide_the_parameters() -> None:
    total = count_parameters(build_workload(make_checkpoint(DENSE)), ParallelDims())
    assert count_parameters(build_workload(make_checkpoint(DENSE)), ParallelDims(tp=2)) == pytest.approx(
        total / 2, rel=0.01
    )  # norms are replicated
    for dims in (
        ParallelDims(dp_shard=2),
        ParallelDims(dp_shard=2, ep=2),
    ):  # by rows or by experts, each rank has half of them
        assert weight_bytes(build_workload(make_checkpoint(SPARSE)), dims) == pytest.approx(
            weight_bytes(build_workload(make_checkpoint(SPARSE)), ParallelDims()) / 2, rel=0.01
        )


def count_parameters(workload: Workload, dims: ParallelDims) -> int:
    return sum(p.numel() for p in build_rank_model(workload, dims).parameters())


def weight_bytes(workload: Workload, dims: ParallelDims) -> int:
    return build_memory_model(workload, dims).weights


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


def test_savings_match_the_plan_with_the_option() -> None:
    plan = estimate.estimate(llama_workload("llama3_2_1b"), replace(H100, devices=1))
    options = {option.overrides: option for option in memory_options.plan_options(plan)}
    assert {("optimizer=adamw8bit",), ("precision.master_dtype=bf16",), ("adapter=lora",)} <= set(options)
    bf16 = options["precision.master_dtype=bf16",]
    assert bf16.saved_bytes == plan.peak.total - bf16.plan.peak.total > 6 * GIB


def test_search_finds_overrides_that_fit() -> None:
    slow = replace(GPUS["h100"], tflops=1)  # a fast GPU would be limited by kernel launches of the host
    workload, cluster = (
        build_workload(make_checkpoint(DENSE), max_length=4096, micro_batch_size=4, global_batch_size=4),
        replace(H100, devices=1, gpu=slow),
    )
    plan = estimate.estimate(workload, cluster)
    plan = estimate.estimate(workload, replace(cluster, memory=plan.peak.total - 50 * 2**20))
    assert plan.fits is False
    result = search.search_config(plan)
    assert plan.cluster.memory is not None and result.plan.peak.total <= 0.97 * plan.cluster.memory
    assert any(override.startswith("micro_batch_size=") for override in result.overrides)
    with pytest.raises(UserError, match="nothing fits"):
        search.search_config(
            estimate.estimate(
                build_workload(make_checkpoint(DENSE), micro_batch_size=1, compile=True),
                replace(H100, devices=1, memory=GIB // 2),
            )
        )


def test_cpu_offload_is_suggested_only_if_needed() -> None:
    workload, cluster = (
        build_workload(
            make_checkpoint(*[DENSE] * 8), max_length=512, global_batch_size=2, micro_batch_size=1, compile=True
        ),
        replace(H100, devices=2),
    )
    result = search.search_config(estimate.estimate(workload, cluster))
    assert not any(word.startswith(("parallel.cpu_offload", "parallel.tp")) for word in result.overrides)
    offloaded = estimate.estimate(replace(workload, parallel=ParallelConfig(cpu_offload=True)), cluster)
    smallest_peak = min(
        estimate.estimate(replace(workload, parallel=ParallelConfig(tp=2)), cluster).peak.total, result.plan.peak.total
    )
    assert offloaded.memory.host > 0 and offloaded.peak.total < smallest_peak
    with pytest.raises(UserError, match="parallel.cpu_offload: device cpu"):
        estimate.estimate(replace(workload, parallel=ParallelConfig(cpu_offload=True)), ClusterSpec(2))


def test_activation_offloading_is_searched_only_if_needed() -> None:
    cluster = replace(H100, devices=1, gpu=replace(GPUS["h100"], tflops=1))  # checkpointing takes time
    checkpoint = make_checkpoint(*[DENSE] * 8)
    workload = build_workload(checkpoint, max_length=4096, global_batch_size=1, micro_batch_size=1)
    faster, full, offloaded = (
        estimate.estimate(replace(workload, memory=MemoryConfig(mode, offload)), cluster)
        for mode, offload in (("none", True), ("full", False), ("full", True))
    )
    assert offloaded.peak.total < full.peak.total < faster.peak.total
    for plan, offload in ((faster, False), (full, False), (offloaded, True)):
        available = replace(cluster, memory=int(plan.peak.total / (1 - search.MEMORY_MARGIN)) + 2**10)
        memory = search.search_config(estimate.estimate(workload, available)).plan.workload.memory
        assert memory == MemoryConfig("full", offload)
    large = replace(offloaded, memory=replace(offloaded.memory, host=3000 * GIB))
    assert "warning" in report.format_memory(large) and "warning" not in report.format_memory(offloaded)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: " ".join(option.overrides))
def test_overrides_of_an_option_are_its_change_of_the_workload(option: memory_options.MemoryOption) -> None:
    """For some workload and cluster, each option of the table applies, and its overrides are written for exactly it."""
    layouts = (ParallelConfig(reshard_after_forward=False, all_gather_dtype="param"), ParallelConfig(dp_replicate=2))
    workloads = [
        build_workload(make_checkpoint(DENSE), random_init=False, parallel=parallel, adapter=adapter)
        for parallel in layouts
        for adapter in (NoAdapter(), LoRAConfig())
    ]
    plans = (estimate.estimate(workload, replace(H100, devices=2)) for workload in workloads)
    plan = next(plan for plan in plans if option.applies(plan))
    workload = option.apply(plan.workload, plan)
    changed = dict(override.split("=") for override in memory_options.diff_overrides(plan.workload, workload))
    assert changed and set(changed) <= set(option.overrides)
    assert not memory_options.diff_overrides(workload, option.apply(workload, plan))


def test_fallbacks_of_the_search_name_their_cost() -> None:
    assert all(option.cost and option in OPTIONS for option in search.FALLBACKS)
    workload = build_workload(make_checkpoint(DENSE, DENSE), random_init=False, micro_batch_size=1)
    smallest = replace(workload, memory=MemoryConfig("full", True), optimizer=AdamW8bitConfig())
    peak = estimate.estimate(smallest, replace(H100, devices=1)).peak.total
    cluster = replace(H100, devices=1, memory=int(peak / (1 - search.MEMORY_MARGIN)) + 2**10)
    result = search.search_config(estimate.estimate(workload, cluster))
    assert result.options and all(option.cost in report.format_search_result(result) for option in result.options)


@pytest.mark.parametrize(
    "changes", [{}, {"micro_batch_size": 1}, {"adapter": LoRAConfig()}, {"docs_per_packed_row": 2}]
)
def test_longest_row_fits_and_a_longer_one_does_not(changes: dict) -> None:
    checkpoint = with_context(make_checkpoint(DENSE, DENSE, DENSE), 2**17)
    workload = build_workload(checkpoint, device="cuda", flash=True, **changes)
    lengths = []
    for extra in (200 * 2**20, 400 * 2**20):
        shortest = search.with_length(estimate.estimate(workload, replace(H100, devices=1)), search.LENGTH_STEP)
        memory = shortest.peak.total + extra
        result = search.search_max_length(
            estimate.estimate(workload, replace(H100, devices=1, memory=int(memory / (1 - search.MEMORY_MARGIN))))
        )
        lengths.append(result.length)
        longer = search.with_length(result.plan, result.length + search.LENGTH_STEP)
        assert not result.is_context and result.length % search.LENGTH_STEP == 0
        assert result.plan.peak.total <= memory < longer.peak.total
        assert result.plan.workload.max_length == workload.docs_per_packed_row * result.length
    assert search.LENGTH_STEP < lengths[0] < lengths[1], "more memory, longer rows"


def test_peak_grows_with_the_length() -> None:
    plan = estimate.estimate(llama_workload("llama3_2_1b"), replace(H100, devices=1))
    peaks = [search.with_length(plan, length).peak.total for length in range(1024, 8193, 1024)]
    assert peaks == sorted(peaks)


def test_longest_row_is_limited_by_the_context_of_the_model() -> None:
    plan = estimate.estimate(build_workload(make_checkpoint(DENSE)), replace(H100, devices=1))
    plan = replace(plan, workload=replace(plan.workload, source=with_context(plan.workload.source, 1000)))
    result = search.search_max_length(plan)
    assert result.is_context and result.length == 896, "the largest multiple of 128"
    with pytest.raises(UserError, match="max_length=128"):
        search.search_max_length(replace(plan, cluster=replace(plan.cluster, memory=GIB // 2)))


def with_context(source: HFCheckpoint, context: int) -> HFCheckpoint:
    return replace(source, spec=replace(source.spec, context=context))


def test_search_for_the_longest_row_needs_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, lengths = estimate.estimate(llama_workload("llama3_1_8b", adapter=LoRAConfig()), replace(H100, devices=1)), []

    def record(plan: estimate.Estimate, length: int) -> estimate.Estimate:
        lengths.append(length)
        return with_length(plan, length)

    with_length = search.with_length
    monkeypatch.setattr(search, "with_length", record)
    assert search.search_max_length(plan).length > 4096 and len(lengths) <= 8, lengths


def test_report_is_complete_and_at_most_120_columns_wide() -> None:
    plan = replace(
        estimate.estimate(llama_workload("llama3_2_1b"), replace(H100, price=2.0)),
        step_count=StepCount(10_000, 160_000),
    )
    text = report.format_report(plan, memory_options.plan_options(plan))
    assert max(map(len, text.splitlines())) <= 120
    for word in (
        "optimizer states",
        "does not fit" if not plan.fits else "fits",
        "all-gather",
        "step time: ",
        "10,000 steps (1 epoch of 160,000 rows), at most 81,920,000 tokens",
        "cost: ",
    ):
        assert word in text
    data = report.report_json(plan, [])
    assert data["peak"] == plan.peak.total and data["step_seconds"] == plan.step_time.seconds


@pytest.mark.parametrize(
    ("config", "overrides", "omitted"),
    [
        ("sft nano/tools_lora", [], ["cuda_graph"]),
        ("sft nano/tools_lora", ["compile=true"], []),
        ("sft nano/tools_lora", ["cuda_graph=false", "forgetting={data: {source: rows.jsonl}}"], ["forgetting"]),
        ("sft nano/tools_lora", ["compile=true", "generation_eval={prompts: [hello]}"], ["generation_eval"]),
        ("preference nano/dpo", ["cuda_graph=false"], ["shared prompts"]),
        (
            "distill nano/distill",
            ["cuda_graph=false", "on_policy.lmbda=0.5", "on_policy.max_new_tokens=9"],
            ["student"],
        ),
        ("distill nano/distill", ["cuda_graph=false", "on_policy.lmbda=0"], []),
    ],
)
def test_plan_lists_what_it_does_not_include(config: str, overrides: list[str], omitted: list[str]) -> None:
    recipe, name = config.split()
    cfg = recipe_loader.load_recipe_config(recipe_loader.load_recipe(recipe), name, overrides, [])
    messages = list(list_omissions(cfg, ClusterSpec(gpu=GPUS["h100"])))
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
    with pytest.raises(UserError, match="^--gpu-type h1000: .*'h100'"):
        hardware.gpu_by_name("h1000")
    assert hardware.gpu_by_memory(141 * GIB) == GPUS["h200"]


def test_oom_report() -> None:
    recipe = recipe_loader.load_recipe("sft")
    cfg = recipe_loader.load_recipe_config(recipe, "nano/tools_full", ["micro_batch_size=1", "data.max_length=64"], [])
    text = oom_report.format_oom_report(cfg, CPU)
    assert text.startswith("out of memory: ") and "optimizer=adamw8bit" in text
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
    assert plan.memory.phases["load"].components["temporary_buffers"] == embedding
