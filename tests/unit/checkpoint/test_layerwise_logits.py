"""Layer-by-layer logits of a checkpoint equal those of the full model bit for bit, with far less memory."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.random_checkpoints import FP32, SHAPES, build, load_model, make_checkpoint, save, shuffle_adapter
from tests.helpers.ranks import run_ranks
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.checkpoint import merge, peft_adapter, verify
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import ModelSource, checkpoint_logits, forward_logits
from tunekit.models.precision import PrecisionConfig

CPU = torch.device("cpu")
ROWS = [[5, 3, 60, 2, 2, 9, 14, 33], [7], [66, 0, 41], list(range(20))]
BF16 = PrecisionConfig("bf16", "fp32", "bf16")
# 16 layers of 9 MB.
DEEP = SHAPES["llama2"] | {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 16}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_the_full_model(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, name)
    logits = checkpoint_logits(ModelSource(HFCheckpoint.open(folder)), ROWS, CPU)
    assert torch.equal(logits.full(), forward_logits(load_model(folder), ROWS, CPU).full())


@pytest.mark.parametrize("name", ["llama2", "gemma2", "mixtral", "qwen3-next"])
def test_rows_of_different_lengths_are_batched(name: str, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, name))
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([row]))[0] for row in ROWS])
    torch.testing.assert_close(forward_logits(model, ROWS, CPU).full(), expected, rtol=1e-4, atol=1e-4)


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
def test_adapter_is_applied(name: str, adapter: LoRAConfig, precision: PrecisionConfig, tmp_path: Path) -> None:
    folder, adapter_dir = make_checkpoint(tmp_path / "base", name), tmp_path / "adapter"
    model, source = load_model(folder, adapter, precision), HFCheckpoint.open(folder)
    shuffle_adapter(model)
    adapter_dir.mkdir()
    peft_adapter.save_adapter(adapter_dir, model, adapter, source)
    saved_adapter = peft_adapter.read_adapter_config(AdapterDir.open(adapter_dir), source)
    logits = checkpoint_logits(ModelSource(source, adapter=saved_adapter, precision=precision), ROWS, CPU).full()
    assert torch.equal(logits, forward_logits(model, ROWS, CPU).full())
    base_logits = checkpoint_logits(ModelSource(source, precision=precision), ROWS, CPU).full()
    assert not torch.allclose(logits, base_logits, atol=0.1), "the adapter changes the logits"


def memory_status(field: str) -> int:
    """Bytes of the process in a field of /proc/self/status. VmRSS includes mapped files, RssAnon does not."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def peak_growth(fn: Callable[[], Any], field: str = "VmRSS") -> int:
    """Peak growth of the process's memory during a call, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would be reused without growth
    before, samples, finished = memory_status(field), [0], threading.Event()

    def sample() -> None:
        while not finished.wait(0.0005):
            samples.append(memory_status(field))

    thread = threading.Thread(target=sample)
    thread.start()
    result = fn()
    samples.append(memory_status(field))  # the thread may have missed the end
    del result
    finished.set()
    thread.join()
    return max(samples) - before


def test_neither_a_second_model_nor_a_large_vocabulary_is_in_memory(tmp_path: Path) -> None:
    """Measured in a separate process: memory left by other tests would hide growth."""
    run_ranks(1, check_memory, tmp_path)


def check_memory(folder: Path) -> None:
    check_no_second_model(folder / "deep")
    check_large_vocabulary(folder / "wide")


def check_no_second_model(tmp_path: Path) -> None:
    folder = save(build(DEEP), tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    checkpoint_logits(ModelSource(HFCheckpoint.open(folder)), ROWS, CPU)  # imports and one-time allocations
    assert peak_growth(lambda: load_model(folder)) > 0.8 * size, "a second model is measured"
    assert peak_growth(lambda: checkpoint_logits(ModelSource(HFCheckpoint.open(folder)), ROWS, CPU)) < 0.5 * size


def check_large_vocabulary(tmp_path: Path) -> None:
    """An embedding and a head of 92 MB each, an adapted head, and 40 MB of logits."""
    config = SHAPES["llama2"] | {"hidden_size": 384, "num_hidden_layers": 1, "vocab_size": 60_000}
    base, adapter_dir, out = save(build(config), tmp_path / "base"), tmp_path / "adapter", tmp_path / "out"
    adapter = LoRAConfig(2, target_modules=("embed", "head"))
    model, source = load_model(base, adapter), HFCheckpoint.open(base)
    adapter_dir.mkdir(), out.mkdir()
    peft_adapter.save_adapter(adapter_dir, model, adapter, source)
    merge.merge_adapter(source, source.open_adapter(adapter_dir), out, quiet=True)
    saved_adapter, rows = replace(adapter, adapter_path=str(adapter_dir)), [list(range(20))] * 8

    def compare() -> None:
        expected = checkpoint_logits(ModelSource(source, adapter=saved_adapter), rows, CPU)
        dtypes = HFCheckpoint.open(out).dtypes
        rounded = checkpoint_logits(ModelSource(source, adapter=saved_adapter), rows, CPU, rounded_dtypes=dtypes)
        actual = checkpoint_logits(ModelSource(HFCheckpoint.open(out)), rows, CPU)
        assert verify.logit_diffs([expected, rounded], actual)[0].mean < 1e-4

    compare()
    assert peak_growth(lambda: torch.ones(10**7), "RssAnon") > 3e7, "40 MB are measured"
    assert peak_growth(compare, "RssAnon") < 92e6, "neither the embedding nor the head is loaded completely"
