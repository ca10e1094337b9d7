"""What a GGUF file will hold: the tensors of a checkpoint under their names there, and what is done to each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION, Keys
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tunekit.checkpoint.folder import Folder
from tunekit.checkpoint.read import check, check_tie
from tunekit.export.architecture import DIVISORS, TABLE, Architecture, architecture
from tunekit.export.encoding import Encoding, fitting, size
from tunekit.export.metadata import attention, fields
from tunekit.export.told import Told, agree, divisors
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.norm import RMSNorm
from tunekit.models.spec import DecoderSpec
from tunekit.models.weights import Shape, from_ours

EMBED = "embed.weight"


@dataclass(frozen=True)
class Part:
    """A tensor on its way."""

    ours: str
    name: str
    shape: Shape
    kind: Kind
    offset: float = 0.0  # what the model adds to it, and llama.cpp does not
    halves: int | None = None  # width of the heads whose halves are written in turns

    def written(self, tensor: Tensor) -> Tensor:
        """What stands in the file for what stands in the checkpoint."""
        if self.offset:
            tensor = tensor.float() + self.offset
        if self.halves is not None:
            tensor = tensor.unflatten(0, (-1, 2, self.halves // 2)).transpose(1, 2).reshape(self.shape)
        return tensor


@dataclass(frozen=True)
class Plan:
    """All that a file will hold but its tokenizer."""

    source: Folder
    arch: Architecture
    spec: DecoderSpec
    encoding: Encoding
    parts: tuple[Part, ...]
    shapes: Mapping[str, Shape]  # of our tensors
    divisors: tuple[float, ...] | None
    notes: tuple[str, ...]  # what people should know

    def said(self) -> dict[str, Any]:
        general = {Keys.General.TYPE: "model", Keys.General.FILE_TYPE: int(self.encoding.file)}
        return general | {Keys.General.QUANTIZATION_VERSION: GGML_QUANT_VERSION} | fields(self.spec, self.arch)

    def bytes(self) -> int:
        return sum(size(part.kind, part.shape) for part in self.parts)

    def tensors(self) -> Iterator[tuple[Part, Tensor]]:
        """The parts in turn, as they will be written, from the checkpoint's files."""
        parts = {part.ours: part for part in self.parts}
        if self.divisors is not None:
            yield parts[DIVISORS], torch.tensor(self.divisors)
        with self.source.reader() as tensors:
            for move in self.source.moves:
                loaded = move.load([tensors[name] for name in move.hub], self.shapes)
                for name, tensor in zip(move.ours, loaded, strict=True):
                    if name in parts:
                        yield parts[name], parts[name].written(tensor)
                    else:
                        check_tie(self.source, move, tensors)


def planned(source: Folder, encoding: Encoding) -> Plan:
    """Refuses what llama.cpp would run as another model."""
    where = str(source.path)
    arch = architecture(source.config, where)
    spec, notes = narrowed(source.spec, arch)
    with torch.device("meta"):
        net = Decoder(source.spec)
    check(source, net.shapes)
    names = [name for move in source.moves for name in move.ours if not (name == TIED and spec.tied)]
    mixer = attention(spec.layers[-1])
    table = divisors(mixer.rope, mixer.head_dim)
    agree(spec, Told(fields(spec, arch), arch, names, table).spec(), arch.name, where)
    parts = [part(name, net, arch, encoding) for name in names]
    if table is not None:
        parts.insert(0, Part(DIVISORS, DIVISORS, (len(table),), Kind.F32))
    return Plan(source, arch, spec, encoding, tuple(parts), net.shapes, table, notes)


def narrowed(spec: DecoderSpec, arch: Architecture) -> tuple[DecoderSpec, tuple[str, ...]]:
    """The model in the context where it needs no windows, if the architecture has none; and what to say of it."""
    reach = min((mixer.window for mixer in map(attention, spec.layers) if mixer.window is not None), default=None)
    if arch.pattern is not None or reach is None:
        return spec, ()
    layers = tuple(replace(layer, mixer=replace(attention(layer), window=None)) for layer in spec.layers)
    if reach >= spec.context:
        return replace(spec, layers=layers), ()
    note = (
        f"the file is for up to {reach:,} tokens, not {spec.context:,}: llama.cpp's {arch.name} has no sliding window"
    )
    return replace(spec, layers=layers, context=reach), (note,)


def part(name: str, net: Decoder, arch: Architecture, encoding: Encoding) -> Part:
    """What is done to one of our tensors."""
    owner, _, leaf = name.rpartition(".")
    module, shape = net.get_submodule(owner), net.shapes[name]
    there = from_ours(name, TABLE).hub[0]
    if isinstance(module, RMSNorm):
        return Part(name, there, shape, Kind.F32, offset=module.spec.offset)
    turned = arch.paired and owner.endswith((".q_proj", ".k_proj"))
    halves = attention(net.spec.layers[int(name.split(".")[1])]).head_dim if turned else None
    return Part(name, there, shape, kind(name, shape, net.spec.tied, encoding), halves=halves)


def kind(name: str, shape: Shape, tied: bool, encoding: Encoding) -> Kind:
    """The type of a tensor that is no norm."""
    if len(shape) == 1:
        return Kind.F32
    wanted = encoding.kind
    if name == TIED or (name == EMBED and tied):
        wanted = encoding.head or wanted
    elif name == EMBED:
        wanted = encoding.embed or wanted
    elif len(shape) == 3:
        wanted = encoding.experts or wanted
    return fitting(wanted, shape)
