"""Merged checkpoints: the logits of base and adapter, what peft makes of them, and no byte changed without need."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.test_peft import DENSE, SPARSE, foreign, has_experts, suited, trained, with_adapter
from tests.checkpoint.test_quantized import GPT_OSS, LLAMA, pack_all_four, pack_experts, pack_fp8, packed
from tests.checkpoints import SHAPES, build, error, opened, ours, rewrite, save, theirs, tokens, train
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.checkpoint import atomic, peft_adapter
from tunekit.checkpoint import final_checkpoint as saving
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.merge import merge_adapter
from tunekit.checkpoint.safetensors_io import read_header
from tunekit.cli import main as cli
from tunekit.errors import UserError
from tunekit.models.precision import PrecisionConfig

WEIGHTS = "model.safetensors"


def merged(path: Path) -> Path:
    """What becomes of `base` and `adapter` in a folder."""
    with atomic.AtomicDir(path / "merged") as out:
        merge_adapter(HFCheckpoint.open(path / "base"), path / "adapter", out, quiet=True)
    return path / "merged"


def adapted(path: Path, base: Path, adapter: LoRAConfig) -> Path:
    """A trained adapter for a checkpoint of any dtype."""
    model = ours(base, adapter, PrecisionConfig("fp32"))
    train(model, adapter)
    with atomic.AtomicDir(path / "adapter") as out:
        saving.save_final(adapter, out, model, HFCheckpoint.open(base))
    return path / "adapter"


FAMILIES = ("llama3.1", "smollm2", "gemma2", "phi3", "glm4", "mixtral", "gpt-oss", "qwen2-moe", "deepseek-v3", "llama4")
FAMILIES += ("gemma4-moe-shared", "qwen3-next", "gemma3-vision", "qwen3.5-moe-vision")
ENDS = LoRAConfig(4, target_modules=("o_proj", "embed", "head"))
KINDS = {"all": (DENSE, SPARSE), "dora": (DoRAConfig(4), DoRAConfig(4)), "ends": (ENDS, ENDS)}


@torch.no_grad()
def agrees(path: Path, shape: str, adapter: LoRAConfig) -> None:
    folder, model = trained(path, shape, adapter)
    out, wanted = merged(path), model(tokens())
    turns = has_experts(HFCheckpoint.open(path / "base").spec)
    for found in (ours(out)(tokens()), theirs(out)(tokens()).logits):
        errors = ((found - wanted).abs().amax(-1) / wanted.abs().max()).flatten().sort(descending=True).values
        assert errors[int(turns)] < 1e-5  # where two experts are as good, the last bit decides
    before, after = load_file(path / "base" / WEIGHTS), load_file(out / WEIGHTS)
    assert {t.dtype for t in after.values()} == {t.dtype for t in before.values()}


@pytest.mark.parametrize(("shape", "kind"), [(shape, [*KINDS][i % 3]) for i, shape in enumerate(FAMILIES)])
def test_the_model_is_that_of_base_and_adapter(shape: str, kind: str, tmp_path: Path) -> None:
    agrees(tmp_path, shape, suited(shape, KINDS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_that_of_base_and_adapter_in_every_family(shape: str, kind: str, tmp_path: Path) -> None:
    agrees(tmp_path, shape, suited(shape, KINDS[kind]))


@pytest.mark.parametrize(("shape", "adapter"), [
    ("llama3.1", LoRAConfig(4, target_modules=("all-linear", "head", "embed"), use_rslora=True)),
    ("llama-biases", DoRAConfig(4, target_modules=("all-linear", "head"))),
    ("llama-biases", LoRAConfig(4, bias="all", modules_to_save=("head", "norms"))),
    ("phi3", DoRAConfig(4, target_modules=("q_proj", "up_proj", "o_proj"))),
    ("mixtral", LoRAConfig(
        4, target_modules=("all-linear", "experts"), rank_pattern={"up_proj": 2}, alpha_pattern={"o_proj": 3.0}
    )),
    ("gpt-oss", LoRAConfig(4, target_modules=("all-linear", "experts"))),
    ("llama4", LoRAConfig(4, target_modules=("all-linear", "experts"))),
    ("qwen3-next", LoRAConfig(4)),
])  # fmt: skip
@torch.no_grad()
def test_the_weights_are_those_of_peft(shape: str, adapter: LoRAConfig, tmp_path: Path) -> None:
    folder, _ = trained(tmp_path, shape, adapter)
    found = load_file(merged(tmp_path) / WEIGHTS)
    with_adapter(theirs(tmp_path / "base"), folder).merge_and_unload().save_pretrained(tmp_path / "theirs")
    wanted = load_file(tmp_path / "theirs" / WEIGHTS)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert error(found[name], tensor) < 1e-6, name


@pytest.mark.parametrize(
    ("adapter", "untied"),
    [
        (LoRAConfig(4, target_modules="head"), True),
        (LoRAConfig(4, target_modules="embed"), True),
        (DoRAConfig(4, target_modules="head"), True),
        (LoRAConfig(4, target_modules=("head", "embed", "q_proj")), True),
        (LoRAConfig(4, modules_to_save=("embed",)), False),
        (LoRAConfig(4), False),
        (LoRAConfig(4, modules_to_save=("head",), untie_embeddings=True), True),
        (LoRAConfig(4, modules_to_save=("embed",), untie_embeddings=True), True),
        (LoRAConfig(4, modules_to_save=("embed",), target_modules="head", untie_embeddings=True), True),
    ],
)
@pytest.mark.parametrize("stored", ["embed", "head", "both"])
@torch.no_grad()
def test_a_tied_head_goes_its_own_way_only_if_it_must(
    adapter: LoRAConfig, untied: bool, stored: str, tmp_path: Path
) -> None:
    """peft would put the update of one into the tensor of both."""
    _, model = trained(tmp_path, "smollm2", adapter)
    file, ends = tmp_path / "base" / WEIGHTS, ("model.embed_tokens.weight", "lm_head.weight")
    held = {name: tensor.clone() for name, tensor in load_file(file).items()}
    table = held.pop(ends[0])
    held |= {end: table.clone() for end, word in zip(ends, ("embed", "head"), strict=True) if stored in (word, "both")}
    save_file(held, file, metadata={"format": "pt"})
    out = merged(tmp_path)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is not untied
    assert load_file(out / WEIGHTS).keys() == held.keys() | (set(ends) if untied else set())
    for found in (ours(out)(tokens()), theirs(out)(tokens()).logits):
        assert error(found, model(tokens())) < 1e-5


@pytest.mark.parametrize("options", [
    {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True},
    {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
])  # fmt: skip
@torch.no_grad()
def test_an_adapter_of_peft_that_keeps_the_tie(options: dict, tmp_path: Path) -> None:
    _, other = foreign(tmp_path, "smollm2", **options)
    out = merged(tmp_path)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert error(ours(out)(tokens()), other(tokens()).logits) < 1e-5


def sharded(path: Path, shape: str, dtype: torch.dtype, size: str) -> Path:
    return save(build(SHAPES[shape]).to(dtype), path / "base", max_shard_size=size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_sums_are_exact_and_what_is_not_touched_is_copied(dtype: torch.dtype, tmp_path: Path) -> None:
    base = sharded(tmp_path, "llama3.1", dtype, "40KB")
    with torch.enable_grad():
        folder = adapted(tmp_path, base, LoRAConfig(4, target_modules=("q_proj", "down_proj")))
    out, updates = merged(tmp_path), load_file(folder / peft_adapter.TENSORS)
    files = sorted(base.glob("*.safetensors"))
    assert len(files) == 3
    assert (out / "model.safetensors.index.json").read_bytes() == (base / "model.safetensors.index.json").read_bytes()
    for file in files:
        before, after = load_file(file), load_file(out / file.name)
        assert list(read_header(out / file.name)) == list(read_header(file)), "in the same order"
        for name, tensor in before.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" not in updates:
                assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))
                continue
            a, b = updates[f"{module}.lora_A.weight"].double(), updates[f"{module}.lora_B.weight"].double()
            wanted = (tensor.double() + 8 * b @ a).to(dtype)  # alpha / rank is 8
            steps = after[name].view(torch.int16).int() - wanted.view(torch.int16).int()
            assert steps.abs().max() <= 1
            assert (steps == 0).float().mean() > 0.999, "rounded once, to the nearest"


def test_files_beside(tmp_path: Path) -> None:
    """The adapter's tokenizer wins; without one, the base's stays."""
    trained(tmp_path, "llama3.1", LoRAConfig(2))
    (tmp_path / "base" / "LICENSE").write_text("the base's")
    (tmp_path / "base" / "chat_template.jinja").write_text("the base's")
    tokenizer = tmp_path / "adapter" / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace("<user>", "<person>"))
    out = merged(tmp_path)
    assert (out / "LICENSE").read_text() == "the base's"
    assert (out / "tokenizer_config.json").read_bytes() == tokenizer.read_bytes()
    assert not (out / "chat_template.jinja").exists(), "it belongs to the other tokenizer"
    assert not list(out.glob("adapter*"))
    for file in (tmp_path / "adapter").glob("tokenizer*"):
        file.unlink()
    shutil.rmtree(out)
    out = merged(tmp_path)
    assert (out / "tokenizer_config.json").read_bytes() == (tmp_path / "base" / "tokenizer_config.json").read_bytes()
    assert (out / "chat_template.jinja").is_file()


@torch.no_grad()
def test_a_base_of_pickles(tmp_path: Path) -> None:
    trained(tmp_path, "smollm2", LoRAConfig(4, target_modules=("all-linear", "head", "embed")))
    wanted = load_file(merged(tmp_path) / WEIGHTS)
    shutil.rmtree(tmp_path / "merged")
    file = tmp_path / "base" / WEIGHTS
    torch.save(load_file(file), tmp_path / "base" / "pytorch_model.bin")
    file.unlink()
    found = load_file(merged(tmp_path) / WEIGHTS)
    assert found.keys() == wanted.keys()
    assert all(same(found[name], tensor) for name, tensor in wanted.items())


PACKED = {
    "mxfp4": (GPT_OSS, {"quant_method": "mxfp4"}, pack_experts),
    "fp8": (LLAMA, {"quant_method": "fp8", "weight_block_size": [32, 32]}, pack_fp8(32)),
    "4 bits": (LLAMA, {"quant_method": "bitsandbytes", "load_in_4bit": True}, pack_all_four),
}


@pytest.mark.parametrize("case", PACKED)
@torch.no_grad()
def test_a_packed_base_gives_a_plain_model(case: str, tmp_path: Path) -> None:
    """The same as if it had been unpacked before."""
    base = packed(tmp_path / "base", *PACKED[case])
    targets = ("all-linear", "experts") if case == "mxfp4" else "all-linear"
    with torch.enable_grad():
        adapted(tmp_path, base, LoRAConfig(2, 0.01, target_modules=targets))
    out = merged(tmp_path)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    (tmp_path / "plain").mkdir()
    source = HFCheckpoint.open(base)
    with source.reader() as tensors:
        save_file({name: tensors[name].contiguous() for name in source.tensors}, tmp_path / "plain" / WEIGHTS)
    for file in base.glob("*.json"):
        shutil.copy(file, tmp_path / "plain")
    rewrite(tmp_path / "plain", lambda c: {key: value for key, value in c.items() if key != "quantization_config"})
    base.rename(tmp_path / "packed")
    (tmp_path / "plain").rename(base)
    out.rename(tmp_path / "first")
    found, wanted = load_file(tmp_path / "first" / WEIGHTS), load_file(merged(tmp_path) / WEIGHTS)
    assert found.keys() == wanted.keys()
    assert all(same(found[name], tensor) for name, tensor in wanted.items())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32).eval()
    assert error(ours(tmp_path / "first")(tokens()), plain(tokens()).logits) < 1e-4


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@torch.no_grad()
def test_parts_that_see_are_copied(tmp_path: Path) -> None:
    trained(tmp_path, "gemma3-vision", LoRAConfig(4, modules_to_save=("norms",)))
    before, after = load_file(tmp_path / "base" / WEIGHTS), load_file(merged(tmp_path) / WEIGHTS)
    seeing = [name for name in before if "vision" in name or "projector" in name]
    assert seeing
    assert all(same(after[name], before[name]) for name in seeing)
    assert before.keys() == after.keys()


# The command


def tune(*words: object) -> None:
    cli.dispatch([str(word) for word in words])


def test_the_command_verifies_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = sharded(tmp_path, "llama3.1", torch.bfloat16, "5GB")
    adapter = adapted(tmp_path, base, LoRAConfig(4, target_modules=("all-linear", "head")))
    tune("merge", base, adapter, tmp_path / "out")
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out'}\n", "the folder alone, for scripts"
    assert "verified: logits of base with adapter and merged files" in printed.err
    told = json.loads((tmp_path / "out" / "verification.json").read_text())
    assert told["passed"] is True
    assert 0 < told["mean"] < 0.05, "rounded to bf16"
    assert (tmp_path / "out" / "README.md").read_text().count("# out\n") == 1
    assert atomic.is_complete(tmp_path / "out")
    assert error(opened(tmp_path / "out")(tokens()).detach(), opened(adapter)(tokens()).detach()) < 0.05


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    trained(tmp_path, "llama3.1", LoRAConfig(4))
    save(build(SHAPES["qwen3"]), tmp_path / "other")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for words, told in (
        ((base, adapter, adapter), f"{adapter} is there already: name another folder"),
        ((base, base, tmp_path / "out"), f"{base}: no adapter_config.json, so this is no adapter"),
        (
            (adapter, adapter, tmp_path / "out"),
            f"{adapter} is an adapter itself: name the model that it is for, ",
        ),
        ((tmp_path / "other", adapter, tmp_path / "out"), f"this adapter was trained for {base}"),
        ((tmp_path / "none", adapter, tmp_path / "out"), f"no such folder: {tmp_path / 'none'}"),
    ):
        with pytest.raises(UserError) as caught:
            tune("merge", *words)
        assert told in str(caught.value)
    assert not [*tmp_path.glob("out*")], "nothing is left"
    file = adapter / peft_adapter.TENSORS
    held = load_file(file)
    save_file({name: t for name, t in held.items() if "layers.1.mlp.up_proj.lora_B" not in name}, tmp_path / "less")
    shutil.copy(tmp_path / "less", file)
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj: no lora_B"):
        tune("merge", base, adapter, tmp_path / "out")


def test_an_adapter_goes_into_another_model_of_its_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "llama3.1", LoRAConfig(4))
    other = save(build(SHAPES["llama3.1"], seed=7), tmp_path / "other")
    tune("merge", other, tmp_path / "adapter", tmp_path / "out")
    told = capsys.readouterr().err
    assert f"{tmp_path / 'adapter'} was trained for {tmp_path / 'base'}; its updates fit {other} too" in told
    config = tmp_path / "adapter" / peft_adapter.CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    tune("merge", other, tmp_path / "adapter", tmp_path / "again")
    assert "trained for" not in capsys.readouterr().err
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()


def test_what_fails_its_verification_is_kept_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merged weights are too large for fp16, those of base and adapter apart are not."""
    base = sharded(tmp_path, "llama3.1", torch.float16, "5GB")
    adapter = adapted(tmp_path, base, LoRAConfig(4, target_modules="head"))
    file = adapter / peft_adapter.TENSORS
    held = load_file(file)
    save_file({name: t * (1e6 if "lora_B" in name else 1) for name, t in held.items()}, tmp_path / "more")
    shutil.copy(tmp_path / "more", file)
    with pytest.raises(UserError, match="the files stay there, see verification.json"):
        tune("merge", base, adapter, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "verification.json").read_text())["passed"] is False
    tune("merge", "--force", base, adapter, tmp_path / "forced")
    assert "verification failed" in capsys.readouterr().err
