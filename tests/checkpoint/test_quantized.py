"""Packed checkpoints are read as what transformers and bitsandbytes make of them, bit for bit, and written plain."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoints import FULL, build, ours, rewrite, save, theirs, tokens
from tunekit.checkpoint.dequantize import Bnb4bitTensor, Bnb8bitTensor, FP8BlockTensor, MXFP4Tensor
from tunekit.checkpoint.hf_checkpoint import WEIGHTS, HFCheckpoint
from tunekit.checkpoint.save_model import save_model
from tunekit.errors import UserError
from tunekit.models.precision import PrecisionConfig

PLAN = {"vocab_size": 67, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
LLAMA = PLAN | {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "layer_types": ["full_attention"] * 2}
BF16 = torch.bfloat16
HERE = Path()
# The tables of the QLoRA paper (appendix E) and of bitsandbytes' FP4.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def equal_bits(found: Tensor, wanted: Tensor) -> bool:
    assert found.dtype == wanted.dtype
    return found.shape == wanted.shape and torch.equal(found.contiguous().view(torch.int16), wanted.view(torch.int16))


def draw(*shape: int, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def packed(folder: Path, shape: dict, method: dict, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A small checkpoint in bf16 with some of its tensors packed."""
    save(build(shape).bfloat16(), folder)
    held = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(held)
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
    rewrite(folder, lambda c: c | {"quantization_config": method})
    return folder


def again(source: Path, out: Path) -> Path:
    out.mkdir()
    save_model(
        out, ours(source, FULL, PrecisionConfig("fp32", "bf16", "checkpoint")), HFCheckpoint.open(source), quiet=True
    )
    return out


# MXFP4


@pytest.mark.parametrize("shape", [(2, 6, 3), (1, 1, 1), (3, 64, 2)])
def test_mxfp4_of_all_bytes(shape: tuple[int, int, int]) -> None:
    """Every exponent but 255, which the format keeps for NaN."""
    blocks, scales = draw(*shape, 16), draw(*shape, high=255, seed=1)
    experts, rows, groups = shape
    found = MXFP4Tensor(HERE, (experts, 32 * groups, rows), BF16, ()).decode([blocks, scales])
    assert equal_bits(found, convert_moe_packed_tensors(blocks, scales, dtype=BF16))


def test_mxfp4_by_hand() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0], blocks[..., 1] = 0x71, 0xF9  # the lower half comes first
    found = MXFP4Tensor(HERE, (1, 32, 1), BF16, ()).decode([blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8)])
    assert found.flatten()[:5].tolist() == [1.0, 12.0, -1.0, -12.0, 0.0]


