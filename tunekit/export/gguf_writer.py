"""Writes GGUF files, with one tensor in memory at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from tqdm import tqdm

from tunekit.checkpoint.atomic import atomic_file, check_free_space
from tunekit.errors import UserError
from tunekit.export.quant_types import encode_tensor, tensor_bytes
from tunekit.export.tensor_map import TensorMap

TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
TYPES |= {str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}


def write_gguf(out: Path, plan: TensorMap, fields: Mapping[str, Any]) -> None:
    """Write a file atomically. `fields` are added to those of the plan."""
    if out.is_dir():
        raise UserError(f"{out}: is a directory. Specify a file, such as {out / 'model.gguf'}.")
    check_free_space(out, plan.num_bytes())
    with atomic_file(out) as partial:
        alignment = write_header(partial, plan, plan.fields() | dict(fields))
        progress = tqdm(total=plan.num_bytes(), desc="writing", unit="B", unit_scale=True, disable=None, leave=False)
        with partial.open("ab") as file, progress:
            for entry, tensor in plan.tensors():
                write_padding(file, alignment)
                file.write(encode_tensor(tensor, entry.kind).data)
                progress.update(tensor_bytes(entry.kind, entry.shape))
            write_padding(file, alignment)


def write_header(file: Path, plan: TensorMap, fields: Mapping[str, Any]) -> int:
    """Write everything before the tensor data. Returns the alignment of tensors in bytes."""
    writer = GGUFWriter(file, plan.arch.name)
    for key, value in fields.items():
        writer.add_key_value(key, value, TYPES[type(value)])
    for entry in plan.entries:
        writer.add_tensor_info(
            entry.name, entry.shape, np.dtype(np.float32), tensor_bytes(entry.kind, entry.shape), entry.kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return writer.data_alignment


def write_padding(file: IO[bytes], alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))
