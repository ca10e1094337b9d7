"""Quantized checkpoints are read like transformers and bitsandbytes do, bit for bit, and written dequantized."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from bitsandbytes import functional as bnb
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import (
    FULL,
    build,
    load_model,
    load_transformers_model,
    random_tokens,
    rewrite_config,
    save,
)
from tunekit.checkpoint.dequantize import Bnb4bitTensor, Bnb8bitTensor, FP8BlockTensor, MXFP4Tensor
from tunekit.checkpoint.hf_checkpoint import WEIGHTS, HFCheckpoint
from tunekit.checkpoint.save_model import save_model
from tunekit.errors import UserError
from tunekit.kernels import nf4
from tunekit.models.precision import PrecisionConfig

PLAN = {"vocab_size": 67, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
LLAMA = PLAN | {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "layer_types": ["full_attention"] * 2}
BF16 = torch.bfloat16
ANY_PATH = Path()
# The tables of the QLoRA paper (appendix E) and of bitsandbytes' FP4.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def has_equal_bits(actual: Tensor, expected: Tensor) -> bool:
    assert actual.dtype == expected.dtype
    return actual.shape == expected.shape and torch.equal(
        actual.contiguous().view(torch.int16), expected.view(torch.int16)
    )


def random_bytes(*shape: int, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def quantize_checkpoint(
    directory: Path, shape: dict, method: dict, change: Callable[[dict[str, Tensor]], None]
) -> Path:
    """Write a small bf16 checkpoint with some quantized tensors."""
    save(build(shape).bfloat16(), directory)
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    rewrite_config(directory, lambda c: c | {"quantization_config": method})
    return directory


def save_dequantized(source: Path, out: Path) -> Path:
    out.mkdir()
    save_model(
        out,
        load_model(source, FULL, PrecisionConfig("fp32", "bf16", "checkpoint")),
        HFCheckpoint.open(source),
        quiet=True,
    )
    return out


# MXFP4


@pytest.mark.parametrize("shape", [(2, 6, 3), (1, 1, 1), (3, 64, 2)])
def test_mxfp4_of_all_bytes(shape: tuple[int, int, int]) -> None:
    """All exponents except 255, which is NaN."""
    blocks, scales = random_bytes(*shape, 16), random_bytes(*shape, high=255, seed=1)
    experts, rows, groups = shape
    decoded = MXFP4Tensor(ANY_PATH, (experts, 32 * groups, rows), BF16, ()).decode([blocks, scales])
    assert has_equal_bits(decoded, convert_moe_packed_tensors(blocks, scales, dtype=BF16))


def test_mxfp4_values() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0], blocks[..., 1] = 0x71, 0xF9  # the low nibble comes first
    decoded = MXFP4Tensor(ANY_PATH, (1, 32, 1), BF16, ()).decode(
        [blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8)]
    )
    assert decoded.flatten()[:5].tolist() == [1.0, 12.0, -1.0, -12.0, 0.0]


def quantize_experts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = random_bytes(experts, rows, columns // 32, 16)
        tensors[f"{name}_scales"] = 117 + random_bytes(experts, rows, columns // 32, high=8)


def test_gpt_oss_equals_transformers(tmp_path: Path) -> None:
    source = quantize_checkpoint(tmp_path / "packed", GPT_OSS, {"quant_method": "mxfp4"}, quantize_experts)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=BF16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).state_dict()
    checkpoint = HFCheckpoint.open(source)
    assert set(checkpoint.tensors) == set(expected)
    with checkpoint.reader() as reader:
        assert all(has_equal_bits(reader[name], tensor) for name, tensor in expected.items())
    out = save_dequantized(source, tmp_path / "out")
    written = load_file(out / WEIGHTS)
    assert set(written) == set(expected)
    assert all(has_equal_bits(written[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    with torch.no_grad():
        torch.testing.assert_close(
            load_transformers_model(out)(random_tokens()).logits,
            load_model(source)(random_tokens()),
            rtol=1e-4,
            atol=1e-4,
        )


# FP8


def scale_blocks(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scale block by block."""
    values = codes.float()
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            values[..., i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] *= scales[..., i, j, None, None]
    return values.to(BF16)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=2),
    st.lists(st.integers(1, 4), min_size=2, max_size=2),
    st.lists(st.integers(1, 2), max_size=1),
)
def test_fp8_with_partial_blocks(shape: list[int], block: list[int], lead: list[int]) -> None:
    codes = torch.randn(*lead, *shape).to(torch.float8_e4m3fn)
    scales = torch.rand(*lead, -(-shape[0] // block[0]), -(-shape[1] // block[1]))
    decoded = FP8BlockTensor(ANY_PATH, codes.shape, BF16, (), tuple(block)).decode([codes, scales])
    assert has_equal_bits(decoded, scale_blocks(codes, scales, *block))


def test_fp8_with_one_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    scale = torch.tensor(0.037)
    decoded = FP8BlockTensor(ANY_PATH, (16, 16), BF16, (), None).decode([codes, scale])
    assert has_equal_bits(decoded, (codes.float() * scale).to(BF16))


def quantize_fp8(block: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // block), -(-columns // block)) + 0.5

    return change


def test_fp8_equals_transformers(tmp_path: Path) -> None:
    method = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    source = quantize_checkpoint(tmp_path / "packed", LLAMA, method, quantize_fp8(32))
    quant_config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    expected = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=BF16, quantization_config=quant_config)
    written = load_file(save_dequantized(source, tmp_path / "out") / WEIGHTS)
    assert all(has_equal_bits(written[name], tensor) for name, tensor in expected.state_dict().items())


def test_fp8_with_activation_scales(tmp_path: Path) -> None:
    """A scale per weight, and an activation scale, which is ignored."""

    def change(tensors: dict[str, Tensor]) -> None:
        quantize_fp8(10**6)(tensors)
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].reshape(()).to(BF16)
            tensors[name.replace("weight_scale_inv", "activation_scale")] = torch.tensor(2.0)

    source = quantize_checkpoint(tmp_path, LLAMA, {"quant_method": "fp8", "weight_block_size": None}, change)
    tensors, name = load_file(source / WEIGHTS), "model.layers.1.mlp.up_proj.weight"
    with HFCheckpoint.open(source).reader() as reader:
        assert has_equal_bits(reader[name], (tensors[name].float() * tensors[f"{name}_scale_inv"].float()).to(BF16))
    load_model(source)


# bitsandbytes


def quantize_4bit(codes: Tensor, absmax: Tensor, block: int, shape: list[int], nested: bool) -> dict[str, Tensor]:
    """Tensors that bitsandbytes writes for the codes (n,) of a weight; the first code is in the high nibble."""
    codes = torch.cat([codes, codes.new_zeros(len(codes) % 2)]).view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": shape}
    tensors = {"": (codes[:, :1] << 4) | codes[:, 1:], ".absmax": absmax, ".quant_map": torch.tensor(NF4)}
    if nested:
        tensors[".absmax"] = random_bytes(len(absmax), seed=5)
        tensors[".nested_absmax"] = torch.rand(-(-len(absmax) // 256)) + 0.1
        tensors[".nested_quant_map"] = torch.linspace(-1, 1, 256)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.5}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {".quant_state.bitsandbytes__nf4": text}


def dequantize_one_by_one(codes: Tensor, tensors: dict[str, Tensor], block: int) -> list[float]:
    """Dequantize one code at a time."""
    scales = tensors[".absmax"]
    if ".nested_absmax" in tensors:
        table, outer = tensors[".nested_quant_map"], tensors[".nested_absmax"]
        scales = torch.stack([table[code.item()] * outer[i // 256] + 1.5 for i, code in enumerate(scales)])
    numbers = [tensors[".quant_map"][code] * scales[i // block] for i, code in enumerate(codes.tolist())]
    return torch.stack(numbers).to(BF16).tolist()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(4, 64, 64), (3, 50, 64), (5, 7, 16), (1, 1, 64), (300, 64, 64)]
)
def test_4bit_values(rows: int, columns: int, block: int, nested: bool) -> None:
    codes = random_bytes(rows * columns, high=16)
    blocks = -(-rows * columns // block)
    tensors = quantize_4bit(codes, torch.rand(blocks), block, [rows, columns], nested)
    inner = (256, 1.5) if nested else (None, 0.0)
    inputs = [tensor for key, tensor in tensors.items() if "state" not in key]
    decoded = Bnb4bitTensor(ANY_PATH, (rows, columns), BF16, (), block, *inner).decode(inputs)
    assert decoded.flatten().tolist() == dequantize_one_by_one(codes, tensors, block)


def quantize_4bit_linears(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        nested = "q_proj" in name
        quantized = quantize_4bit(
            random_bytes(rows * columns, high=16), torch.rand(rows * columns // 64), 64, [rows, columns], nested
        )
        tensors |= {name + key: tensor for key, tensor in quantized.items()}


def test_4bit_checkpoint(tmp_path: Path) -> None:
    source = quantize_checkpoint(
        tmp_path / "packed", LLAMA, {"quant_method": "bitsandbytes", "load_in_4bit": True}, quantize_4bit_linears
    )
    checkpoint, tensors = HFCheckpoint.open(source), load_file(source / WEIGHTS)
    name = "model.layers.1.self_attn.q_proj.weight"
    quantized = {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}
    codes = torch.cat([quantized[""] >> 4, quantized[""] & 15], 1).flatten()
    with checkpoint.reader() as reader:
        assert reader[name].flatten().tolist() == dequantize_one_by_one(codes, quantized, 64)
    assert all(stored.dtype == BF16 for stored in checkpoint.tensors.values())
    written = load_file(save_dequantized(source, tmp_path / "out") / WEIGHTS)
    assert set(written) == set(checkpoint.tensors)
    assert written[name].flatten().tolist() == dequantize_one_by_one(codes, quantized, 64)


def test_int8_checkpoint(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name.replace("weight", "SCB")] = tensors[name].float().abs().amax(1)
            tensors[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
            tensors[name] = random_bytes(*tensors[name].shape).view(torch.int8)

    source = quantize_checkpoint(tmp_path, LLAMA, {"quant_method": "bitsandbytes", "load_in_8bit": True}, change)
    tensors, name = load_file(source / WEIGHTS), "model.layers.0.mlp.down_proj.weight"
    expected = tensors[name].double() * tensors[name.replace("weight", "SCB")].double()[:, None] / 127
    with HFCheckpoint.open(source).reader() as reader:
        torch.testing.assert_close(reader[name].double(), expected, rtol=2**-8, atol=0)
    load_model(source)


@pairwise(shape=[(48, 64), (3, 50), (65, 33)], nested=[False, True], quant_type=["nf4", "fp4"])
def test_4bit_equals_bitsandbytes(quant_type: str, nested: bool, shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    data, state = functional.quantize_4bit(
        torch.randn(shape).bfloat16(), quant_type=quant_type, compress_statistics=nested, blocksize=64
    )
    state_tensors = state.as_dict(packed=True)
    inputs = [data, state_tensors["absmax"], state_tensors["quant_map"]]
    inputs += [state_tensors["nested_absmax"], state_tensors["nested_quant_map"]] if nested else []
    inner = (state.state2.blocksize, state.offset.item()) if nested else (None, 0.0)
    decoded = Bnb4bitTensor(ANY_PATH, shape, BF16, (), 64, *inner).decode(inputs)
    assert torch.equal(decoded, functional.dequantize_4bit(data, state))  # some of its kernels return -0.0


def test_int8_equals_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    rows, largest, _ = functional.int8_vectorwise_quant(torch.randn(48, 64).half())
    decoded = Bnb8bitTensor(ANY_PATH, (48, 64), torch.float16, ()).decode([rows, largest])
    assert has_equal_bits(decoded, functional.int8_vectorwise_dequant(rows, largest).half())


@pytest.mark.parametrize("options", [
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    {"load_in_8bit": True},
])  # fmt: skip
def test_checkpoints_of_transformers_and_bitsandbytes(options: dict, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    # For (64, 96), the CPU kernel of bitsandbytes 0.50 does not invert its quantization: its blocks start at each row.
    source_dir = save(build(LLAMA | {"intermediate_size": 128}).bfloat16(), tmp_path / "plain")
    method = transformers.BitsAndBytesConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(source_dir, dtype=BF16, quantization_config=method)
    model.save_pretrained(tmp_path / "packed")
    source, num_quantized = HFCheckpoint.open(tmp_path / "packed"), 0
    with source.reader() as reader:
        for name, module in model.named_modules():
            if type(module).__name__ == "Linear4bit":
                expected = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            elif type(module).__name__ == "Linear8bitLt":
                expected = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).to(BF16)
            else:
                continue
            assert torch.equal(reader[f"{name}.weight"], expected)
            num_quantized += 1
    assert num_quantized == 14
    load_model(tmp_path / "packed")


# Inconsistent tensors


@pytest.mark.parametrize(("text", "method"), [
    ("'gptq'", {"quant_method": "gptq"}),
    ("'awq'", {"quant_method": "awq", "bits": 4}),
    ("'yes'", "yes"),
    ("None", {"quant_method": None}),
])  # fmt: skip
def test_other_quantization_methods_are_rejected(text: str, method: object, tmp_path: Path) -> None:
    source = save(build(LLAMA), tmp_path)
    rewrite_config(source, lambda c: c | {"quantization_config": method})
    with pytest.raises(UserError) as caught:
        HFCheckpoint.open(source)
    assert text in str(caught.value)
    assert f"{source / 'config.json'}: " in str(caught.value)


Q = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{Q}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(("change", "text"), [
    (lambda t: t.pop(f"{Q}.absmax"), f"{Q}.absmax "),
    (lambda t: t.update({f"{Q}.absmax": t[f"{Q}.absmax"][:-1].clone()}), f"{Q} "),
    (lambda t: t.update({Q: t[Q][:-1].clone()}), f"{Q} "),
    (lambda t: t.update({f"{Q}.quant_map": torch.ones(15)}), f"{Q} "),
    (lambda t: t.update({STATE: t[STATE][:-4].clone()}), f"{STATE} "),
    (lambda t: t.update({STATE: torch.tensor([123, 125], dtype=torch.uint8)}), f"{STATE} "),
    (lambda t: t.update({STATE: torch.ones(3)}), f"{STATE} "),
    (lambda t: t.pop(STATE), f"{Q} "),
    (lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(1)}), "lm_head.weight "),
    (lambda t: t.update({"lm_head.SCB": torch.ones(67)}), "lm_head.weight "),
])  # fmt: skip
def test_damaged_quantized_tensors_are_named(change: Callable[[dict], object], text: str, tmp_path: Path) -> None:
    def quantize_and_damage(tensors: dict[str, Tensor]) -> None:
        quantize_4bit_linears(tensors)
        change(tensors)

    source = quantize_checkpoint(tmp_path, LLAMA, {"quant_method": "bitsandbytes"}, quantize_and_damage)
    with pytest.raises(UserError) as caught:
        load_model(source)
    assert f"{source / WEIGHTS}: {text}" in str(caught.value)


@pytest.mark.parametrize("block", [None, [16, 32], [32], "32", [0, 0]])
def test_fp8_block_size_that_does_not_fit_is_rejected(block: object, tmp_path: Path) -> None:
    source = quantize_checkpoint(tmp_path, LLAMA, {"quant_method": "fp8", "weight_block_size": block}, quantize_fp8(32))
    with pytest.raises(UserError, match=f"{source / WEIGHTS}: .*_proj"):
        load_model(source)


def test_mxfp4_blocks_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        quantize_experts(tensors)
        name = "model.layers.0.mlp.experts.down_proj_scales"
        tensors[name] = tensors[name][:, :-1].clone()

    source = quantize_checkpoint(tmp_path, GPT_OSS, {"quant_method": "mxfp4"}, change)
    with pytest.raises(UserError, match="down_proj_blocks"):
        load_model(source)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_double_quantized_scales_are_at_least_as_near_as_those_of_bitsandbytes(kind: str) -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) / 50
    packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type=kind)
    our_packed, scales = nf4.quantize(weight, kind)
    codes, outer_scales = nf4.double_quantize(scales)
    assert torch.equal(our_packed.flatten(), packed.flatten())
    assert torch.equal(outer_scales[:-1], state.state2.absmax)
    assert outer_scales[-1] == state.offset
    largest = state.state2.absmax.repeat_interleave(nf4.DOUBLE_QUANT_BLOCK)
    errors, other_errors = (
        (state.state2.code[values.flatten().long()] * largest - (scales.flatten() - state.offset)).abs()
        for values in (codes, state.absmax)
    )
    assert (errors <= other_errors).all()
    assert (codes.flatten() != state.absmax.flatten()).float().mean() < 0.005
