"""Layers in static tensors have the hidden states and gradients of the originals, also when passes are replayed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers import preference_pairs
from tests.helpers.random_checkpoints import make_checkpoint, relative_error
from tests.helpers.training_steps import make_batch
from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE, LENGTH_MULTIPLE, Batch
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.losses.dpo import DPO
from tunekit.losses.preference_objective import PreferenceObjective
from tunekit.memory.config import MemoryConfig
from tunekit.models import decode
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.recipes import preference, sft
from tunekit.training import cuda_graph
from tunekit.training.cuda_graph import GraphedLayers, PassShape, StaticInputs, set_up_cuda_graphs

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
@pytest.mark.parametrize("packed", [True, False])
def test_static_inputs_have_the_hidden_states_of_their_batch(folder: Path, packed: bool, length: int) -> None:
    with DistributedContext(0, "cpu") as dist, torch.no_grad():
        model = load(folder, NoAdapter(), dist)
        for step in range(3):
            batch = random_batch(step, packed, length=length)
            static = StaticInputs(PassShape.of(batch.tokens, batch.layout), CPU)
            static.fill(batch.tokens, batch.positions, batch.layout)
            actual = model.run_layers(static.tokens, static.positions, static.layout)[:, :length]
            expected = model.run_layers(batch.tokens, batch.positions, batch.layout)
            assert relative_error(actual, expected) < 1e-6


def rerun(step: Callable[[], None]) -> Callable[[], None]:
    """A capture whose replay runs the step again."""
    return step


def train(
    folder: Path, adapter: NoAdapter | LoRAConfig, capture: Callable | None, packed: bool, steps: int = 9
) -> tuple[list[float], Tensor, GraphedLayers | None]:
    """Losses and weights of a few steps of one to three micro-batches. The gradients of step 4 are not used."""
    with DistributedContext(0, "cpu") as dist:
        model = load(folder, adapter, dist)
        graphs = model.layer_graphs = None if capture is None else GraphedLayers(model, capture)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        losses = []
        for step in range(steps):
            batches = [random_batch(3 * step + i, packed, weighted=True) for i in range(1 + step % 3)]
            losses.append(float(sft.forward_backward(model, batches, CONFIG, dist)))
            if step == 4:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        return losses, torch.cat([p.detach().flatten() for p in model.parameters()]), graphs


@pytest.mark.parametrize("adapter", [NoAdapter(), LoRAConfig(4)], ids=["full", "lora"])
@pytest.mark.parametrize("packed", [True, False])
def test_replayed_passes_train_like_eager_ones(folder: Path, adapter: NoAdapter | LoRAConfig, packed: bool) -> None:
    """With gradient accumulation, gradients that are dropped, and several shapes."""
    losses, weights, graphs = train(folder, adapter, rerun, packed)
    expected_losses, expected_weights, _ = train(folder, adapter, None, packed)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert relative_error(weights, expected_weights) < 1e-6
    assert graphs is not None and any(item.replay for item in graphs.passes.values())


@pytest.mark.parametrize("shared", [True, False])
def test_preference_losses_run_with_graphs(folder: Path, shared: bool) -> None:
    """Pairs that share their prompts are not captured, with the same result."""
    results = []
    for use_graphs in (False, True):
        with DistributedContext(0, "cpu") as dist:
            model = load(folder, LoRAConfig(4), dist)
            graphs = model.layer_graphs = GraphedLayers(model, rerun) if use_graphs else None
            objective = PreferenceObjective((DPO(),))
            for _ in range(4):
                model.zero_grad()
                batches = preference_pairs.make_batches(shared, 0, 1, 1)
                loss, _ = preference.forward_backward(model, batches, objective, dist)
            results.append((float(loss), gradients(model)))
            assert not graphs or any(item.replay for item in graphs.passes.values()) is not shared
    (expected, expected_gradients), (actual, actual_gradients) = results
    assert actual == pytest.approx(expected, rel=1e-5)
    assert relative_error(actual_gradients, expected_gradients) < 1e-5


def test_second_pass_before_the_backward_pass_of_the_first_runs_without_a_graph(folder: Path) -> None:
    """Both would use the same memory."""
    with DistributedContext(0, "cpu") as dist:
        model = load(folder, LoRAConfig(4), dist)
        results = []
        for graphs in (None, GraphedLayers(model, rerun)):
            model.layer_graphs = graphs
            for _ in range(4):
                model.zero_grad()
                first, second = (
                    model(batch.tokens, batch.positions, batch.layout).square().mean()
                    for batch in (random_batch(0, packed=True), random_batch(1, packed=True))
                )
                (first + 2 * second).backward()
            results.append(gradients(model))
        assert relative_error(results[1], results[0]) < 1e-5
        lost = model(random_batch(0, packed=True).tokens)  # without a backward pass: later passes are graphs again
        assert graphs is not None and graphs.pending is not None and graphs.pending() is not None
        del lost
        assert graphs.pending() is None


def test_failed_capture_leaves_passes_eager(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    decode.warn_eager.cache_clear()
    losses, weights, _ = train(folder, NoAdapter(), fail, packed=True)
    assert "the capture failed: operation not permitted when stream is capturing. " in capsys.readouterr().err
    expected_losses, expected_weights, _ = train(folder, NoAdapter(), None, packed=True)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert relative_error(weights, expected_weights) < 1e-6


def test_wrong_hidden_states_leave_passes_eager(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode.warn_eager.cache_clear()
    with DistributedContext(0, "cpu") as dist:
        model, batch = load(folder, NoAdapter(), dist), random_batch(0, packed=True)
        scale = [1.0]

        def run(*inputs: Tensor | SequenceLayout | None) -> Tensor:
            return model.run_layers(*inputs) * scale[0]

        def capture(step: Callable[[], None]) -> Callable[[], None]:
            def replay() -> None:
                scale[0] = 1.5
                step()
                scale[0] = 1.0

            return replay

        graphs = GraphedLayers(model, capture)
        for _ in range(3):
            hidden = graphs(run, batch.tokens, batch.positions, batch.layout)
            hidden.sum().backward()
        assert torch.equal(hidden, run(batch.tokens, batch.positions, batch.layout))
    assert "hidden states differ by 0.5" in capsys.readouterr().err


def test_further_shapes_run_without_a_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 1)
    decode.warn_eager.cache_clear()
    losses, weights, _ = train(folder, NoAdapter(), rerun, packed=True)
    assert "more shapes than the 1 that" in capsys.readouterr().err
    expected_losses, expected_weights, _ = train(folder, NoAdapter(), None, packed=True)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert relative_error(weights, expected_weights) < 1e-6


def test_large_micro_batches_run_without_a_graph(folder: Path) -> None:
    """With `auto`."""
    with DistributedContext(0, "cpu") as dist:
        model = load(folder, NoAdapter(), dist)
        num_params = sum(p.numel() for p in model.parameters())
        graphs = GraphedLayers(model, rerun, max_work=num_params * 96)
        small, large = (random_batch(0, packed=False, length=length).tokens for length in (48, 64))
        assert graphs.accepts(small, None) and not graphs.accepts(large, None)


def test_shapes_are_few() -> None:
    """Micro-batches of packed rows share a few graphs, also if the rows are not full."""

    def shape(batch: Batch) -> PassShape:
        return PassShape.of(batch.tokens, batch.layout)

    assert len({shape(random_batch(step, packed=True)) for step in range(200)}) <= 4
    widths = range(1700, 2049, LENGTH_MULTIPLE)
    assert len({shape(random_batch(0, packed=True, length=width)).length for width in widths}) <= 4


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
    assert replace(CONFIG, **options).cuda_graph == "auto"


def test_without_graphs_steps_are_eager(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode.warn_eager.cache_clear()
    with DistributedContext(0, "cpu") as dist:
        model = load(folder, NoAdapter(), dist)
        set_up_cuda_graphs(model, CONFIG, dist)
        assert model.layer_graphs is None and not capsys.readouterr().err
        set_up_cuda_graphs(model, replace(CONFIG, cuda_graph=True), dist)
        assert model.layer_graphs is None
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
            set_up_cuda_graphs(model, replace(CONFIG, cuda_graph=use_graphs), dist)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            losses = []
            for step in range(12):
                batches = [random_batch(3 * step + i, packed=True) for i in range(1 + step % 3)]
                losses.append(float(sft.forward_backward(model, batches, CONFIG, dist)))
                optimizer.step()
                optimizer.zero_grad()
            if use_graphs:
                assert isinstance(model.layer_graphs, GraphedLayers)
                assert any(item.replay for item in model.layer_graphs.passes.values())
            trained = [p.detach().float().flatten() for p in model.parameters() if p.requires_grad]
            results.append((losses, torch.cat(trained)))
    (expected, expected_weights), (actual, actual_weights) = results
    assert actual == pytest.approx(expected, rel=2e-3)
    assert relative_error(actual_weights, expected_weights) < 2e-3
