"""Checkpoints that are loaded and saved again are the same bit for bit, in every layout and dtype."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import (
    FULL,
    SHAPES,
    build,
    load_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    save,
)
from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import INDEX, PICKLE, PICKLE_INDEX, WEIGHTS, HFCheckpoint
from tunekit.checkpoint.save_model import save_model
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_init import init_weights

EXTRA = {"chat_template.jinja": "{{ messages }}", "LICENSE": "free", "generation_config.json": "{}"}


def assert_same_files(out: Path, source: Path, ignored: tuple[str, ...] = ()) -> None:
    """Assert that all files of both directories are equal, except for the completion marker."""
    names = {f.name for f in source.iterdir()} - set(ignored)
    assert {f.name for f in out.iterdir()} == names | {"complete"}
    for name in names:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name


def load_and_save(source: Path, out: Path, precision: PrecisionConfig) -> Path:
    return save_checkpoint(out, load_model(source, FULL, precision), HFCheckpoint.open(source))


def save_checkpoint(out: Path, model: Decoder, source: HFCheckpoint) -> Path:
    with atomic.AtomicDir(out) as folder:
        save_model(folder, model, source, quiet=True)
    return out


SOURCE_DTYPES = PrecisionConfig("fp32", "fp32", "checkpoint")


@pairwise(
    name=["llama3.2", "qwen3-biases"],
    shard=[None, "20KB"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)
def test_dtypes_and_shards_are_kept(name: str, shard: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """tests/helpers/transformers_parity.py compares the saved files of every family."""
    options = {} if shard is None else {"max_shard_size": shard}
    source = save(build(SHAPES[name]).to(dtype), tmp_path / "source", **options)
    assert (source / INDEX).is_file() == (shard is not None)
    for file, text in EXTRA.items():
        (source / file).write_text(text)
    (source / "pytorch_model.bin").write_text("the same in an older format")
    out = load_and_save(source, tmp_path / "out", SOURCE_DTYPES)
    assert_same_files(out, source, ignored=("pytorch_model.bin",))
    with torch.no_grad():
        assert torch.equal(
            load_transformers_model(out)(random_tokens()).logits,
            load_transformers_model(source)(random_tokens()).logits,
        )


LAYOUTS = ["mixtral", "gpt-oss", "phi3", "gemma3-vision", "qwen2-vl", "deepseek-v3", "gemma4-moe", "qwen3-next"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_of_one_mapping_in_several_files(name: str, tmp_path: Path) -> None:
    """Experts of one layer, fused layers and vision towers: each tensor is saved to the file that it came from."""
    source = save(build(SHAPES[name]).bfloat16(), tmp_path / "source")
    items = list(read_tensors(source).items())
    (source / WEIGHTS).unlink()
    weight_map = {}
    for number in range(5):
        file = f"model-{number + 1:05d}-of-00005.safetensors"
        save_file(dict(items[number::5]), source / file, metadata={"format": "pt"})
        weight_map |= {name: file for name, _ in items[number::5]}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same_files(load_and_save(source, tmp_path / "out", SOURCE_DTYPES), source)


def test_unmodeled_tensors_are_copied(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "gemma3-vision")
    model, before = load_model(source), read_tensors(source)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    after = read_tensors(save_checkpoint(tmp_path / "out", model, HFCheckpoint.open(source)))
    vision_names = {name for name in before if "vision" in name or "multi_modal" in name}
    assert len(vision_names) > 10
    assert {name for name in before if torch.equal(before[name], after[name])} == vision_names


def test_index_is_kept_exactly(tmp_path: Path) -> None:
    source = save(build(SHAPES["qwen2"]), tmp_path / "source", max_shard_size="20KB")
    index = json.loads((source / INDEX).read_text()) | {"made_by": "hand"}
    index["metadata"] = {"total_size": 1, "more": [2]}
    (source / INDEX).write_text(json.dumps(index, indent=5))
    assert_same_files(load_and_save(source, tmp_path / "out", SOURCE_DTYPES), source)


@pytest.mark.parametrize("num_files", [1, 2])
def test_pickled_weights_are_saved_as_safetensors(num_files: int, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama3.2")
    expected = load_transformers_model(source)(random_tokens()).logits
    items = list((read_tensors(source) | {"lm_head.weight": read_tensors(source)["model.embed_tokens.weight"]}).items())
    files = [PICKLE] if num_files == 1 else ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for number, file in enumerate(files):
        torch.save(dict(items[number::num_files]), source / file)
    if num_files > 1:
        weight_map = {name: file for number, file in enumerate(files) for name, _ in items[number::num_files]}
        (source / PICKLE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (source / WEIGHTS).unlink()
    out = load_and_save(source, tmp_path / "out", SOURCE_DTYPES)
    file_names = (
        [WEIGHTS] if num_files == 1 else ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
    )
    assert sorted(f.name for f in out.glob("*model*")) == file_names
    assert torch.equal(load_transformers_model(out)(random_tokens()).logits, expected)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / WEIGHTS, framework="pt") as f:
        return {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118 - not a mapping


def test_each_tensor_keeps_its_dtype(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama-biases")
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    mixed = {name: t.to(kinds[i % 3]) for i, (name, t) in enumerate(read_tensors(source).items())}
    save_file(mixed, source / WEIGHTS, metadata={"format": "pt"})
    assert_same_files(load_and_save(source, tmp_path / "out", SOURCE_DTYPES), source)


def test_tied_head_is_saved_under_its_name(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama3.2")
    weights = read_tensors(source)
    assert "lm_head.weight" not in weights
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, source / WEIGHTS, {"format": "pt"}
    )
    assert_same_files(load_and_save(source, tmp_path / "out", SOURCE_DTYPES), source)


def test_rotary_tables_are_dropped(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama2")
    contents = (source / WEIGHTS).read_bytes()
    table = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    save_file(read_tensors(source) | table, source / WEIGHTS, metadata={"format": "pt"})
    assert (load_and_save(source, tmp_path / "out", SOURCE_DTYPES) / WEIGHTS).read_bytes() == contents


@pytest.mark.parametrize("indexed", [False, True])
def test_single_file_with_another_name(indexed: bool, tmp_path: Path) -> None:
    """Other libraries find it through an index, which is written even if there was none."""
    source = make_checkpoint(tmp_path / "source", "qwen2")
    name = "model-00001-of-00001.safetensors"
    (source / WEIGHTS).rename(source / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(HFCheckpoint.open(source).tensors, name)}
    if indexed:
        (source / INDEX).write_text(json.dumps(index))
    out = load_and_save(source, tmp_path / "out", SOURCE_DTYPES)
    assert (out / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((out / INDEX).read_text())["weight_map"] == index["weight_map"]
    with torch.no_grad():
        torch.testing.assert_close(
            load_transformers_model(out)(random_tokens()).logits,
            load_model(source)(random_tokens()),
            rtol=1e-4,
            atol=1e-4,
        )


def test_initialized_model_is_opened_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source", "llama3.2")
    (source / WEIGHTS).unlink()
    checkpoint = HFCheckpoint.open(source)
    model = Decoder(checkpoint.spec)
    init_weights(model, 0)
    save_checkpoint(tmp_path / "one", model, checkpoint)
    assert [f.name for f in (tmp_path / "one").glob("model*")] == [WEIGHTS]
    monkeypatch.setattr("tunekit.checkpoint.save_model.SHARD_BYTES", 20_000)
    save_checkpoint(tmp_path / "many", model, checkpoint)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(f.stat().st_size < 22_000 for f in shards)
    with torch.no_grad():
        expected = model(random_tokens())
        for out in ("one", "many"):
            torch.testing.assert_close(
                load_transformers_model(tmp_path / out)(random_tokens()).logits, expected, rtol=1e-4, atol=1e-5
            )
            assert torch.equal(load_model(tmp_path / out)(random_tokens()), expected)


def test_fp32_trained_weights_are_saved_in_checkpoint_dtype(tmp_path: Path) -> None:
    source = save(build(SHAPES["qwen3"]).bfloat16(), tmp_path / "source")
    model = load_model(source, FULL, PrecisionConfig("bf16", "fp32"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    weights = read_tensors(save_checkpoint(tmp_path / "out", model, HFCheckpoint.open(source)))
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["model.embed_tokens.weight"], model.embed.weight.bfloat16())
    assert torch.equal(weights["model.norm.weight"], model.norm.weight.bfloat16())
