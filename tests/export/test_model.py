"""Whole models: what a file says is the model that it was made of, and a model of which it cannot is refused."""

from pathlib import Path

import gguf
import pytest
import torch
import transformers

from tests.checkpoints import FP32, SHAPES, error, ours, shuffle_adapter, theirs, tokens
from tests.export.exported import FITTING, NAMES, made, split, write_bytes, written
from tests.shapes_dense import LLAMA
from tunekit.adapters.config import DoRAConfig, FrozenModel, LoRAConfig
from tunekit.checkpoint import layerwise_forward, merge, peft_adapter, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.export.architecture import ARCHITECTURES, FUSED, MODULES
from tunekit.export.gguf_export import about, export
from tunekit.export.lazy_merge import LazyMergedCheckpoint
from tunekit.export.pretokenizer import QWEN2
from tunekit.export.quant_types import ENCODINGS, parse_quant_type
from tunekit.export.tensor_map import build_tensor_map
from tunekit.models.weight_map import sides

CPU = torch.device("cpu")
# What transformers reads, with sizes that it does not read but takes for granted.
USUAL2 = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
READ = {"llama2": {}, "mistral-null": {}, "phi3": {}, "qwen2": {}, "qwen3": {"head_dim": 128}}
READ |= {"gemma2": USUAL2}
WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("name", FITTING)
def test_a_file_is_the_model(name: str, tmp_path: Path) -> None:
    """Built from the fields and tensors of the file alone, it gives the logits of transformers for the checkpoint."""
    folder = made(tmp_path / "model", FITTING[name])
    plan, file = written(folder, tmp_path / "model.gguf")
    rows = tokens(length=min(23, plan.spec.context))
    with torch.no_grad():
        wanted = theirs(folder)(rows).logits.flatten(0, 1)
    assert (
        error(layerwise_forward.checkpoint_logits(file, FrozenModel(), rows.tolist(), FP32, CPU).whole(), wanted) < 1e-5
    )


@pytest.mark.parametrize("name", READ)
def test_transformers_opens_it(name: str, tmp_path: Path) -> None:
    """Its reader knows some architectures, as long as nothing stretches their positions."""
    folder = write_bytes(made(tmp_path / "model", FITTING[name] | READ[name] | {"vocab_size": 448}), split(QWEN2))
    out = tmp_path / "model.gguf"
    file = export(HFCheckpoint.open(folder), FrozenModel(), Tokenizer.open(folder), out, None, "x").file
    rows = tokens(length=min(23, file.spec.context))
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=out.name, dtype=torch.float32)
    with torch.no_grad():
        assert error(opened.eval()(rows).logits, theirs(folder)(rows).logits) < 1e-5


REFUSED = {
    "llama-gelu": "layers.0.ffn.act is gelu_tanh, and there silu",
    "llama-yarn-mscale": "layers.0.mixer.rope.scaling.fast is 8.0, and there 32.0",
    "llama-yarn-smooth": "layers.0.mixer.rope.scaling.truncate is False, and there True",
    "smollm3-sliding": "layers.0.mixer.out_bias is True, and there False",
    "gemma-gelu": "layers.0.mixer.out_bias is True, and there False",
    "gemma2": "layers.0.mixer.scale is 0.22",
    "gemma2-uncapped": "layers.0.mixer.scale is 0.22",
    "gemma3": "layers.0.mixer.scale is 0.22",
    "gemma3-scaled": "layers.0.mixer.scale is 0.22",
    "gemma3-vision": "layers.0.mixer.scale is 0.22",
    "olmo2-biases": "layers.0.mixer.out_bias is True, and there False",
    "qwen3-biases": "layers.0.mixer.out_bias is True, and there False",
    "qwen2-moe": "layers.1.ffn is MoE",
    "qwen2-moe-sliding": "layers.0.ffn.normalize is True, and there False",
    "qwen3-moe-sparse": "layers.0.mixer.out_bias is True, and there False",
}


def known(name: str) -> bool:
    shape = SHAPES[name]
    return shape.get("text_config", shape).get("model_type") in ARCHITECTURES


@pytest.mark.parametrize("name", [name for name in SHAPES if known(name) and name not in NAMES])
def test_another_model_than_that_of_llama_cpp_is_refused(name: str, tmp_path: Path) -> None:
    folder = made(tmp_path, SHAPES[name])
    with pytest.raises(UserError) as refusal:
        build_tensor_map(HFCheckpoint.open(folder), parse_quant_type("f32"))
    assert "cannot run this model: " + REFUSED[name] in str(refusal.value)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    folder = made(tmp_path, SHAPES["gpt-oss"])
    with pytest.raises(UserError, match=r"a gpt_oss model cannot be written as GGUF; llama, .*gemma2.* can"):
        build_tensor_map(HFCheckpoint.open(folder), parse_quant_type("f32"))


def test_the_context_is_that_of_the_window_where_llama_cpp_has_none(tmp_path: Path) -> None:
    plan, file = written(made(tmp_path / "model", SHAPES["mistral"]), tmp_path / "model.gguf")
    assert plan.notes == ("llama.cpp's llama has no sliding window: the file is for up to 5 tokens, not 64",)
    assert file.config["llama.context_length"] == 5


