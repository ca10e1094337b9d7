"""Micro-batches in static tensors have the loss and gradients of the originals, also when passes are replayed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.random_checkpoints import make_checkpoint, relative_error
from tests.helpers.training_steps import make_batch
from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE, LENGTH_MULTIPLE, Batch
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models import decode
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.recipes import sft
from tunekit.training import cuda_graph
from tunekit.training.cuda_graph import BatchShape, GraphedBackwardPass, StaticBatch

CPU = torch.device("cpu")
FP32 = PrecisionConfig("fp32", "fp32", "fp32")
CONFIG = sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o")


def random_batch(step: int, packed: bool, weighted: bool = False, rows: int = 2, length: int = 48) -> Batch:
    """Rows with a number of targets, and bounds of documents, that differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(4, 60, (rows, length), generator=generator)
    is_target = torch.rand(tokens.shape, generator=generator) < 0.3 + 0.05 * (step % 4)
    targets = tokens.roll(-1, 1).masked_fill(~is_target, IGNORE)
    weights = torch.rand(tokens.shape, generator=generator) if weighted else None
    batch = make_batch(tokens, targets, packed=False, weights=weights)
    if not packed:
        return batch
    ends = sorted({*torch.randint(1, length, (1 + step % 4,), generator=generator).tolist(), length})
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)] * rows
    cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in sizes]).view(rows, length)
    return replace(batch, cu_seqlens=cu_seqlens, positions=positions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama3.2")


def load(folder: Path, adapter: NoAdapter | LoRAConfig, dist: DistributedContext) -> Decoder:
    model = build.build_model(HFCheckpoint.open(folder), NoQuantization(), adapter, FP32, MemoryConfig(), dist)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def gradients(model: Decoder) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("length", [48, 39])  # padded to 48
@pytest.mark.parametrize(("packed", "weighted"), [(True, False), (False, False), (True, True)])
def test_a_static_batch_has_the_loss_and_gradients_of_its_batch(
    folder: Path, packed: bool, weighted: bool, length: int
) -> None:
    with DistributedContext(0, "cpu") as dist:
        model = load(folder, NoAdapter(), dist)
        for step in range(3):
            batch = random_batch(step, packed, weighted, length=length)
            static = StaticBatch(BatchShape.of(batch), CPU)
            static.fill(batch, batch.loss_denominator)
            results = []
            for item in (batch, static.batch):
                model.zero_grad()
                loss = sft.backward_pass(model, CONFIG, dist, item, batch.loss_denominator)
                results.append((float(loss), gradients(model)))
            (expected, expected_gradients), (actual, actual_gradients) = results
            assert actual == pytest.approx(expected, rel=1e-6)
            assert relative_error(actual_gradients, expected_gradients) < 1e-6


def train(
    folder: Path, adapter: NoAdapter | LoRAConfig, capture: Callable | None, packed: bool, steps: int = 9
) -> tuple[list[float], Tensor]:
    """Losses and weights of a few steps of one to three micro-batches. The gradients of step 4 are not used."""
    with DistributedContext(0, "cpu") as dist:
        model = load(folder, adapter, dist)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        run_pass = partial(sft.backward_pass, model, CONFIG, dist)
        if capture is not None:
            run_pass = GraphedBackwardPass(run_pass, model, capture)
        losses = []
        for step in range(steps):
            batches = [random_batch(3 * step + i, packed) for i in range(1 + step % 3)]
            losses.append(float(sft.forward_backward(model, batches, CONFIG, dist, run_pass)))
            if step == 4:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("adapter", [NoAdapter(), LoRAConfig(4)], ids=["full", "lora"])
@pytest.mark.parametrize("packed", [True, False])
def test_replayed_passes_train_like_eager_ones(folder: Path, adapter: NoAdapter | LoRAConfig, packed: bool) -> None:
    """With gradient accumulation, gradients that are dropped, and several shapes. Here a replay runs the step again."""
    replays = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            replays.append(step)
            step()

        return replay

    losses, weights = train(folder, adapter, capture, packed)
    expected_losses, expected_weights = train(folder, adapter, None, packed)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert relative_error(weights, expected_weights) < 1e-6
    assert replays


def test_further_shapes_run_without_a_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 1)
    decode.warn_eager.cache_clear()
    losses, weights = train(folder, NoAdapter(), lambda step: step, packed=True)
    assert "more than 1 shapes" in capsys.readouterr().err
    expected_losses, expected_weights = train(folder, NoAdapter(), None, packed=True)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert relative_error(weights, expected_weights) < 1e-6


