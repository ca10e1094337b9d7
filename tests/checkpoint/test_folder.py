"""Checkpoint folders that are damaged, incomplete or unknown: one line that names the file and the tensor."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import SHAPES, build, made, ours, rewrite, save
from tests.shapes_dense import LLAMA3, YARN
from tunekit.checkpoint.hf_checkpoint import INDEX, PICKLE, PICKLE_INDEX, WEIGHTS, HFCheckpoint
from tunekit.errors import UserError

Q = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "llama", "llama2")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save(build(SHAPES["llama2"]), tmp_path / "shards", max_shard_size="20KB")


def refused(told: str, folder: Path) -> None:
    """Reading the folder ends with one line that says `told`."""
    with pytest.raises(UserError) as caught:
        ours(folder)
    assert told in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the one weights file of a folder."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def config(folder: Path, **values: object) -> None:
    rewrite(folder, lambda c: c | values)


@pytest.mark.parametrize(("values", "told"), [
    ({"model_type": "lama"}, "model_type 'lama' is not supported, did you mean 'llama'? (supported: "),
    ({"model_type": "t5"}, "model_type 't5' is not supported (supported"),
    ({"model_type": None}, "no 'model_type'"),
    ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    ({"hidden_size": None}, "'hidden_size' is missing"),
    ({"vocab_size": None}, "'vocab_size' is missing"),
    ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported: silu, gelu, gelu_pytorch_tanh"),
    ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
    ({"num_attention_heads": 0}, "num_attention_heads must be a whole number above 0, not 0"),
    ({"num_hidden_layers": "three"}, "num_hidden_layers must be a whole number above 0, not 'three'"),
    ({"hidden_size": "48"}, "hidden_size must be a whole number above 0, not '48'"),
    ({"rms_norm_eps": "1e-06"}, "rms_norm_eps must be a number, not '1e-06'"),
    ({"rms_norm_eps": [1]}, "rms_norm_eps must be a number, not [1]"),
    ({"rope_theta": "fast"}, "rope_theta must be a number, not 'fast'"),
    ({"rope_parameters": "fast"}, "config.json"),
    ({"quantization_config": {"quant_method": "gptq"}}, "the weights are packed by 'gptq', which is not read"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported: default, li"),
    ({"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "'low_freq_factor' is missing"),
    ({"rope_parameters": YARN | {"factor": "four"}}, "config.json"),
    ({"dtype": "int8"}, "config.json"),
])  # fmt: skip
def test_config_that_is_not_supported(values: dict, told: str, folder: Path) -> None:
    config(folder, **values)
    if "dtype" in values:
        (folder / WEIGHTS).unlink()
        with pytest.raises(UserError, match="dtype 'int8' is none of float32, float16, bfloat16"):
            HFCheckpoint.open(folder).dtype(Q)
        return
    refused(told, folder)


@pytest.mark.parametrize(("text", "told"), [
    ("{'model_type': 1}", "not valid JSON (Expecting property name"),
    ("", "not valid JSON"),
    ("[1]", "holds a list, not an object"),
    (b"\xff\xfe\x00", "not valid JSON ('utf-8' codec"),
])  # fmt: skip
def test_config_that_is_no_json(text: str | bytes, told: str, folder: Path) -> None:
    file = folder / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(f"{file}: {told}", folder)


def test_a_folder_without_config_or_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model.h5")
    refused("no *.safetensors and no pytorch_model.bin, so there are no weights to read", folder)
    (folder / "config.json").unlink()
    refused("no config.json, so this is no checkpoint folder", folder)


def test_what_is_taken_for_a_checkpoint(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    refused(
        f"no checkpoint folder but an adapter: `tune merge BASE {folder} OUT` makes one, and `adapter.adapter_path`",
        folder,
    )
    run = folder.parent / "run"
    run.mkdir()
    folder.rename(run / "final")
    refused(f"no checkpoint folder but a run whose result is an adapter: `tune merge BASE {run} OUT` makes one", run)
    (run / "final/adapter_config.json").rename(run / "final/config.json")
    refused(f"no checkpoint folder but a run: name its result, {run}/final", run)


def header(length: int, body: bytes) -> bytes:
    return struct.pack("<Q", length) + body


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1],
    lambda data: data[: len(data) // 2],
    lambda data: data[:100],
    lambda data: data[:4],
    lambda data: b"",
    lambda data: data + b"more",
    lambda data: header(2**40, data[8:]),
    lambda data: header(16, b"{not json at all" + data[24:]),
    lambda data: data[:8] + b"\x00" * 40 + data[48:],
    lambda data: b"<html>404: not found</html>" * 100,
])  # fmt: skip
def test_weights_that_are_damaged(damage: Callable[[bytes], bytes], folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    refused(f"{file}: damaged or cut off", folder)


def test_a_damaged_shard_is_named(shards: Path) -> None:
    file = sorted(shards.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-7])
    refused(f"{file}: damaged or cut off", shards)


@pytest.mark.parametrize(("change", "told"), [
    (lambda t: t.pop(Q), f"{Q} is missing; the checkpoint is incomplete"),
    (lambda t: [t.pop(n) for n in list(t) if ".1.mlp" in n], "1.mlp.gate_proj.weight (and 2 more) is missing"),
    (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    (lambda t: t.update({"visual.weight": torch.ones(3)}), "visual.weight is no tensor of a llama model"),
    (lambda t: t.update({f"a{i}": torch.ones(3) for i in range(4)}), "a0 (and 3 more) is no tensor of a llama model"),
    (lambda t: t.update({Q.replace("weight", "bias"): torch.ones(48)}), "q_proj.bias has no place in the model"),
    (lambda t: t.update({Q.replace(".0.", ".3."): torch.ones(48, 48)}), "3.self_attn.q_proj.weight has no place"),
    (lambda t: t.update({Q: torch.ones(48, 47)}), f"{Q} has the shape [48, 47], but config.json asks for [48, 48]"),
    (lambda t: t.update({EMBED: torch.ones(60, 48)}), f"{EMBED} has the shape [60, 48], but config.json asks for [67"),
    (lambda t: t.update({Q: torch.ones(48, 48, dtype=torch.int8)}), f"{Q} is stored as int8; only float32, fl"),
])  # fmt: skip
def test_tensors_that_do_not_fit(change: Callable[[dict], object], told: str, folder: Path) -> None:
    edit(folder, change)
    refused(told, folder)


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    folder = made(tmp_path, "llama3.2")
    edit(folder, lambda t: t.update({"lm_head.weight": t[EMBED] + 1}))
    told = f"ties the head to the embedding, but lm_head.weight differs from {EMBED}; set tie_word_embeddings to false"
    refused(told, folder)
    edit(folder, lambda t: t.update({"lm_head.weight": t[EMBED].bfloat16()}))
    refused(told, folder)
    config(folder, tie_word_embeddings=False)
    ours(folder)


def index(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / INDEX
    value = json.loads(file.read_text())
    change(value["weight_map"])
    file.write_text(json.dumps(value))


def test_an_index_that_names_what_is_not_there(shards: Path) -> None:
    first = sorted(shards.glob("*.safetensors"))[0]
    kept = first.read_bytes()
    first.unlink()
    refused(f"{INDEX}: names {first.name}, which is not there; download the checkpoint again", shards)
    first.write_bytes(kept)
    ours(shards)
    (shards / INDEX).write_text("{}")
    refused(f"{INDEX}: no 'weight_map' from tensor names to files", shards)
    (shards / INDEX).write_text("{")
    refused(f"{INDEX}: not valid JSON", shards)
    (shards / INDEX).unlink()
    refused(f"files *.safetensors but no {INDEX} to say which belong together", shards)


@pytest.mark.parametrize("name", ["../llama/model.safetensors", "/etc/passwd", "a/../model.safetensors", "..", "", "."])
def test_an_index_does_not_lead_out_of_its_folder(name: str, shards: Path, folder: Path) -> None:
    index(shards, lambda names: names.update({Q: name}))
    refused(f"{shards / INDEX}: ", shards)


def test_a_tensor_that_the_index_puts_elsewhere(shards: Path) -> None:
    files = [file.name for file in sorted(shards.glob("*.safetensors"))]
    there = json.loads((shards / INDEX).read_text())["weight_map"][Q]
    other = next(name for name in files if name != there)
    index(shards, lambda names: names.update({Q: other}))
    refused(f"{shards / INDEX}: lists {Q} in {other}, but {there} holds it; download both again", shards)
    index(shards, lambda names: names.update({Q: there, "more.weight": there}))
    refused(f"{shards / INDEX}: lists more.weight in {there}, but no file holds it; download both again", shards)
    index(shards, lambda names: [names.pop("more.weight"), names.pop(Q)])
    refused(f"{shards / there}: holds {Q}, which {INDEX} does not list; download both again", shards)


@pytest.mark.parametrize(
    "text", ["", "{", "\x00" * 50, '{"weight_map": {"a": NaN', "[]", '{"weight_map": []}', "\ufeff{}"]
)
def test_an_index_that_is_damaged(text: str, shards: Path) -> None:
    (shards / INDEX).write_text(text)
    refused(f"{shards / INDEX}: ", shards)


@pytest.mark.parametrize("value", [None, {}, {Q: 5}, {Q: ["a"]}, [[Q, "a"]]])
def test_an_index_without_a_map(value: object, shards: Path) -> None:
    (shards / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": value}))
    refused(f"{shards / INDEX}: no 'weight_map' from tensor names to files", shards)


def test_files_may_be_links(shards: Path, tmp_path: Path) -> None:
    """The Hub's cache is a folder of links to files of other names elsewhere."""
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(shards.iterdir())):
        file.rename(tmp_path / f"blobs/{number}")
        file.symlink_to(tmp_path / f"blobs/{number}")
    ours(shards)


