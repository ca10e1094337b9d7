"""Plans for GPUs: rates of each precision, time of launches, and buffers inside kernels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.plan_workloads import build_workload, make_checkpoint
from tunekit import devices
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.datasets import TextDataset
from tunekit.errors import UserError
from tunekit.kernels import cross_entropy, fake_mode
from tunekit.kernels.gated_delta_rule import CHUNK, gated_delta_rule
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import MLP, Attention, DecoderSpec, Layer, Rope
from tunekit.plan import estimate, hardware, report
from tunekit.plan.hardware import GIB, GPUS, ClusterSpec, GPUSpec
from tunekit.plan.memory_tracker import MemoryTracker, Operations, count, flash_workspace
from tunekit.plan.workload import Workload, make_workload, resolve_precision, without_flash
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.recipes.sft import SFTConfig

NEW = ("t4", "v100", "a40", "a6000", "l40", "rtx3060", "rtx4080", "rtx5080", "rtx6000-ada", "rtxpro6000", "h20",
       "gh200", "b300", "mi300x")  # fmt: skip


def on(kind: GPUSpec, devices: int = 1) -> ClusterSpec:
    return ClusterSpec(devices, 1, kind, int(kind.memory_gib * GIB))


def small(kv_heads: int = 2, layers: int = 4) -> HFCheckpoint:
    return make_checkpoint(*(Layer(Attention(4, kv_heads, 32, rope=Rope()), MLP(384)),) * layers)


def described(source: HFCheckpoint, **changes: object) -> Workload:
    return build_workload(source, **{"max_length": 256, "device": "cuda", "flash": True} | changes)


def test_kinds_are_plausible() -> None:
    assert set(NEW) <= set(GPUS)
    for name, kind in GPUS.items():
        assert hardware.gpu_by_name(name) is kind
        assert kind.fp32 <= (kind.tf32 or kind.fp32) <= kind.tflops, name
        assert (kind.tf32 is not None) == kind.capabilities.tf32, name
        assert kind.inter_node_bandwidth <= kind.intra_node_bandwidth or kind.intra_node_bandwidth <= 32, name
        seconds = kind.memory_gib * GIB / (kind.memory_bandwidth * 1e9)
        assert 5e-3 < seconds < 0.08, f"{name}: seconds to read all of the memory"


@pytest.mark.parametrize(("name", "compute", "rate"), [
    ("h100", "bf16", 989), ("h100", "fp32", 67), ("h100", "tf32", 494), ("a100", "fp32", 19.5), ("a100", "tf32", 156),
    ("t4", "bf16", 8.1), ("t4", "fp16", 65), ("t4", "fp32", 8.1),
    ("v100", "bf16", 15.7), ("mi300x", "fp32", 163.4), ("h20", "bf16", 148),
])  # fmt: skip
def test_rates_of_each_precision(name: str, compute: str, rate: float) -> None:
    assert GPUS[name].rate(compute) == rate
    plan = estimate.estimate(described(small(), precision=PrecisionConfig(compute)), on(GPUS[name]))  # pyright: ignore
    assert plan.step_time.compute == pytest.approx(plan.step_time.flops / (rate * 1e12 * 0.45))


def test_a_gpu_without_a_name_keeps_the_proportions() -> None:
    kind = GPUS["h100"].scaled(2 * 989)
    assert kind.rate("fp32") == 2 * 67 and kind.rate("tf32") == 2 * 494 and GPUS["t4"].scaled(130).tf32 is None


@pytest.mark.parametrize(("name", "dtype"), [("t4", "fp16"), ("v100", "fp16"), ("a100", "bf16"), ("mi300x", "bf16")])
def test_auto_is_what_the_card_can_do(name: str, dtype: str) -> None:
    assert resolve_precision(PrecisionConfig(), on(GPUS[name])).compute_dtype == dtype
    assert bool(without_flash(on(GPUS[name]))) == (name in ("t4", "v100"))
    best = "bf16" if devices.has_fast_bf16(torch.device("cpu")) else "fp32"
    assert resolve_precision(PrecisionConfig(), ClusterSpec()).compute_dtype == best


def test_tf32_is_refused_where_there_is_none() -> None:
    for where in (ClusterSpec(), on(GPUS["t4"]), on(GPUS["mi300x"])):
        with pytest.raises(UserError, match="precision.compute_dtype: tf32"):
            resolve_precision(PrecisionConfig("tf32"), where)
    assert resolve_precision(PrecisionConfig("tf32"), on(GPUS["a100"])).compute_dtype == "tf32"


def config() -> SFTConfig:
    data = TextDataset("rows.jsonl", max_length=64)
    return SFTConfig(model="tunekit/nano", data=data, output_dir="run", adapter=LoRAConfig(), global_batch_size=4)


def test_a_config_is_planned_for_the_card() -> None:
    for name, dtype in (("t4", torch.float16), ("h100", torch.bfloat16)):
        workload = make_workload(config(), on(GPUS[name]))
        assert workload.compute_dtype == dtype and workload.flash == (name == "h100")


# Launches


class Counter(TorchDispatchMode):
    """The kernels of a CPU run: what each dispatched operation counts as."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Operations()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total = self.total.plus(count(func))
        return func(*args, **(kwargs or {}))


def test_views_and_allocations_are_no_launches() -> None:
    x = torch.ones(4, 6)
    with Counter() as seen:
        y = torch.empty(4, 6)
        y.copy_(x)  # 1
        (y.T @ x.view(4, 6)[:, :3]).add_(1)  # 2
        x.detach().reshape(2, 12)
    assert seen.total == Operations(launches=3, matmuls=1)


