"""What a GGUF file will hold: the tensors of a checkpoint under their names there, and what is done to each."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION, Keys
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tunekit.checkpoint.hf_checkpoint import EMBED, HFCheckpoint
from tunekit.checkpoint.load_model import check_tensors, check_tied_head
from tunekit.export.architecture import Architecture, get_architecture
from tunekit.export.compatibility import check_spec_matches
from tunekit.export.gguf_to_spec import GGUFSpec, Tables, rope_factor_tensors
from tunekit.export.metadata import attention_fields, model_fields
from tunekit.export.quant_types import QuantType, fallback_type, tensor_bytes
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.moe import Router
from tunekit.models.norm import RMSNorm
from tunekit.models.spec import DecoderSpec
from tunekit.models.weight_map import Identity, KeyMatch, Shape, match_name


@dataclass(frozen=True)
class GGUFEntry:
    """A tensor of the file."""

    ours: tuple[str, ...]
    name: str
    shape: Shape
    kind: Kind
    op: Identity = Identity()
    offset: float = 0.0  # what the model adds to it, and llama.cpp does not
    halves: int | None = None  # width of the heads whose halves are written in turns

    def written(self, tensors: list[Tensor]) -> Tensor:
        """What stands in the file for our tensors."""
        tensor = self.op.save(tensors)[0]
        if self.offset:
            tensor = tensor.float() + self.offset
        if self.halves is not None:
            tensor = tensor.unflatten(0, (-1, 2, self.halves // 2)).transpose(1, 2).reshape(self.shape)
        return tensor


@dataclass(frozen=True)
class TensorMap:
    """All that a file will hold but its tokenizer."""

    source: HFCheckpoint
    arch: Architecture
    spec: DecoderSpec
    encoding: QuantType
    parts: tuple[GGUFEntry, ...]
    shapes: Mapping[str, Shape]  # of our tensors
    tables: Tables  # tensors that are no weights
    notes: tuple[str, ...]  # what people should know

    def said(self) -> dict[str, Any]:
        general = {Keys.General.TYPE: "model", Keys.General.FILE_TYPE: int(self.encoding.file)}
        return general | {Keys.General.QUANTIZATION_VERSION: GGML_QUANT_VERSION} | model_fields(self.spec, self.arch)

    def bytes(self) -> int:
        return sum(tensor_bytes(part.kind, part.shape) for part in self.parts)

    def tensors(self) -> Iterator[tuple[GGUFEntry, Tensor]]:
        """The parts in turn, as they will be written, from the checkpoint's files."""
        parts = {name: part for part in self.parts for name in part.ours}
        for name, numbers in self.tables.items():
            yield parts[name], torch.tensor(numbers)
        held: dict[str, Tensor] = {}
        for name, tensor in self.loaded():
            part, held[name] = parts[name], tensor
            if held.keys() >= set(part.ours):
                yield part, part.written([held.pop(one) for one in part.ours])

    def loaded(self) -> Iterator[tuple[str, Tensor]]:
        """Our tensors. A tied head that the checkpoint holds as well must be the embedding."""
        with self.source.reader() as tensors:
            for move in self.source.moves:
                if TIED in move.ours and self.spec.tied:
                    check_tied_head(self.source, move, tensors)
                else:
                    loaded = move.load([tensors[name] for name in move.hub], self.shapes)
                    yield from zip(move.ours, loaded, strict=True)


def build_tensor_map(source: HFCheckpoint, encoding: QuantType) -> TensorMap:
    """Refuses what llama.cpp would run as another model."""
    where = str(source.path)
    arch = get_architecture(source.config, where)
    spec, notes = narrowed(source.spec, arch)
    with torch.device("meta"):
        net = Decoder(source.spec)
    check_tensors(source, net.shapes)
    names = [name for move in source.moves for name in move.ours if not (name == TIED and spec.tied)]
    far = next((one for one in map(attention_fields, reversed(spec.layers)) if one.rope is not None), None)
    beside = {} if far is None else rope_factor_tensors(far.rope, far.head_dim)
    check_spec_matches(spec, GGUFSpec(model_fields(spec, arch), arch, names, beside).spec(), arch.name, where)
    parts = [GGUFEntry((name,), name, (len(numbers),), Kind.F32) for name, numbers in beside.items()]
    parts += [part(match, net, arch, encoding) for match in whole(names, arch)]
    if any(not move.ours for move in source.all_moves):
        notes = (*notes, "only the text model is written, and nothing that belongs to images or further tokens")
    return TensorMap(source, arch, spec, encoding, tuple(parts), net.shapes, beside, notes)


def narrowed(spec: DecoderSpec, arch: Architecture) -> tuple[DecoderSpec, tuple[str, ...]]:
    """The model in the context where it needs no windows, if the architecture has none; and what to say of it."""
    reach = min(
        (mixer.window for mixer in map(attention_fields, spec.layers) if mixer.window is not None), default=None
    )
    if arch.window is not None or reach is None:
        return spec, ()
    layers = tuple(replace(layer, mixer=replace(attention_fields(layer), window=None)) for layer in spec.layers)
    if reach >= spec.context:
        return replace(spec, layers=layers), ()
    note = (
        f"llama.cpp's {arch.name} has no sliding window: the file is for up to {reach:,} tokens, not {spec.context:,}"
    )
    return replace(spec, layers=layers, context=reach), (note,)


def whole(names: Iterable[str], arch: Architecture) -> Iterator[KeyMatch]:
    """What becomes one tensor, each when the last of its parts has come."""
    missing: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        match = match_name(name, arch.table)
        rest = missing.setdefault(match.ours, set(match.ours))
        rest.discard(name)
        if not rest:
            yield match


def part(match: KeyMatch, net: Decoder, arch: Architecture, encoding: QuantType) -> GGUFEntry:
    """What is done to one tensor."""
    first, op = match.ours[0], match.row.op
    owner = first.rpartition(".")[0]
    module = net.get_submodule(owner)
    shape = tuple(op.save([torch.empty(net.shapes[name], device="meta") for name in match.ours])[0].shape)
    if isinstance(module, RMSNorm):
        return GGUFEntry(match.ours, match.hub[0], shape, Kind.F32, op, offset=module.spec.offset)
    if isinstance(module, Router) or 1 in (len(shape), shape[0]):  # what chooses experts, vectors, a single row
        kind = Kind.F32
    else:
        kind = matrix(first, shape, net.spec.tied, encoding)
    turned = arch.paired and owner.endswith((".q_proj", ".k_proj"))
    halves = attention_fields(net.spec.layers[int(match.index[0])]).head_dim if turned else None
    return GGUFEntry(match.ours, match.hub[0], shape, kind, op, halves=halves)


def matrix(name: str, shape: Shape, tied: bool, encoding: QuantType) -> Kind:
    """The type of a matrix."""
    if name == TIED or (name == EMBED and tied):
        wanted = encoding.head
    elif name == EMBED:
        wanted = encoding.embed
    else:
        wanted = encoding.experts if len(shape) == 3 else None
    return fallback_type(encoding.kind if wanted is None else wanted, shape)
