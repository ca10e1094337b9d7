"""An exported file is complete or absent, and export needs memory for one tensor of the model."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.gguf_models import export_checkpoint, make_checkpoint
from tests.helpers.random_checkpoints import SHAPES, rewrite_config
from tunekit.checkpoint import atomic
from tunekit.errors import UserError

WIDE = SHAPES["llama2"] | {"hidden_size": 96, "intermediate_size": 512}
MEMORY_SCRIPT = """
import sys, threading, time
from pathlib import Path
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.export.gguf_export import check_rounding
from tunekit.export.quant_types import parse_quant_type
from tunekit.export.gguf_plan import build_gguf_plan
from tunekit.export.gguf_reader import GGUFCheckpoint
from tunekit.export.vocabulary import Vocabulary
from tunekit.export.gguf_export import write_gguf
plan = build_gguf_plan(HFCheckpoint.open(Path(sys.argv[1])), parse_quant_type(sys.argv[2]))
vocabulary = Vocabulary("gpt2", ["a"], [1], ["a a"])
def anonymous_kib():  # without pages of memory-mapped files
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])
before, seen, over = anonymous_kib(), [], threading.Event()
def watch():
    while not over.wait(0.002):
        seen.append(anonymous_kib())
thread = threading.Thread(target=watch, daemon=True)
thread.start()
write_gguf(Path(sys.argv[3]), plan, vocabulary.to_fields())
check_rounding(GGUFCheckpoint.open(Path(sys.argv[3])), plan, vocabulary)
over.set()
thread.join()
print((max(seen) - before) * 1024)
"""


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
    with pytest.raises(UserError, match=r"model\.gguf.*1 kB"):
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


@pytest.mark.slow
@pytest.mark.parametrize("quant_type", ["bf16", "q8_0"])
def test_peak_memory_is_that_of_a_few_tensors(quant_type: str, tmp_path: Path) -> None:
    """The model has 660 MB, its largest tensor 26 MB, or 52 MB in fp32. A few are in memory at a time."""
    directory = make_checkpoint(tmp_path / "model", WIDE)
    layers, dim, hidden = 8, 1024, 12_800
    rewrite_config(
        directory, lambda c: c | {"hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers}
    )
    rewrite_config(directory, lambda c: c | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128})
    shapes = {"input_layernorm": (dim,), "post_attention_layernorm": (dim,), "self_attn.q_proj": (dim, dim)}
    shapes |= {"self_attn.k_proj": (128, dim), "self_attn.v_proj": (128, dim), "self_attn.o_proj": (dim, dim)}
    shapes |= {"mlp.gate_proj": (hidden, dim), "mlp.up_proj": (hidden, dim), "mlp.down_proj": (dim, hidden)}
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (67, dim), "lm_head.weight": (67, dim), "model.norm.weight": (dim,)}
    save_file(
        {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in names.items()},
        directory / "model.safetensors",
    )
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(directory), quant_type, str(tmp_path / "model.gguf")]
    peak_growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak_growth < 330e6
