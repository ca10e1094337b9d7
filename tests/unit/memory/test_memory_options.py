"""Memory options reduce memory and do not change results."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from tests.helpers.optimizer_step import step_optimizer
from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import FP32, load_model, make_batch, make_checkpoint, random_tokens
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.data.dataloader.batch import Batch
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.kernels.attention_cpu import is_available
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory import activation_offloading
from tunekit.memory.activation_offloading import ActivationOffloader
from tunekit.memory.config import MemoryConfig
from tunekit.models.compile import INDUCTOR_CACHE, compile_layers
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig, MuonConfig, SGDConfig
from tunekit.recipes import sft

FAMILIES = ["llama3.2", "qwen3-moe", "gemma2", "qwen3-next"]


def gradients(model: Decoder, micro_batch: Batch | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    CrossEntropy()(model, micro_batch or make_batch(random_tokens())).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pairwise(name=FAMILIES, adapter={"full": NoAdapter(), "lora": LoRAConfig(4)}, recompute=["full", "selective"])
def test_activation_checkpointing_is_bit_exact(name: str, adapter, recompute, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    uncheckpointed, checkpointed = (
        load_model(folder, adapter, memory=MemoryConfig(activation_checkpointing=mode)) for mode in ("none", recompute)
    )
    assert all(map(torch.equal, gradients(uncheckpointed), gradients(checkpointed)))


def saved_bytes(model: Decoder) -> int:
    """Bytes that the forward pass saves for the backward pass."""
    micro_batch = make_batch(random_tokens(8, 64))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = CrossEntropy()(model, micro_batch)
    loss.backward()
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


def test_activation_checkpointing_saves_memory(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama3.2")
    num_bytes = [
        saved_bytes(load_model(folder, memory=MemoryConfig(activation_checkpointing=mode)))
        for mode in ("none", "selective", "full")
    ]
    assert num_bytes[0] > 1.2 * num_bytes[1]
    assert num_bytes[1] > 1.2 * num_bytes[2]


@pytest.fixture
def offloaded_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of offloaded tensors. The CPU plays the role of the GPU."""
    sizes = []
    base_class = activation_offloading.OffloadedTensor

    class Counted(base_class):
        def __init__(self, x: torch.Tensor, *rest) -> None:
            sizes.append(x.nbytes)
            super().__init__(x, *rest)

    monkeypatch.setattr(activation_offloading, "MIN_OFFLOAD_BYTES", 1)
    monkeypatch.setattr(activation_offloading, "OffloadedTensor", Counted)
    yield sizes
    assert sizes


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activation_offloading_is_bit_exact(name: str, recompute, offloaded_sizes: list[int], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    resident, offloaded = (
        load_model(folder),
        load_model(folder, memory=MemoryConfig(activation_checkpointing=recompute)),
    )
    offloader = ActivationOffloader(offloaded)
    offloaded.layer_call = offloader.wrap_layer_call(offloaded.layer_call or (lambda layer, *inputs: layer(*inputs)))
    for _ in range(2):
        assert all(map(torch.equal, gradients(resident), gradients(offloaded)))
        assert offloader.last is None and not offloader.offloaded, "all offloaded tensors are released"


def test_weights_are_not_offloaded(offloaded_sizes: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "llama3.2"))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    base_class = activation_offloading.OffloadedTensor

    def check(x: torch.Tensor, *rest) -> activation_offloading.OffloadedTensor:
        assert x.untyped_storage().data_ptr() not in weights
        return base_class(x, *rest)

    monkeypatch.setattr(activation_offloading, "OffloadedTensor", check)
    model.layer_call = ActivationOffloader(model).wrap_layer_call(lambda layer, *inputs: layer(*inputs))
    gradients(model)


def test_tensor_saved_by_several_ops_is_offloaded_once(offloaded_sizes: list[int], tmp_path: Path) -> None:
    """The input of q, k and v, and the input of gate and up, are offloaded once."""
    model = load_model(make_checkpoint(tmp_path, "llama3.2"))
    model.layer_call = ActivationOffloader(model).wrap_layer_call(lambda layer, *inputs: layer(*inputs))
    gradients(model)
    assert len(offloaded_sizes) < 20 * len(model.spec.layers)


