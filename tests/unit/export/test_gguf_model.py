"""Exported models: the fields and tensors of a file describe the model, and unsupported models are rejected."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from tests.helpers.dense_shapes import LLAMA
from tests.helpers.gguf_models import (
    NAMES,
    SUPPORTED,
    export_checkpoint,
    make_checkpoint,
    regex_pre_tokenizer,
    write_byte_level_bpe,
)
from tests.helpers.random_checkpoints import (
    SHAPES,
    load_model,
    load_transformers_model,
    random_tokens,
    relative_error,
    shuffle_adapter,
)
from tunekit.adapters.config import DoRAConfig, FrozenModel, LoRAConfig
from tunekit.checkpoint import merge, peft_adapter, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import ModelSource, checkpoint_logits
from tunekit.checkpoint.merge import MergedCheckpoint
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.export.architecture import ARCHITECTURES, FUSED, MODULES
from tunekit.export.gguf_export import export_gguf, source_fields
from tunekit.export.gguf_plan import build_gguf_plan
from tunekit.export.pretokenizer import QWEN2
from tunekit.export.quant_types import QUANT_TYPES, parse_quant_type
from tunekit.models.weight_map import as_tuple

CPU = torch.device("cpu")
# Architectures that transformers reads, with values that it does not read but assumes.
GEMMA2_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
TRANSFORMERS_READS = {"llama2": {}, "mistral-null": {}, "phi3": {}, "qwen2": {}, "qwen3": {"head_dim": 128}}
TRANSFORMERS_READS |= {"gemma2": GEMMA2_DEFAULTS}
WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("name", SUPPORTED)
def test_exported_file_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """A model built from the file gives the logits of transformers for the checkpoint."""
    directory = make_checkpoint(tmp_path / "model", SUPPORTED[name])
    gguf_plan, gguf_file = export_checkpoint(directory, tmp_path / "model.gguf")
    rows = random_tokens(length=min(23, gguf_plan.spec.context))
    with torch.no_grad():
        expected = load_transformers_model(directory)(rows).logits.flatten(0, 1)
    assert relative_error(checkpoint_logits(ModelSource(gguf_file), rows.tolist(), CPU).full(), expected) < 1e-5


@pytest.mark.parametrize("name", TRANSFORMERS_READS)
def test_transformers_opens_the_file(name: str, tmp_path: Path) -> None:
    """transformers reads some architectures without RoPE scaling."""
    directory = write_byte_level_bpe(
        make_checkpoint(tmp_path / "model", SUPPORTED[name] | TRANSFORMERS_READS[name] | {"vocab_size": 448}),
        regex_pre_tokenizer(QWEN2),
    )
    out = tmp_path / "model.gguf"
    gguf_file = export_gguf(HFCheckpoint.open(directory), FrozenModel(), Tokenizer.open(directory), out, None, "x").file
    rows = random_tokens(length=min(23, gguf_file.spec.context))
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=out.name, dtype=torch.float32)
    with torch.no_grad():
        assert relative_error(opened.eval()(rows).logits, load_transformers_model(directory)(rows).logits) < 1e-5


UNSUPPORTED = {
    "llama-gelu": "layers.0.ffn.act is gelu_tanh",
    "llama-yarn-mscale": "layers.0.mixer.rope.scaling.fast is 8.0",
    "llama-yarn-smooth": "layers.0.mixer.rope.scaling.truncate is False",
    "smollm3-sliding": "layers.0.mixer.out_bias is True",
    "gemma-gelu": "layers.0.mixer.out_bias is True",
    "gemma2": "layers.0.mixer.scale is 0.22",
    "gemma2-uncapped": "layers.0.mixer.scale is 0.22",
    "gemma3": "layers.0.mixer.scale is 0.22",
    "gemma3-scaled": "layers.0.mixer.scale is 0.22",
    "gemma3-vision": "layers.0.mixer.scale is 0.22",
    "olmo2-biases": "layers.0.mixer.out_bias is True",
    "qwen3-biases": "layers.0.mixer.out_bias is True",
    "qwen2-moe": "layers.1.ffn is MoE",
    "qwen2-moe-sliding": "layers.0.ffn.norm_topk_prob is True",
    "qwen3-moe-sparse": "layers.0.mixer.out_bias is True",
}


def has_architecture(name: str) -> bool:
    shape = SHAPES[name]
    return shape.get("text_config", shape).get("model_type") in ARCHITECTURES


@pytest.mark.parametrize("name", [name for name in SHAPES if has_architecture(name) and name not in NAMES])
def test_unsupported_model_of_a_known_architecture_is_rejected(name: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, SHAPES[name])
    with pytest.raises(UserError) as error:
        build_gguf_plan(HFCheckpoint.open(directory), parse_quant_type("f32"))
    assert UNSUPPORTED[name] in str(error.value)


def test_unknown_architecture_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, SHAPES["gpt-oss"])
    with pytest.raises(UserError, match=r"gpt_oss.*llama.*gemma2"):
        build_gguf_plan(HFCheckpoint.open(directory), parse_quant_type("f32"))


def test_context_is_limited_to_an_unsupported_sliding_window(tmp_path: Path) -> None:
    gguf_plan, gguf_file = export_checkpoint(
        make_checkpoint(tmp_path / "model", SHAPES["mistral"]), tmp_path / "model.gguf"
    )
    assert len(gguf_plan.notes) == 1 and all(text in gguf_plan.notes[0] for text in ("llama", " 5 ", "64"))
    assert gguf_file.config["llama.context_length"] == 5


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_every_type(quant_type: str, tmp_path: Path) -> None:
    """Norms are fp32, the head has more than 5 bits, and logits change by at most the expected drift."""
    directory = write_byte_level_bpe(
        make_checkpoint(tmp_path / "model", WIDE | {"vocab_size": 448}), regex_pre_tokenizer(QWEN2)
    )
    source = HFCheckpoint.open(directory)
    out = tmp_path / "model.gguf"
    result = export_gguf(source, FrozenModel(), Tokenizer.open(directory), out, quant_type, "x")
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(out).tensors}
    default_kind = "q8_0" if quant_type == "mxfp4_moe" else quant_type
    is_small, is_ternary = quant_type.startswith(("q4", "q5")), quant_type.startswith("tq")
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "f32"
    assert kinds["blk.1.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == default_kind
    assert kinds["output.weight"] == ("q8_0" if is_small else "f16" if is_ternary else default_kind)
    assert kinds["token_embd.weight"] == ("f16" if is_ternary else default_kind)
    verification = verify.verify_export(source, FrozenModel(), result.file, result.drift, CPU)
    assert verification.passed != is_ternary, verification
    assert (verification.mean < 1e-5) == (quant_type == "f32")


def test_rows_without_full_blocks_are_fp16(tmp_path: Path) -> None:
    _, gguf_file = export_checkpoint(
        make_checkpoint(tmp_path / "model", SHAPES["llama2"]), tmp_path / "model.gguf", "q4_0"
    )
    assert {tensor.kind.name for tensor in gguf_file.gguf_tensors.values()} == {"F16", "F32"}


def test_mxfp4_moe_quantizes_only_experts(tmp_path: Path) -> None:
    shape = SUPPORTED["mixtral"] | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8}
    _, gguf_file = export_checkpoint(make_checkpoint(tmp_path / "model", shape), tmp_path / "model.gguf", "mxfp4_moe")
    kinds = {name: tensor.kind.name for name, tensor in gguf_file.gguf_tensors.items()}
    assert kinds["blk.0.ffn_down_exps.weight"] == kinds["blk.2.ffn_up_exps.weight"] == "MXFP4"
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_k.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"


def test_fp16_overflow_is_detected(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**(WIDE | {"vocab_size": 448})))
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] = 1e6
    directory = write_byte_level_bpe(tmp_path / "model", regex_pre_tokenizer(QWEN2))
    model.save_pretrained(directory)
    out = tmp_path / "model.gguf"
    with pytest.raises(UserError, match=r"token_embd.weight.* inf .*F16"):
        export_gguf(HFCheckpoint.open(directory), FrozenModel(), Tokenizer.open(directory), out, "f16", "x")
    assert out.is_file()


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("llama3.2", LoRAConfig(3, target_modules=("all-linear",))),
        ("llama3.2", LoRAConfig(3, target_modules=("attn", "embed"))),
        ("phi3-long", LoRAConfig(2, target_modules=("all-linear",))),
        ("qwen3", DoRAConfig(2, target_modules=("all-linear",))),
        ("mixtral", LoRAConfig(2, target_modules=("all-linear",))),
    ],
)
def test_adapter_is_merged_during_export(name: str, adapter: LoRAConfig, tmp_path: Path) -> None:
    """The tensors equal those of a merged checkpoint bit for bit."""
    directory = make_checkpoint(tmp_path / "model", SUPPORTED[name])
    source, model = HFCheckpoint.open(directory), load_model(directory, adapter)
    shuffle_adapter(model)
    adapter_dir, merged_dir = tmp_path / "adapter", tmp_path / "merged"
    adapter_dir.mkdir()
    merged_dir.mkdir()
    peft_adapter.save_adapter(adapter_dir, model, adapter, source)
    merge.merge_adapter(source, source.open_adapter(adapter_dir), merged_dir, quiet=True)
    expected = dict(
        (tensor_entry.name, tensor)
        for tensor_entry, tensor in build_gguf_plan(HFCheckpoint.open(merged_dir), parse_quant_type("f32")).tensors()
    )
    actual = dict(
        (tensor_entry.name, tensor)
        for tensor_entry, tensor in build_gguf_plan(
            MergedCheckpoint.with_adapter(source, replace(adapter, adapter_path=str(adapter_dir))),
            parse_quant_type("f32"),
        ).tensors()
    )
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_names_equal_gguf() -> None:
    """gguf's own tables map the Hub names to the same names."""
    hub = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    hub |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "mlp.router": "mlp.gate"}
    hub |= {"mlp.shared_gate": "mlp.shared_expert_gate"}
    arch = gguf.MODEL_ARCH
    tables = [gguf.get_tensor_name_map(architecture, 3) for architecture in (arch.LLAMA, arch.QWEN3, arch.QWEN2MOE)]
    for name, kind in MODULES.items():
        leaf = name.removeprefix("layers.{}.")
        hub_name = hub.get(leaf, leaf.replace("attn.", "self_attn.").replace("shared.", "shared_expert."))
        hub_name = hub_name if name == leaf else f"model.layers.2.{hub_name}"
        if not leaf.endswith("post_norm"):  # one name on the Hub, but several in GGUF, depending on the family
            assert {table.get_name(hub_name) for table in tables} - {None} == {gguf.TENSOR_NAMES[kind].format(bid=2)}
    phi = gguf.get_tensor_name_map(arch.PHI3, 3)
    names = [as_tuple(row.hub)[0].format(2) for row in FUSED]
    assert names == [phi.get_name("model.layers.2.self_attn.qkv_proj"), phi.get_name("model.layers.2.mlp.gate_up_proj")]


