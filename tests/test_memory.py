"""What saves memory changes no bit of a step, and saves memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from tests.checkpoints import FP32, batch, made, ours, tokens
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.data.dataloader.batch import Batch
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.kernels.attention_cpu import able
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


def gradients(model: Decoder, part: Batch | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    CrossEntropy()(model, part or batch(tokens())).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("adapter", [NoAdapter(), LoRAConfig(4)], ids=["full", "lora"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_no_bit(name: str, adapter, recompute, tmp_path: Path) -> None:
    folder = made(tmp_path, name)
    plain, again = (
        ours(folder, adapter, memory=MemoryConfig(activation_checkpointing=how)) for how in ("none", recompute)
    )
    assert all(map(torch.equal, gradients(plain), gradients(again)))


def kept(model: Decoder) -> int:
    """Bytes that a forward pass leaves behind for the backward pass."""
    part = batch(tokens(8, 64))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = CrossEntropy()(model, part)
    loss.backward()
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


def test_what_is_kept_is_less_and_less(tmp_path: Path) -> None:
    folder = made(tmp_path, "llama3.2")
    sizes = [
        kept(ours(folder, memory=MemoryConfig(activation_checkpointing=how))) for how in ("none", "selective", "full")
    ]
    assert sizes[0] > 1.2 * sizes[1]
    assert sizes[1] > 1.2 * sizes[2]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of what goes to the host, on a machine that has nothing else."""
    sent = []
    away = activation_offloading.OffloadedTensor

    class Counted(away):
        def __init__(self, x: torch.Tensor, *rest) -> None:
            sent.append(x.nbytes)
            super().__init__(x, *rest)

    monkeypatch.setattr(activation_offloading, "LEAST", 1)
    monkeypatch.setattr(activation_offloading, "OffloadedTensor", Counted)
    yield sent
    assert sent


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offload_changes_no_bit(name: str, recompute, host: list[int], tmp_path: Path) -> None:
    folder = made(tmp_path, name)
    plain, away = ours(folder), ours(folder, memory=MemoryConfig(activation_checkpointing=recompute))
    mover = ActivationOffloader(away)
    away.through = mover.around(away.through or (lambda layer, *inputs: layer(*inputs)))
    for _ in range(2):
        assert all(map(torch.equal, gradients(plain), gradients(away)))
        assert mover.last is None and not mover.known, "nothing stays behind"


