"""A plan says what a step then takes: measured with real tensors, layer by layer and in whole."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.optimizer_step import step_optimizer
from tests.plan.workloads import build_workload, make_checkpoint
from tunekit import assets
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
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
from tunekit.plan.workload import Workload, build_rank_model, profile_workload
from tunekit.quantization.config import NF4Config

ATTENTION = Attention(4, 2, 32, rope=Rope())
DENSE = Layer(ATTENTION, MLP(384))
SPARSE = Layer(ATTENTION, MoE(4, 2, 96))
H100 = ClusterSpec(8, 1, KINDS["h100"], 80 * GIB)


def llama(name: str, **changes: object) -> Workload:
    source = HFCheckpoint.open(assets.PRESETS[f"tunekit/{name}"], name)
    return replace(
        build_workload(source, max_length=4096, global_batch_size=16, micro_batch_size=1, random=False), **changes
    )


def lived(task: Workload) -> int:
    """Bytes of the tensors of a real step at most, in its second run."""
    run = DistributedContext(device="cpu")
    net = filled(task)
    optimizer = task.optimizer.build(
        task.adapter.param_groups(net), [p for each in net.layers for p in each.parameters()]
    )
    train_optimizer = task.memory.wrap_optimizer(optimizer, run)
    sizes = ParallelDims()
    step = rows_of(task, sizes)
    with MemoryTracker() as live:
        live.see([*net.parameters(), *net.buffers()])
        for _ in range(2):
            live.mark()
            for _ in range(task.parts(sizes)):
                task.loss(net, step).backward()
            step_optimizer(train_optimizer, task.max_grad_norm)
    return live.most


def filled(task: Workload) -> Decoder:
    """The model with some numbers."""
    net = build_rank_model(task, ParallelDims())
    task.memory.apply(net, CPU)
    net.to_empty(device="cpu")
    net.tie()
    for parameter in net.parameters():
        parameter.data.normal_(std=0.02) if parameter.is_floating_point() else parameter.data.zero_()
    return net


def rows_of(task: Workload, sizes: ParallelDims) -> Batch:
    made = rows(step_of(task, sizes))
    tokens = torch.randint(0, task.source.spec.vocab, made.tokens.shape)
    targets = tokens.clone()
    targets[:, 0] = -100
    return replace(made, tokens=tokens, targets=targets, positions=torch.arange(task.max_length).expand_as(tokens))


def step_of(task: Workload, sizes: ParallelDims) -> ProbeStep:
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


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_was_planned(name: str) -> None:
    source, changes = CASES[name]
    wanted = build_workload(source, **changes)
    plan = estimate.estimate(wanted, ClusterSpec())
    moments = (plan.room.phases[phase] for phase in ("forward", "backward", "step"))
    planned = max(moment.total - moment.parts["process"] for moment in moments)
    assert planned == pytest.approx(lived(wanted), rel=0.03)


def test_a_layer_that_is_sharded_leaves_its_part_on_each_rank() -> None:
    wanted = llama("llama3_1_8b")
    one, eight = (estimate.estimate(wanted, replace(H100, devices=n, memory=None)) for n in (1, 8))
    for name in ("weights", "gradients", "optimizer"):
        whole, part = (plan.room.phases["step"].parts[name] for plan in (one, eight))
        assert part == pytest.approx(whole / 8, rel=1e-3)
    assert eight.room.phases["backward"].parts["gathered"] > 0


def test_bytes_that_are_sent_follow_from_the_theory() -> None:
    wanted = llama("llama3_1_8b", global_batch_size=8)
    plan = estimate.estimate(wanted, H100)
    weights = 8_030_261_248 * 4
    sent = {flow.what: flow.bytes for flow in plan.pace.flows}
    assert sent["weights, forward"] == pytest.approx(weights * 7 / 8, rel=1e-3)
    assert sent["gradients"] == pytest.approx(weights * 7 / 8, rel=1e-3)
    root = 2 * 128256 * 4096 * 4
    assert sent["weights, backward"] == pytest.approx((weights - root) * 7 / 8, rel=1e-3)
    assert plan.pace.flops == pytest.approx(6 * (8.03e9 - 128256 * 4096) * 4096, rel=0.1)


def test_a_row_that_ranks_share_takes_as_many_products_as_one_that_they_do_not() -> None:
    two, flops = replace(H100, devices=2), []
    for parallel in (ParallelConfig(dp_shard=2), ParallelConfig(cp=2)):
        flops.append(
            estimate.estimate(
                build_workload(make_checkpoint(DENSE), max_length=4096, parallel=parallel), two
            ).pace.flops
        )
    assert flops[0] == pytest.approx(flops[1])


def test_a_token_goes_through_as_many_experts_wherever_they_are() -> None:
    two, flops = replace(H100, devices=2), []
    for expert in (1, 2):
        layer = Layer(ATTENTION, MoE(2, 2, 96))
        flops.append(
            estimate.estimate(
                build_workload(make_checkpoint(layer), parallel=ParallelConfig(ep=expert)), two
            ).pace.flops
        )
    assert flops[0] == pytest.approx(flops[1])


def test_copies_add_up_what_they_keep() -> None:
    plan = estimate.estimate(
        llama("llama3_1_8b", parallel=ParallelConfig(dp_replicate=2)), replace(H100, devices=16, hosts=2)
    )
    (flow,) = (flow for flow in plan.pace.flows if flow.kind == "all-reduce")
    assert flow.ranks == 2 and flow.stride == 8
    assert plan.machine.bandwidth(flow.ranks, flow.stride) == KINDS["h100"].far * 1e9


def test_ranks_that_share_layers_have_a_part_of_them() -> None:
    whole = numbers(build_workload(make_checkpoint(DENSE)), ParallelDims())
    assert numbers(build_workload(make_checkpoint(DENSE)), ParallelDims(tp=2)) == pytest.approx(
        whole / 2, rel=0.01
    )  # norms are whole
    for sizes in (
        ParallelDims(dp_shard=2),
        ParallelDims(dp_shard=2, ep=2),
    ):  # by rows or by experts, each has half of them
        assert held(build_workload(make_checkpoint(SPARSE)), sizes) == pytest.approx(
            held(build_workload(make_checkpoint(SPARSE)), ParallelDims()) / 2, rel=0.01
        )


def numbers(task: Workload, sizes: ParallelDims) -> int:
    return sum(p.numel() for p in build_rank_model(task, sizes).parameters())


def held(task: Workload, sizes: ParallelDims) -> int:
    return build_memory_model(task, sizes).weights


@pytest.mark.parametrize(
    ("changes", "devices", "told"),
    [
        ({"parallel": ParallelConfig(tp=3)}, 3, "parallel.tp: .* 4 heads, which 3 devices cannot share"),
        ({"parallel": ParallelConfig(ep=2)}, 2, "no experts"),
        ({"parallel": ParallelConfig(dp_shard=3)}, 8, "there are 8 processes"),
    ],
)
def test_what_cannot_be_shared_is_told(changes: dict, devices: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        estimate.estimate(build_workload(make_checkpoint(DENSE), **changes), replace(H100, devices=devices))


def test_what_a_change_saves_is_what_its_plan_says() -> None:
    plan = estimate.estimate(llama("llama3_2_1b"), replace(H100, devices=1))
    found = {change.words: change for change in suggestions.suggest_changes(plan)}
    assert {"optimizer=adamw8bit", "precision.master_dtype=bf16", "adapter=lora"} <= set(found)
    half = found["precision.master_dtype=bf16"]
    assert half.saves == plan.peak.total - half.plan.peak.total > 6 * GIB


def test_what_fits_is_found_and_said_in_overrides() -> None:
    slow = replace(KINDS["h100"], tflops=1)  # or the host would take longest, to launch the kernels of more passes
    wanted, one = (
        build_workload(make_checkpoint(DENSE, DENSE), max_length=4096, micro_batch_size=16, global_batch_size=64),
        replace(H100, devices=1, kind=slow),
    )
    plan = estimate.estimate(wanted, one)
    plan = estimate.estimate(wanted, replace(one, memory=plan.peak.total - 50 * 2**20))
    assert plan.fits is False
    found = search.search_config(plan)
    assert plan.machine.memory is not None and found.plan.peak.total <= 0.97 * plan.machine.memory
    assert any(word.startswith("micro_batch_size=") for word in found.words)
    with pytest.raises(UserError, match="nothing fits"):
        search.search_config(
            estimate.estimate(build_workload(make_checkpoint(DENSE)), replace(H100, devices=1, memory=GIB // 2))
        )


def test_weights_wait_on_the_host_only_where_nothing_fits_without() -> None:
    wanted, two = (
        build_workload(make_checkpoint(*[DENSE] * 8), max_length=512, global_batch_size=2, micro_batch_size=1),
        replace(H100, devices=2),
    )
    roomy = search.search_config(estimate.estimate(wanted, two))
    assert not any(word.startswith(("parallel.cpu_offload", "parallel.tp")) for word in roomy.words)
    away = estimate.estimate(replace(wanted, parallel=ParallelConfig(cpu_offload=True)), two)
    least = min(
        estimate.estimate(replace(wanted, parallel=ParallelConfig(tp=2)), two).peak.total, roomy.plan.peak.total
    )
    assert away.room.host > 0 and away.peak.total < least
    with pytest.raises(UserError, match="parallel.cpu_offload: device cpu"):
        estimate.estimate(replace(wanted, parallel=ParallelConfig(cpu_offload=True)), ClusterSpec(2))


def test_a_report_tells_all_of_it_in_lines_that_fit_a_screen() -> None:
    plan = replace(estimate.estimate(llama("llama3_2_1b"), replace(H100, price=2.0)), extent=StepCount(10_000, 160_000))
    text = report.format_report(plan, suggestions.suggest_changes(plan))
    assert max(map(len, text.splitlines())) <= 120
    for word in (
        "forward pass",
        "does not fit" if not plan.fits else "fits",
        "all-gather",
        "s a step",
        "10,000 steps (1 epoch of 160,000 rows), at most 655,360,000 tokens",
        "costs",
    ):
        assert word in text
    told = report.report_json(plan, [], None)
    assert told["peak"] == plan.peak.total and told["seconds"] == plan.pace.seconds


def test_as_many_steps_are_told_as_a_run_then_takes(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "{"word " * 20}"}}\n' for _ in range(90)))

    class Config:
        def __init__(self, **said: object) -> None:
            vars(self).update({"global_batch_size": 4, "epochs": 2, "max_steps": None, **said})

    mixed = Mixture(
        (MixtureMember(TextDataset(str(file))), MixtureMember(TextDataset(str(file)), max_samples_per_epoch=10))
    )
    for data, count in ((TextDataset(str(file)), 90), (TextDataset(str(file), split="train[:10]"), 10), (mixed, 100)):
        assert count_steps(Config(data=data)) == StepCount(2 * -(-count // 4), count, 2)
    packed = count_steps(Config(data=TextDataset(str(file), packing=True, max_length=100)))
    assert packed is not None and not packed.exact and 0 < packed.steps < 46
    assert count_steps(Config(data=TextDataset("owner/name"))) is None and count_steps(
        Config(data=TextDataset("owner/name"), max_steps=7)
    ) == StepCount(7)


def test_words_for_machines() -> None:
    assert hardware.parse_memory_size("80G") == 80 * GIB and hardware.parse_memory_size("24000MiB") == 24000 * 2**20
    with pytest.raises(UserError, match="such as 80G"):
        hardware.parse_memory_size("eighty")
    with pytest.raises(UserError, match="did you mean h100"):
        hardware.gpu_by_name("h1000")
    assert hardware.gpu_by_memory(141 * GIB) == KINDS["h200"]


def test_a_full_memory_is_explained(tmp_path: Path) -> None:
    class Config:
        pass

    cfg = Config()
    vars(cfg).update(
        vars(build_workload(make_checkpoint(DENSE)))
        | {"model": "tunekit/nano", "data": TextDataset("rows.jsonl", max_length=64)}
    )
    text = oom_report.format_oom_report(cfg, CPU)
    assert "out of memory: a step needs about" in text and "optimizer=adamw8bit" in text
    assert text.count("\n") < 15
    assert oom_report.is_oom(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert oom_report.is_oom(torch.OutOfMemoryError("CUDA out of memory")) and not oom_report.is_oom(RuntimeError("no"))


def test_a_rank_plans_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds no memory explains it while the others are in the middle of a step."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert (
        estimate.estimate(build_workload(make_checkpoint(DENSE), max_length=96), replace(H100, devices=2)).peak.total
        > 0
    )


def test_layers_are_measured_once() -> None:
    wanted = build_workload(make_checkpoint(DENSE, DENSE))
    assert profile_workload(wanted, ParallelDims()) is profile_workload(wanted, ParallelDims())
