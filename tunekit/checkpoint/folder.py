"""A checkpoint folder as the Hub lays it out: config.json, safetensors with or without an index, tokenizer files."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tunekit.errors import UserError
from tunekit.models.families.registry import Family, family
from tunekit.models.spec import DecoderSpec
from tunekit.models.weights import Move, moves_in

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Rotation tables that early Llama checkpoints carry along: they follow from config.json.
DERIVED = ".rotary_emb.inv_freq"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Folder:
    """A checkpoint on disk. Headers are read when first asked for, tensors one at a time."""

    path: Path
    name: str  # as the user gave it: a Hub name, a bundled name or a path
    config: Mapping[str, Any]
    family: Family
    spec: DecoderSpec

    @staticmethod
    def open(path: Path, name: str | None = None) -> "Folder":
        file = path / "config.json"
        if not file.is_file():
            raise UserError(f"{path}: no config.json, so this is no checkpoint folder")
        config = read_json(file)
        return Folder(path, name or str(path), config, *family(config, str(file)))

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Every tensor of the checkpoint under its Hub name, in the order of the files."""
        found: dict[str, Stored] = {}
        for file in self.files():
            for name, stored in header(file).items():
                if name in found:
                    raise UserError(f"{file}: holds {name}, and so does {found[name].file.name}")
                found[name] = stored
        return {name: stored for name, stored in found.items() if not name.endswith(DERIVED)}

    def files(self) -> list[Path]:
        """The safetensors files: the one of the usual name, those of the index, or the only one."""
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        if (self.path / INDEX).is_file():
            return self.indexed()
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise UserError(f"{self.path}: no *.safetensors file; weights in other formats are not read")
        if len(files) > 1:
            raise UserError(f"{self.path}: {len(files)} safetensors files but no {INDEX} to say which belong together")
        return files

    def indexed(self) -> list[Path]:
        index = self.path / INDEX
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise UserError(f"{index}: no 'weight_map' from tensor names to files")
        for name in listed.values():
            if Path(name).name != name:
                raise UserError(f"{index}: {name!r} lies outside the folder")
        files = [self.path / name for name in sorted(set(listed.values()))]
        for file in files:
            if not file.is_file():
                raise UserError(f"{index}: names {file.name}, which is not there; download the checkpoint again")
        return files

    @cached_property
    def all_moves(self) -> list[Move]:
        """Every tensor of the checkpoint in its move. A tensor without a place is an error, and so is a gap."""
        moves, unknown = moves_in(self.tensors, self.family.table)
        if unknown:
            first = unknown[0]
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            kind = self.config["model_type"]
            raise UserError(f"{self.tensors[first].file}: {first}{more} is no tensor of a {kind} model")
        for move in moves:
            if missing := [name for name in move.hub if name not in self.tensors]:
                there = next(name for name in move.hub if name in self.tensors)
                file = self.tensors[there].file
                raise UserError(f"{file}: {missing[0]} is missing, which belongs to {there}; download it again")
        return moves

    @cached_property
    def moves(self) -> list[Move]:
        """How its tensors become ours."""
        return [move for move in self.all_moves if move.ours]

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the stored tensors, by our names. Parts of one tensor have the one that holds them all."""
        return {
            name: reduce(torch.promote_types, (self.tensors[part].dtype for part in move.hub))
            for move in self.moves
            for name in move.ours
        }

    @cached_property
    def has_weights(self) -> bool:
        """False for a folder that only describes a model to train from scratch."""
        return (self.path / INDEX).is_file() or any(self.path.glob("*.safetensors"))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which our tensor `name` is stored here, or would be."""
        return self.dtypes.get(name, self.usual_dtype) if self.has_weights else self.usual_dtype

    @property
    def usual_dtype(self) -> torch.dtype:
        """The dtype that config.json states: that of tensors which the checkpoint does not hold yet."""
        stated = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if stated not in NAMES:
            raise UserError(f"{self.path / 'config.json'}: dtype {stated!r} is none of {', '.join(NAMES)}")
        return NAMES[stated]

    def reader(self) -> "Reader":
        return Reader(self.tensors)


class Reader:
    """Open files of a checkpoint; tensors come one at a time, straight from the mapped file."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors, self.files, self.stack = tensors, {}, ExitStack()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __getitem__(self, name: str) -> Tensor:
        file = self.tensors[name].file
        if file not in self.files:
            self.files[file] = self.stack.enter_context(safe_open(file, framework="pt"))
        return self.files[file].get_tensor(name)


def header(file: Path) -> dict[str, Stored]:
    """What a safetensors file holds. The library checks that the file is as long as its header says."""
    try:
        with safe_open(file, framework="pt") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 - it is no mapping
            return {name: Stored(file, tuple(s.get_shape()), dtype(file, name, s)) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: damaged or cut off ({error}); download it again") from error


def dtype(file: Path, name: str, part: Any) -> torch.dtype:
    kind = part.get_dtype()
    if kind not in DTYPES:
        raise UserError(f"{file}: {name} is stored as {kind}; only {', '.join(DTYPES)} are read")
    return DTYPES[kind]