def test_activation_offloading_requires_a_gpu(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama3.2")
    with pytest.raises(UserError, match="memory.activation_offloading"):
        load_model(folder, memory=MemoryConfig(activation_offloading=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_activation_offloading_on_a_gpu_is_bit_exact(
    recompute, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(activation_offloading, "MIN_OFFLOAD_BYTES", 1)
    folder = make_checkpoint(tmp_path, "llama3.2")
    models = [load_model(folder).cuda() for _ in range(2)]
    MemoryConfig(recompute, activation_offloading=True).apply(models[1], torch.device("cuda"))
    micro_batch = make_batch(random_tokens(4, 64)).to(torch.device("cuda"))
    for _ in range(3):
        for model in models:
            model.zero_grad()
            CrossEntropy()(model, micro_batch).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in models), strict=True))


def packed_batch(rows: int, length: int, *documents: int) -> Batch:
    """Rows that contain documents of these lengths; one document per row if there are none."""
    micro_batch = make_batch(random_tokens(rows, length))
    if not documents:
        return micro_batch
    positions = torch.cat([torch.arange(n) for n in documents]).view(rows, length)
    return replace(micro_batch, positions=positions, cu_seqlens=F.pad(torch.tensor(documents).cumsum(0), (1, 0)).int())


BATCHES = [
    packed_batch(2, 24),
    packed_batch(1, 17),
    packed_batch(2, 24, 20, 20, 8),
    packed_batch(1, 40, 40),
    packed_batch(1, 40, 3, 37),
]
NUM_LAYER_TYPES = {"llama3.2": 1, "gemma2": 2}  # number of layer types
BF16 = PrecisionConfig("bf16", "fp32", "bf16")
slow = pytest.mark.slow


def flat_gradients(model: Decoder, micro_batch: Batch) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients(model, micro_batch)])


@pytest.mark.parametrize(("name", "adapter", "recompute", "precision", "backend"), [
    ("llama3.2", NoAdapter(), "none", FP32, "aot_eager"),
    pytest.param("gemma2", LoRAConfig(4), "full", BF16, "eager", marks=slow),
    pytest.param("qwen3-moe", NoAdapter(), "full", FP32, "eager", marks=slow),
])  # fmt: skip
def test_new_lengths_do_not_recompile(
    name: str, adapter, recompute: str, precision: PrecisionConfig, backend: str, tmp_path: Path
) -> None:
    """One training graph and one evaluation graph per layer type for all lengths, with the results of eager mode.

    `aot_eager` adds the guards of the backward pass; tests/gpu/test_recompiles.py has it with LoRA and experts.
    """
    torch.compiler.reset()
    folder, tolerance = make_checkpoint(tmp_path, name), 1e-5 if precision is FP32 else 3e-2
    plain, model = (load_model(folder, adapter, precision, MemoryConfig(recompute), compile=on) for on in (False, True))
    for layer in model.layers:
        layer.compile(dynamic=True, backend=backend)  # code generation takes long and adds no graphs

    @functools.cache
    def eager_results(index: int) -> tuple[torch.Tensor, float]:
        return flat_gradients(plain.train(), BATCHES[index]), CrossEntropy()(plain.eval(), BATCHES[index]).item()

    def count_graphs(indices: Sequence[int]) -> int:
        for index in indices:
            expected, actual = eager_results(index)[0], flat_gradients(model.train(), BATCHES[index])
            assert (actual - expected).norm() < tolerance * expected.norm()
        with torch.no_grad():
            for index in indices:
                loss = CrossEntropy()(model.eval(), BATCHES[index]).item()
                assert loss == pytest.approx(eager_results(index)[1], rel=tolerance)
        return counters["stats"]["unique_graphs"]

    counters.clear()
    first = count_graphs([0])
    # Loops in Python over documents or experts split the graph in two.
    if name in NUM_LAYER_TYPES and is_available():
        assert first == 2 * NUM_LAYER_TYPES[name]
    indices = range(len(BATCHES))
    assert count_graphs(indices) == count_graphs(indices[::-1]) == first
    torch.compiler.reset()


