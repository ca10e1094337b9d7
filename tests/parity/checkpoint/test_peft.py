"""Adapters as files: peft opens ours with the same logits, and tunekit opens those of peft."""

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.helpers.random_checkpoints import (
    SHAPES,
    load_inference_model,
    load_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    shuffle_adapter,
)
from tests.helpers.transformers_parity import max_logit_rounding, measure_adapter_parity, open_with_peft, train_adapter
from tunekit import build
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.checkpoint.peft_config import KNOWN_KEYS, SUPPORTED_VALUES
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.precision import PrecisionConfig

CASES = {
    "lora": ("llama-biases", LoRAConfig(4)),
    "rslora": ("qwen2", LoRAConfig(4, 6.0, use_rslora=True)),
    "dora": ("llama-biases", DoRAConfig(4)),
    "dora head": ("qwen3", DoRAConfig(3, target_modules=("mlp", "head"))),
    "pissa": ("qwen3-biases", LoRAConfig(4, 4.0, init="pissa")),
    "rslora pissa": ("qwen2", LoRAConfig(4, 4.0, init="pissa", use_rslora=True)),
    "dora pissa": ("llama-biases", DoRAConfig(4, 4.0, init="pissa")),
    "pissa embed": ("llama3.1", LoRAConfig(4, 4.0, init="pissa", target_modules=("attn", "embed", "head"))),
    "lora+ dropout": ("mistral", LoRAConfig(4, loraplus_lr_ratio=4.0, dropout=0.2)),
    "some layers": ("llama3.1", LoRAConfig(4, target_modules=(r"layers\.[02]\..*\.(q|v)_proj", "down_proj"))),
    "tied": ("llama3.2", LoRAConfig(4, target_modules=("attn", "head", "embed"))),
    "tied head": ("smollm2", LoRAConfig(4, target_modules="head")),
    "tied embed": ("smollm2", LoRAConfig(4, target_modules="embed")),
    "patterns": (
        "llama3.1",
        LoRAConfig(4, rank_pattern={"mlp": 2, "[qk]_proj": 6}, alpha_pattern={"v_proj": 3.0, "mlp": 9.0}),
    ),
    "rslora patterns": (
        "qwen2",
        LoRAConfig(4, use_rslora=True, rank_pattern={r"layers\.1\..*": 7}, alpha_pattern={"q_proj": 3.0}),
    ),
    "dora patterns": ("qwen3", DoRAConfig(4, rank_pattern={"o_proj": 2, "up_proj": 9}, alpha_pattern={"o_proj": 9.0})),
    "pissa patterns": (
        "llama3.1",
        LoRAConfig(4, 4.0, init="pissa", rank_pattern={"mlp": 2}, alpha_pattern={"q_proj": 9.0}),
    ),
    "modules to save": ("llama3.1", LoRAConfig(4, modules_to_save=("head", "embed", "norms"))),
    "one norm": ("llama3.1", LoRAConfig(4, modules_to_save=("norm",))),
    "some norms": ("qwen3-biases", DoRAConfig(4, modules_to_save=(r"layers\.1\..*norm", "q_norm"))),
    "tied modules to save": ("llama3.2", LoRAConfig(4, modules_to_save=("embed",))),
    "untied": ("llama3.2", LoRAConfig(4, modules_to_save=("embed", "head"), untie_embeddings=True)),
    "untied head": ("smollm2", LoRAConfig(4, modules_to_save=("head",), untie_embeddings=True)),
    "untied embed": ("smollm2", DoRAConfig(4, modules_to_save=("embed",), untie_embeddings=True)),
    "biases": ("llama-biases", LoRAConfig(4, target_modules="attn", bias="all")),
    "biases of adapted": ("llama-biases", LoRAConfig(4, target_modules=("attn", "up_proj"), bias="lora_only")),
    "biases of saved modules": (
        "qwen2",
        LoRAConfig(4, target_modules="mlp", bias="all", modules_to_save=("q_proj", "norms")),
    ),
    "fused": ("phi3", LoRAConfig(4)),
    "fused rslora patterns": (
        "phi4-mini",
        LoRAConfig(4, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 5.0}),
    ),
    "fused dora": ("glm4", DoRAConfig(3)),
    "fused pissa": ("phi3", LoRAConfig(4, 4.0, init="pissa")),
    "parts of fused": ("phi3", LoRAConfig(4, target_modules=("v_proj", "up_proj"))),
    "parts of fused dora": ("phi3", DoRAConfig(4, target_modules=("q_proj", "gate_proj", "o_proj"))),
    "fused modules to save": ("phi3", LoRAConfig(4, target_modules="mlp", modules_to_save=("k_proj",))),
    "experts": ("mixtral", LoRAConfig(4, target_modules=("experts", "attn"), rank_pattern={"down_proj": 2})),
    "some experts": ("mixtral", LoRAConfig(4, target_modules=(r"layers\.[02]\.mlp\.experts\.up_proj",))),
    "experts and shared": (
        "qwen2-moe",
        LoRAConfig(4, target_modules=("experts", "all-linear"), alpha_pattern={"experts": 3.0}),
    ),
    "saved experts": ("qwen3-moe", LoRAConfig(4, target_modules="attn", modules_to_save=("experts", "router"))),
    "dora with frozen experts": ("mixtral", DoRAConfig(4)),
    "embedding with one per layer": ("gemma3n", LoRAConfig(4, target_modules=("q_proj", "embed_tokens"))),
    "saved embedding with one per layer": (
        "gemma4",
        LoRAConfig(4, target_modules="attn", modules_to_save=("embed_tokens", "per_layer.norm")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_peft_opens_trained_adapters(case: str, tmp_path: Path) -> None:
    model, errors = measure_adapter_parity(tmp_path, *CASES[case])
    assert max(errors.in_peft, errors.from_files) < max_logit_rounding(model.spec)
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path == str(tmp_path / "base")


@pytest.mark.parametrize("shape", ["qwen2", "qwen2-tied", "qwen3", "qwen2-moe", "qwen3-moe", "qwen3-next", "qwen3.5"])
def test_q_and_k_of_qwen_are_exported_unpermuted(shape: str, tmp_path: Path) -> None:
    """torchtune permuted lora_B of q and k for a RoPE layout that Qwen does not have, which corrupted such adapters."""
    folder, model = train_adapter(tmp_path, shape, LoRAConfig(4, target_modules=("[qk]_proj",)))
    files = load_file(folder / "adapter_model.safetensors")
    names = [name for name in files if name.endswith("lora_B.weight")]
    assert names
    for name in names:
        ours = name.removeprefix("base_model.model.model.").replace("self_attn", "attn")
        assert torch.equal(files[name], model.get_parameter(ours))


PEFT_CASES = {
    "lora": ("llama-biases", {"target_modules": "all-linear", "lora_alpha": 5}),
    "rslora": ("qwen2", {"target_modules": ["q_proj", "up_proj"], "use_rslora": True}),
    "dora": ("llama-biases", {"target_modules": "all-linear", "use_dora": True}),
    "dora head": ("mistral", {"target_modules": ["lm_head", "o_proj"], "use_dora": True}),
    "one layer": ("qwen3", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "regex": ("qwen3", {"target_modules": r".*\.(0|2)\..*(k|gate)_proj"}),
    "embed": ("llama3.1", {"target_modules": ["embed_tokens", "v_proj"]}),
    "head": ("llama3.1", {"target_modules": ["lm_head", "embed_tokens"]}),
    "tied": ("smollm2", {"target_modules": ["embed_tokens", "k_proj"]}),
    "tied head": ("smollm2", {"target_modules": ["lm_head"]}),
    "patterns": ("llama3.1", {"target_modules": "all-linear", "rank_pattern": {"q_proj": 5, "1.mlp.up_proj": 2}}),
    "alphas": ("qwen3", {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {".*[01].self_attn.q_proj": 5}}),
    "rslora patterns": (
        "qwen2",
        {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"o_proj": 7}, "lora_alpha": 1}
        | {"alpha_pattern": {"mlp.*": 2}},
    ),
    "saved": ("llama3.1", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "norms": ("qwen3-biases", {"target_modules": ["v_proj"], "modules_to_save": ["norm"]}),
    "dora saved": ("llama3.1", {"target_modules": ["v_proj"], "use_dora": True, "modules_to_save": ["0.mlp.up_proj"]}),
    "tied saved": ("smollm2", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied saved head": ("smollm2", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "tied saved embedding": ("smollm2", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}),
    "saved head, adapted embedding": ("smollm2", {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]}),
    "biases": ("llama-biases", {"target_modules": ["q_proj", "up_proj"], "bias": "all"}),
    "biases of adapted": ("qwen2", {"target_modules": ["q_proj", "up_proj"], "bias": "lora_only"}),
}
# In these, a tensor that PEFT trains belongs to several of our layers, or to a part of one: same logits, other tensors.
LAYOUTS = {
    "fused": ("phi3", {"target_modules": "all-linear"}),
    "fused patterns": ("phi3", {"target_modules": "all-linear", "rank_pattern": {"qkv_proj": 6}, "use_rslora": True}),
    "fused dora": ("glm4", {"target_modules": ["gate_up_proj", "o_proj"], "use_dora": True}),
    "fused saved": ("phi3", {"target_modules": ["o_proj"], "modules_to_save": ["qkv_proj"]}),
    "kept tied": (
        "smollm2",
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "adapted tied": ("smollm2", {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True}),
    "saved embedding": ("llama3.1", {"target_modules": ["embed_tokens", "lm_head"]}),
    "embedding with one per layer": ("gemma3n", {"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding of each layer": ("gemma4", {"target_modules": ["v_proj", "embed_tokens_per_layer"]}),
    "saved embedding with one per layer": (
        "gemma4",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "delta net": ("qwen3-next", {"target_modules": ["in_proj_qkvz", "out_proj", "q_proj"]}),
    "latent": ("deepseek-v3", {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"], "use_dora": True}),
    "vision model": ("gemma3-vision", {"target_modules": r".*language_model.*(q|gate)_proj"}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}),
    "experts, one tensor": ("qwen3-moe", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "experts and patterns": (
        "qwen2-moe",
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["gate_up_proj", "0.mlp.experts.down_proj"],
            "rank_pattern": {"down_proj": 5},
            "alpha_pattern": {"gate_up_proj": 5},
        },
    ),
    "interleaved experts": (
        "gpt-oss",
        {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    ),
    "experts that PEFT treats as transposed": (
        "llama4",
        {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    ),
    "experts, renamed": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    "experts and more, renamed": ("qwen3-moe", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "router": ("mixtral", {"target_modules": ["q_proj"], "modules_to_save": ["mlp.gate"]}),
    "router as a parameter": ("qwen3-moe", {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
}


def make_peft_adapter(directory: Path, shape: str, **options: object) -> tuple[Path, peft.PeftModel]:
    """Create an adapter with peft, with random values in all tensors."""
    base = load_transformers_model(make_checkpoint(directory / "base", shape))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(tie_word_embeddings|tied weights|tied modules).*")
        warnings.filterwarnings("ignore", message=".*save_embedding_layers.*")
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=3, **options)).eval()
        shuffle_adapter(model)
        shuffle_other_parameters(model)
        model.save_pretrained(directory / "adapter")
    return directory / "adapter", model


@torch.no_grad()
def shuffle_other_parameters(model: peft.PeftModel) -> None:
    """Change the trained parameters of the model itself."""
    for name, p in model.named_parameters():
        if ".modules_to_save." in name or (p.requires_grad and name.endswith(".bias")):
            p.add_(torch.randn(p.shape) * 0.1)


@pytest.mark.parametrize("case", LAYOUTS)
@torch.no_grad()
def test_layouts_of_peft_are_read(case: str, tmp_path: Path) -> None:
    shape, options = LAYOUTS[case]
    folder, other = make_peft_adapter(tmp_path, shape, **options)
    expected = other(random_tokens()).logits
    assert relative_error(load_transformers_model(tmp_path / "base")(random_tokens()).logits, expected) > 1e-2
    # Large deltas cause large rounding errors: compared with float64 logits, ours are off by 0.03e-5 to 1e-5, peft's by
    # 0.03e-5 to 0.7e-5, and both by up to 1.2e-5 from each other ("fused patterns").
    assert relative_error(load_inference_model(folder)(random_tokens()), expected) < 4e-5


@pytest.mark.parametrize("case", PEFT_CASES)
def test_adapters_of_peft_are_read(case: str, tmp_path: Path) -> None:
    shape, options = PEFT_CASES[case]
    folder, other = make_peft_adapter(tmp_path, shape, **options)
    model = load_inference_model(folder)
    for logits in (actual := model(random_tokens()), expected := other(random_tokens()).logits):
        F.cross_entropy(logits.flatten(0, 1), random_tokens(seed=3).flatten()).backward()
    assert relative_error(actual.detach(), expected.detach()) < 3e-5
    grad_norms = sorted(p.grad.abs().sum().item() for n, p in model.named_parameters() if p.requires_grad)
    expected_norms = sorted(p.grad.abs().sum().item() for n, p in other.named_parameters() if p.requires_grad)
    assert grad_norms == pytest.approx(expected_norms, rel=1e-4)


@pytest.mark.parametrize(("shape", "options"), [
    ("smollm2", {"target_modules": ["embed_tokens"]}), ("llama3.1", {"target_modules": ["embed_tokens"]}),
    ("llama3.1", {"target_modules": ["v_proj"], "trainable_token_indices": [3, 5, 8]}),
])  # fmt: skip
@torch.no_grad()
def test_updates_of_bf16_embeddings_are_added_in_the_compute_dtype(shape: str, options: dict, tmp_path: Path) -> None:
    folder, other = make_peft_adapter(tmp_path, shape, **options)
    load_transformers_model(tmp_path / "base").bfloat16().save_pretrained(tmp_path / "base")
    for name, parameter in other.named_parameters():
        if "lora_" not in name and "trainable_tokens_delta" not in name:
            parameter.copy_(parameter.bfloat16())
    model, _ = build.load_for_inference(str(folder), PrecisionConfig("fp32"), DistributedContext(0, "cpu"))
    assert model.embed.weight.dtype == torch.bfloat16
    assert relative_error(model(random_tokens()), other(random_tokens()).logits) < 3e-5


@torch.no_grad()
def test_loaded_model_applies_no_dropout(tmp_path: Path) -> None:
    folder, other = make_peft_adapter(tmp_path, "llama3.1", target_modules=["v_proj"], lora_dropout=0.5)
    model, _ = build.load_for_inference(str(folder), PrecisionConfig("fp32"), DistributedContext(0, "cpu"))
    assert relative_error(model(random_tokens()), other.eval()(random_tokens()).logits) < 3e-5


@pytest.mark.parametrize(("key", "value"), [
    ("layers_to_transform", [1]), ("layers_to_transform", 1), ("target_modules", ["q_proj"]),
    ("exclude_modules", ["layers.0.mlp.down_proj"]),
])  # fmt: skip
@torch.no_grad()
def test_tensors_that_peft_ignores_are_refused(key: str, value: object, tmp_path: Path) -> None:
    folder, other = make_peft_adapter(tmp_path, "qwen3", target_modules=["q_proj", "down_proj"])
    expected = other(random_tokens()).logits
    assert relative_error(load_inference_model(folder)(random_tokens()), expected) < 3e-5
    edit_config(folder, **{key: value})
    ignored = open_with_peft(load_transformers_model(tmp_path / "base"), folder)(random_tokens()).logits
    assert relative_error(ignored, expected) > 1e-2
    assert_rejected(f"{folder / 'adapter_config.json'}: ", lambda: load_inference_model(folder))


EXPERTS = {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}


@torch.no_grad()
def test_module_for_each_expert(tmp_path: Path) -> None:
    """PEFT adapted experts so when transformers 4 had a module per expert, and still opens such files."""
    folder, other = make_peft_adapter(tmp_path, "mixtral", **EXPERTS)
    file, expected = folder / "adapter_model.safetensors", other(random_tokens()).logits
    tensors = {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}"
        for depth, names in ((".base_layer", ("w1", "w3")), ("", ("w2",))):
            a, b = (load_file(file)[f"{name}.mlp.experts{depth}.lora_{x}.weight"] for x in "AB")
            for expert, (a1, b1) in enumerate(zip(a.chunk(5), b.unflatten(1, (-1, 5)).unbind(-1), strict=True)):
                for part, rows in zip(names, b1.chunk(len(names)), strict=True):
                    to = f"{name}.block_sparse_moe.experts.{expert}.{part}"
                    tensors |= {f"{to}.lora_A.weight": a1.clone(), f"{to}.lora_B.weight": rows.clone()}
    save_file(tensors, file)
    edit_config(folder, target_modules=["w1", "w2", "w3"], target_parameters=None)
    assert (
        relative_error(
            open_with_peft(load_transformers_model(tmp_path / "base"), folder)(random_tokens()).logits, expected
        )
        < 1e-5
    )
    assert relative_error(load_inference_model(folder)(random_tokens()), expected) < 4e-5
    missing = "base_model.model.model.layers.1.block_sparse_moe.experts.2.w3"
    del tensors[f"{missing}.lora_A.weight"]
    save_file(tensors, file)
    assert_rejected(f"{file}: model.layers.1.block_sparse_moe.experts.2.w3: ", lambda: load_inference_model(folder))
    del tensors[f"{missing}.lora_B.weight"]
    save_file(tensors, file)
    assert_rejected("model.layers.1.block_sparse_moe.experts.2.w3.weight", lambda: load_inference_model(folder))


@pytest.mark.parametrize(("hidden", "version", "parameters"), [
    (56, None, EXPERTS["target_parameters"]), (56, "0.18.1", EXPERTS["target_parameters"]),
    (24, "0.18.2.dev0", EXPERTS["target_parameters"]),
    # gate_up_proj is square, as in OLMoE: only down_proj shows the layout, or the version.
    (24, None, EXPERTS["target_parameters"]), (24, "0.18.0", ["gate_up_proj"]), (48, "0.18.0", ["down_proj"]),
])  # fmt: skip
@torch.no_grad()
def test_experts_of_older_peft(
    hidden: int, version: str | None, parameters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT before 0.19 assumed the shape (E, in, out) for all experts, so A and B are swapped."""
    monkeypatch.setitem(SHAPES, "mixtral", SHAPES["mixtral"] | {"intermediate_size": hidden})
    folder, other = make_peft_adapter(tmp_path, "mixtral", target_modules=[], target_parameters=parameters)
    swap_experts(folder, version)
    assert relative_error(load_inference_model(folder)(random_tokens()), other(random_tokens()).logits) < 3e-5


@torch.no_grad()
def test_experts_of_unknown_layout_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts are square, and the config has no version of PEFT. Adapters of tunekit need none."""
    monkeypatch.setitem(SHAPES, "mixtral", SHAPES["mixtral"] | {"intermediate_size": 24})
    folder, other = make_peft_adapter(tmp_path, "mixtral", target_modules=[], target_parameters=["gate_up_proj"])
    edit_config(folder, peft_version=None)
    assert_rejected(f"{folder / 'adapter_config.json'}: no 'peft_version'", lambda: load_inference_model(folder))
    edit_config(folder, peft_version="0.19.0")
    assert relative_error(load_inference_model(folder)(random_tokens()), other(random_tokens()).logits) < 3e-5
    monkeypatch.setitem(SHAPES, "mixtral", SHAPES["mixtral"] | {"intermediate_size": 48})
    _, errors = measure_adapter_parity(tmp_path / "own", "mixtral", LoRAConfig(4, target_modules=("down_proj",)))
    assert max(errors.in_peft, errors.from_files) < 1e-5


def swap_experts(folder: Path, version: str | None) -> None:
    """Convert an adapter of experts to the layout of PEFT before 0.19, with this version in its config."""
    edit_config(folder, peft_version=version)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "lora_A" in name]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        tensors[name] = b.T.unflatten(0, (-1, 5)).transpose(0, 1).flatten(0, 1)  # (rank E, out) to (E rank, out)
        tensors[name.replace("lora_A", "lora_B")] = a.T.unflatten(1, (5, -1)).transpose(1, 2).flatten(1)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


@torch.no_grad()
def test_transposed_experts_of_older_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was correct for experts of the shape (E, in, out)."""
    square = {"intermediate_size": SHAPES["gpt-oss"]["hidden_size"]}  # of down_proj, as in the published models
    monkeypatch.setitem(SHAPES, "gpt-oss", SHAPES["gpt-oss"] | square)
    folder, other = make_peft_adapter(tmp_path, "gpt-oss", **EXPERTS)
    edit_config(folder, peft_version="0.18.1")
    assert relative_error(load_inference_model(folder)(random_tokens()), other(random_tokens()).logits) < 3e-5


@torch.no_grad()
def test_training_continues_from_a_peft_adapter(tmp_path: Path) -> None:
    folder, other = make_peft_adapter(tmp_path, "qwen3", target_modules="all-linear", use_dora=True, lora_alpha=5)
    model = load_model(tmp_path / "base", DoRAConfig(3, 5.0, adapter_path=str(folder)))
    assert relative_error(model.eval()(random_tokens()), other(random_tokens()).logits) < 3e-5


@pytest.mark.parametrize(
    ("adapter", "parts"),
    [
        (LoRAConfig(4, 5.0), ["adapter.rank", "4", "3"]),
        (LoRAConfig(3, 6.0), ["adapter.alpha", "6.0", "5.0"]),
        (LoRAConfig(3, 5.0, use_rslora=True), ["adapter.use_rslora", "True"]),
        (DoRAConfig(3, 5.0), ["adapter.kind", "dora", "lora"]),
        (LoRAConfig(3, 5.0, target_modules="attn"), ["weight"]),
        (LoRAConfig(3, 5.0, target_modules=("all-linear", "head")), ["lm_head.weight", "{base}"]),
    ],
)
def test_adapter_must_match_the_config(adapter: LoRAConfig, parts: list[str], tmp_path: Path) -> None:
    folder, _ = make_peft_adapter(tmp_path, "llama3.1", target_modules="all-linear", lora_alpha=5)
    adapter = type(adapter)(**(vars(adapter) | {"adapter_path": str(folder)}))
    texts = [part.format(base=tmp_path / "base") for part in parts]
    assert_rejected(texts, lambda: load_model(tmp_path / "base", adapter))


@pytest.mark.parametrize(("shape", "adapter", "changes"), [
    ("phi3", LoRAConfig(4), {"target_modules": ("qkv_proj",)}),
    ("phi3", DoRAConfig(4, target_modules=("v_proj", "mlp")), {}),
    ("phi4-mini", LoRAConfig(4, 6.0, use_rslora=True, rank_pattern={"k_proj": 2}, modules_to_save="norms"), {}),
    ("llama3.2", LoRAConfig(4, modules_to_save="head", untie_embeddings=True), {"untie_embeddings": False}),
    ("llama-biases", LoRAConfig(4, target_modules="attn", bias="lora_only"), {"bias": "none"}),
    ("llama3.1", LoRAConfig(4, rank_pattern={"v_proj": 2}), {"rank_pattern": {"v_proj": 3}}),
    ("mixtral", LoRAConfig(4, target_modules="experts", alpha_pattern={"up_proj": 3.0}),
     {"alpha_pattern": {"up_proj": 4.0}}),
])  # fmt: skip
@torch.no_grad()
def test_training_continues_from_a_tunekit_adapter(
    shape: str, adapter: LoRAConfig, changes: dict, tmp_path: Path
) -> None:
    """The same config fits, even if several layers share a delta in the file; another config does not."""
    folder, model = train_adapter(tmp_path, shape, adapter)
    loaded = load_model(tmp_path / "base", replace(adapter, adapter_path=str(folder)))
    tolerance = 1e-6 if adapter.alpha_pattern or adapter.rank_pattern else 0  # the file has one of several scales
    for name, p in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), p, rtol=tolerance, atol=0)
    if changes:
        with pytest.raises(UserError):
            load_model(tmp_path / "base", replace(adapter, adapter_path=str(folder), **changes))


@pytest.mark.parametrize("shape", ["llama2", "qwen2"])
def test_adapter_of_another_model_is_rejected(shape: str, tmp_path: Path) -> None:
    folder, _ = make_peft_adapter(tmp_path, "llama3.1", target_modules="all-linear")
    other = make_checkpoint(tmp_path / "other", shape)
    edit_config(folder, base_model_name_or_path=str(other))
    assert_rejected((str(folder / "adapter_model.safetensors"), "["), lambda: load_inference_model(folder))


@pytest.fixture(scope="module")
def llama2_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapter that tests copy. Its base is not in the copy."""
    return train_adapter(tmp_path_factory.mktemp("llama2"), "llama2", LoRAConfig(2))[0]


@pytest.mark.parametrize(("key", "value", "part"), [
    ("peft_type", "IA3", "'IA3'"),
    ("modules_to_save", ["lm_head"], "lm_head"),
    ("bias", "some", "'some'"),
    ("alpha_pattern", {"q_proj": "much"}, "alpha_pattern: q_proj: "),
    ("alpha_pattern", {"q_proj": 0}, "alpha_pattern: q_proj: "),
    ("rank_pattern", {"(q": 2}, "rank_pattern: (q: "),
    ("lora_bias", True, "lora_bias"),
    ("trainable_token_indices", [1], "trainable_token_indices"),
    ("init_lora_weights", "pissa", "'pissa'"),
    ("init_lora_weights", "pissa_niter_4", "'pissa_niter_4'"),
    ("init_lora_weights", "olora", "'olora'"),
    ("init_lora_weights", "loftq", "'loftq'"),
    ("base_model_name_or_path", None, "base_model_name_or_path"),
    ("r", None, "r: must be an integer, got null"), ("r", "4", 'r: must be an integer, got "4"'),
    ("lora_alpha", None, "lora_alpha: must be a number, got null"), ("lora_dropout", "x", "lora_dropout: "),
    ("target_modules", 5, "target_modules: "), ("use_rslora", "no", "use_rslora: "), ("use_dora", 1, "use_dora: "),
    ("r", 0, "rank: "),
    ("lora_alpha", "much", "much"),
])  # fmt: skip
def test_unsupported_options_are_named(
    key: str, value: object, part: str, llama2_adapter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama2_adapter, tmp_path / "adapter")
    edit_config(folder, **{key: value})
    assert_rejected((part, str(folder / "adapter_config.json")), lambda: load_inference_model(folder))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder, _ = train_adapter(tmp_path, "llama2", LoRAConfig(2))
    file, base = folder / "adapter_model.safetensors", tmp_path / "base"
    contents = file.read_bytes()
    tensors = {name: t.clone() for name, t in load_file(file).items()}  # clones, because the file is rewritten
    first_name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    file.write_bytes(contents[:-10])
    assert_rejected(f"{file}: ", lambda: load_inference_model(folder))
    file.write_bytes(b"nonsense" * 9)
    assert_rejected(f"{file}: ", lambda: load_inference_model(folder))
    save_file({name: t for name, t in tensors.items() if name != first_name}, file)
    assert_rejected(f"{file}: model.layers.0.self_attn.q_proj: ", lambda: load_inference_model(folder))
    save_file({name: t for name, t in tensors.items() if "layers.0.self_attn.q_proj" not in name}, file)
    assert_rejected(
        "model.layers.0.self_attn.q_proj.weight",
        lambda: load_model(base, LoRAConfig(2, adapter_path=str(folder))),
    )
    save_file(tensors | {"base_model.model.visual.lora_A.weight": tensors[first_name].clone()}, file)
    assert_rejected(f"{file}: visual ", lambda: load_inference_model(folder))
    save_file(tensors | {"unet.lora_A.weight": tensors[first_name].clone()}, file)
    assert_rejected(f"{file}: unet.lora_A.weight ", lambda: load_inference_model(folder))
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(3, 3)}, file)
    assert_rejected("lm_head.weight has shape [3, 3]", lambda: load_inference_model(folder))
    save_file(tensors | {first_name: torch.zeros(3, 48)}, file)
    texts = ("layers.0.self_attn.q_proj.lora_A.weight has shape [3, 48]", "[2, 48]")
    assert_rejected(texts, lambda: load_inference_model(folder))
    save_file({"base_model.model.lm_head.weight": torch.zeros(67, 48)}, file)
    assert_rejected(f"{file}: ", lambda: load_inference_model(folder))
    file.unlink()
    assert_rejected("adapter_model.safetensors", lambda: load_inference_model(folder))
    (folder / "adapter_config.json").write_text("{'r': 8}")
    assert_rejected("adapter_config.json", lambda: load_inference_model(folder))


def edit_config(folder: Path, **values: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def assert_rejected(texts: str | Sequence[str], action) -> None:
    """Assert that the error contains all of the texts."""
    with pytest.raises(UserError) as caught:
        action()
    for text in (texts,) if isinstance(texts, str) else texts:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_keys_are_reported(llama2_adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once for each file, unless their values turn them off. All keys of PEFT are known."""
    folder = shutil.copytree(llama2_adapter, tmp_path / "adapter")
    keys = {field.name for field in fields(peft.LoraConfig)}
    assert keys <= KNOWN_KEYS | SUPPORTED_VALUES.keys()
    capsys.readouterr()
    load_inference_model(folder)
    assert "adapter_config.json" not in capsys.readouterr().err
    folder = folder.rename(tmp_path / "newer")
    edit_config(folder, lora_of_next_year={"gamma": 2}, use_other_lora=False, other_config=None)
    load_inference_model(folder)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "adapter_config.json" in line]
    assert "lora_of_next_year" in line
    assert "use_other_lora" not in line and "other_config" not in line


def test_missing_config_keys_have_defaults(llama2_adapter: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama2_adapter, tmp_path / "adapter")
    file = folder / "adapter_config.json"
    required = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules")
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key in required}))
    load_inference_model(folder)
