"""Models with quantized linear layers: which layers, their size, training, checkpoints and errors."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.helpers.random_checkpoints import (
    DEFAULT_MEMORY,
    FP32,
    SHAPES,
    build,
    random_tokens,
    relative_error,
    rewrite_config,
    save,
    shuffle_adapter,
    train,
)
from tunekit import assets
from tunekit import build as assemble
from tunekit.adapters.config import DoRAConfig, FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.dcp_planner import read_metadata
from tunekit.checkpoint.hf_checkpoint import WEIGHTS, HFCheckpoint
from tunekit.checkpoint.layerwise_forward import ModelSource, checkpoint_logits, forward_logits
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.cli import registry
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.distributed.context import DistributedContext
from tunekit.errors import RunStopped, UserError
from tunekit.generation.generate import generate_batch
from tunekit.generation.sampling import SamplingConfig
from tunekit.kernels import nf4
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.feed_forward import GatedMLP
from tunekit.models.linear import GroupedLinear, Linear
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import MLP
from tunekit.quantization.config import Float8Config, FP4Config, NF4Config, NoQuantization, QuantizedWeightMixin
from tunekit.recipes import sft

# Sizes that are multiples of the block size.
BLOCK_SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}
MOE_SIZES = {"moe_intermediate_size": 64}
DELTA_NET_SIZES = {"linear_num_value_heads": 4, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPES["llama-biases"] | BLOCK_SIZES,
    "qwen3-moe": SHAPES["qwen3-moe"] | BLOCK_SIZES | MOE_SIZES,
    "gpt-oss": SHAPES["gpt-oss"] | BLOCK_SIZES,
    "qwen3-next": SHAPES["qwen3-next"] | BLOCK_SIZES | MOE_SIZES | DELTA_NET_SIZES,
}
BF16 = PrecisionConfig("bf16")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def family_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(FAMILIES[request.param]), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(FAMILIES["llama"]), tmp_path_factory.mktemp("llama"))


def build_model(
    folder: Path,
    weights: NoQuantization,
    adapter: NoAdapter | LoRAConfig,
    precision: PrecisionConfig = FP32,
    memory: MemoryConfig = DEFAULT_MEMORY,
) -> Decoder:
    return assemble.build_model(
        HFCheckpoint.open(folder), weights, adapter, precision, memory, DistributedContext(0, "cpu")
    )


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedWeightMixin]]:
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantizedWeightMixin))


# Which layers are quantized


def test_only_linear_layers_of_blocks_are_quantized(family_checkpoint: Path) -> None:
    plain, model = (
        build_model(family_checkpoint, NoQuantization(), FrozenModel()),
        build_model(family_checkpoint, NF4Config(), FrozenModel()),
    )
    names = {name for name, _ in quantized_layers(model)}
    assert names and all(name.startswith("layers.") for name in names)
    assert any("attn" in name for name in names) and any("mlp" in name for name in names)
    assert not [name for name in names if "router" in name or "grad_norm" in name]
    for name, p in plain.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner in names and leaf == "weight":
            layer = model.get_submodule(owner)
            rows = p.view(-1, 64)
            assert torch.equal(layer.scales.view(torch.float32).flatten(), rows.abs().amax(1))
            assert ((layer.dequantize().view(-1, 64) - rows).abs().amax(1) <= 0.16 * rows.abs().amax(1)).all()
        else:
            assert torch.equal(model.get_parameter(name), p)


def test_quantized_tensors_are_uint8_and_frozen(llama_checkpoint: Path) -> None:
    for adapter in (LoRAConfig(2), FrozenModel()):
        model = build_model(
            llama_checkpoint, NF4Config(double_quant=True), adapter, PrecisionConfig("bf16", "fp32", "bf16")
        )
        for _, layer in quantized_layers(model):
            assert {p.dtype for p in (layer.quantized_weight, layer.scales, layer.outer_scales)} == {torch.uint8}
            assert not any(p.requires_grad for p in (layer.quantized_weight, layer.scales, layer.outer_scales))


@pytest.mark.parametrize(
    ("weights", "bits"),
    [(NF4Config(), 4.5), (NF4Config(double_quant=True), 4.13), (FP4Config(), 4.5), (Float8Config(), 8.5)],
    ids=str,
)
def test_bits_per_weight(weights: Float8Config, bits: float) -> None:
    model = nn.ModuleDict({"layers": GatedMLP(256, MLP(1024))})
    weights.apply(model)
    assert 8 * sum(p.numel() for p in model.parameters()) / (3 * 256 * 1024) == pytest.approx(bits, abs=0.01)


def test_layers_with_partial_blocks_are_not_quantized_and_reported(tmp_path: Path, capsys) -> None:
    folder = save(build(FAMILIES["llama"] | {"intermediate_size": 96}), tmp_path)
    model = build_model(folder, NF4Config(), FrozenModel())
    assert capsys.readouterr().err.count("quantization: 3 layers") == 1
    names = {name.rpartition(".")[2] for name, _ in quantized_layers(model)}
    assert "down_proj" not in names and {"q_proj", "gate_proj"} <= names
    build_model(folder, NoQuantization(), FrozenModel())
    assert capsys.readouterr().err == ""


# Comparison with dequantized weights


def dequantized_model(
    folder: Path, model: Decoder, adapter: NoAdapter | LoRAConfig, precision: PrecisionConfig = FP32
) -> Decoder:
    """Unquantized model with the dequantized weights of `model`."""
    plain = build_model(folder, NoQuantization(), adapter, precision)
    for name, layer in quantized_layers(model):
        plain_layer = plain.get_submodule(name)
        assert isinstance(plain_layer, Linear | GroupedLinear)
        plain_layer.weight.data = layer.dequantize()
    return plain


@pytest.mark.parametrize("weights", [NF4Config(), NF4Config(double_quant=True), FP4Config(), Float8Config()], ids=str)
def test_logits_and_gradients_match_dequantized_weights(weights: Float8Config, family_checkpoint: Path) -> None:
    adapter = LoRAConfig(4, bias="all") if "llama" in family_checkpoint.name else LoRAConfig(4)
    model = build_model(family_checkpoint, weights, adapter)
    plain = dequantized_model(family_checkpoint, model, adapter)
    for item in (model, plain):
        shuffle_adapter(item)
    logits, expected = model(random_tokens()), plain(random_tokens())
    assert relative_error(logits.detach(), expected.detach()) < 1e-5
    for item in (logits, expected):
        item.square().sum().backward()
    grads = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    largest = max(grad.abs().max() for grad in grads.values())
    for name, p in model.named_parameters():
        assert p.requires_grad == (name in grads)
        if p.requires_grad:
            tolerance = (2e-4 if isinstance(weights, FP4Config) else 1e-4) * grads[name].abs().max()
            assert (p.grad - grads[name]).abs().max() < tolerance + 1e-6 * largest, name


def test_bf16_error_is_that_of_unquantized_layers(family_checkpoint: Path) -> None:
    model = build_model(family_checkpoint, NF4Config(), FrozenModel(), BF16)
    twins = [dequantized_model(family_checkpoint, model, FrozenModel(), precision) for precision in (BF16, FP32)]
    quantized, plain, exact = (net(random_tokens()).float() for net in (model, *twins))
    assert (quantized - exact).abs().mean() <= 2 * (plain - exact).abs().mean()


@pytest.mark.parametrize(
    ("family_checkpoint", "kind"),
    [("llama", "lora"), ("llama", "experts"), ("llama", "pissa"), ("qwen3-moe", "experts"), ("qwen3-moe", "dora")]
    + [("gpt-oss", "lora"), ("gpt-oss", "experts"), ("qwen3-next", "dora"), ("qwen3-next", "pissa")],
    indirect=["family_checkpoint"],
)
def test_adapters_train_like_on_dequantized_weights(kind: str, family_checkpoint: Path) -> None:
    """Adapters train the same on dequantized weights, and activation checkpointing does not change the result."""
    adapter = {
        "lora": LoRAConfig(4),
        "experts": LoRAConfig(4, target_modules=("experts",)),
        "dora": DoRAConfig(4),
        "pissa": LoRAConfig(4, target_modules="attn", init="pissa"),
    }[kind]
    try:
        model = build_model(family_checkpoint, NF4Config(), adapter)
    except UserError as error:
        assert kind == "experts" and "adapter.target_modules: " in str(error)
        return
    checkpointed, plain = (
        build_model(family_checkpoint, NF4Config(), adapter, memory=MemoryConfig(activation_checkpointing="full")),
        dequantized_model(family_checkpoint, model, adapter),
    )
    before = model(random_tokens()).detach()
    adapter.init_weights(plain, 0)
    for net in (model, checkpointed, plain):
        train(net, adapter)
    assert relative_error(model(random_tokens()).detach(), before) > 1e-3
    assert torch.equal(model(random_tokens()), checkpointed(random_tokens()))
    actual, expected = model(random_tokens()).detach(), plain(random_tokens()).detach()
    errors = (actual - expected).abs().amax(-1) / expected.abs().max()
    near_ties = 0 if "llama" in family_checkpoint.name else 1  # rounding may route a token to another expert
    assert (errors >= 1e-3).sum() <= near_ties


@pytest.mark.slow
def test_compiled_layer_matches_eager(llama_checkpoint: Path) -> None:
    model = build_model(llama_checkpoint, NF4Config(), LoRAConfig(4))
    expected = model(random_tokens())
    model.layers[1].compile(backend="aot_eager")
    assert relative_error(model(random_tokens()).detach(), expected.detach()) < 1e-5


def test_generation_matches_dequantized_weights(family_checkpoint: Path) -> None:
    model = build_model(family_checkpoint, NF4Config(), FrozenModel())
    prompts = [[5, 9, 12], [30, 7]]
    answers = [
        generate_batch(net, prompts, SamplingConfig(max_new_tokens=6), frozenset())
        for net in (model, dequantized_model(family_checkpoint, model, FrozenModel()))
    ]
    assert answers[0] == answers[1]


# Files


def test_layerwise_logits_match_the_model(family_checkpoint: Path, tmp_path: Path) -> None:
    adapter = LoRAConfig(4)
    model = build_model(family_checkpoint, NF4Config(), adapter)
    shuffle_adapter(model)
    source = HFCheckpoint.open(family_checkpoint)
    peft_adapter.save_adapter(tmp_path, model, adapter, source)
    rows = random_tokens(3, 9).tolist()
    initial_adapter = peft_adapter.read_adapter_config(AdapterDir.open(tmp_path), source)
    logits = checkpoint_logits(ModelSource(source, NF4Config(), initial_adapter), rows, CPU).full()
    assert torch.equal(logits, forward_logits(model, rows, CPU).full())
    assert (
        relative_error(logits, checkpoint_logits(ModelSource(source, adapter=initial_adapter), rows, CPU).full()) > 1e-3
    )


def quantize_checkpoint(tensors: dict[str, Tensor], nested: bool, kind: str = "nf4") -> dict[str, Tensor]:
    """Tensors of a checkpoint with 4-bit linear layers, as bitsandbytes saves them."""
    quantized = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = quantized.pop(name).bfloat16()
        codes, scales = nf4.quantize(weight, kind)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
        quantized |= {
            name: codes[:, None],
            f"{name}.absmax": scales,
            f"{name}.quant_map": nf4.code_values(kind, CPU).clone(),
        }
        if nested:
            codes, outer_scales = nf4.double_quantize(scales)
            quantized |= {f"{name}.absmax": codes, f"{name}.nested_absmax": outer_scales[:-1].clone()}
            quantized[f"{name}.nested_quant_map"] = nf4.dynamic_map(CPU).clone()
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": outer_scales[-1].item()}
        quantized[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            [*json.dumps(state).encode()], dtype=torch.uint8
        )
    return quantized


@pytest.mark.parametrize("weights", [NF4Config(), FP4Config()], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_checkpoint_is_loaded_bit_exactly(weights: NF4Config, nested: bool, tmp_path: Path) -> None:
    folder = save(build(FAMILIES["llama"]), tmp_path)
    tensors = quantize_checkpoint(load_file(folder / WEIGHTS), nested, weights.kind)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    rewrite_config(folder, lambda c: c | {"quantization_config": {"quant_method": "bitsandbytes"}, "dtype": "bfloat16"})
    model = build_model(folder, weights, FrozenModel())
    name, layer = "model.layers.1.self_attn.o_proj.weight", model.layers[1].attn.o_proj
    scales = tensors[f"{name}.absmax"]
    if nested:
        outer_scales = torch.cat([tensors[f"{name}.nested_absmax"], torch.zeros(1)])
        state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__{weights.kind}"].tolist()))
        outer_scales[-1] = state["nested_offset"]
        scales = nf4.decode_scales(scales, outer_scales)
    assert torch.equal(layer.scales.view(torch.float32).flatten(), scales)
    assert torch.equal(
        layer.dequantize(), nf4.dequantize_reference(tensors[name].view(64, -1), scales.view(64, -1), weights.kind)
    )
    if weights.kind == "nf4":  # FP4 has two codes for zero
        assert torch.equal(layer.quantized_weight.flatten(), tensors[name].flatten())


# Comparison with bitsandbytes


@pytest.fixture(scope="module")
def bnb() -> ModuleType:
    return pytest.importorskip("bitsandbytes")


def load_bitsandbytes_model(folder: Path, nested: bool = False) -> transformers.PreTrainedModel:
    """transformers model with bitsandbytes layers. In training mode they use the same algorithm as on a GPU."""
    method = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, quantization_config=method, attn_implementation="eager")
    return model.train()


def test_adapter_gives_the_same_logits_in_bitsandbytes(llama_checkpoint: Path, tmp_path: Path, bnb: ModuleType) -> None:
    """An adapter trained on our NF4 weights gives the same logits in PEFT with bitsandbytes."""
    adapter = LoRAConfig(4)
    model = build_model(llama_checkpoint, NF4Config(), adapter)
    train(model, adapter)
    peft_adapter.save_adapter(tmp_path, model, adapter, HFCheckpoint.open(llama_checkpoint))
    logits = (
        PeftModel.from_pretrained(load_bitsandbytes_model(llama_checkpoint), tmp_path).train()(random_tokens()).logits
    )
    assert relative_error(model(random_tokens()).detach(), logits.detach()) < 1e-5
    plain = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(llama_checkpoint), tmp_path)
    assert relative_error(model(random_tokens()).detach(), plain(random_tokens()).logits.detach()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("nested", "tolerance"), [(False, 1e-6), (True, 1e-4)])
def test_nano_loss_matches_bitsandbytes(nested: bool, tolerance: float, bnb: ModuleType) -> None:
    """In fp32. The double-quantized scales of bitsandbytes are sometimes one code off on the CPU, see test_nf4.py."""
    folder = assets.model_dir("tunekit/nano")
    rows = torch.randint(0, 2048, (8, 64), generator=torch.Generator().manual_seed(0))
    exact = PrecisionConfig("fp32", frozen_dtype="fp32")
    losses = []
    for model in (
        build_model(folder, NF4Config(nested), FrozenModel(), exact),
        lambda x: load_bitsandbytes_model(folder, nested)(x).logits,
    ):
        with torch.no_grad():
            logits = model(rows)
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item())
    assert losses[0] == pytest.approx(losses[1], rel=tolerance, abs=0)


# Runs


def run_nano(folder: Path, *overrides: str) -> Path:
    """The last files of a run of the nano on its tools."""
    sft.main(load_config(sft.SFTConfig, registry.find_config("nano/tools_qlora"), [f"output_dir={folder}", *overrides]))
    return folder / "final" / "adapter_model.safetensors"


SHORT_RUN = (
    "eval_data=null",
    "global_batch_size=4",
    "micro_batch_size=2",
    "save_every=2",
    "device=cpu",
    "adapter.dropout=0.1",
)


LEARNING_RUN = (
    "eval_data.split=test[:32]",
    "global_batch_size=8",
    "micro_batch_size=8",
    "max_steps=24",
    "device=cpu",
)


def test_stopped_qlora_run_resumes_bit_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = load_file(run_nano(tmp_path / "whole", *SHORT_RUN, "max_steps=4"))
    assert "| quantization | nf4 |" in (tmp_path / "whole" / "final" / "README.md").read_text()
    save = Checkpointer.save

    def save_and_stop(checkpointer: Checkpointer, step: int) -> None:
        save(checkpointer, step)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(RunStopped):
        patch.setattr(Checkpointer, "save", save_and_stop)
        run_nano(tmp_path / "halves", *SHORT_RUN, "max_steps=4")
    resumed = load_file(run_nano(tmp_path / "halves", *SHORT_RUN, "max_steps=4"))
    assert unbroken.keys() == resumed.keys() and all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    names = read_metadata(tmp_path / "whole" / "state" / "00000004").state_dict_metadata
    assert names and all(".lora_" in name for name in names)  # no frozen tensor is saved


@pytest.mark.slow
def test_qlora_reaches_the_loss_of_lora(tmp_path: Path) -> None:
    """The nano model with NF4 layers learns tool calls as well: evaluation losses within 2%, or both near 0."""
    losses = []
    for name, weights in (("four", "nf4"), ("plain", "none")):
        run_nano(tmp_path / name, f"quantization={weights}", *LEARNING_RUN)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["eval/loss"] for line in lines if "eval/loss" in line])
    (first, *_, four), (base, *_, plain) = losses
    assert plain < 0.5 * base and four < 1.02 * plain + 0.002 * base and first < 1.1 * base


# Choices


def test_trained_weights_cannot_be_quantized(llama_checkpoint: Path) -> None:
    config = {
        "model": str(llama_checkpoint),
        "data": {"kind": "text", "source": "x.jsonl"},
        "output_dir": "out",
        "quantization": "nf4",
    }
    with pytest.raises(ConfigError) as caught:
        load_config(sft.SFTConfig, config)
    assert "quantization: quantized weights cannot be trained" in str(caught.value)
    assert load_config(sft.SFTConfig, config | {"adapter": "lora"}).quantization == NF4Config()
    assert load_config(
        sft.SFTConfig, config | {"adapter": "dora", "quantization": {"kind": "nf4", "double_quant": True}}
    ).quantization == NF4Config(True)
    with pytest.raises(UserError, match=r"adapter\.modules_to_save: layers\.0\.mlp\.up_proj"):
        build_model(llama_checkpoint, NF4Config(), LoRAConfig(2, target_modules="attn", modules_to_save=("up_proj",)))