def test_a_tensor_in_two_files(shards: Path) -> None:
    first, second = sorted(shards.glob("*.safetensors"))[:2]
    twice = load_file(first)
    name = next(iter(twice))
    save_file({name: twice[name].clone()} | {n: t.clone() for n, t in load_file(second).items()}, shards / "new")
    (shards / "new").replace(second)
    refused(f"{second}: holds {name}, and so does {first.name}", shards)


def test_the_usual_name_goes_before_an_index(folder: Path, shards: Path) -> None:
    """As in transformers: an index left behind by an older version does not matter."""
    (folder / INDEX).write_bytes((shards / INDEX).read_bytes())
    assert torch.equal(ours(folder).embed.weight, load_file(folder / WEIGHTS)[EMBED])


def test_dtypes_are_those_of_the_files(tmp_path: Path) -> None:
    folder = save(build(SHAPES["qwen2"]).bfloat16(), tmp_path)
    edit(folder, lambda t: t.update({Q: t[Q].float()}))
    source = HFCheckpoint.open(folder)
    assert source.dtype("layers.0.attn.q_proj.weight") == torch.float32
    assert source.dtype("layers.0.attn.k_proj.weight") == torch.bfloat16
    assert source.dtype("head.weight") == torch.bfloat16


PREFIXES = [
    (lambda name: name.removeprefix("model."), "lack 'model.': save the whole model, with its head"),
    (lambda name: f"module.{name}", "begin with 'module.', which some wrapper added: save the model without it"),
    (lambda name: f"_orig_mod.{name}", "begin with '_orig_mod.', which some wrapper added"),
    (lambda name: f"base_model.model.{name}", "begin with 'base_model.model.', which some wrapper added"),
]


