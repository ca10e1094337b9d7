"""Logits of a checkpoint that is read part by part: those of the whole model to the last bit, in far less memory."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import FP32, SHAPES, build, made, ours, save, shuffle_adapter
from tunekit.adapters.config import DoRAConfig, FrozenModel, LoRAConfig
from tunekit.checkpoint import layerwise_forward, merge, peft_adapter, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.models.precision import PrecisionConfig

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
ROWS = [[5, 3, 60, 2, 2, 9, 14, 33], [7], [66, 0, 41], list(range(20))]
BF16 = PrecisionConfig("bf16", "fp32", "bf16")
# 16 layers of 9 MB.
DEEP = SHAPES["llama2"] | {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 16}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = made(tmp_path, name)
    found = layerwise_forward.checkpoint_logits(HFCheckpoint.open(folder), FrozenModel(), ROWS, FP32, CPU)
    assert torch.equal(found.whole(), layerwise_forward.forward_logits(ours(folder), ROWS, CPU).whole())


@pytest.mark.parametrize("name", ["llama2", "gemma2", "mixtral", "qwen3-next"])
def test_rows_of_any_length_are_asked_together(name: str, tmp_path: Path) -> None:
    model = ours(made(tmp_path, name))
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row]))[0] for row in ROWS])
    torch.testing.assert_close(layerwise_forward.forward_logits(model, ROWS, CPU).whole(), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("llama3.2", LoRAConfig(3, target_modules=("all-linear", "embed", "head"))),
        ("llama-biases", LoRAConfig(4, use_rslora=True, target_modules=("q_proj", "down_proj"))),
        ("qwen3-biases", DoRAConfig(2, target_modules=("all-linear", "head"))),
        ("mixtral", LoRAConfig(2, target_modules="all-linear")),
        ("gemma2", LoRAConfig(2, target_modules="attn", modules_to_save=("norms", "embed"))),
        ("llama3.2", LoRAConfig(2, target_modules="attn", modules_to_save=("head",), untie_embeddings=True)),
        ("phi3", LoRAConfig(2, alpha_pattern={"down_proj": 5.0})),
    ],
)
def test_an_adapter_takes_part(name: str, adapter: LoRAConfig, precision: PrecisionConfig, tmp_path: Path) -> None:
    folder, start = made(tmp_path / "base", name), tmp_path / "adapter"
    model, source = ours(folder, adapter, precision), HFCheckpoint.open(folder)
    shuffle_adapter(model)
    start.mkdir()
    peft_adapter.save_adapter(start, model, adapter, source)
    there = replace(peft_adapter.read_adapter_config(start, source), adapter_path=str(start))
    found = layerwise_forward.checkpoint_logits(source, there, ROWS, precision, CPU).whole()
    assert torch.equal(found, layerwise_forward.forward_logits(model, ROWS, CPU).whole())
    plain = layerwise_forward.checkpoint_logits(source, FrozenModel(), ROWS, precision, CPU).whole()
    assert not torch.allclose(found, plain, atol=0.1), "the adapter says something"


def resident(what: str) -> int:
    """Bytes that this process holds, pages of mapped files among them in VmRSS and not in RssAnon."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) * 1024


def growth(work: Callable[[], Any], what: str = "VmRSS") -> int:
    """How much the memory of this process grows at most."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not used again unseen
    before, most, over = resident(what), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            most.append(resident(what))

    thread = threading.Thread(target=watch)
    thread.start()
    made = work()
    most.append(resident(what))  # the other thread may not have come to it
    del made
    over.set()
    thread.join()
    return max(most) - before


def alone(work: Callable[[Path], None], folder: Path) -> None:
    """Call a function of this file in a process of its own: memory that other tests have left would hide growth."""
    told = f"import sys, pathlib, {__name__} as here; here.{work.__name__}(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", told, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_second_model_is_in_memory(tmp_path: Path) -> None:
    alone(no_second_model, tmp_path)


def no_second_model(tmp_path: Path) -> None:
    folder = save(build(DEEP), tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    layerwise_forward.checkpoint_logits(
        HFCheckpoint.open(folder), FrozenModel(), ROWS, FP32, CPU
    )  # what is imported and allocated once
    assert growth(lambda: ours(folder)) > 0.8 * size, "a second one is seen"
    assert (
        growth(lambda: layerwise_forward.checkpoint_logits(HFCheckpoint.open(folder), FrozenModel(), ROWS, FP32, CPU))
        < 0.5 * size
    )


def test_of_a_large_vocabulary_only_parts_are_in_memory(tmp_path: Path) -> None:
    alone(parts_of_a_large_vocabulary, tmp_path)


def parts_of_a_large_vocabulary(tmp_path: Path) -> None:
    """An embedding and a head of 92 MB each, a head that was adapted, and 40 MB of logits."""
    wide = SHAPES["llama2"] | {"hidden_size": 384, "num_hidden_layers": 1, "vocab_size": 60_000}
    base, start, out = save(build(wide), tmp_path / "base"), tmp_path / "adapter", tmp_path / "out"
    adapter = LoRAConfig(2, target_modules=("embed", "head"))
    model, source = ours(base, adapter), HFCheckpoint.open(base)
    start.mkdir(), out.mkdir()
    peft_adapter.save_adapter(start, model, adapter, source)
    merge.merge_adapter(source, start, out, quiet=True)
    there, rows = replace(adapter, adapter_path=str(start)), [list(range(20))] * 8

    def compare() -> None:
        wanted = layerwise_forward.checkpoint_logits(source, there, rows, FP32, CPU)
        rounded = layerwise_forward.checkpoint_logits(
            source, there, rows, FP32, CPU, written=HFCheckpoint.open(out).dtypes
        )
        found = layerwise_forward.checkpoint_logits(HFCheckpoint.open(out), FrozenModel(), rows, FP32, CPU)
        assert verify.distances([wanted, rounded], found)[0].mean < 1e-4

    compare()
    assert growth(lambda: torch.ones(10**7), "RssAnon") > 3e7, "that much more is seen"
    assert growth(compare, "RssAnon") < 92e6, "none of them was there whole"
