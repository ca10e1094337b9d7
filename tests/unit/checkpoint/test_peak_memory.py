"""Peak memory of loading and saving, measured by the kernel in a separate process."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoint_ranks import measure_memory, peak_memory, return_freed_memory
from tests.helpers.ranks import run_ranks
from tunekit import build
from tunekit.adapters.config import FrozenModel, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.safetensors_io import SafetensorsWriter
from tunekit.checkpoint.save_model import plan_shards, save_model, tensor_entries, write_index
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_map import save_mappings
from tunekit.quantization.config import NoQuantization

CONFIG = {"model_type": "llama", "vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 4096}
CONFIG |= {"num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "torch_dtype": "bfloat16"}
LARGEST = 16000 * 1024 * 4  # bytes of the embedding in fp32

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 MB of random weights in files of 100 MB."""
    directory = tmp_path_factory.mktemp("large")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    source = HFCheckpoint.open(directory)
    with torch.device("meta"):
        shapes = Decoder(source.spec).shapes
        model = Decoder(source.spec)
    entries = {
        n: e for move in save_mappings(shapes, source.family.table) for n, e in tensor_entries(model, move, source)
    }
    shards = plan_shards(entries, source, 10**8)
    assert len(shards) > 3
    for file, names in shards.items():
        with SafetensorsWriter(directory / file, {name: entries[name] for name in names}) as out:
            for name in names:
                out[name] = torch.full(entries[name][0], 0.01, dtype=entries[name][1])
    write_index(directory, shards, entries, source)
    return directory


def load_and_save(directory: Path, out: Path, adapter: NoAdapter | FrozenModel) -> tuple[int, int, int]:
    """Bytes of a model, and growth of the memory while it is loaded and saved."""
    return_freed_memory()
    source, options = HFCheckpoint.open(directory), (MemoryConfig(), DistributedContext(0, "cpu"))
    precision = PrecisionConfig("fp32", "fp32", "checkpoint")
    load, model = peak_memory(lambda: build.build_model(source, NoQuantization(), adapter, precision, *options))
    out.mkdir()
    save, _ = peak_memory(lambda: save_model(out, model, source, quiet=True))
    return sum(parameter.nbytes for parameter in model.parameters()), load, save


@pytest.mark.parametrize("adapter", [FrozenModel(), NoAdapter()], ids=["frozen", "full"])
def test_model_is_in_memory_once(adapter: NoAdapter | FrozenModel, directory: Path, tmp_path: Path) -> None:
    """Frozen in the dtype of the files, or trained in fp32. Saving makes no copy of the full model."""
    ((model, load, save),) = run_ranks(1, load_and_save, directory, tmp_path / "out", adapter)
    assert model > 4e8
    assert load < 1.15 * model
    assert save < LARGEST + 3e7
    first = HFCheckpoint.open(directory).directory.files[0].name
    assert (tmp_path / "out" / first).read_bytes() == (directory / first).read_bytes()


@pytest.mark.multi
def test_rank_has_its_shard_and_one_tensor(directory: Path, tmp_path: Path) -> None:
    for shard_bytes, load, save in run_ranks(2, measure_memory, directory, tmp_path / "out"):
        assert 2e8 < shard_bytes < 2.4e8
        assert load < 1.6 * shard_bytes, "the full model is twice the shard"
        assert save < 1.25 * LARGEST, "one full tensor in bf16, its shards, and what is written"
    for path in HFCheckpoint.open(directory).directory.files:
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
