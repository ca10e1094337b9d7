"""A plan and a vocabulary as a GGUF file, tensor by tensor: never more of a model in memory than one of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from tqdm import tqdm

from tunekit.checkpoint.atomic import PARTIAL, beside, disk_error, need, refusal, sync
from tunekit.errors import UserError
from tunekit.export.encoding import encode, size
from tunekit.export.plan import Plan

TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
TYPES |= {str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}


def write(out: Path, plan: Plan, said: Mapping[str, Any], quiet: bool = False) -> None:
    """Write the file: it appears whole or not at all. `said` are fields beside those of the plan."""
    need(out, plan.bytes())
    with appearing(out) as partial:
        alignment = write_head(partial, plan, plan.said() | dict(said))
        bar = tqdm(total=plan.bytes(), desc="writing", unit="B", unit_scale=True, disable=quiet or None, leave=False)
        with partial.open("ab") as file, bar:
            for part, tensor in plan.tensors():
                pad(file, alignment)
                file.write(encode(tensor, part.kind).data)
                bar.update(size(part.kind, part.shape))
            pad(file, alignment)


def write_head(file: Path, plan: Plan, said: Mapping[str, Any]) -> int:
    """All that stands before the tensors. Returns the number of bytes of which their places are multiples."""
    writer = GGUFWriter(file, plan.arch.name)
    for key, value in said.items():
        writer.add_key_value(key, value, TYPES[type(value)])
    for part in plan.parts:
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), size(part.kind, part.shape), part.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return writer.data_alignment


def pad(file: IO[bytes], alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A place to write a file into, which is `out` in the end; a write that the disk refuses is a UserError."""
    partial = beside(out, PARTIAL)
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file, such as {out / 'model.gguf'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise refusal(out, error) from error
    try:
        yield partial
        sync(partial)
        partial.replace(out)
        sync(out.parent)
    except OSError as error:
        cause = disk_error(error)
        if cause is None:
            raise
        raise refusal(out, cause) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