def test_architectures_are_known_to_gguf() -> None:
    assert {architecture.name for architecture in ARCHITECTURES.values()} <= set(gguf.MODEL_ARCH_NAMES.values())


def test_license_and_base_are_stored(tmp_path: Path) -> None:
    """License and name of the base are stored in the file."""
    snapshot_dir = tmp_path / "models--acme--small" / "snapshots" / ("0123456789abcdef" * 3)[:40]
    directory = write_byte_level_bpe(
        make_checkpoint(snapshot_dir, SUPPORTED["qwen3"] | {"vocab_size": 448}), regex_pre_tokenizer(QWEN2)
    )
    (directory / "README.md").write_text(
        "---\nlicense: other\nlicense_name: acme\nlicense_link: https://acme.example\n---\n"
    )
    source = HFCheckpoint.open(directory)
    expected = {"general.name": "mine", "general.license": "other", "general.license.name": "acme"}
    expected |= {"general.license.link": "https://acme.example"}
    url = "https://huggingface.co/acme/small"
    assert source_fields(source, "mine", derived=False) == expected | {"general.source.repo_url": url}
    base = {"general.base_model.0.name": "acme/small", "general.base_model.0.repo_url": url}
    assert source_fields(source, "mine", derived=True) == expected | base | {"general.base_model.count": 1}
    gguf_file = export_gguf(source, FrozenModel(), Tokenizer.open(directory), tmp_path / "x.gguf", None, "mine").file
    assert {key: gguf_file.config[key] for key in expected} == expected
