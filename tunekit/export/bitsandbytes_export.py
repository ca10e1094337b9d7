"""Exports a model as a 4-bit bitsandbytes checkpoint for transformers."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.atomic import check_free_space
from tunekit.checkpoint.dequantize import QUANTIZATION_KEY
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.checkpoint.merge import CONFIG, MergedCheckpoint, mark_untied, write_companion_files
from tunekit.checkpoint.safetensors_io import Entries
from tunekit.checkpoint.save_model import (
    copy_companion_files,
    open_writers,
    plan_shards,
    tensor_bytes,
    unrelated_files,
    write_index,
)
from tunekit.checkpoint.sentence_transformers import copy_modules
from tunekit.errors import UserError
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
LM_HEAD = "lm_head"  # transformers quantizes it unless it is listed, even if it is tied
STATE_BYTES = 256  # of the JSON state of each weight, padded, because the length of its numbers is not known before


@torch.no_grad()
def export_bitsandbytes(
    source: HFCheckpoint, adapter: NoAdapter | LoRAConfig, quantization: NF4Config, folder: Path
) -> HFCheckpoint:
    """Quantize a model, with its adapter merged, into an existing directory. Returns the unquantized checkpoint."""
    model = MergedCheckpoint.with_adapter(source, adapter)
    quantized = packable_weights(model, quantization)
    if not quantized:
        raise UserError(f"{source.path}: this model has no linear layers that bitsandbytes can quantize")
    unquantized_entries = {name: (meta.shape, meta.dtype) for name, meta in model.tensors.items()}
    entries = {
        name: packed_entries(name, *shape_and_dtype, quantization) if name in quantized else {name: shape_and_dtype}
        for name, shape_and_dtype in unquantized_entries.items()
    }
    all_entries = {name: entry for group in entries.values() for name, entry in group.items()}
    check_free_space(folder, sum(map(tensor_bytes, all_entries.values())))
    export_companion_files(model, adapter, folder)
    shards = plan_shards(unquantized_entries, model)
    file_names = {file: [key for name in names for key in entries[name]] for file, names in shards.items()}
    with replace(model, keeps_prequantized=True).reader() as tensors, ExitStack() as stack:
        writers = open_writers(stack, folder, model, file_names, all_entries)
        for name, (_, dtype) in tqdm(unquantized_entries.items(), "packing", disable=None, leave=False):
            weight = tensors[name]
            group = quantize_weight(name, weight, dtype, quantization) if name in quantized else [(name, weight)]
            for key, tensor in group:
                writers[key][key] = tensor
    write_index(folder, file_names, all_entries, model)
    write_quantization_config(folder, model, quantization, [name for name in entries if name not in quantized])
    return model


def export_companion_files(model: HFCheckpoint, adapter: NoAdapter | LoRAConfig, folder: Path) -> None:
    """Write everything but the weights: config, tokenizer, chat template, license."""
    if adapter.adapter_path is None:
        copy_companion_files(model, folder, skip=unrelated_files(model))
        if model.is_base_model:
            copy_modules(model.path, folder)
    else:
        write_companion_files(model, model.open_adapter(adapter.adapter_path), folder)


def packable_weights(model: HFCheckpoint, quantization: NF4Config) -> frozenset[str]:
    """Weights of linear layers in both tunekit and transformers, which excludes stacked experts."""
    with torch.device("meta"):
        meta_model = Decoder(model.spec)
    quantization.apply(meta_model)
    names = {name + WEIGHT for name, layer in meta_model.named_modules() if isinstance(layer, QuantizedLinear)}
    return frozenset(
        key
        for mapping in model.key_mappings
        if keeps_row_order(mapping) and names.issuperset(mapping.ours)
        for key in mapping.hub
    )


def keeps_row_order(mapping: KeyMapping) -> bool:
    """Whether a mapping keeps the rows of a weight, so that quantization blocks are the same."""
    op = mapping.op
    return op == Identity() or (isinstance(op, Fused) and op.dim == 0 and not op.transposed)


def packed_entries(name: str, shape: tuple[int, ...], dtype: torch.dtype, quantization: NF4Config) -> Entries:
    """Names, shapes and dtypes of the tensors of a quantized weight."""
    count = math.prod(shape)
    blocks = count // nf4.BLOCK
    entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((count // 2, 1), torch.uint8),
        f"{name}.absmax": ((blocks,), torch.uint8 if quantization.double_quant else torch.float32),
        f"{name}.quant_map": ((16,), torch.float32),
        f"{name}.quant_state.bitsandbytes__{quantization.kind}": ((STATE_BYTES,), torch.uint8),
    }
    if quantization.double_quant:
        entries[f"{name}.nested_absmax"] = (-(-blocks // nf4.DOUBLE_QUANT_BLOCK),), torch.float32
        entries[f"{name}.nested_quant_map"] = (256,), torch.float32
    return entries


def quantize_weight(
    name: str, weight: Tensor, dtype: torch.dtype, quantization: NF4Config
) -> Iterator[tuple[str, Tensor]]:
    """Quantize a weight to the tensors of `packed_entries`. `dtype` is that of the dequantized weight."""
    packed, scales = nf4.quantize(weight, quantization.kind)
    state = {"quant_type": quantization.kind, "blocksize": nf4.BLOCK}
    state |= {"dtype": str(dtype).removeprefix("torch."), "shape": list(weight.shape)}
    if quantization.double_quant:
        scales, outer_scales = nf4.double_quantize(scales)
        state |= {"nested_blocksize": nf4.DOUBLE_QUANT_BLOCK, "nested_dtype": "float32"}
        state |= {"nested_offset": outer_scales[-1].item()}
        yield f"{name}.nested_absmax", outer_scales[:-1]
        yield f"{name}.nested_quant_map", nf4.dynamic_map(weight.device)
    text = json.dumps(state).encode().ljust(STATE_BYTES)
    yield name, packed[:, None]
    yield f"{name}.absmax", scales
    yield f"{name}.quant_map", nf4.code_values(quantization.kind, weight.device)
    yield f"{name}.quant_state.bitsandbytes__{quantization.kind}", torch.frombuffer(bytearray(text), dtype=torch.uint8)


def write_quantization_config(
    folder: Path, model: HFCheckpoint, quantization: NF4Config, unquantized: list[str]
) -> None:
    """Write the quantization config, with the modules that are not quantized: transformers quantizes all others."""
    if isinstance(model, MergedCheckpoint) and model.was_untied:
        mark_untied(folder / CONFIG)
    matrices = [name for name in unquantized if name.endswith(WEIGHT) and len(model.tensors[name].shape) == 2]
    skipped = dict.fromkeys([LM_HEAD, *(expert_parent(name.removesuffix(WEIGHT)) for name in matrices)])
    dtype = str(model.default_dtype).removeprefix("torch.")
    method = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quantization.kind,
        "bnb_4bit_use_double_quant": quantization.double_quant,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(skipped),
    }
    config = read_json(folder / CONFIG) | {QUANTIZATION_KEY: method}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def expert_parent(module: str) -> str:
    """Name of a module, or of the module that contains all experts of a layer."""
    head, separator, _ = module.partition(".experts.")
    return head + separator.rstrip(".")
