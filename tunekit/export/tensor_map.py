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
from tunekit.export.gguf_to_spec import GGUFSpec, RopeFactors, rope_factor_tensors
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
    interleaved_head_dim: int | None = None  # width of the heads whose halves are written in turns

    def transform(self, tensors: list[Tensor]) -> Tensor:
        """What stands in the file for our tensors."""
        tensor = self.op.save(tensors)[0]
        if self.offset:
            tensor = tensor.float() + self.offset
        if self.interleaved_head_dim is not None:
            tensor = tensor.unflatten(0, (-1, 2, self.interleaved_head_dim // 2)).transpose(1, 2).reshape(self.shape)
        return tensor


@dataclass(frozen=True)
class TensorMap:
    """All that a file will hold but its tokenizer."""

    source: HFCheckpoint
    arch: Architecture
    spec: DecoderSpec
    quant_type: QuantType
    entries: tuple[GGUFEntry, ...]
    shapes: Mapping[str, Shape]  # of our tensors
    rope_factors: RopeFactors  # tensors that are no weights
    notes: tuple[str, ...]  # what people should know

    def fields(self) -> dict[str, Any]:
        general = {Keys.General.TYPE: "model", Keys.General.FILE_TYPE: int(self.quant_type.file_type)}
        return general | {Keys.General.QUANTIZATION_VERSION: GGML_QUANT_VERSION} | model_fields(self.spec, self.arch)

    def num_bytes(self) -> int:
        return sum(tensor_bytes(entry.kind, entry.shape) for entry in self.entries)

    def tensors(self) -> Iterator[tuple[GGUFEntry, Tensor]]:
        """The parts in turn, as they will be written, from the checkpoint's files."""
        entries = {name: entry for entry in self.entries for name in entry.ours}
        for name, values in self.rope_factors.items():
            yield entries[name], torch.tensor(values)
        pending: dict[str, Tensor] = {}
        for name, tensor in self.load_tensors():
            entry, pending[name] = entries[name], tensor
            if pending.keys() >= set(entry.ours):
                yield entry, entry.transform([pending.pop(one) for one in entry.ours])

    def load_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Our tensors. A tied head that the checkpoint holds as well must be the embedding."""
        with self.source.reader() as tensors:
            for mapping in self.source.key_mappings:
                if TIED in mapping.ours and self.spec.tie_word_embeddings:
                    check_tied_head(self.source, mapping, tensors)
                else:
                    loaded = mapping.load([tensors[name] for name in mapping.hub], self.shapes)
                    yield from zip(mapping.ours, loaded, strict=True)


def build_tensor_map(source: HFCheckpoint, quant_type: QuantType) -> TensorMap:
    """Refuses what llama.cpp would run as another model."""
    where = str(source.path)
    arch = get_architecture(source.config, where)
    spec, notes = limit_context(source.spec, arch)
    with torch.device("meta"):
        model = Decoder(source.spec)
    check_tensors(source, model.shapes)
    names = [
        name
        for mapping in source.key_mappings
        for name in mapping.ours
        if not (name == TIED and spec.tie_word_embeddings)
    ]
    last_rope = next(
        (attention for attention in map(attention_fields, reversed(spec.layers)) if attention.rope is not None), None
    )
    rope_factors = {} if last_rope is None else rope_factor_tensors(last_rope.rope, last_rope.head_dim)
    check_spec_matches(spec, GGUFSpec(model_fields(spec, arch), arch, names, rope_factors).spec(), arch.name, where)
    entries = [GGUFEntry((name,), name, (len(values),), Kind.F32) for name, values in rope_factors.items()]
    entries += [build_entry(match, model, arch, quant_type) for match in complete_matches(names, arch)]
    if any(not mapping.ours for mapping in source.all_key_mappings):
        notes = (*notes, "only the text model is written, and nothing that belongs to images or further tokens")
    return TensorMap(source, arch, spec, quant_type, tuple(entries), model.shapes, rope_factors, notes)


def limit_context(spec: DecoderSpec, arch: Architecture) -> tuple[DecoderSpec, tuple[str, ...]]:
    """The model in the context where it needs no windows, if the architecture has none; and what to say of it."""
    window = min(
        (mixer.window for mixer in map(attention_fields, spec.layers) if mixer.window is not None), default=None
    )
    if arch.window_period is not None or window is None:
        return spec, ()
    layers = tuple(replace(layer, mixer=replace(attention_fields(layer), window=None)) for layer in spec.layers)
    if window >= spec.context:
        return replace(spec, layers=layers), ()
    note = (
        f"llama.cpp's {arch.name} has no sliding window: the file is for up to {window:,} tokens, not {spec.context:,}"
    )
    return replace(spec, layers=layers, context=window), (note,)


def complete_matches(names: Iterable[str], arch: Architecture) -> Iterator[KeyMatch]:
    """What becomes one tensor, each when the last of its parts has come."""
    missing: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        match = match_name(name, arch.table)
        remaining = missing.setdefault(match.ours, set(match.ours))
        remaining.discard(name)
        if not remaining:
            yield match


def build_entry(match: KeyMatch, model: Decoder, arch: Architecture, quant_type: QuantType) -> GGUFEntry:
    """What is done to one tensor."""
    first, op = match.ours[0], match.rule.op
    owner = first.rpartition(".")[0]
    module = model.get_submodule(owner)
    shape = tuple(op.save([torch.empty(model.shapes[name], device="meta") for name in match.ours])[0].shape)
    if isinstance(module, RMSNorm):
        return GGUFEntry(match.ours, match.hub[0], shape, Kind.F32, op, offset=module.spec.offset)
    if isinstance(module, Router) or 1 in (len(shape), shape[0]):  # what chooses experts, vectors, a single row
        kind = Kind.F32
    else:
        kind = matrix_type(first, shape, model.spec.tie_word_embeddings, quant_type)
    is_interleaved = arch.interleaved_rope and owner.endswith((".q_proj", ".k_proj"))
    head_dim = attention_fields(model.spec.layers[int(match.index[0])]).head_dim if is_interleaved else None
    return GGUFEntry(match.ours, match.hub[0], shape, kind, op, interleaved_head_dim=head_dim)


def matrix_type(name: str, shape: Shape, is_tied: bool, quant_type: QuantType) -> Kind:
    """The type of a matrix."""
    if name == TIED or (name == EMBED and is_tied):
        override = quant_type.head
    elif name == EMBED:
        override = quant_type.embed
    else:
        override = quant_type.experts if len(shape) == 3 else None
    return fallback_type(quant_type.kind if override is None else override, shape)