def test_compilation_is_announced_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One message with the first batch, including the cache directory if it is set."""
    folder, messages = make_checkpoint(tmp_path, "llama3.2"), []
    for cache_dir in ("/home/me/.cache", None):
        monkeypatch.setenv(INDUCTOR_CACHE, cache_dir) if cache_dir else monkeypatch.delenv(INDUCTOR_CACHE)
        model = load_model(folder)
        compile_layers(model, messages.append)
        for layer in model.layers:
            layer.compile(backend="eager")
        assert not messages
        for _ in range(2):
            gradients(model)
        assert len(messages) == 1 and ("cached in /home/me/.cache" in messages.pop()) == (cache_dir is not None)


def train_steps(
    folder: Path, adapter, optimizer_config, memory: MemoryConfig
) -> tuple[Decoder, torch.optim.Optimizer, list[float]]:
    """Four steps, and their gradient norms."""
    model, norms = load_model(folder, adapter, memory=memory), []
    inner = (p for layer in model.layers for p in layer.parameters())
    optimizer = optimizer_config.build(adapter.param_groups(model), inner)
    train_optimizer = memory.wrap_optimizer(optimizer, DistributedContext())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(4):
        CrossEntropy()(model, make_batch(random_tokens(seed=step))).backward()
        norms.append(float(step_optimizer(train_optimizer, 0.0)))
        schedule.step()
        assert all(p.grad is None for p in model.parameters())
    return model, optimizer, norms


@pairwise(
    optimizer_config={
        "adamw": AdamWConfig(1e-3),
        "adamw8bit": AdamW8bitConfig(1e-3),
        "muon": MuonConfig(1e-3),
        "sgd": SGDConfig(1e-3, 0.9),
    },
    adapter={"full": NoAdapter(), "lora": LoRAConfig(4, loraplus_lr_ratio=4.0)},
    recompute=["none", "full"],
)
def test_optimizer_in_bwd_is_bit_exact(optimizer_config, adapter, recompute: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama3.2")
    separate = train_steps(folder, adapter, optimizer_config, MemoryConfig(recompute))
    fused = train_steps(folder, adapter, optimizer_config, MemoryConfig(recompute, optimizer_in_bwd=True))
    assert fused[2] == separate[2]
    weights = [*zip(separate[0].parameters(), fused[0].parameters(), strict=True)]
    assert all(torch.equal(p, q) for p, q in weights)
    for p, q in weights:
        separate_state, fused_state = separate[1].state[p], fused[1].state[q]
        assert separate_state.keys() == fused_state.keys()
        assert all(
            torch.equal(torch.as_tensor(separate_state[key]), torch.as_tensor(fused_state[key]))
            for key in separate_state
        )


def test_optimizer_in_bwd_frees_each_gradient(tmp_path: Path) -> None:
    """At most one gradient exists when the next one is computed."""
    model = load_model(make_checkpoint(tmp_path, "llama3.2"))
    optimizer, num_gradients = AdamWConfig().build(NoAdapter().param_groups(model)), []
    MemoryConfig(optimizer_in_bwd=True).wrap_optimizer(optimizer, DistributedContext())
    for p in model.parameters():
        p.register_hook(lambda grad: num_gradients.append(sum(q.grad is not None for q in model.parameters())))
    CrossEntropy()(model, make_batch(random_tokens())).backward()
    assert num_gradients and max(num_gradients) <= 1


def test_optimizer_in_bwd_refuses_clipping_and_accumulation() -> None:
    options = {"max_grad_norm": 1.0, "global_batch_size": 4, "micro_batch_size": 4}
    sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o", **options).memory.check_clipping(1.0)
    memory = MemoryConfig(optimizer_in_bwd=True)
    with pytest.raises(FieldError, match="max_grad_norm=0") as caught:
        sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o", memory=memory, **options)
    assert caught.value.field == "memory.optimizer_in_bwd"
    memory.check_num_micro_batches(4, 4)
    MemoryConfig().check_num_micro_batches(4, 2)
    with pytest.raises(UserError, match="micro_batch_size=4"):
        memory.check_num_micro_batches(4, 2)
