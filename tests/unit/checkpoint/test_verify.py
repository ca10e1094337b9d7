"""Correctly saved files pass verification in each dtype; files with an error fail."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.random_checkpoints import (
    FP32,
    FULL,
    SHAPES,
    build,
    load_model,
    rewrite_config,
    save,
    shuffle_adapter,
    train,
)
from tunekit import assets
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint import final_checkpoint as saving
from tunekit.checkpoint import merge, peft_adapter, peft_config, verify
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import ModelSource, checkpoint_logits
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig

SavedModel = Callable[[str, torch.dtype], tuple[Decoder, HFCheckpoint, Path]]
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BF16 = PrecisionConfig("bf16")
FAMILIES = ("llama3.2", "mistral", "qwen2", "gemma2", "phi3", "olmo3", "granite", "glm4", "gemma3-vision", "mixtral")
FAMILIES += ("gpt-oss", "deepseek-v3", "qwen3-moe", "llama4", "gemma4-moe-shared", "qwen3-next", "qwen3.5-moe-vision")


def make_trained_model(
    folder: Path, name: str, dtype: torch.dtype, adapter: NoAdapter | LoRAConfig = FULL
) -> tuple[Decoder, HFCheckpoint]:
    """Model after some steps, and its base checkpoint in `dtype`."""
    base = save(build(SHAPES[name]).to(dtype), folder / "base")
    model = load_model(base, adapter, PrecisionConfig("fp32"))
    train(model, adapter)
    return model, HFCheckpoint.open(base)


def save_checkpoint(folder: Path, model: Decoder, source: HFCheckpoint, adapter: NoAdapter | LoRAConfig = FULL) -> Path:
    out = folder / "final"
    out.mkdir()
    saving.save_final(adapter, out, model, source)
    return out


def verify_saved(
    out: Path, model: Decoder, source: HFCheckpoint, precision: PrecisionConfig = FP32
) -> verify.VerificationResult:
    return verify.verify_saved(out, model, ModelSource(source, precision=precision), DistributedContext(device="cpu"))


@pytest.mark.parametrize(("name", "dtype"), [(n, DTYPES[i % 3]) for i, n in enumerate(FAMILIES)])
def test_saved_model_passes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, source = make_trained_model(tmp_path, name, dtype)
    result = verify_saved(save_checkpoint(tmp_path, model, source), model, source, BF16)
    assert result.passed, result
    assert (result.mean == 0) == (dtype == torch.float32), "fp32 files are exact, other dtypes are rounded"
    assert result.unexplained == 0


@pytest.mark.parametrize("adapter", [
    LoRAConfig(4, 8.0),
    LoRAConfig(4, use_rslora=True, target_modules=("q_proj", "embed", "head")),
    LoRAConfig(4, init="pissa"),
    DoRAConfig(3, target_modules=("attn", "head")),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_saved_adapter_passes(adapter: LoRAConfig, precision: PrecisionConfig, tmp_path: Path) -> None:
    base = save(build(SHAPES["llama3.2"]).bfloat16(), tmp_path / "base")
    model, source = load_model(base, adapter, precision), HFCheckpoint.open(base)
    train(model, adapter)
    result = verify_saved(save_checkpoint(tmp_path, model, source, adapter), model, source, precision)
    assert result.passed, result
    assert result.mean < 1e-6, "adapters are saved in fp32"


def edit_file(file: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Apply `change` to the tensors of a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def swap_tensors(first: str, second: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if first in name]:
            twin = name.replace(first, second)
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    return change


def zero_tensors(name_part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        assert any(name_part in name for name in tensors)
        tensors.update({name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name_part in name})

    return change


def scale_tensor(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] *= factor

    return change


def swap_rows(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][[3, 4]] = tensors[name][[4, 3]]

    return change


MISTAKES = {
    "q and k swapped": ("llama2", swap_tensors("q_proj", "k_proj")),
    "q and k swapped in one layer": ("llama2", swap_tensors("1.self_attn.q_proj", "1.self_attn.k_proj")),
    "gate and up swapped in one layer": ("llama2", swap_tensors("0.mlp.gate_proj", "0.mlp.up_proj")),
    "a lost bias": ("qwen2", zero_tensors("q_proj.bias")),
    "a lost bias in one layer": ("qwen2", zero_tensors("1.self_attn.v_proj.bias")),
    "a lost bias of the attention output": ("llama-biases", zero_tensors("2.self_attn.o_proj.bias")),
    "two rows of the head": ("llama2", swap_rows("lm_head.weight")),
    "two rows of the embedding": ("qwen3", swap_rows("model.embed_tokens.weight")),
    "two rows of v": ("mistral", swap_rows("model.layers.1.self_attn.v_proj.weight")),
    "two rows of up": ("llama3.1", swap_rows("model.layers.0.mlp.up_proj.weight")),
    "a layer scaled by 1%": ("qwen3-moe", scale_tensor("model.layers.1.self_attn.o_proj.weight", 1.01)),
    "two experts swapped in one layer": ("qwen3-moe", swap_tensors("1.mlp.experts.0.", "1.mlp.experts.1.")),
    "two rows of a router": ("mixtral", swap_rows("model.layers.1.block_sparse_moe.gate.weight")),
    "not a number": ("llama2", lambda tensors: tensors["model.norm.weight"][0].fill_(math.nan)),
}


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Function that returns a trained model, its base, and its saved files, which pass and must be copied."""

    @cache
    def save_once(name: str, dtype: torch.dtype) -> tuple[Decoder, HFCheckpoint, Path]:
        directory = tmp_path_factory.mktemp("saved")
        model, source = make_trained_model(directory, name, dtype)
        out = save_checkpoint(directory, model, source)
        assert verify_saved(out, model, source).passed
        return model, source, out

    return save_once


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_weights_fail(mistake: str, dtype: torch.dtype, saved_model: SavedModel, tmp_path: Path) -> None:
    name, change = MISTAKES[mistake]
    model, source, files = saved_model(name, dtype)
    out = shutil.copytree(files, tmp_path / "final")
    edit_file(out / "model.safetensors", change)
    result = verify_saved(out, model, source)
    assert not result.passed, result
    result_file = json.loads((out / verify.FILE).read_text(), parse_constant=pytest.fail)
    assert result_file["passed"] is False
    with pytest.raises(UserError, match=r"verification\.json") as caught:
        verify.raise_if_failed(out)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "key", "value"), [
    ("llama2", "rms_norm_eps", 0.1),
    ("llama3.1", "rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
    ("mistral", "sliding_window", None),
    ("llama-gelu", "hidden_act", "silu"),
])  # fmt: skip
def test_wrong_config_fails(name: str, key: str, value: object, saved_model: SavedModel, tmp_path: Path) -> None:
    model, source, files = saved_model(name, torch.bfloat16)
    out = shutil.copytree(files, tmp_path / "final")
    rewrite_config(out, lambda config: config | {key: value})
    assert not verify_saved(out, model, source).passed