@pytest.mark.parametrize(("change", "told"), PREFIXES)
def test_names_with_another_prefix(change: Callable[[str], str], told: str, folder: Path) -> None:
    tensors = {change(name): tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    refused(f"is no tensor of a llama model; its names {told}", folder)


def test_weights_that_are_not_finite(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are loaded, for they may be what one wants to look at, and counted."""
    ours(folder)
    assert "warning" not in capfd.readouterr().err

    def spoil(t: dict[str, torch.Tensor]) -> None:
        t[Q][1, :3] = torch.nan
        t[EMBED][5, 7], t[EMBED][5, 8] = torch.inf, -torch.inf

    edit(folder, spoil)
    model = ours(folder)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert line == f"warning: {folder / WEIGHTS}: 5 weights are NaN or infinite, in {EMBED} and 1 more tensors"
    assert model.embed.weight[5, 7] == torch.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_weights_are_finite(dtype: torch.dtype, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Their sum is not, and is only a hint."""
    folder = save(build(SHAPES["llama2"]).to(dtype), tmp_path)
    edit(folder, lambda t: t[EMBED].fill_(6e4 if dtype == torch.float16 else 3e38))
    ours(folder)
    assert "warning" not in capfd.readouterr().err


def test_a_tied_matrix_under_its_other_name(tmp_path: Path) -> None:
    """Some programs keep the last of two names of one tensor."""
    folder = made(tmp_path, "llama3.2")
    wanted = load_file(folder / WEIGHTS)[EMBED]
    edit(folder, lambda t: t.update({"lm_head.weight": t.pop(EMBED)}))
    model = ours(folder)
    assert torch.equal(model.embed.weight, wanted)
    assert model.head.weight is model.embed.weight


EXPERT = "model.layers.1.mlp.experts.{}.w3.weight".replace("mlp.experts", "block_sparse_moe.experts")


@pytest.mark.parametrize(("change", "told"), [
    (lambda t: t.pop(EXPERT.format(1)), f"{EXPERT.format(1)} is missing, which belongs to {EXPERT.format(0)}"),
    (lambda t: t.pop(EXPERT.format(0)), f"{EXPERT.format(0)} is missing, which belongs to {EXPERT.format(1)}"),
    (lambda t: t.pop(EXPERT.format(4)), f"{EXPERT.format(3)} is the last of 4, but config.json asks for 5"),
    (lambda t: t.update({EXPERT.format(5): torch.ones(52, 48)}), f"{EXPERT.format(5)} is the last of 6, but"),
    (lambda t: t.update({EXPERT.format(99): torch.ones(52, 48)}), f"{EXPERT.format(5)} is missing, which belongs to"),
    (lambda t: [t.pop(EXPERT.format(e)) for e in range(4)], f"{EXPERT.format(0)} is missing; download it again"),
    (lambda t: t.update({EXPERT.format(2): torch.ones(52, 47)}), f"{EXPERT.format(2)} has the shape [52, 47], but"),
    (lambda t: [t.pop(EXPERT.format(e)) for e in range(5)], f"{EXPERT.format('*')} is missing; the checkpoint is inco"),
])  # fmt: skip
def test_experts_that_do_not_fit(change: Callable[[dict], object], told: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "mixtral", "mixtral")
    edit(folder, change)
    refused(told, folder)


# Weights of torch.save


@pytest.fixture
def pickled(folder: Path) -> Path:
    """The same checkpoint as older programs wrote it."""
    torch.save(load_file(folder / WEIGHTS), folder / PICKLE)
    (folder / WEIGHTS).unlink()
    return folder


def test_pickled_weights(pickled: Path, tmp_path: Path) -> None:
    other = ours(made(tmp_path / "plain", "llama2")).state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in ours(pickled).state_dict().items())


def test_safetensors_go_before_a_pickle(folder: Path) -> None:
    (folder / PICKLE).write_bytes(b"not looked at")
    ours(folder)


def test_pickles_with_an_index(pickled: Path) -> None:
    held = torch.load(pickled / PICKLE, weights_only=True)
    names = sorted(held)
    parts = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, part in parts.items():
        torch.save({name: held[name] for name in part}, pickled / file)
    (pickled / PICKLE).unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (pickled / PICKLE_INDEX).write_text(json.dumps(index))
    ours(pickled)
    (pickled / PICKLE_INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {Q: "../x.bin"}}))
    refused(f"{pickled / PICKLE_INDEX}: '../x.bin' lies outside the folder", pickled)


def test_a_pickle_that_asks_for_more(pickled: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Path()}, pickled / PICKLE)
    refused(f"{pickled / PICKLE}: holds more than tensors, or is damaged", pickled)