@pytest.mark.parametrize("word", ENCODINGS)
def test_every_type(word: str, tmp_path: Path) -> None:
    """Vectors are fp32, the head keeps more than Q5, and logits move by no more than is said."""
    folder = write_bytes(made(tmp_path / "model", WIDE | {"vocab_size": 448}), split(QWEN2))
    source = HFCheckpoint.open(folder)
    out = tmp_path / "model.gguf"
    result = export(source, FrozenModel(), Tokenizer.open(folder), out, word, "x")
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(out).tensors}
    usual = "q8_0" if word == "mxfp4_moe" else word
    small, ternary = word.startswith(("q4", "q5")), word.startswith("tq")
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "f32"
    assert kinds["blk.1.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == usual
    assert kinds["output.weight"] == ("q8_0" if small else "f16" if ternary else usual)
    assert kinds["token_embd.weight"] == ("f16" if ternary else usual)
    found = verify.verify_export(source, FrozenModel(), result.file, result.drift, CPU)
    assert found.passed != ternary, found
    assert (found.mean < 1e-5) == (word == "f32")


def test_rows_that_are_no_whole_blocks_stay_fp16(tmp_path: Path) -> None:
    _, file = written(made(tmp_path / "model", SHAPES["llama2"]), tmp_path / "model.gguf", "q4_0")
    assert {one.kind.name for one in file.coded.values()} == {"F16", "F32"}


def test_experts_alone_are_mxfp4(tmp_path: Path) -> None:
    shape = FITTING["mixtral"] | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8}
    _, file = written(made(tmp_path / "model", shape), tmp_path / "model.gguf", "mxfp4_moe")
    kinds = {name: one.kind.name for name, one in file.coded.items()}
    assert kinds["blk.0.ffn_down_exps.weight"] == kinds["blk.2.ffn_up_exps.weight"] == "MXFP4"
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_k.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"


def test_numbers_that_fp16_does_not_hold_are_found(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**(WIDE | {"vocab_size": 448})))
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] = 1e6
    folder = write_bytes(tmp_path / "model", split(QWEN2))
    model.save_pretrained(folder)
    out = tmp_path / "model.gguf"
    with pytest.raises(UserError, match=r"token_embd.weight is inf times as far from the checkpoint as F16 may be"):
        export(HFCheckpoint.open(folder), FrozenModel(), Tokenizer.open(folder), out, "f16", "x")
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
def test_an_adapter_is_merged_on_the_way(name: str, adapter: LoRAConfig, tmp_path: Path) -> None:
    """The same numbers, to the bit, as in a checkpoint that was merged before."""
    folder = made(tmp_path / "model", FITTING[name])
    source, model = HFCheckpoint.open(folder), ours(folder, adapter)
    shuffle_adapter(model)
    beside, whole = tmp_path / "adapter", tmp_path / "merged"
    beside.mkdir()
    whole.mkdir()
    peft_adapter.save_adapter(beside, model, adapter, source)
    merge.merge_adapter(source, beside, whole, quiet=True)
    wanted = dict(
        (part.name, tensor)
        for part, tensor in build_tensor_map(HFCheckpoint.open(whole), parse_quant_type("f32")).tensors()
    )
    found = dict(
        (part.name, tensor)
        for part, tensor in build_tensor_map(LazyMergedCheckpoint.of(source, beside), parse_quant_type("f32")).tensors()
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_names_are_those_of_gguf() -> None:
    """Its own tables lead from names of the Hub to the same ones."""
    hub = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    hub |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "mlp.router": "mlp.gate"}
    hub |= {"mlp.shared_gate": "mlp.shared_expert_gate"}
    arch = gguf.MODEL_ARCH
    tables = [gguf.get_tensor_name_map(one, 3) for one in (arch.LLAMA, arch.QWEN3, arch.QWEN2MOE)]
    for ours_, kind in MODULES.items():
        leaf = ours_.removeprefix("layers.{}.")
        there = hub.get(leaf, leaf.replace("attn.", "self_attn.").replace("shared.", "shared_expert."))
        there = there if ours_ == leaf else f"model.layers.2.{there}"
        if not leaf.endswith("post_norm"):  # one name on the Hub, and others in GGUF for other families
            assert {table.get_name(there) for table in tables} - {None} == {gguf.TENSOR_NAMES[kind].format(bid=2)}
    phi = gguf.get_tensor_name_map(arch.PHI3, 3)
    names = [sides(row.hub)[0].format(2) for row in FUSED]
    assert names == [phi.get_name("model.layers.2.self_attn.qkv_proj"), phi.get_name("model.layers.2.mlp.gate_up_proj")]


def test_architectures_are_those_of_gguf() -> None:
    assert {one.name for one in ARCHITECTURES.values()} <= set(gguf.MODEL_ARCH_NAMES.values())


def test_where_it_comes_from(tmp_path: Path) -> None:
    """Licence and name of the base go with the weights."""
    place = tmp_path / "models--acme--small" / "snapshots" / ("0123456789abcdef" * 3)[:40]
    folder = write_bytes(made(place, FITTING["qwen3"] | {"vocab_size": 448}), split(QWEN2))
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: acme\nlicense_link: https://acme.example\n---\n"
    )
    source = HFCheckpoint.open(folder)
    wanted = {"general.name": "mine", "general.license": "other", "general.license.name": "acme"}
    wanted |= {"general.license.link": "https://acme.example"}
    url = "https://huggingface.co/acme/small"
    assert about(source, "mine", derived=False) == wanted | {"general.source.repo_url": url}
    base = {"general.base_model.0.name": "acme/small", "general.base_model.0.repo_url": url}
    assert about(source, "mine", derived=True) == wanted | base | {"general.base_model.count": 1}
    file = export(source, FrozenModel(), Tokenizer.open(folder), tmp_path / "x.gguf", None, "mine").file
    assert {key: file.config[key] for key in wanted} == wanted