def test_wrong_adapter_scale_fails(tmp_path: Path) -> None:
    adapter = LoRAConfig(4, 8.0)
    model, source = make_trained_model(tmp_path, "qwen3", torch.bfloat16, adapter)
    out = save_checkpoint(tmp_path, model, source, adapter)
    file = out / "adapter_config.json"
    for key, value in [("lora_alpha", 8.5), ("use_rslora", True)]:
        right = file.read_text()
        file.write_text(json.dumps(json.loads(right) | {key: value}))
        assert not verify_saved(out, model, source).passed
        file.write_text(right)
    assert verify_saved(out, model, source).passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flipped_router_choices_pass(dtype: torch.dtype, tmp_path: Path) -> None:
    """Two experts have almost the same router logits, so that rounding errors choose between them."""
    model = build(SHAPES["qwen3-moe"])
    router = model.get_parameter("model.layers.1.mlp.gate.weight")
    with torch.no_grad():
        router[1] = router[0] * (1 + 1e-6)
    source = HFCheckpoint.open(save(model, tmp_path / "exact"))
    rounded = HFCheckpoint.open(save(model.to(dtype), tmp_path / "rounded"))
    allowed = 0.00625 if dtype == torch.float16 else 0.05  # as for GGUF files
    result = verify.verify_export(source, FULL, rounded, allowed, CPU)
    assert result.passed, result
    rows = verify.probe_prompts(source.path, source.spec)
    expected, actual = (checkpoint_logits(ModelSource(checkpoint), rows, CPU) for checkpoint in (source, rounded))
    assert any(not torch.equal(a, b) for a, b in zip(expected.routing.experts, actual.routing.experts, strict=True))
    assert verify.logit_diffs([expected], actual)[0].largest > 2 * result.largest