def pack_experts(held: dict[str, Tensor]) -> None:
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = held.pop(name).shape
        held[f"{name}_blocks"] = draw(experts, rows, columns // 32, 16)
        held[f"{name}_scales"] = 117 + draw(experts, rows, columns // 32, high=8)


def test_gpt_oss_as_transformers_reads_it(tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", GPT_OSS, {"quant_method": "mxfp4"}, pack_experts)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=BF16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).state_dict()
    folder = HFCheckpoint.open(source)
    assert set(folder.tensors) == set(wanted)
    with folder.reader() as reader:
        assert all(equal_bits(reader[name], tensor) for name, tensor in wanted.items())
    out = again(source, tmp_path / "out")
    written = load_file(out / WEIGHTS)
    assert set(written) == set(wanted)
    assert all(equal_bits(written[name], tensor) for name, tensor in wanted.items())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    with torch.no_grad():
        torch.testing.assert_close(theirs(out)(tokens()).logits, ours(source)(tokens()), rtol=1e-4, atol=1e-4)


# FP8


def tiles(whole: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Block by block."""
    found = whole.float()
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            found[..., i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] *= scales[..., i, j, None, None]
    return found.to(BF16)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=2),
    st.lists(st.integers(1, 4), min_size=2, max_size=2),
    st.lists(st.integers(1, 2), max_size=1),
)
def test_fp8_blocks_need_not_fit(shape: list[int], block: list[int], lead: list[int]) -> None:
    whole = torch.randn(*lead, *shape).to(torch.float8_e4m3fn)
    scales = torch.rand(*lead, -(-shape[0] // block[0]), -(-shape[1] // block[1]))
    found = FP8BlockTensor(HERE, whole.shape, BF16, (), tuple(block)).decode([whole, scales])
    assert equal_bits(found, tiles(whole, scales, *block))


def test_fp8_with_one_scale() -> None:
    whole = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    scale = torch.tensor(0.037)
    found = FP8BlockTensor(HERE, (16, 16), BF16, (), None).decode([whole, scale])
    assert equal_bits(found, (whole.float() * scale).to(BF16))


def pack_fp8(block: int) -> Callable[[dict[str, Tensor]], None]:
    def change(held: dict[str, Tensor]) -> None:
        for name in [name for name in held if name.endswith("_proj.weight")]:
            rows, columns = held[name].shape
            held[name] = held[name].to(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"] = torch.rand(-(-rows // block), -(-columns // block)) + 0.5

    return change


def test_fp8_as_transformers_reads_it(tmp_path: Path) -> None:
    method = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    source = packed(tmp_path / "packed", LLAMA, method, pack_fp8(32))
    plan = transformers.FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=BF16, quantization_config=plan)
    written = load_file(again(source, tmp_path / "out") / WEIGHTS)
    assert all(equal_bits(written[name], tensor) for name, tensor in wanted.state_dict().items())


def test_fp8_with_scales_of_activations(tmp_path: Path) -> None:
    """One scale for each weight, and one for what comes in, which is of no use here."""

    def change(held: dict[str, Tensor]) -> None:
        pack_fp8(10**6)(held)
        for name in [name for name in held if name.endswith("_scale_inv")]:
            held[name] = held[name].reshape(()).to(BF16)
            held[name.replace("weight_scale_inv", "activation_scale")] = torch.tensor(2.0)

    source = packed(tmp_path, LLAMA, {"quant_method": "fp8", "weight_block_size": None}, change)
    held, name = load_file(source / WEIGHTS), "model.layers.1.mlp.up_proj.weight"
    with HFCheckpoint.open(source).reader() as reader:
        assert equal_bits(reader[name], (held[name].float() * held[f"{name}_scale_inv"].float()).to(BF16))
    ours(source)


# bitsandbytes


def pack_four(codes: Tensor, absmax: Tensor, block: int, shape: list[int], nested: bool) -> dict[str, Tensor]:
    """What bitsandbytes writes for a weight of these codes (n,), its first number in the upper half of a byte."""
    codes = torch.cat([codes, codes.new_zeros(len(codes) % 2)]).view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": shape}
    made = {"": (codes[:, :1] << 4) | codes[:, 1:], ".absmax": absmax, ".quant_map": torch.tensor(NF4)}
    if nested:
        made[".absmax"] = draw(len(absmax), seed=5)
        made[".nested_absmax"] = torch.rand(-(-len(absmax) // 256)) + 0.1
        made[".nested_quant_map"] = torch.linspace(-1, 1, 256)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.5}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return made | {".quant_state.bitsandbytes__nf4": text}


def by_hand(codes: Tensor, made: dict[str, Tensor], block: int) -> list[float]:
    """The same numbers, one at a time."""
    scales = made[".absmax"]
    if ".nested_absmax" in made:
        table, outer = made[".nested_quant_map"], made[".nested_absmax"]
        scales = torch.stack([table[code.item()] * outer[i // 256] + 1.5 for i, code in enumerate(scales)])
    numbers = [made[".quant_map"][code] * scales[i // block] for i, code in enumerate(codes.tolist())]
    return torch.stack(numbers).to(BF16).tolist()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(4, 64, 64), (3, 50, 64), (5, 7, 16), (1, 1, 64), (300, 64, 64)]
)
def test_four_bits_by_hand(rows: int, columns: int, block: int, nested: bool) -> None:
    codes = draw(rows * columns, high=16)
    blocks = -(-rows * columns // block)
    made = pack_four(codes, torch.rand(blocks), block, [rows, columns], nested)
    inner = (256, 1.5) if nested else (None, 0.0)
    parts = [tensor for key, tensor in made.items() if "state" not in key]
    found = Bnb4bitTensor(HERE, (rows, columns), BF16, (), block, *inner).decode(parts)
    assert found.flatten().tolist() == by_hand(codes, made, block)


def pack_all_four(held: dict[str, Tensor]) -> None:
    for name in [name for name in held if name.endswith("_proj.weight")]:
        rows, columns = held.pop(name).shape
        nested = "q_proj" in name
        made = pack_four(draw(rows * columns, high=16), torch.rand(rows * columns // 64), 64, [rows, columns], nested)
        held |= {name + key: tensor for key, tensor in made.items()}


def test_a_checkpoint_of_four_bits(tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", LLAMA, {"quant_method": "bitsandbytes", "load_in_4bit": True}, pack_all_four)
    folder, held = HFCheckpoint.open(source), load_file(source / WEIGHTS)
    name = "model.layers.1.self_attn.q_proj.weight"
    made = {key.removeprefix(name): tensor for key, tensor in held.items() if key.startswith(name)}
    codes = torch.cat([made[""] >> 4, made[""] & 15], 1).flatten()
    with folder.reader() as reader:
        assert reader[name].flatten().tolist() == by_hand(codes, made, 64)
    assert all(stored.dtype == BF16 for stored in folder.tensors.values())
    written = load_file(again(source, tmp_path / "out") / WEIGHTS)
    assert set(written) == set(folder.tensors)
    assert written[name].flatten().tolist() == by_hand(codes, made, 64)


def test_a_checkpoint_of_int8(tmp_path: Path) -> None:
    def change(held: dict[str, Tensor]) -> None:
        for name in [name for name in held if name.endswith("_proj.weight")]:
            held[name.replace("weight", "SCB")] = held[name].float().abs().amax(1)
            held[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
            held[name] = draw(*held[name].shape).view(torch.int8)

    source = packed(tmp_path, LLAMA, {"quant_method": "bitsandbytes", "load_in_8bit": True}, change)
    held, name = load_file(source / WEIGHTS), "model.layers.0.mlp.down_proj.weight"
    wanted = held[name].double() * held[name.replace("weight", "SCB")].double()[:, None] / 127
    with HFCheckpoint.open(source).reader() as reader:
        torch.testing.assert_close(reader[name].double(), wanted, rtol=2**-8, atol=0)
    ours(source)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(48, 64), (3, 50), (65, 33)])
def test_four_bits_as_bitsandbytes_reads_them(quant_type: str, nested: bool, shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    data, state = functional.quantize_4bit(
        torch.randn(shape).bfloat16(), quant_type=quant_type, compress_statistics=nested, blocksize=64
    )
    held = state.as_dict(packed=True)
    parts = [data, held["absmax"], held["quant_map"]]
    parts += [held["nested_absmax"], held["nested_quant_map"]] if nested else []
    inner = (state.state2.blocksize, state.offset.item()) if nested else (None, 0.0)
    found = Bnb4bitTensor(HERE, shape, BF16, (), 64, *inner).decode(parts)
    assert torch.equal(found, functional.dequantize_4bit(data, state))  # some of its ways make a zero negative


def test_int8_as_bitsandbytes_reads_it() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    rows, largest, _ = functional.int8_vectorwise_quant(torch.randn(48, 64).half())
    found = Bnb8bitTensor(HERE, (48, 64), torch.float16, ()).decode([rows, largest])
    assert equal_bits(found, functional.int8_vectorwise_dequant(rows, largest).half())


@pytest.mark.parametrize("options", [
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    {"load_in_8bit": True},
])  # fmt: skip
def test_what_transformers_packs_with_bitsandbytes(options: dict, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    # Of (64, 96), the CPU code of bitsandbytes 0.50 makes other numbers than it packed: its blocks begin at each row.
    plain = save(build(LLAMA | {"intermediate_size": 128}).bfloat16(), tmp_path / "plain")
    method = transformers.BitsAndBytesConfig(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=BF16, quantization_config=method)
    model.save_pretrained(tmp_path / "packed")
    source, seen = HFCheckpoint.open(tmp_path / "packed"), 0
    with source.reader() as reader:
        for name, module in model.named_modules():
            if type(module).__name__ == "Linear4bit":
                wanted = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            elif type(module).__name__ == "Linear8bitLt":
                wanted = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).to(BF16)
            else:
                continue
            assert torch.equal(reader[f"{name}.weight"], wanted)
            seen += 1
    assert seen == 14
    ours(tmp_path / "packed")


# What does not fit together


@pytest.mark.parametrize(("told", "method"), [
    ("packed by 'gptq', which is not read (mxfp4, fp8, bitsandbytes are)", {"quant_method": "gptq"}),
    ("packed by 'awq'", {"quant_method": "awq", "bits": 4}),
    ("packed by 'yes'", "yes"),
    ("packed by None", {"quant_method": None}),
])  # fmt: skip
def test_other_kinds_are_named(told: str, method: object, tmp_path: Path) -> None:
    source = save(build(LLAMA), tmp_path)
    rewrite(source, lambda c: c | {"quantization_config": method})
    with pytest.raises(UserError) as caught:
        HFCheckpoint.open(source)
    assert told in str(caught.value)
    assert f"{source / 'config.json'}: " in str(caught.value)


Q = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{Q}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(("change", "told"), [
    (lambda t: t.pop(f"{Q}.absmax"), f"{Q}.absmax is missing"),
    (lambda t: t.update({f"{Q}.absmax": t[f"{Q}.absmax"][:-1].clone()}), f"{Q} and its scales do not fit together"),
    (lambda t: t.update({Q: t[Q][:-1].clone()}), f"{Q} and its scales do not fit together"),
    (lambda t: t.update({f"{Q}.quant_map": torch.ones(15)}), f"{Q} and its scales do not fit together"),
    (lambda t: t.update({STATE: t[STATE][:-4].clone()}), f"{STATE} is damaged"),
    (lambda t: t.update({STATE: torch.tensor([123, 125], dtype=torch.uint8)}), f"{STATE} is damaged ('shape')"),
    (lambda t: t.update({STATE: torch.ones(3)}), f"{STATE} is damaged"),
    (lambda t: t.pop(STATE), f"{Q} is stored as uint8"),
    (lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(1)}), "lm_head.weight and its scales do not fit"),
    (lambda t: t.update({"lm_head.SCB": torch.ones(67)}), "lm_head.weight and its scales do not fit"),
])  # fmt: skip
def test_groups_that_are_damaged(change: Callable[[dict], object], told: str, tmp_path: Path) -> None:
    def both(held: dict[str, Tensor]) -> None:
        pack_all_four(held)
        change(held)

    source = packed(tmp_path, LLAMA, {"quant_method": "bitsandbytes"}, both)
    with pytest.raises(UserError) as caught:
        ours(source)
    assert f"{source / WEIGHTS}: {told}" in str(caught.value)


@pytest.mark.parametrize("block", [None, [16, 32], [32], "32", [0, 0]])
def test_fp8_blocks_that_do_not_fit(block: object, tmp_path: Path) -> None:
    source = packed(tmp_path, LLAMA, {"quant_method": "fp8", "weight_block_size": block}, pack_fp8(32))
    with pytest.raises(UserError, match="and its scales do not fit together"):
        ours(source)


def test_mxfp4_blocks_that_do_not_fit(tmp_path: Path) -> None:
    def change(held: dict[str, Tensor]) -> None:
        pack_experts(held)
        name = "model.layers.0.mlp.experts.down_proj_scales"
        held[name] = held[name][:, :-1].clone()

    source = packed(tmp_path, GPT_OSS, {"quant_method": "mxfp4"}, change)
    with pytest.raises(UserError, match=r"down_proj_blocks and its scales do not fit together"):
        ours(source)
