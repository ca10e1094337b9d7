"""A checkpoint folder as the Hub lays it out: config.json, safetensors with or without an index, tokenizer files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch

from tunekit.checkpoint import dequantize
from tunekit.checkpoint.safetensors_io import (
    NAMES,
    RandomTensor,
    TensorMeta,
    TensorReader,
    read_header,
    read_pickle_header,
)
from tunekit.errors import UserError
from tunekit.models.decoder import TIED
from tunekit.models.families.registry import Family, find_family
from tunekit.models.spec import DecoderSpec
from tunekit.models.weight_map import KeyMapping, KeyRule, load_mappings, match_hub_name, to_hub_name

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# The usual file, the index of several, and what else such files are called, by kind; the better kind first.
LAYOUTS = ((WEIGHTS, INDEX, "*.safetensors"), (PICKLE, PICKLE_INDEX, PICKLE))
# Rotation tables that early Llama checkpoints carry along: they follow from config.json.
DERIVED = ".rotary_emb.inv_freq"
EMBED = "embed.weight"
# What a model is trained in; a tensor of another kind is none of its weights.
LOADED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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


def instead(path: Path) -> str:
    """What a folder is that people take for a checkpoint, and what to do with it."""
    final = path / "final"
    if (path / "adapter_config.json").is_file():
        return f" but an adapter: `tune merge BASE {path} OUT` makes one, and `adapter.adapter_path` goes on from it"
    if (final / "adapter_config.json").is_file():
        return f" but a run whose result is an adapter: `tune merge BASE {path} OUT` makes one"
    return f" but a run: name its result, {final}" if (final / "config.json").is_file() else ""


@dataclass(frozen=True)
class HFCheckpoint:
    """A checkpoint on disk. Headers are read when first asked for, tensors one at a time."""

    path: Path
    name: str  # as the user gave it: a Hub name, a bundled name or a path
    config: Mapping[str, Any]
    family: Family
    spec: DecoderSpec
    words: Path | None = field(default=None, kw_only=True)  # folder of the tokenizer, where it is another one's
    exact: bool = field(default=False, kw_only=True)  # weights in four bits are read unrounded, in fp32
    fresh: int | None = field(default=None, kw_only=True)  # the seed of a head that it does not hold

    @property
    def tokenizer(self) -> Path:
        """The folder whose tokenizer goes with this checkpoint."""
        return self.words or self.path

    @staticmethod
    def open(path: Path, name: str | None = None) -> "HFCheckpoint":
        file = path / "config.json"
        if not file.is_file():
            raise UserError(f"{path}: no config.json, so this is no checkpoint folder{instead(path)}")
        config = read_json(file)
        dequantize.check_quant_format(config, str(file))
        return HFCheckpoint(path, name or str(path), config, *find_family(config, str(file)))

    @cached_property
    def tensors(self) -> dict[str, TensorMeta]:
        """Every tensor of the checkpoint under its Hub name, in the order of the files; packed ones as if plain."""
        dtype = self.usual_dtype if self.stated_dtype else torch.bfloat16
        found = dequantize.logical_tensors(self.stored, self.config, dtype)
        found = {name: stored for name, stored in found.items() if not name.endswith(DERIVED)}
        held = {name: stored for name, stored in found.items() if match_hub_name(name, self.family.unread) is None}
        return held if self.fresh is None else {**held, **self.drawn([*held.values()][-1].file, self.fresh)}

    def drawn(self, file: Path, seed: int) -> Mapping[str, TensorMeta]:
        """A head that scores, where there is none yet. It would be in this file."""
        score, name = self.spec.score, to_hub_name("head", self.family.table)
        assert score is not None
        weight = RandomTensor(file, (score.labels, self.spec.dim), self.usual_dtype, seed, self.spec.std)
        bias = {f"{name}.bias": replace(weight, shape=(score.labels,), std=0.0)} if score.bias else {}
        return {f"{name}.weight": weight} | bias

    @cached_property
    def stored(self) -> dict[str, TensorMeta]:
        """Every tensor of the files, which must agree with the index."""
        found: dict[str, TensorMeta] = {}
        for file in self.files:
            for name, stored in (
                read_header(file) if file.suffix == ".safetensors" else read_pickle_header(file)
            ).items():
                if name in found:
                    raise UserError(f"{file}: holds {name}, and so does {found[name].file.name}")
                found[name] = stored
        if self.index is not None:
            agree(self.index, self.listed, found)
        return found

    @cached_property
    def files(self) -> list[Path]:
        """The files of weights: those of the index, the one of the usual name, or the only one."""
        if self.index is not None:
            return [self.path / name for name in sorted(set(self.listed.values()))]
        for one, _, others in LAYOUTS:
            files = [self.path / one] if (self.path / one).is_file() else sorted(self.path.glob(others))
            if len(files) > 1:
                raise UserError(f"{self.path}: {len(files)} files {others} but no {INDEX} to say which belong together")
            if files:
                return files
        raise UserError(
            f"{self.path}: no *.safetensors and no {PICKLE}, so there are no weights to read (init: random needs none)"
        )

    @cached_property
    def index(self) -> Path | None:
        """The index that says which files belong together. One beside a file of the usual name was left behind."""
        for one, index, others in LAYOUTS:
            if (self.path / index).is_file() and not (self.path / one).is_file():
                return self.path / index
            if any(self.path.glob(others)):
                return None
        return None

    @cached_property
    def listed(self) -> dict[str, str]:
        """What the index says: tensors and their files, which must be there."""
        if self.index is None:
            return {}
        listed = read_json(self.index).get("weight_map")
        if not listed or not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise UserError(f"{self.index}: no 'weight_map' from tensor names to files")
        for name in dict.fromkeys(listed.values()):
            if Path(name).name != name:
                raise UserError(f"{self.index}: {name!r} lies outside the folder")
            if not (self.path / name).is_file():
                raise UserError(f"{self.index}: names {name}, which is not there; download the checkpoint again")
        return listed

    @cached_property
    def all_moves(self) -> list[KeyMapping]:
        """Every tensor of the checkpoint in its move. A tensor without a place is an error, and so is a gap."""
        moves, unknown = load_mappings(self.tensors, self.family.table)
        if unknown:
            first, more = unknown[0], f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            told = f"{self.tensors[first].file}: {first}{more} is no tensor of a {self.config['model_type']} model"
            raise UserError(told + advice(first, self.family.table))
        for move in moves:
            self.check(move)
        if self.spec.tied and not any(EMBED in move.ours for move in moves):
            # Some programs wrote a tied matrix under its other name.
            moves = [replace(move, ours=(EMBED,)) if move.ours == (TIED,) else move for move in moves]
        return moves

    def check(self, move: KeyMapping) -> None:
        """All tensors of a move are there, and those that are loaded are numbers."""
        for name in move.hub:
            if name not in self.tensors:
                others = [other for other in move.hub if other in self.tensors]
                file, of = (
                    (self.tensors[others[0]].file, f", which belongs to {others[0]}") if others else (self.path, "")
                )
                raise UserError(f"{file}: {name} is missing{of}; download it again")
            stored = self.tensors[name]
            if move.ours and stored.dtype not in LOADED:
                kinds = ", ".join(map(plain, LOADED))
                raise UserError(f"{stored.file}: {name} is stored as {plain(stored.dtype)}; only {kinds} are read")

    @cached_property
    def moves(self) -> list[KeyMapping]:
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
        return any(any(self.path.glob(name)) for layout in LAYOUTS for name in layout)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which our tensor `name` is stored here, or would be."""
        return self.dtypes.get(name, self.usual_dtype) if self.has_weights else self.usual_dtype

    @property
    def stated_dtype(self) -> str | None:
        """What config.json says of it, for the whole or for the text model in it."""
        told = [c for c in (self.config, self.config.get("text_config")) if isinstance(c, Mapping)]
        return next((c[key] for c in told for key in ("dtype", "torch_dtype") if c.get(key)), None)

    @property
    def usual_dtype(self) -> torch.dtype:
        """The dtype that config.json states: that of tensors which the checkpoint does not hold yet."""
        stated = self.stated_dtype or "float32"
        if stated not in NAMES:
            raise UserError(f"{self.path / 'config.json'}: dtype {stated!r} is none of {', '.join(NAMES)}")
        return NAMES[stated]

    def reader(self) -> "TensorReader":
        return TensorReader(dequantize.exact_tensors(self.tensors) if self.exact else self.tensors)


def agree(index: Path, listed: Mapping[str, str], found: Mapping[str, TensorMeta]) -> None:
    """Files hold just what their index lists."""
    for name, file in listed.items():
        there = found[name].file.name if name in found else "no file"
        if file != there:
            raise UserError(f"{index}: lists {name} in {file}, but {there} holds it; download both again")
    for name, stored in found.items():
        if name not in listed:
            raise UserError(f"{stored.file}: holds {name}, which {index.name} does not list; download both again")


def plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def advice(name: str, table: tuple[KeyRule, ...]) -> str:
    """What is wrong with a name that has no place, where it is one thing that is wrong with all."""
    if match_hub_name(f"model.{name}", table):
        return "; its names lack 'model.': save the whole model, with its head, and not only what is inside"
    first, _, rest = name.partition(".")
    while rest:
        if match_hub_name(rest, table):
            return f"; its names begin with {first + '.'!r}, which some wrapper added: save the model without it"
        more, _, rest = rest.partition(".")
        first = f"{first}.{more}"
    return ""