def test_router_with_one_expert_passes(tmp_path: Path) -> None:
    shape = SHAPES["mixtral"] | {"num_local_experts": 1, "num_experts_per_tok": 1}
    source = HFCheckpoint.open(save(build(shape), tmp_path))
    result = verify.verify_export(source, FULL, source, verify.TOLERANCE, CPU)
    assert result.passed, result


@pytest.mark.parametrize("change", ["scale", "router"])
def test_failed_export_names_the_limit(change: str, tmp_path: Path) -> None:
    model = build(SHAPES["qwen3-moe"])
    source = HFCheckpoint.open(save(model, tmp_path / "exact"))
    name = "model.layers.1.mlp.gate.weight" if change == "router" else "model.layers.2.self_attn.v_proj.weight"
    with torch.no_grad():
        if change == "router":
            model.get_parameter(name)[[2, 5]] = model.get_parameter(name)[[5, 2]]
        else:
            model.get_parameter(name).mul_(2)
    result = verify.verify_export(source, FULL, HFCheckpoint.open(save(model, tmp_path / "wrong")), 0.00625, CPU)
    assert not result.passed
    assert result.exceeded is not None
    assert result.exceeded in str(result)
    assert "above" in result.exceeded
    saved = result.write(tmp_path).exceeded
    assert verify.read_verification(tmp_path) == asdict(result) | {"exceeded": saved}


ADAPTERS = {
    "llama-biases": LoRAConfig(4, use_rslora=True, bias="all"),
    "llama3.2": LoRAConfig(4, target_modules=("all-linear", "embed")),
    "qwen3": DoRAConfig(3, target_modules=("all-linear", "head")),
    "phi3": LoRAConfig(4, rank_pattern={"q_proj": 2}),
    "mixtral": LoRAConfig(2),
    "gemma2": LoRAConfig(2, target_modules="attn", modules_to_save=("norms", "embed")),
}


