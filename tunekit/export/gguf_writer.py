"""Writes GGUF files, with one tensor in memory at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from tqdm import tqdm

from tunekit.checkpoint.atomic import PARTIAL, check_free_space, find_disk_error, sibling_path, write_error
from tunekit.errors import UserError
from tunekit.export.quant_types import encode_tensor, tensor_bytes
from tunekit.export.tensor_map import TensorMap
from tunekit.system import fsync_path

TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
TYPES |= {str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}


def write_gguf(out: Path, plan: TensorMap, fields: Mapping[str, Any], quiet: bool = False) -> None:
    """Write a file atomically. `fields` are added to those of the plan."""
    check_free_space(out, plan.num_bytes())
    with atomic_file(out) as partial:
        alignment = write_header(partial, plan, plan.fields() | dict(fields))
        progress = tqdm(
            total=plan.num_bytes(), desc="writing", unit="B", unit_scale=True, disable=quiet or None, leave=False
        )
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


@contextmanager
def atomic_file(out: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `out` at the end. Disk errors are raised as UserError."""
    partial = sibling_path(out, PARTIAL)
    if out.is_dir():
        raise UserError(f"{out}: is a directory. Specify a file, such as {out / 'model.gguf'}.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise write_error(out, error) from error
    try:
        yield partial
        fsync_path(partial)
        partial.replace(out)
        fsync_path(out.parent)
    except OSError as error:
        cause = find_disk_error(error)
        if cause is None:
            raise
        raise write_error(out, cause) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
