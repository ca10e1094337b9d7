"""A GGUF file as a checkpoint that is read part by part: the model that llama.cpp runs for it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, Keys
from torch import Tensor

from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.safetensors_io import OpenFiles, TensorMeta, TensorReader
from tunekit.export.architecture import ARCHITECTURES, DIVISORS, LONG, SHORT
from tunekit.export.gguf_to_spec import GGUFSpec
from tunekit.export.quant_types import decode_tensor
from tunekit.models.families.registry import Family
from tunekit.models.weight_map import load_mappings

BESIDE = (DIVISORS, SHORT, LONG)  # tensors that are no weights: the spec has them


@dataclass(frozen=True)
class GGUFTensor(TensorMeta):
    """Bytes of a GGUF file, which are numbers in one of its types."""

    kind: GGMLQuantizationType
    start: int
    size: int

    def read(self, files: OpenFiles) -> Tensor:
        coded = torch.empty(self.size, dtype=torch.uint8)
        files.fill(coded, self.file, self.start)
        return decode_tensor(coded, self.kind, self.shape)


@dataclass(frozen=True)
class GGUFCheckpoint(HFCheckpoint):
    """What `Folder` is for a checkpoint of the Hub; `config` are the fields of the file."""

    coded: dict[str, GGUFTensor]

    @staticmethod
    def open(path: Path, name: str | None = None) -> "GGUFCheckpoint":
        file = GGUFReader(path)
        said: dict[str, Any] = {key: field.contents() for key, field in file.fields.items()}
        coded = {
            one.name: GGUFTensor(
                path, tuple(one.shape[::-1].tolist()), torch.float32, one.tensor_type, one.data_offset, one.n_bytes
            )
            for one in file.tensors
        }
        arch = next(one for one in ARCHITECTURES.values() if one.name == said[Keys.General.ARCHITECTURE])
        moves, _ = load_mappings([name for name in coded if name not in BESIDE], arch.table)
        with TensorReader(coded) as tensors:
            beside = {name: tuple(tensors[name].tolist()) for name in BESIDE if name in coded}
        told = GGUFSpec(said, arch, [name for move in moves for name in move.ours], beside).spec()
        return GGUFCheckpoint(path, name or str(path), said, Family(lambda _: told, arch.table), told, coded)

    @cached_property
    def tensors(self) -> dict[str, TensorMeta]:
        """The weights."""
        return {name: one for name, one in self.coded.items() if name not in BESIDE}