def test_offload_leaves_weights_where_they_are(
    host: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = ours(made(tmp_path, "llama3.2"))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    counted = activation_offloading.OffloadedTensor

    def check(x: torch.Tensor, *rest) -> activation_offloading.OffloadedTensor:
        assert x.untyped_storage().data_ptr() not in weights
        return counted(x, *rest)

    monkeypatch.setattr(activation_offloading, "OffloadedTensor", check)
    model.through = ActivationOffloader(model).around(lambda layer, *inputs: layer(*inputs))
    gradients(model)


def test_what_several_operations_keep_goes_once(host: list[int], tmp_path: Path) -> None:
    """The input of q, k and v, and that of gate and up."""
    model = ours(made(tmp_path, "llama3.2"))
    model.through = ActivationOffloader(model).around(lambda layer, *inputs: layer(*inputs))
    gradients(model)
    assert len(host) < 20 * len(model.spec.layers)


def test_offload_is_for_gpus(tmp_path: Path) -> None:
    folder = made(tmp_path, "llama3.2")
    with pytest.raises(UserError, match="memory.activation_offloading"):
        ours(folder, memory=MemoryConfig(activation_offloading=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_offload_on_a_gpu(recompute, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(activation_offloading, "LEAST", 1)
    folder = made(tmp_path, "llama3.2")
    models = [ours(folder).cuda() for _ in range(2)]
    MemoryConfig(recompute, activation_offloading=True).apply(models[1], torch.device("cuda"))
    part = batch(tokens(4, 64)).to(torch.device("cuda"))
    for _ in range(3):
        for model in models:
            model.zero_grad()
            CrossEntropy()(model, part).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in models), strict=True))


def packed(rows: int, length: int, *documents: int) -> Batch:
    """Rows in which documents of these lengths lie behind each other; none: rows of their own."""
    part = batch(tokens(rows, length))
    if not documents:
        return part
    positions = torch.cat([torch.arange(n) for n in documents]).view(rows, length)
    return replace(part, positions=positions, offsets=F.pad(torch.tensor(documents).cumsum(0), (1, 0)).int())


SEEN = [packed(2, 24), packed(1, 24), packed(3, 17), packed(2, 24, 20, 20, 8), packed(1, 40, 40), packed(1, 40, 3, 37)]
KINDS = {"llama3.2": 1, "gemma2": 2, "qwen3-sliding": 2}  # kinds of layers
BF16 = PrecisionConfig("bf16", "fp32", "bf16")
slow = pytest.mark.slow


@pytest.mark.parametrize(("name", "adapter", "recompute", "precision"), [
    ("llama3.2", NoAdapter(), "none", FP32),
    pytest.param("llama3.2", LoRAConfig(4, loraplus_lr_ratio=4.0), "full", BF16, marks=slow),
    pytest.param("gemma2", LoRAConfig(4), "none", FP32, marks=slow),
    pytest.param("qwen3-sliding", NoAdapter(), "full", BF16, marks=slow),
    pytest.param("qwen3-moe", NoAdapter(), "none", FP32, marks=slow),
    pytest.param("qwen3-moe", LoRAConfig(4), "none", BF16, marks=slow),
])  # fmt: skip
def test_nothing_is_compiled_for_a_new_length(
    name, adapter, recompute, precision: PrecisionConfig, tmp_path: Path
) -> None:
    """One graph for training and one for validation of each kind of layer, whatever comes; and they give the same."""
    torch.compiler.reset()
    folder, near = made(tmp_path, name), 1e-5 if precision is FP32 else 3e-2
    plain, model = (ours(folder, adapter, precision, MemoryConfig(recompute), compile=on) for on in (False, True))
    for layer in model.layers:
        layer.compile(dynamic=True, backend="aot_eager")  # what comes behind the graphs takes long, and makes none

    def seen(parts: list[Batch]) -> int:
        for part in parts:
            found, wanted = (torch.cat([g.flatten() for g in gradients(one.train(), part)]) for one in (model, plain))
            assert (found - wanted).norm() < near * wanted.norm()
        with torch.no_grad():
            for part in parts:
                found, wanted = (CrossEntropy()(one.eval(), part).item() for one in (model, plain))
                assert found == pytest.approx(wanted, rel=near)
        return counters["stats"]["unique_graphs"]

    counters.clear()
    first = seen(SEEN[:1])
    # Where attention or experts go from part to part in Python, a graph ends before them and another begins behind.
    if name in KINDS and able():
        assert first == 2 * KINDS[name]
    assert seen(SEEN) == seen(SEEN[::-1]) == first
    torch.compiler.reset()


def test_it_is_told_when_compiling_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once, when the first rows come and not before, and where the work is kept, if somebody says where."""
    folder, told = made(tmp_path, "llama3.2"), []
    for kept in ("/home/me/.cache", None):
        monkeypatch.setenv(INDUCTOR_CACHE, kept) if kept else monkeypatch.delenv(INDUCTOR_CACHE)
        model = ours(folder)
        compile_layers(model, told.append)
        for layer in model.layers:
            layer.compile(backend="eager")
        assert not told
        for _ in range(2):
            gradients(model)
        assert len(told) == 1 and ("cached in /home/me/.cache" in told.pop()) == (kept is not None)


def trained(folder: Path, adapter, choice, memory: MemoryConfig) -> tuple[Decoder, torch.optim.Optimizer, list[float]]:
    """Four steps, and the lengths of their gradients."""
    model, norms = ours(folder, adapter, memory=memory), []
    inner = (p for layer in model.layers for p in layer.parameters())
    optimizer = choice.build(adapter.trained(model), inner)
    update = memory.update(optimizer, 0.0, DistributedContext())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(4):
        CrossEntropy()(model, batch(tokens(seed=step))).backward()
        norms.append(float(update()))
        schedule.step()
        assert all(p.grad is None for p in model.parameters())
    return model, optimizer, norms


@pytest.mark.parametrize(
    "choice",
    [AdamWConfig(1e-3), AdamW8bitConfig(1e-3), MuonConfig(1e-3), SGDConfig(1e-3, 0.9)],
    ids=lambda c: type(c).__name__,
)
@pytest.mark.parametrize("adapter", [NoAdapter(), LoRAConfig(4, loraplus_lr_ratio=4.0)], ids=["full", "lora"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_steps_in_backward_are_the_same_steps(choice, adapter, recompute: str, tmp_path: Path) -> None:
    folder = made(tmp_path, "llama3.2")
    plain = trained(folder, adapter, choice, MemoryConfig(recompute))
    early = trained(folder, adapter, choice, MemoryConfig(recompute, optimizer_in_bwd=True))
    assert early[2] == plain[2]
    weights = [*zip(plain[0].parameters(), early[0].parameters(), strict=True)]
    assert all(torch.equal(p, q) for p, q in weights)
    for p, q in weights:
        one, other = plain[1].state[p], early[1].state[q]
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


def test_gradients_are_freed_at_once(tmp_path: Path) -> None:
    """Never more than two weights have one: that which steps, and that which comes next."""
    model = ours(made(tmp_path, "llama3.2"))
    optimizer, most = AdamWConfig().build(NoAdapter().trained(model)), []
    MemoryConfig(optimizer_in_bwd=True).update(optimizer, 0.0, DistributedContext())
    for p in model.parameters():
        p.register_hook(lambda grad: most.append(sum(q.grad is not None for q in model.parameters())))
    CrossEntropy()(model, batch(tokens())).backward()
    assert most and max(most) <= 1


def test_where_it_cannot_hold_it_is_refused() -> None:
    options = {"max_grad_norm": 1.0, "global_batch_size": 4, "micro_batch_size": 4}
    assert sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o", **options).memory.refusal(1.0) is None
    early = MemoryConfig(optimizer_in_bwd=True)
    with pytest.raises(FieldError, match="max_grad_norm=0") as caught:
        sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o", memory=early, **options)
    assert caught.value.field == "memory.optimizer_in_bwd"
    early.check_passes(4, 4)
    MemoryConfig().check_passes(4, 2)
    with pytest.raises(UserError, match="micro_batch_size to 4"):
        early.check_passes(4, 2)
