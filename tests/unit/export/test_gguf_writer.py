"""An exported file is complete or absent, and export needs memory for one tensor of the model."""

import ctypes
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.gguf_models import export_checkpoint, make_checkpoint
from tests.helpers.random_checkpoints import SHAPES, rewrite_config
from tests.helpers.ranks import run_ranks
from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.errors import UserError
from tunekit.export.gguf_export import check_rounding, write_gguf
from tunekit.export.gguf_plan import build_gguf_plan
from tunekit.export.gguf_reader import GGUFCheckpoint
from tunekit.export.quant_types import parse_quant_type
from tunekit.export.vocabulary import Vocabulary

WIDE = SHAPES["llama2"] | {"hidden_size": 96, "intermediate_size": 512}


@pytest.fixture
def restore_file_size_limit() -> Iterator[None]:
    """Restore the file size limit, with which writes fail with EFBIG, as they do with ENOSPC on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("restore_file_size_limit")
def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    directory, out = make_checkpoint(tmp_path / "model", WIDE), tmp_path / "deep" / "model.gguf"
    export_checkpoint(directory, out)
    contents = out.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(UserError, match=f"{out}: .*file too large|{out}.*file too large"):
        export_checkpoint(directory, out, "q8_0")
    assert out.read_bytes() == contents
    assert [path.name for path in out.parent.iterdir()] == ["model.gguf"]


def test_missing_space_is_an_error_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path / "model", WIDE)
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=r"model\.gguf.*1000 bytes free"):
        export_checkpoint(directory, tmp_path / "out" / "model.gguf")
    assert not (tmp_path / "out").exists()


def test_error_leaves_no_partial_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), atomic.atomic_file(tmp_path / "model.gguf") as partial:
        partial.write_text("partial")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_invalid_output_path_is_rejected(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", WIDE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        export_checkpoint(directory, tmp_path / "file" / "model.gguf")
    with pytest.raises(UserError, match=str(tmp_path)):
        export_checkpoint(directory, tmp_path)


def anonymous_bytes() -> int:
    """Memory of this process without pages of memory-mapped files."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def measure_export(directory: Path, quant_type: str) -> int:
    """Growth of the memory of this process during the export and check of a checkpoint, in bytes."""
    gguf_plan = build_gguf_plan(HFCheckpoint.open(directory), parse_quant_type(quant_type))
    vocabulary, out = Vocabulary("gpt2", ["a"], [1], ["a a"]), directory / "model.gguf"
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would be reused without growth
    before, samples, finished = anonymous_bytes(), [], threading.Event()

    def sample() -> None:
        while not finished.wait(0.002):
            samples.append(anonymous_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    write_gguf(out, gguf_plan, vocabulary.to_fields())
    check_rounding(GGUFCheckpoint.open(out), gguf_plan, vocabulary)
    finished.set()
    thread.join()
    return max(samples) - before


@pytest.mark.slow
@pytest.mark.parametrize("quant_type", ["bf16", "q8_0"])
def test_peak_memory_is_that_of_a_few_tensors(quant_type: str, tmp_path: Path) -> None:
    """The model has 185 MB, its largest tensor 4 MB, or 8 MB in fp32. A few are in memory at a time."""
    directory = make_checkpoint(tmp_path / "model", WIDE)
    layers, dim, hidden = 11, 1024, 2048
    rewrite_config(
        directory, lambda c: c | {"hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers}
    )
    rewrite_config(directory, lambda c: c | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128})
    shapes = {"input_layernorm": (dim,), "post_attention_layernorm": (dim,), "self_attn.q_proj": (dim, dim)}
    shapes |= {"self_attn.k_proj": (128, dim), "self_attn.v_proj": (128, dim), "self_attn.o_proj": (dim, dim)}
    shapes |= {"mlp.gate_proj": (hidden, dim), "mlp.up_proj": (hidden, dim), "mlp.down_proj": (dim, hidden)}
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (67, dim), "lm_head.weight": (67, dim), "model.norm.weight": (dim,)}
    weights = directory / "model.safetensors"
    save_file({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in names.items()}, weights)
    (peak_growth,) = run_ranks(1, measure_export, directory, quant_type)
    assert peak_growth < 0.5 * weights.stat().st_size
