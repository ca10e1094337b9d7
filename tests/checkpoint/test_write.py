"""What is read and written again is the same, bit for bit, in every layout and dtype."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.checkpoints import FULL, SHAPES, build, made, ours, save, theirs, tokens
from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import INDEX, PICKLE, PICKLE_INDEX, WEIGHTS, HFCheckpoint
from tunekit.checkpoint.save_model import save_model
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_init import init_weights

EXTRA = {"chat_template.jinja": "{{ messages }}", "LICENSE": "free", "generation_config.json": "{}"}


def same(out: Path, source: Path, but: tuple[str, ...] = ()) -> None:
    """All files of both folders are equal in every byte, but for the mark of what was written."""
    names = {f.name for f in source.iterdir()} - set(but)
    assert {f.name for f in out.iterdir()} == names | {"complete"}
    for name in names:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name


def again(source: Path, out: Path, precision: PrecisionConfig) -> Path:
    return written(out, ours(source, FULL, precision), HFCheckpoint.open(source))


def written(out: Path, model: Decoder, source: HFCheckpoint) -> Path:
    with atomic.AtomicDir(out) as folder:
        save_model(folder, model, source, quiet=True)
    return out


AS_IT_IS = PrecisionConfig("fp32", "fp32", "checkpoint")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", [None, "20KB"])
@pytest.mark.parametrize("name", ["llama3.2", "qwen3-biases"])
def test_dtypes_and_shards(name: str, shard: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """What every family writes is compared in tests/parity.py."""
    options = {} if shard is None else {"max_shard_size": shard}
    source = save(build(SHAPES[name]).to(dtype), tmp_path / "source", **options)
    assert (source / INDEX).is_file() == (shard is not None)
    for file, text in EXTRA.items():
        (source / file).write_text(text)
    (source / "pytorch_model.bin").write_text("the same in an older format")
    out = again(source, tmp_path / "out", AS_IT_IS)
    same(out, source, but=("pytorch_model.bin",))
    with torch.no_grad():
        assert torch.equal(theirs(out)(tokens()).logits, theirs(source)(tokens()).logits)


LAYOUTS = ["mixtral", "gpt-oss", "phi3", "gemma3-vision", "qwen2-vl", "deepseek-v3", "gemma4-moe", "qwen3-next"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_of_one_move_in_several_files(name: str, tmp_path: Path) -> None:
    """Experts of one layer, fused layers and towers that are kept: each goes back into the file it was in."""
    source = save(build(SHAPES[name]).bfloat16(), tmp_path / "source")
    held = list(tensors(source).items())
    (source / WEIGHTS).unlink()
    listed = {}
    for number in range(5):
        file = f"model-{number + 1:05d}-of-00005.safetensors"
        save_file(dict(held[number::5]), source / file, metadata={"format": "pt"})
        listed |= {name: file for name, _ in held[number::5]}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    same(again(source, tmp_path / "out", AS_IT_IS), source)


def test_kept_tensors_are_untouched_by_training(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "gemma3-vision")
    model, before = ours(source), tensors(source)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    after = tensors(written(tmp_path / "out", model, HFCheckpoint.open(source)))
    kept = {name for name in before if "vision" in name or "multi_modal" in name}
    assert len(kept) > 10
    assert {name for name in before if torch.equal(before[name], after[name])} == kept


def test_an_index_is_kept_to_the_byte(tmp_path: Path) -> None:
    source = save(build(SHAPES["qwen2"]), tmp_path / "source", max_shard_size="20KB")
    told = json.loads((source / INDEX).read_text()) | {"made_by": "hand"}
    told["metadata"] = {"total_size": 1, "more": [2]}
    (source / INDEX).write_text(json.dumps(told, indent=5))
    same(again(source, tmp_path / "out", AS_IT_IS), source)


@pytest.mark.parametrize("parts", [1, 2])
def test_pickled_weights_are_written_as_safetensors(parts: int, tmp_path: Path) -> None:
    plain = made(tmp_path / "source", "llama3.2")
    wanted = theirs(plain)(tokens()).logits
    held = list((tensors(plain) | {"lm_head.weight": tensors(plain)["model.embed_tokens.weight"]}).items())
    files = [PICKLE] if parts == 1 else ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for number, file in enumerate(files):
        torch.save(dict(held[number::parts]), plain / file)
    if parts > 1:
        listed = {name: file for number, file in enumerate(files) for name, _ in held[number::parts]}
        (plain / PICKLE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    (plain / WEIGHTS).unlink()
    out = again(plain, tmp_path / "out", AS_IT_IS)
    usual = [WEIGHTS] if parts == 1 else ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
    assert sorted(f.name for f in out.glob("*model*")) == usual
    assert torch.equal(theirs(out)(tokens()).logits, wanted)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / WEIGHTS, framework="pt") as f:
        return {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118 - it is no mapping


def test_tensors_of_one_file_keep_their_own_dtypes(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "llama-biases")
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    mixed = {name: t.to(kinds[i % 3]) for i, (name, t) in enumerate(tensors(source).items())}
    save_file(mixed, source / WEIGHTS, metadata={"format": "pt"})
    same(again(source, tmp_path / "out", AS_IT_IS), source)


def test_a_tied_head_stays_where_it_was_written(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "llama3.2")
    held = tensors(source)
    assert "lm_head.weight" not in held
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}, source / WEIGHTS, {"format": "pt"})
    same(again(source, tmp_path / "out", AS_IT_IS), source)


def test_rotation_tables_are_left_out(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "llama2")
    whole = (source / WEIGHTS).read_bytes()
    table = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    save_file(tensors(source) | table, source / WEIGHTS, metadata={"format": "pt"})
    assert (again(source, tmp_path / "out", AS_IT_IS) / WEIGHTS).read_bytes() == whole


@pytest.mark.parametrize("indexed", [False, True])
def test_one_file_of_another_name(indexed: bool, tmp_path: Path) -> None:
    """Readers find it by an index, whether there was one or not."""
    source = made(tmp_path / "source", "qwen2")
    name = "model-00001-of-00001.safetensors"
    (source / WEIGHTS).rename(source / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(HFCheckpoint.open(source).tensors, name)}
    if indexed:
        (source / INDEX).write_text(json.dumps(index))
    out = again(source, tmp_path / "out", AS_IT_IS)
    assert (out / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((out / INDEX).read_text())["weight_map"] == index["weight_map"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(out)(tokens()).logits, ours(source)(tokens()), rtol=1e-4, atol=1e-4)


def test_a_model_from_nothing_is_one_that_transformers_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made(tmp_path / "source", "llama3.2")
    (source / WEIGHTS).unlink()
    described = HFCheckpoint.open(source)
    model = Decoder(described.spec)
    init_weights(model, 0)
    written(tmp_path / "one", model, described)
    assert [f.name for f in (tmp_path / "one").glob("model*")] == [WEIGHTS]
    monkeypatch.setattr("tunekit.checkpoint.save_model.SHARD", 20_000)
    written(tmp_path / "many", model, described)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(f.stat().st_size < 22_000 for f in shards)
    with torch.no_grad():
        wanted = model(tokens())
        for out in ("one", "many"):
            torch.testing.assert_close(theirs(tmp_path / out)(tokens()).logits, wanted, rtol=1e-4, atol=1e-5)
            assert torch.equal(ours(tmp_path / out)(tokens()), wanted)


def test_what_was_trained_in_fp32_is_written_in_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    source = save(build(SHAPES["qwen3"]).bfloat16(), tmp_path / "source")
    model = ours(source, FULL, PrecisionConfig("bf16", "fp32"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    held = tensors(written(tmp_path / "out", model, HFCheckpoint.open(source)))
    assert {t.dtype for t in held.values()} == {torch.bfloat16}
    assert torch.equal(held["model.embed_tokens.weight"], model.embed.weight.bfloat16())
    assert torch.equal(held["model.norm.weight"], model.norm.weight.bfloat16())