def test_launches_grow_with_layers_passes_and_adapters() -> None:
    h100 = on(GPUS["h100"])
    plain, twice = (estimate.estimate(described(small(layers=n)), h100).step_time for n in (4, 8))
    assert 1.4 * plain.num_launches < twice.num_launches < 2 * plain.num_launches
    passes = estimate.estimate(described(small(), micro_batch_size=1), h100).step_time
    assert 1.3 * plain.num_launches < passes.num_launches < 2 * plain.num_launches
    for changes in ({"adapter": LoRAConfig()}, {"memory": MemoryConfig(activation_checkpointing="full")}):
        assert estimate.estimate(described(small(), **changes), h100).step_time.num_launches > plain.num_launches, (
            changes
        )
    lora, qlora = (
        estimate.estimate(described(small(), adapter=LoRAConfig(), quantization=w), h100).step_time
        for w in (NoQuantization(), NF4Config())
    )
    assert qlora.launches > lora.launches
    compiled = estimate.estimate(described(small(), adapter=LoRAConfig(), compile=True), h100).step_time
    assert compiled.launches < lora.launches


def delta_rule_launches(device: str, chunks: int) -> int:
    """Kernels of the gated delta rule in the plan for a kind of device."""
    with fake_mode.fake_mode(device), FakeTensorMode(), Counter() as seen:
        q, k, v = (torch.empty(1, chunks * CHUNK, heads, 16) for heads in (2, 2, 4))
        decay, beta = (torch.empty(1, chunks * CHUNK, 4) for _ in range(2))
        gated_delta_rule(q, k, v, decay, beta)
    return seen.total.launches


def test_the_delta_rule_is_planned_as_the_device_computes_it() -> None:
    """A GPU solves all chunks at once, and only the product that carries the state is launched for each."""
    more = {device: delta_rule_launches(device, 20) - delta_rule_launches(device, 10) for device in ("cuda", "cpu")}
    assert more["cuda"] == 10 and more["cpu"] >= 50


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logits_are_planned_in_the_chunks_of_the_device(device: str) -> None:
    vocab, like = 2**17, torch.empty(1, dtype=torch.bfloat16, device="meta")
    with fake_mode.fake_mode(device):
        size = cross_entropy.chunk_size(2**15, vocab, like)
    assert size * vocab * like.itemsize == cross_entropy.CHUNK_BYTES[device]


def test_a_small_model_is_limited_by_the_host() -> None:
    plan = estimate.estimate(described(small()), on(GPUS["h200"]))
    step = plan.step_time
    assert step.compute is not None and step.seconds == step.launches > 10 * step.compute
    assert (
        "CPU-bound" in report.format_report(plan, [])
        and report.report_json(plan, [])["kernel_launches"] == step.num_launches
    )
    large = estimate.estimate(described(small(), max_length=2**17), on(GPUS["h200"])).step_time
    assert large.seconds is not None and large.seconds > large.launches
    assert estimate.estimate(described(small(), device="cpu", flash=False), ClusterSpec()).step_time.seconds is None


# Buffers inside FlashAttention


def backward(kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    q = torch.zeros(2, 100, 4, 48, dtype=dtype)
    k = torch.zeros(2, 100, kv_heads, 48, dtype=dtype)
    offsets = torch.tensor([0, 60, 100, 200])
    return q, [q, k, k, offsets, offsets, q, torch.zeros(4, 200)]


@pytest.mark.parametrize(("kv_heads", "dtype", "bytes"), [
    (4, torch.bfloat16, 4 * (200 + 3 * 128) * 4 * 65),  # fp32 sums of (tokens, heads, 64), and one of each row
    (2, torch.bfloat16, 4 * (200 + 3 * 128) * 4 * 65 + 2 * 2 * 200 * 4 * 48),  # and dK, dV of all heads in bf16
    (2, torch.float32, 0),  # FlexAttention
])  # fmt: skip
def test_the_buffers_of_flash_attention(kv_heads: int, dtype: torch.dtype, bytes: int) -> None:
    grad, saved = backward(kv_heads, dtype)
    op = torch.ops.tunekit.attention_backward.default
    assert flash_workspace(op, (grad, saved, [1.0, 0.0, 0.0, 0.0])) == bytes
    assert flash_workspace(torch.ops.aten.mm.default, (grad, saved)) == 0


def test_buffers_of_attention_are_in_the_backward_pass_of_a_gpu() -> None:
    # So little in addition to attention that its backward pass is the highest peak of the layer.
    layer = Layer(Attention(8, 2, 64, rope=Rope()), MLP(8))
    source = replace(small(), spec=DecoderSpec(64, 32, (layer,) * 2))
    with_flash, without = (
        estimate.estimate(
            described(source, max_length=1024, adapter=LoRAConfig(), flash=flash), on(GPUS["a100"])
        ).memory.phases
        for flash in (True, False)
    )
    tokens = 2 * 1024
    buffers = 4 * (tokens + 2 * 128) * 8 * 65 + 2 * 2 * tokens * 8 * 64
    more = with_flash["backward"].total - without["backward"].total
    assert more == pytest.approx(buffers * 1.03, rel=0.01)  # with the gaps between tensors
    assert with_flash["forward"].total == without["forward"].total


def test_a_live_count_without_flash_is_that_of_the_cpu() -> None:
    assert not MemoryTracker().flash