@pytest.mark.parametrize(("name", "dtype"), [(n, DTYPES[i % 3]) for i, n in enumerate(ADAPTERS)])
def test_merged_model_passes_and_wrong_merge_fails(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, source = make_trained_model(tmp_path, name, dtype, ADAPTERS[name])
    shuffle_adapter(model)
    adapter_dir = save_checkpoint(tmp_path, model, source, ADAPTERS[name])
    adapter = peft_adapter.read_adapter_config(AdapterDir.open(adapter_dir), source)
    result = verify_merged(tmp_path / "merged", source, adapter, adapter_dir)
    assert result.passed, result
    assert result.unexplained < max(1e-6, 0.01 * result.mean)
    assert verify.read_verification(tmp_path / "merged") == asdict(result)
    wrong_dir = shutil.copytree(adapter_dir, tmp_path / "wrong")
    config = json.loads((wrong_dir / peft_config.CONFIG).read_text())
    (wrong_dir / peft_config.CONFIG).write_text(json.dumps(config | {"lora_alpha": 1.02 * config["lora_alpha"]}))
    assert not verify_merged(tmp_path / "other", source, adapter, wrong_dir).passed


def verify_merged(out: Path, source: HFCheckpoint, adapter: LoRAConfig, adapter_dir: Path) -> verify.VerificationResult:
    """Verification of a merge of the adapter in `adapter_dir`, when `adapter` was expected."""
    out.mkdir()
    merge.merge_adapter(source, source.open_adapter(adapter_dir), out, quiet=True)
    return verify.verify_merge(out, source, adapter, CPU)


def test_verification_does_not_change_the_model(tmp_path: Path) -> None:
    model, source = make_trained_model(tmp_path, "llama3.2", torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    verify_saved(save_checkpoint(tmp_path, model, source), model, source)
    assert model.training
    assert model.compute_dtype is torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_compiled_model_is_not_recompiled(tmp_path: Path) -> None:
    model, source = make_trained_model(tmp_path, "llama3.2", torch.float32)
    out = save_checkpoint(tmp_path, model, source)
    for layer in model.layers:
        layer.compile(backend=lambda *_: pytest.fail("compiled"))
    assert verify_saved(out, model, source).mean == 0


def test_non_finite_weights_fail(tmp_path: Path) -> None:
    model, source = make_trained_model(tmp_path, "llama2", torch.float32)
    with torch.no_grad():
        model.norm.weight.fill_(math.inf)
    out = save_checkpoint(tmp_path, model, source)
    assert not verify_saved(out, model, source).passed
    with pytest.raises(UserError, match="nan"):
        verify.raise_if_failed(out)


def test_fp16_overflow_fails(tmp_path: Path) -> None:
    model, source = make_trained_model(tmp_path, "llama2", torch.float16)
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    assert not verify_saved(save_checkpoint(tmp_path, model, source), model, source).passed


def test_probe_prompts_are_short_and_within_the_vocabulary(tmp_path: Path) -> None:
    nano = assets.model_dir("tunekit/nano")
    spec = HFCheckpoint.open(nano).spec
    rows = verify.probe_prompts(nano, spec)
    assert rows == verify.probe_prompts(nano, spec)
    assert len(rows) >= 20
    assert sum(map(len, rows)) <= 512
    tokenizer = Tokenizer.open(nano)
    texts = [tokenizer.decode(row, special=True) for row in rows]
    assert any(
        text == tokenizer.decode(tokenizer.encode(verify.TEXTS[0], special=True), special=True) for text in texts
    )
    question = tokenizer.encode_prompt([{"role": "user", "content": verify.QUESTIONS[0]}])[-9:]
    assert any(tokenizer.decode(question) in text for text in texts)
    small = replace(spec, vocab=300, context=7)
    rows = verify.probe_prompts(nano, small)
    assert max(token for row in rows for token in row) < 300
    assert max(map(len, rows)) <= 7
    assert len(verify.probe_prompts(tmp_path, spec)) == len(verify.RANDOM_LENGTHS), "without a tokenizer"


def test_unverified_directory_is_accepted(tmp_path: Path) -> None:
    assert verify.read_verification(tmp_path) is None
    verify.raise_if_failed(tmp_path)


@pytest.mark.parametrize(
    ("mean", "unexplained", "expected"),
    [
        (0.004, 0.0, "; all of it is due to rounding "),
        (
            0.004,
            3e-5,
            "; all but 3e-05 is due to rounding ",
        ),
        (0.004, 3e-5, "99.0% of 99"),
        (0.004, 0.004, "; the tolerance is 0.0001 on average; "),
    ],
)
def test_result_explains_rounding(mean: float, unexplained: float, expected: str) -> None:
    message = str(verify.VerificationResult(verify.FILES, 0.03, mean, unexplained, 0.99, 99, 1e-4, True))
    assert message.startswith("verified: logits of model and files differ by 0.004 on average and by 0.03 at most")
    assert expected in message


def test_result_of_scores_mentions_no_tokens() -> None:
    result = verify.VerificationResult(verify.FILES, 0.03, 0.004, 0.0, 1.0, 99, 1e-4, True, scores=True)
    assert str(result).startswith("verified: scores of model and files differ by 0.004 on average")
    assert "standard deviations of all scores" in str(result) and "top-1" not in str(result)
    assert "give the same scores bit for bit" in str(replace(result, largest=0.0))