def test_shapes_are_few() -> None:
    """Micro-batches of packed rows share a few graphs, also if the rows are not full."""
    shapes = {BatchShape.of(random_batch(step, packed=True)) for step in range(200)}
    assert len(shapes) <= 12
    widths = range(1700, 2049, LENGTH_MULTIPLE)
    assert len({BatchShape.of(random_batch(0, packed=True, length=width)).length for width in widths}) <= 4


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("compile", {"compile": True}),
        ("memory.activation_checkpointing", {"memory": MemoryConfig("full")}),
        ("adapter.dropout", {"adapter": LoRAConfig(4, dropout=0.1)}),
        ("precision.compute_dtype=bf16", {"precision": FP32}),
        ("neftune_noise_alpha", {"neftune_noise_alpha": 5.0}),
    ],
)
def test_keys_that_a_graph_does_not_support_are_named(key: str, options: dict) -> None:
    with pytest.raises(FieldError, match=key) as error:
        replace(CONFIG, cuda_graph=True, **options)
    assert error.value.field == "cuda_graph"


def test_without_graphs_steps_are_eager(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DistributedContext(0, "cpu") as dist:
        model = load(folder, NoAdapter(), dist)
        decode.warn_eager.cache_clear()
        run_pass = partial(sft.backward_pass, model, CONFIG, dist)
        assert cuda_graph.graph_backward_pass(run_pass, model, dist) is run_pass
    assert "cuda_graph: no CUDA graph is used" in "".join(capsys.readouterr())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
@pytest.mark.parametrize("name", ["llama3.2", "qwen3", "gemma3"])
def test_graphs_on_a_gpu_equal_eager_passes(tmp_path: Path, name: str, kind: str) -> None:
    weights = NF4Config() if kind == "qlora" else NoQuantization()
    adapter = NoAdapter() if kind == "full" else LoRAConfig(4)
    source, results = HFCheckpoint.open(make_checkpoint(tmp_path, name)), []
    for use_graphs in (False, True):
        with DistributedContext(0, "cuda") as dist:
            precision = PrecisionConfig("bf16", "fp32", "bf16")
            model = build.build_model(source, weights, adapter, precision, MemoryConfig(), dist)
            run_pass = partial(sft.backward_pass, model, CONFIG, dist)
            if use_graphs:
                run_pass = cuda_graph.graph_backward_pass(run_pass, model, dist)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            losses = []
            for step in range(12):
                batches = [random_batch(3 * step + i, packed=True) for i in range(1 + step % 3)]
                losses.append(float(sft.forward_backward(model, batches, CONFIG, dist, run_pass)))
                optimizer.step()
                optimizer.zero_grad()
            if use_graphs:
                assert isinstance(run_pass, GraphedBackwardPass)
                assert any(graph.replay for _, graph in run_pass.steps.values())
            trained = [p.detach().float().flatten() for p in model.parameters() if p.requires_grad]
            results.append((losses, torch.cat(trained)))
    (expected, expected_weights), (actual, actual_weights) = results
    assert actual == pytest.approx(expected, rel=2e-3)
    assert relative_error(actual_weights, expected_weights) < 2e-3


@pytest.mark.parametrize(
    "attributes", [{"measure": lambda logits, targets: logits.sum()}, {"__call__": lambda self, model, batch: 0}]
)
def test_losses_that_may_not_read_weights_are_refused(attributes: dict) -> None:
    custom = type("Custom", (CrossEntropy,), attributes)
    with pytest.raises(FieldError, match="loss=crossentropy"):
        replace(CONFIG, cuda_graph=True, loss=custom())
