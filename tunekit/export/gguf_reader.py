"""Reads a GGUF file as a checkpoint of the model that llama.cpp runs."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, Keys
from torch import Tensor

from tunekit.checkpoint.hf_checkpoint import CheckpointDir, HFCheckpoint
from tunekit.checkpoint.safetensors_io import OpenFiles, TensorMeta, TensorReader
from tunekit.export.architecture import ARCHITECTURES, DIVISORS, LONG, SHORT
from tunekit.export.gguf_fields import GGUFSpec
from tunekit.export.quant_types import decode_tensor
from tunekit.models.families.registry import Family
from tunekit.models.weight_map import load_mappings

ROPE_TENSORS = (DIVISORS, SHORT, LONG)  # RoPE factors, which are part of the spec


@dataclass(frozen=True)
class GGUFTensor(TensorMeta):
    """Encoded tensor in a GGUF file."""

    kind: GGMLQuantizationType
    start: int
    size: int

    def read(self, files: OpenFiles) -> Tensor:
        encoded = torch.empty(self.size, dtype=torch.uint8)
        files.read_into(encoded, self.file, self.start)
        return decode_tensor(encoded, self.kind, self.shape)


@dataclass(frozen=True)
class GGUFCheckpoint(HFCheckpoint):
    """Checkpoint in a GGUF file. `config` contains the fields of the file."""

    gguf_tensors: dict[str, GGUFTensor]

    @staticmethod
    def open(path: Path, name: str | None = None) -> "GGUFCheckpoint":
        file = GGUFReader(path)
        fields: dict[str, Any] = {key: field.contents() for key, field in file.fields.items()}
        gguf_tensors = {
            t.name: GGUFTensor(
                path, tuple(t.shape[::-1].tolist()), torch.float32, t.tensor_type, t.data_offset, t.n_bytes
            )
            for t in file.tensors
        }
        arch = next(arch for arch in ARCHITECTURES.values() if arch.name == fields[Keys.General.ARCHITECTURE])
        mappings, _ = load_mappings([name for name in gguf_tensors if name not in ROPE_TENSORS], arch.table)
        with TensorReader(gguf_tensors) as tensors:
            rope_factors = {name: tuple(tensors[name].tolist()) for name in ROPE_TENSORS if name in gguf_tensors}
        spec = GGUFSpec(fields, arch, [name for mapping in mappings for name in mapping.ours], rope_factors).spec()
        return GGUFCheckpoint(
            CheckpointDir(path), name or str(path), fields, Family(lambda _: spec, arch.table), spec, gguf_tensors
        )

    @cached_property
    def tensors(self) -> dict[str, TensorMeta]:
        """Weights by GGUF name."""
        return {name: tensor for name, tensor in self.gguf_tensors.items() if name not in ROPE_TENSORS}
