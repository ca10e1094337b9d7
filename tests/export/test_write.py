"""A file is there whole or not at all, and only one tensor of the model is in memory."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import SHAPES, rewrite
from tests.export.exported import made, written
from tunekit.checkpoint import atomic
from tunekit.errors import UserError
from tunekit.export.gguf_writer import appearing

WIDE = SHAPES["llama2"] | {"hidden_size": 96, "intermediate_size": 512}
NARROW = """
import sys, threading, time
from pathlib import Path
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.export.rounding_check import check_rounding
from tunekit.export.quant_types import parse_quant_type
from tunekit.export.tensor_map import build_tensor_map
from tunekit.export.gguf_reader import GGUFCheckpoint
from tunekit.export.vocabulary import Vocabulary
from tunekit.export.gguf_writer import write_gguf
plan = build_tensor_map(HFCheckpoint.open(Path(sys.argv[1])), parse_quant_type(sys.argv[2]))
words = Vocabulary("gpt2", ["a"], [1], ["a a"])
def own():  # without pages of files that are mapped
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])
before, seen, over = own(), [], threading.Event()
def watch():
    while not over.wait(0.002):
        seen.append(own())
thread = threading.Thread(target=watch)
thread.start()
write_gguf(Path(sys.argv[3]), plan, words.said(), quiet=True)
check_rounding(GGUFCheckpoint.open(Path(sys.argv[3])), plan, words, quiet=True)
over.set()
thread.join()
print((max(seen) - before) * 1024)
"""


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file over 64 kB: every write beyond says EFBIG, as a full disk says ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    folder, out = made(tmp_path / "model", WIDE), tmp_path / "deep" / "model.gguf"
    written(folder, out)
    old = out.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(UserError, match=f"cannot write {out}: file too large"):
        written(folder, out, "q8_0")
    assert out.read_bytes() == old
    assert [path.name for path in out.parent.iterdir()] == ["model.gguf"]


def test_it_is_refused_before_it_is_begun_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "model", WIDE)
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=r"model.gguf: it takes .* and 1 kB are free"):
        written(folder, tmp_path / "out" / "model.gguf")
    assert not (tmp_path / "out").exists()


def test_an_error_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), appearing(tmp_path / "model.gguf") as partial:
        partial.write_text("half")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_no_file_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", WIDE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        written(folder, tmp_path / "file" / "model.gguf")
    with pytest.raises(UserError, match="is a folder"):
        written(folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["bf16", "q8_0"])
def test_memory_is_that_of_one_tensor(word: str, tmp_path: Path) -> None:
    """The model has 660 MB, its largest tensor 26 MB and twice that in fp32, of which a few are there at a time."""
    folder = made(tmp_path / "model", WIDE)
    layers, dim, hidden = 8, 1024, 12_800
    rewrite(folder, lambda c: c | {"hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers})
    rewrite(folder, lambda c: c | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128})
    shapes = {"input_layernorm": (dim,), "post_attention_layernorm": (dim,), "self_attn.q_proj": (dim, dim)}
    shapes |= {"self_attn.k_proj": (128, dim), "self_attn.v_proj": (128, dim), "self_attn.o_proj": (dim, dim)}
    shapes |= {"mlp.gate_proj": (hidden, dim), "mlp.up_proj": (hidden, dim), "mlp.down_proj": (dim, hidden)}
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (67, dim), "lm_head.weight": (67, dim), "model.norm.weight": (dim,)}
    save_file({name: torch.randn(shape).bfloat16() for name, shape in names.items()}, folder / "model.safetensors")
    command = [sys.executable, "-c", NARROW, str(folder), word, str(tmp_path / "model.gguf")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 330e6
