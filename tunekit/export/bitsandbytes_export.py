"""A model in four bits as a folder that transformers opens with bitsandbytes: its bytes, its names, its config."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.atomic import check_free_space
from tunekit.checkpoint.dequantize import PACKED
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.checkpoint.merge import CONFIG, mark_untied, write_companion_files
from tunekit.checkpoint.safetensors_io import Entries, SafetensorsWriter
from tunekit.checkpoint.save_model import (
    copy_companion_files,
    plan_shards,
    source_layout,
    tensor_bytes,
    unrelated_files,
    write_index,
)
from tunekit.errors import UserError
from tunekit.export.lazy_merge import LazyMergedCheckpoint
from tunekit.kernels import nf4
from tunekit.models.decoder import Decoder
from tunekit.models.weight_map import Fused, Identity, KeyMapping
from tunekit.quantization.config import FP4Config, NF4Config, QuantizedLinear

TYPES = {
    "nf4": NF4Config(),
    "nf4-double-quant": NF4Config(double_quant=True),
    "fp4": FP4Config(),
    "fp4-double-quant": FP4Config(double_quant=True),
}
WEIGHT = ".weight"
HEAD = "lm_head"  # whatever a model ties it to, transformers would pack it if it were not named
STATE = 256  # bytes of the JSON text beside each weight: how long a number in it is, is known when it is made


@torch.no_grad()
def export_bitsandbytes(
    source: HFCheckpoint, adapter: NoAdapter | LoRAConfig, weights: NF4Config, folder: Path, quiet: bool = False
) -> HFCheckpoint:
    """Write a model, with its adapter merged, into a folder that is there. Returns what was packed."""
    whole = source if adapter.adapter_path is None else LazyMergedCheckpoint.of(source, Path(adapter.adapter_path))
    packed = packable(whole, weights)
    if not packed:
        raise UserError(f"{source.path}: no linear layer of this model is a tensor that bitsandbytes packs")
    plain = {name: (stored.shape, stored.dtype) for name, stored in whole.tensors.items()}
    entries = {name: parts(name, *entry, weights) if name in packed else {name: entry} for name, entry in plain.items()}
    check_free_space(folder, sum(tensor_bytes(entry) for made in entries.values() for entry in made.values()))
    if adapter.adapter_path is None:
        copy_companion_files(whole.path, folder, skip=unrelated_files(whole), tokenizer=whole.words)
    else:
        write_companion_files(whole, Path(adapter.adapter_path), folder)
    shards = plan_shards(plain, whole)
    exact = replace(whole, exact=True)
    with exact.reader() as tensors, tqdm(total=len(plain), desc="packing", disable=quiet or None, leave=False) as bar:
        for file, names in shards.items():
            with SafetensorsWriter(
                folder / file, joined(entries[name] for name in names), source_layout(whole, file)
            ) as out:
                for name in names:
                    tensor, dtype = tensors[name], plain[name][1]
                    made = pack(name, tensor, dtype, weights) if name in packed else [(name, tensor)]
                    for part, tensor in made:
                        out[part] = tensor
                    bar.update()
    spread = {file: [part for name in names for part in entries[name]] for file, names in shards.items()}
    write_index(folder, spread, joined(entries.values()), whole)
    tell(folder, whole, weights, [name for name in plain if name not in packed])
    return whole


def joined(entries: Iterable[Entries]) -> Entries:
    return {name: entry for made in entries for name, entry in made.items()}


def packable(whole: HFCheckpoint, weights: NF4Config) -> frozenset[str]:
    """Tensors that are the weights of linear layers there and here. Experts are none in transformers."""
    with torch.device("meta"):
        net = Decoder(whole.spec)
    weights.apply(net)
    ours = {name + WEIGHT for name, layer in net.named_modules() if isinstance(layer, QuantizedLinear)}
    return frozenset(n for move in whole.moves if upright(move) and ours.issuperset(move.ours) for n in move.hub)


def upright(move: KeyMapping) -> bool:
    """Whether rows are there what they are here, so that blocks are the same."""
    op = move.op
    return op == Identity() or (isinstance(op, Fused) and op.dim == 0 and not op.transposed)


def parts(name: str, shape: tuple[int, ...], dtype: torch.dtype, weights: NF4Config) -> Entries:
    """What bitsandbytes keeps of a weight, and under which names."""
    count = math.prod(shape)
    blocks = count // nf4.BLOCK
    made: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((count // 2, 1), torch.uint8),
        f"{name}.absmax": ((blocks,), torch.uint8 if weights.double_quant else torch.float32),
        f"{name}.quant_map": ((16,), torch.float32),
        f"{name}.quant_state.bitsandbytes__{weights.kind}": ((STATE,), torch.uint8),
    }
    if weights.double_quant:
        made[f"{name}.nested_absmax"] = (-(-blocks // nf4.NESTED),), torch.float32
        made[f"{name}.nested_quant_map"] = (256,), torch.float32
    return made


def pack(name: str, weight: Tensor, dtype: torch.dtype, weights: NF4Config) -> Iterator[tuple[str, Tensor]]:
    """These tensors. `dtype` is what the weight becomes again when it is decoded."""
    packed, scales = nf4.quantize(weight, weights.kind)
    state = {"quant_type": weights.kind, "blocksize": nf4.BLOCK}
    state |= {"dtype": str(dtype).removeprefix("torch."), "shape": list(weight.shape)}
    if weights.double_quant:
        scales, outer = nf4.double_quantize(scales)
        state |= {"nested_blocksize": nf4.NESTED, "nested_dtype": "float32", "nested_offset": outer[-1].item()}
        yield f"{name}.nested_absmax", outer[:-1]
        yield f"{name}.nested_quant_map", nf4.dynamic_map(weight.device)
    text = json.dumps(state).encode().ljust(STATE)
    yield name, packed[:, None]
    yield f"{name}.absmax", scales
    yield f"{name}.quant_map", nf4.code_values(weights.kind, weight.device)
    yield f"{name}.quant_state.bitsandbytes__{weights.kind}", torch.frombuffer(bytearray(text), dtype=torch.uint8)


def tell(folder: Path, whole: HFCheckpoint, weights: NF4Config, plain: list[str]) -> None:
    """Say in config.json what is packed, and which modules are not: transformers packs whatever it is not told of."""
    if isinstance(whole, LazyMergedCheckpoint) and whole.base.spec.tied and not whole.spec.tied:
        mark_untied(folder / CONFIG)
    matrices = (n.removesuffix(WEIGHT) for n in plain if n.endswith(WEIGHT) and len(whole.tensors[n].shape) == 2)
    kept = dict.fromkeys([HEAD, *map(experts, matrices)])
    dtype = str(whole.usual_dtype).removeprefix("torch.")
    method = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": weights.kind,
        "bnb_4bit_use_double_quant": weights.double_quant,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(kept),
    }
    config = read_json(folder / CONFIG) | {PACKED: method}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def experts(module: str) -> str:
    """A module, or what holds all experts of a layer, which need not be named one by one."""
    head, found, _ = module.partition(".experts.")
    return head + found.rstrip(".")
