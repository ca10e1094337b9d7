"""Damaged, incomplete or unknown checkpoint directories give a one-line error that names file and tensor."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.dense_shapes import LLAMA3, YARN
from tests.helpers.random_checkpoints import SHAPES, build, load_model, make_checkpoint, rewrite_config, save
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import INDEX, PICKLE, PICKLE_INDEX, WEIGHTS, HFCheckpoint
from tunekit.errors import UserError

Q = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "llama", "llama2")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save(build(SHAPES["llama2"]), tmp_path / "shards", max_shard_size="20KB")


def assert_rejected(text: str, directory: Path) -> None:
    """Assert that reading the checkpoint fails with one line that contains `text` and the directory."""
    with pytest.raises(UserError) as caught:
        load_model(directory)
    assert text in str(caught.value)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def edit_weights(directory: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the single weights file of a checkpoint."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def edit_config(directory: Path, **values: object) -> None:
    rewrite_config(directory, lambda c: c | values)


@pytest.mark.parametrize(("values", "text"), [
    ({"model_type": "lama"}, "'llama'"),
    ({"model_type": "t5"}, "'t5'"),
    ({"model_type": None}, "model_type"),
    ({"model_type": ["llama"]}, "['llama']"),
    ({"hidden_size": None}, "hidden_size"),
    ({"vocab_size": None}, "vocab_size"),
    ({"hidden_act": "mish"}, "'mish'"),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_hidden_layers": "three"}, "'three'"),
    ({"hidden_size": "48"}, "'48'"),
    ({"rms_norm_eps": "1e-06"}, "'1e-06'"),
    ({"rms_norm_eps": [1]}, "[1]"),
    ({"rope_theta": "fast"}, "'fast'"),
    ({"rope_parameters": "fast"}, "config.json"),
    ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "low_freq_factor"),
    ({"rope_parameters": YARN | {"factor": "four"}}, "config.json"),
    ({"dtype": "int8"}, "config.json"),
])  # fmt: skip
def test_unsupported_config_is_rejected(values: dict, text: str, directory: Path) -> None:
    edit_config(directory, **values)
    if "dtype" in values:
        (directory / WEIGHTS).unlink()
        with pytest.raises(UserError, match="'int8'"):
            HFCheckpoint.open(directory).dtype(Q)
        return
    assert_rejected(text, directory)


@pytest.mark.parametrize(("text", "part"), [
    ("{'model_type': 1}", "Expecting property name"),
    ("", "JSON"),
    ("[1]", "list"),
    (b"\xff\xfe\x00", "'utf-8' codec"),
])  # fmt: skip
def test_invalid_json_is_rejected(text: str | bytes, part: str, directory: Path) -> None:
    file = directory / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_rejected(str(file), directory)
    assert_rejected(part, directory)


def test_missing_config_or_weights_are_named(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "model.h5")
    assert_rejected("pytorch_model.bin", directory)
    (directory / "config.json").unlink()
    assert_rejected("config.json", directory)


def test_adapter_or_run_dir_is_no_checkpoint(directory: Path) -> None:
    (directory / "config.json").rename(directory / "adapter_config.json")
    assert_rejected(f"tune merge BASE {directory} OUT", directory)
    run = directory.parent / "run"
    run.mkdir()
    directory.rename(run / "final")
    assert_rejected(f"tune merge BASE {run} OUT", run)
    (run / "final/adapter_config.json").rename(run / "final/config.json")
    assert_rejected(f"{run}/final", run)


def test_error_for_pickled_adapter_explains_conversion(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(UserError) as caught:
        AdapterDir.open(tmp_path).header  # noqa: B018
    for text in (str(tmp_path), "adapter_model.safetensors", "adapter_model.bin", "save_pretrained"):
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def with_header_length(length: int, body: bytes) -> bytes:
    return struct.pack("<Q", length) + body


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1],
    lambda data: data[: len(data) // 2],
    lambda data: data[:100],
    lambda data: data[:4],
    lambda data: b"",
    lambda data: data + b"more",
    lambda data: with_header_length(2**40, data[8:]),
    lambda data: with_header_length(16, b"{not json at all" + data[24:]),
    lambda data: data[:8] + b"\x00" * 40 + data[48:],
    lambda data: b"<html>404: not found</html>" * 100,
])  # fmt: skip
def test_damaged_weights_are_rejected(damage: Callable[[bytes], bytes], directory: Path) -> None:
    file = directory / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    assert_rejected(f"{file}: ", directory)


def repeat_first_tensor(data: bytes) -> bytes:
    """A file whose header has its first tensor twice."""
    (size,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + size])
    name = next(key for key in entries if key != "__metadata__")
    header = json.dumps({name: entries[name]})[:-1].encode() + b"," + data[9 : 8 + size].lstrip()
    return with_header_length(len(header), header + data[8 + size :])


def test_repeated_tensor_is_rejected(directory: Path) -> None:
    file = directory / WEIGHTS
    file.write_bytes(repeat_first_tensor(file.read_bytes()))
    assert_rejected("is in the header twice", directory)


@pytest.mark.parametrize("name", ["a\nerror: forged line", "a\x1b[31m", "a\u202eb", "x" * 10**6])
def test_unprintable_tensor_name_is_rejected(name: str, directory: Path) -> None:
    edit_weights(directory, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(UserError, match="invalid tensor name") as error:
        load_model(directory)
    assert len(str(error.value)) < 1000 and "\n" not in str(error.value) and "\x1b" not in str(error.value)


def test_fifo_is_rejected(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    os.mkfifo(directory / WEIGHTS)
    with pytest.raises(UserError):
        load_model(directory)


def test_damaged_shard_is_named(shards: Path) -> None:
    file = sorted(shards.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-7])
    assert_rejected(f"{file}: ", shards)


@pytest.mark.parametrize(("change", "text"), [
    (lambda t: t.pop(Q), f"{Q} "),
    (lambda t: [t.pop(n) for n in list(t) if ".1.mlp" in n], "1.mlp.gate_proj.weight (and 2 more)"),
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight "),
    (lambda t: t.update({"visual.weight": torch.ones(3)}), "visual.weight "),
    (lambda t: t.update({f"a{i}": torch.ones(3) for i in range(4)}), "a0 (and 3 more)"),
    (lambda t: t.update({Q.replace("weight", "bias"): torch.ones(48)}), "q_proj.bias "),
    (lambda t: t.update({Q.replace(".0.", ".3."): torch.ones(48, 48)}), "3.self_attn.q_proj.weight "),
    (lambda t: t.update({Q: torch.ones(48, 47)}), "[48, 47]"),
    (lambda t: t.update({EMBED: torch.ones(60, 48)}), "[60, 48]"),
    (lambda t: t.update({Q: torch.ones(48, 48, dtype=torch.int8)}), "int8"),
])  # fmt: skip
def test_unexpected_and_missing_tensors_are_named(change: Callable[[dict], object], text: str, directory: Path) -> None:
    edit_weights(directory, change)
    assert_rejected(text, directory)


def test_tied_head_that_differs_is_rejected(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama3.2")
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t[EMBED] + 1}))
    text = "tie_word_embeddings"
    assert_rejected(text, directory)
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t[EMBED].bfloat16()}))
    assert_rejected(text, directory)
    edit_config(directory, tie_word_embeddings=False)
    load_model(directory)


def edit_index(directory: Path, change: Callable[[dict], object]) -> None:
    file = directory / INDEX
    value = json.loads(file.read_text())
    change(value["weight_map"])
    file.write_text(json.dumps(value))


def test_invalid_index_is_rejected(shards: Path) -> None:
    first = sorted(shards.glob("*.safetensors"))[0]
    contents = first.read_bytes()
    first.unlink()
    assert_rejected(f"{INDEX}: ", shards)
    assert_rejected(first.name, shards)
    first.write_bytes(contents)
    load_model(shards)
    (shards / INDEX).write_text("{}")
    assert_rejected("weight_map", shards)
    (shards / INDEX).write_text("{")
    assert_rejected(f"{INDEX}: ", shards)
    (shards / INDEX).unlink()
    assert_rejected(INDEX, shards)


@pytest.mark.parametrize("name", ["../llama/model.safetensors", "/etc/passwd", "a/../model.safetensors", "..", "", "."])
def test_index_cannot_leave_its_directory(name: str, shards: Path, directory: Path) -> None:
    edit_index(shards, lambda names: names.update({Q: name}))
    assert_rejected(f"{shards / INDEX}: ", shards)


def test_tensor_in_another_file_than_indexed_is_named(shards: Path) -> None:
    files = [file.name for file in sorted(shards.glob("*.safetensors"))]
    actual_file = json.loads((shards / INDEX).read_text())["weight_map"][Q]
    indexed_file = next(name for name in files if name != actual_file)
    edit_index(shards, lambda names: names.update({Q: indexed_file}))
    for name in (f"{shards / INDEX}: ", Q, indexed_file, actual_file):
        assert_rejected(name, shards)
    edit_index(shards, lambda names: names.update({Q: actual_file, "more.weight": actual_file}))
    for name in (f"{shards / INDEX}: ", "more.weight", actual_file):
        assert_rejected(name, shards)
    edit_index(shards, lambda names: [names.pop("more.weight"), names.pop(Q)])
    for name in (f"{shards / actual_file}: ", Q):
        assert_rejected(name, shards)


@pytest.mark.parametrize(
    "text", ["", "{", "\x00" * 50, '{"weight_map": {"a": NaN', "[]", '{"weight_map": []}', "\ufeff{}"]
)
def test_damaged_index_is_rejected(text: str, shards: Path) -> None:
    (shards / INDEX).write_text(text)
    assert_rejected(f"{shards / INDEX}: ", shards)


@pytest.mark.parametrize("value", [None, {}, {Q: 5}, {Q: ["a"]}, [[Q, "a"]]])
def test_index_without_weight_map_is_rejected(value: object, shards: Path) -> None:
    (shards / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": value}))
    assert_rejected(f"{shards / INDEX}: ", shards)
    assert_rejected("weight_map", shards)


def test_symlinked_files_are_read(shards: Path, tmp_path: Path) -> None:
    """The Hub cache has directories of links to files with other names."""
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(shards.iterdir())):
        file.rename(tmp_path / f"blobs/{number}")
        file.symlink_to(tmp_path / f"blobs/{number}")
    load_model(shards)


def test_tensor_in_two_files_is_rejected(shards: Path) -> None:
    first, second = sorted(shards.glob("*.safetensors"))[:2]
    first_tensors = load_file(first)
    name = next(iter(first_tensors))
    save_file(
        {name: first_tensors[name].clone()} | {n: t.clone() for n, t in load_file(second).items()}, shards / "new"
    )
    (shards / "new").replace(second)
    for text in (f"{second}: ", name, first.name):
        assert_rejected(text, shards)


def test_default_file_takes_precedence_over_an_index(directory: Path, shards: Path) -> None:
    """A leftover index of an older version is ignored, as in transformers."""
    (directory / INDEX).write_bytes((shards / INDEX).read_bytes())
    assert torch.equal(load_model(directory).embed.weight, load_file(directory / WEIGHTS)[EMBED])


def test_dtypes_are_those_of_the_files(tmp_path: Path) -> None:
    directory = save(build(SHAPES["qwen2"]).bfloat16(), tmp_path)
    edit_weights(directory, lambda t: t.update({Q: t[Q].float()}))
    source = HFCheckpoint.open(directory)
    assert source.dtype("layers.0.attn.q_proj.weight") == torch.float32
    assert source.dtype("layers.0.attn.k_proj.weight") == torch.bfloat16
    assert source.dtype("head.weight") == torch.bfloat16


PREFIXES = [
    (lambda name: name.removeprefix("model."), "'model.'"),
    (lambda name: f"module.{name}", "'module.'"),
    (lambda name: f"_orig_mod.{name}", "'_orig_mod.'"),
    (lambda name: f"base_model.model.{name}", "'base_model.model.'"),
]


@pytest.mark.parametrize(("change", "text"), PREFIXES)
def test_other_prefixes_are_named(change: Callable[[str], str], text: str, directory: Path) -> None:
    tensors = {change(name): tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    assert_rejected(text, directory)


def test_non_finite_weights_are_a_warning(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are loaded, because users may inspect them, and counted in a warning."""
    load_model(directory)
    assert "warning" not in capfd.readouterr().err

    def make_non_finite(t: dict[str, torch.Tensor]) -> None:
        t[Q][1, :3] = torch.nan
        t[EMBED][5, 7], t[EMBED][5, 8] = torch.inf, -torch.inf

    edit_weights(directory, make_non_finite)
    model = load_model(directory)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert all(text in line for text in (str(directory / WEIGHTS), "5 weights", EMBED, "and 1 "))
    assert model.embed.weight[5, 7] == torch.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_finite_weights_are_no_warning(
    dtype: torch.dtype, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their sum is infinite, but only a first check."""
    directory = save(build(SHAPES["llama2"]).to(dtype), tmp_path)
    edit_weights(directory, lambda t: t[EMBED].fill_(6e4 if dtype == torch.float16 else 3e38))
    load_model(directory)
    assert "warning" not in capfd.readouterr().err


def test_tied_embedding_under_the_name_of_the_head(tmp_path: Path) -> None:
    """Some programs save a shared tensor under the last of its names."""
    directory = make_checkpoint(tmp_path, "llama3.2")
    expected = load_file(directory / WEIGHTS)[EMBED]
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t.pop(EMBED)}))
    model = load_model(directory)
    assert torch.equal(model.embed.weight, expected)
    assert model.head.weight is model.embed.weight


EXPERT = "model.layers.1.mlp.experts.{}.w3.weight".replace("mlp.experts", "block_sparse_moe.experts")


@pytest.mark.parametrize(("change", "text"), [
    (lambda t: t.pop(EXPERT.format(1)), EXPERT.format(1)),
    (lambda t: t.pop(EXPERT.format(0)), EXPERT.format(0)),
    (lambda t: t.pop(EXPERT.format(4)), EXPERT.format(3)),
    (lambda t: t.update({EXPERT.format(5): torch.ones(52, 48)}), EXPERT.format(5)),
    (lambda t: t.update({EXPERT.format(99): torch.ones(52, 48)}), EXPERT.format(5)),
    (lambda t: [t.pop(EXPERT.format(e)) for e in range(4)], EXPERT.format(0)),
    (lambda t: t.update({EXPERT.format(2): torch.ones(52, 47)}), "[52, 47]"),
    (lambda t: [t.pop(EXPERT.format(e)) for e in range(5)], EXPERT.format("*")),
])  # fmt: skip
def test_unexpected_and_missing_experts_are_named(change: Callable[[dict], object], text: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "mixtral", "mixtral")
    edit_weights(directory, change)
    assert_rejected(text, directory)


# Pickled weights


@pytest.fixture
def pickled(directory: Path) -> Path:
    """The checkpoint with weights written by torch.save."""
    torch.save(load_file(directory / WEIGHTS), directory / PICKLE)
    (directory / WEIGHTS).unlink()
    return directory


def test_pickled_weights_equal_safetensors(pickled: Path, tmp_path: Path) -> None:
    other = load_model(make_checkpoint(tmp_path / "plain", "llama2")).state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in load_model(pickled).state_dict().items())


def test_safetensors_take_precedence_over_pickles(directory: Path) -> None:
    (directory / PICKLE).write_bytes(b"ignored")
    load_model(directory)


def test_pickled_shards_with_an_index(pickled: Path) -> None:
    tensors = torch.load(pickled / PICKLE, weights_only=True)
    names = sorted(tensors)
    shards = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, shard_names in shards.items():
        torch.save({name: tensors[name] for name in shard_names}, pickled / file)
    (pickled / PICKLE).unlink()
    index = {"weight_map": {name: file for file, shard_names in shards.items() for name in shard_names}}
    (pickled / PICKLE_INDEX).write_text(json.dumps(index))
    load_model(pickled)
    (pickled / PICKLE_INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {Q: "../x.bin"}}))
    assert_rejected(f"{pickled / PICKLE_INDEX}: ", pickled)
    assert_rejected("'../x.bin'", pickled)


def test_pickle_with_other_objects_is_rejected(pickled: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Path()}, pickled / PICKLE)
    assert_rejected(f"{pickled / PICKLE}: ", pickled)
