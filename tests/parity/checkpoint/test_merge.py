"""Merged checkpoints give the logits of base and adapter, equal peft's weights, and copy all other bytes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.random_checkpoints import (
    SHAPES,
    build,
    load_inference_model,
    load_model,
    load_transformers_model,
    random_tokens,
    relative_error,
    rewrite_config,
    save,
    train,
)
from tests.helpers.transformers_parity import (
    WEIGHTS,
    check_merge,
    merge,
    open_with_peft,
    train_adapter,
)
from tests.parity.checkpoint.test_peft import make_peft_adapter
from tests.parity.checkpoint.test_quantized import (
    GPT_OSS,
    LLAMA,
    quantize_4bit_linears,
    quantize_checkpoint,
    quantize_experts,
    quantize_fp8,
)
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.checkpoint import atomic, peft_config
from tunekit.checkpoint import final_checkpoint as saving
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.safetensors_io import SafetensorsHeader
from tunekit.cli import main as cli
from tunekit.errors import UserError
from tunekit.models.precision import PrecisionConfig


def train_adapter_of(path: Path, base: Path, adapter: LoRAConfig) -> Path:
    """Train an adapter for a checkpoint of any dtype."""
    model = load_model(base, adapter, PrecisionConfig("fp32"))
    train(model, adapter)
    with atomic.AtomicDir(path / "adapter") as out:
        saving.save_final(adapter, out, model, HFCheckpoint.open(base))
    return path / "adapter"


def test_dora_of_shared_experts_is_merged(tmp_path: Path) -> None:
    """peft cannot open it."""
    _, model = train_adapter(tmp_path, "qwen2-moe", DoRAConfig(4))
    check_merge(tmp_path, model)


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
def test_merged_weights_equal_peft(shape: str, adapter: LoRAConfig, tmp_path: Path) -> None:
    folder, _ = train_adapter(tmp_path, shape, adapter)
    actual = load_file(merge(tmp_path) / WEIGHTS)
    open_with_peft(load_transformers_model(tmp_path / "base"), folder).merge_and_unload().save_pretrained(
        tmp_path / "theirs"
    )
    expected = load_file(tmp_path / "theirs" / WEIGHTS)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert relative_error(actual[name], tensor) < 1e-6, name


@pytest.mark.parametrize(
    ("adapter", "untied", "stored"),
    [
        (LoRAConfig(4, target_modules="head"), True, "embed"),
        (LoRAConfig(4, target_modules="head"), True, "head"),
        (LoRAConfig(4, target_modules="embed"), True, "head"),
        (LoRAConfig(4, target_modules="embed"), True, "both"),
        (DoRAConfig(4, target_modules="head"), True, "both"),
        (LoRAConfig(4, target_modules=("head", "embed", "q_proj")), True, "embed"),
        (LoRAConfig(4, modules_to_save=("embed",)), False, "head"),
        (LoRAConfig(4, modules_to_save=("embed",)), False, "both"),
        (LoRAConfig(4), False, "both"),
        (LoRAConfig(4), False, "embed"),
        (LoRAConfig(4), False, "head"),
        (LoRAConfig(4, modules_to_save=("head",), untie_embeddings=True), True, "embed"),
        (LoRAConfig(4, modules_to_save=("embed",), untie_embeddings=True), True, "head"),
        (LoRAConfig(4, modules_to_save=("embed",), target_modules="head", untie_embeddings=True), True, "both"),
    ],
)
@torch.no_grad()
def test_tied_head_is_untied_only_if_necessary(adapter: LoRAConfig, untied: bool, stored: str, tmp_path: Path) -> None:
    """peft would put the delta of one into the tensor of both."""
    _, model = train_adapter(tmp_path, "smollm2", adapter)
    file, ends = tmp_path / "base" / WEIGHTS, ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    embedding = tensors.pop(ends[0])
    tensors |= {
        end: embedding.clone() for end, word in zip(ends, ("embed", "head"), strict=True) if stored in (word, "both")
    }
    save_file(tensors, file, metadata={"format": "pt"})
    out = merge(tmp_path)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is not untied
    assert load_file(out / WEIGHTS).keys() == tensors.keys() | (set(ends) if untied else set())
    for logits in (load_model(out)(random_tokens()), load_transformers_model(out)(random_tokens()).logits):
        assert relative_error(logits, model(random_tokens())) < 1e-5


@pytest.mark.parametrize("options", [
    {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True},
    {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
])  # fmt: skip
@torch.no_grad()
def test_peft_adapter_that_keeps_the_tie(options: dict, tmp_path: Path) -> None:
    _, other = make_peft_adapter(tmp_path, "smollm2", **options)
    out = merge(tmp_path)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert relative_error(load_model(out)(random_tokens()), other(random_tokens()).logits) < 1e-5


def save_sharded(path: Path, shape: str, dtype: torch.dtype, size: str) -> Path:
    return save(build(SHAPES[shape]).to(dtype), path / "base", max_shard_size=size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_merged_sums_are_exact_and_other_tensors_are_copied(dtype: torch.dtype, tmp_path: Path) -> None:
    base = save_sharded(tmp_path, "llama3.1", dtype, "40KB")
    with torch.enable_grad():
        folder = train_adapter_of(tmp_path, base, LoRAConfig(4, target_modules=("q_proj", "down_proj")))
    out, updates = merge(tmp_path), load_file(folder / peft_config.TENSORS)
    files = sorted(base.glob("*.safetensors"))
    assert len(files) == 3
    assert (out / "model.safetensors.index.json").read_bytes() == (base / "model.safetensors.index.json").read_bytes()
    for file in files:
        before, after = load_file(file), load_file(out / file.name)
        assert list(SafetensorsHeader.read(out / file.name).tensors) == list(SafetensorsHeader.read(file).tensors), (
            "in the same order"
        )
        for name, tensor in before.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" not in updates:
                assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))
                continue
            a, b = updates[f"{module}.lora_A.weight"].double(), updates[f"{module}.lora_B.weight"].double()
            expected = (tensor.double() + 8 * b @ a).to(dtype)  # alpha / rank is 8
            ulps = after[name].view(torch.int16).int() - expected.view(torch.int16).int()
            assert ulps.abs().max() <= 1
            assert (ulps == 0).float().mean() > 0.999, "rounded once, to the nearest"


def test_companion_files_are_copied(tmp_path: Path) -> None:
    """The tokenizer of the adapter replaces that of the base, which is copied if the adapter has none."""
    train_adapter(tmp_path, "llama3.1", LoRAConfig(2))
    (tmp_path / "base" / "LICENSE").write_text("the base's")
    (tmp_path / "base" / "chat_template.jinja").write_text("the base's")
    tokenizer = tmp_path / "adapter" / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace("<user>", "<human>"))
    out = merge(tmp_path)
    assert (out / "LICENSE").read_text() == "the base's"
    assert (out / "tokenizer_config.json").read_bytes() == tokenizer.read_bytes()
    assert not (out / "chat_template.jinja").exists(), "it belongs to the replaced tokenizer"
    assert not list(out.glob("adapter*"))
    for file in (tmp_path / "adapter").glob("tokenizer*"):
        file.unlink()
    shutil.rmtree(out)
    out = merge(tmp_path)
    assert (out / "tokenizer_config.json").read_bytes() == (tmp_path / "base" / "tokenizer_config.json").read_bytes()
    assert (out / "chat_template.jinja").is_file()


@torch.no_grad()
def test_pickled_base(tmp_path: Path) -> None:
    train_adapter(tmp_path, "smollm2", LoRAConfig(4, target_modules=("all-linear", "head", "embed")))
    expected = load_file(merge(tmp_path) / WEIGHTS)
    shutil.rmtree(tmp_path / "merged")
    file = tmp_path / "base" / WEIGHTS
    torch.save(load_file(file), tmp_path / "base" / "pytorch_model.bin")
    file.unlink()
    actual = load_file(merge(tmp_path) / WEIGHTS)
    assert actual.keys() == expected.keys()
    assert all(is_same(actual[name], tensor) for name, tensor in expected.items())


QUANTIZED = {
    "mxfp4": (GPT_OSS, {"quant_method": "mxfp4"}, quantize_experts),
    "fp8": (LLAMA, {"quant_method": "fp8", "weight_block_size": [32, 32]}, quantize_fp8(32)),
    "4-bit": (LLAMA, {"quant_method": "bitsandbytes", "load_in_4bit": True}, quantize_4bit_linears),
}


@pytest.mark.parametrize("case", QUANTIZED)
@torch.no_grad()
def test_merging_dequantizes_the_base(case: str, tmp_path: Path) -> None:
    """The result equals that of a dequantized base."""
    base = quantize_checkpoint(tmp_path / "base", *QUANTIZED[case])
    targets = ("all-linear", "experts") if case == "mxfp4" else "all-linear"
    with torch.enable_grad():
        train_adapter_of(tmp_path, base, LoRAConfig(2, 0.01, target_modules=targets))
    out = merge(tmp_path)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    (tmp_path / "plain").mkdir()
    source = HFCheckpoint.open(base)
    with source.reader() as tensors:
        save_file({name: tensors[name].contiguous() for name in source.tensors}, tmp_path / "plain" / WEIGHTS)
    for file in base.glob("*.json"):
        shutil.copy(file, tmp_path / "plain")
    rewrite_config(
        tmp_path / "plain", lambda c: {key: value for key, value in c.items() if key != "quantization_config"}
    )
    base.rename(tmp_path / "packed")
    (tmp_path / "plain").rename(base)
    out.rename(tmp_path / "first")
    actual, expected = load_file(tmp_path / "first" / WEIGHTS), load_file(merge(tmp_path) / WEIGHTS)
    assert actual.keys() == expected.keys()
    assert all(is_same(actual[name], tensor) for name, tensor in expected.items())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32).eval()
    assert relative_error(load_model(tmp_path / "first")(random_tokens()), plain(random_tokens()).logits) < 1e-4


def is_same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@torch.no_grad()
def test_vision_tensors_are_copied(tmp_path: Path) -> None:
    train_adapter(tmp_path, "gemma3-vision", LoRAConfig(4, modules_to_save=("norms",)))
    before, after = load_file(tmp_path / "base" / WEIGHTS), load_file(merge(tmp_path) / WEIGHTS)
    vision_names = [name for name in before if "vision" in name or "projector" in name]
    assert vision_names
    assert all(is_same(after[name], before[name]) for name in vision_names)
    assert before.keys() == after.keys()


# The command


def run_tune(*args: object) -> None:
    cli.dispatch_command([str(arg) for arg in args])


def test_command_verifies_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_sharded(tmp_path, "llama3.1", torch.bfloat16, "5GB")
    adapter = train_adapter_of(tmp_path, base, LoRAConfig(4, target_modules=("all-linear", "head")))
    run_tune("merge", base, adapter, tmp_path / "out")
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out'}\n", "only the directory, for scripts"
    assert "verified" in printed.err
    verification = json.loads((tmp_path / "out" / "verification.json").read_text())
    assert verification["passed"] is True
    assert 0 < verification["mean"] < 0.05, "rounded to bf16"
    assert (tmp_path / "out" / "README.md").read_text().count("# out\n") == 1
    assert atomic.is_complete(tmp_path / "out")
    assert (
        relative_error(
            load_inference_model(tmp_path / "out")(random_tokens()).detach(),
            load_inference_model(adapter)(random_tokens()).detach(),
        )
        < 0.05
    )


def test_command_names_wrong_arguments(tmp_path: Path) -> None:
    train_adapter(tmp_path, "llama3.1", LoRAConfig(4))
    save(build(SHAPES["qwen3"]), tmp_path / "other")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for args, path in (
        ((base, adapter, adapter), str(adapter)),
        ((base, base, tmp_path / "out"), f"{base}: "),
        ((adapter, adapter, tmp_path / "out"), str(adapter)),
        ((tmp_path / "other", adapter, tmp_path / "out"), str(base)),
        ((tmp_path / "none", adapter, tmp_path / "out"), str(tmp_path / "none")),
    ):
        with pytest.raises(UserError) as caught:
            run_tune("merge", *args)
        assert path in str(caught.value)
    assert not [*tmp_path.glob("out*")], "nothing is written"
    file = adapter / peft_config.TENSORS
    tensors = load_file(file)
    save_file({name: t for name, t in tensors.items() if "layers.1.mlp.up_proj.lora_B" not in name}, tmp_path / "less")
    shutil.copy(tmp_path / "less", file)
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj: .*lora_B"):
        run_tune("merge", base, adapter, tmp_path / "out")


def test_adapter_of_another_model_with_the_same_shapes_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_adapter(tmp_path, "llama3.1", LoRAConfig(4))
    other = save(build(SHAPES["llama3.1"], seed=7), tmp_path / "other")
    run_tune("merge", other, tmp_path / "adapter", tmp_path / "out")
    output = capsys.readouterr().err
    assert all(str(path) in output for path in (tmp_path / "adapter", tmp_path / "base", other))
    config = tmp_path / "adapter" / peft_config.CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    run_tune("merge", other, tmp_path / "adapter", tmp_path / "again")
    assert str(tmp_path / "base") not in capsys.readouterr().err
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()


def test_failed_verification_keeps_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merged weights overflow in fp16; base and adapter alone do not."""
    base = save_sharded(tmp_path, "llama3.1", torch.float16, "5GB")
    adapter = train_adapter_of(tmp_path, base, LoRAConfig(4, target_modules="head"))
    file = adapter / peft_config.TENSORS
    tensors = load_file(file)
    save_file({name: t * (1e6 if "lora_B" in name else 1) for name, t in tensors.items()}, tmp_path / "more")
    shutil.copy(tmp_path / "more", file)
    with pytest.raises(UserError, match=r"verification\.json"):
        run_tune("merge", base, adapter, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "verification.json").read_text())["passed"] is False
    run_tune("merge", "--force", base, adapter, tmp_path / "forced")
    assert "verification failed" in capsys.readouterr().err
