"""Plans a GGUF file: names, types and conversions of the tensors of a checkpoint."""

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
from tunekit.export.gguf_fields import GGUFSpec, RopeFactors, attention_fields, make_rope_factor_tensors, model_fields
from tunekit.export.quant_types import QuantType, fallback_type, tensor_bytes
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.feed_forward import Router
from tunekit.models.norm import RMSNorm
from tunekit.models.spec import DecoderSpec
from tunekit.models.weight_map import Identity, KeyMatch, Shape, match_name


@dataclass(frozen=True)
class GGUFEntry:
    """Tensor of a GGUF file."""

    parameters: tuple[str, ...]
    name: str
    shape: Shape
    kind: Kind
    op: Identity = Identity()
    offset: float = 0.0  # added to the weight, because llama.cpp has no norm offset
    interleaved_head_dim: int | None = None  # head_dim if RoPE channels must be interleaved

    def transform(self, tensors: list[Tensor]) -> Tensor:
        """Convert model parameters to the tensor in the file."""
        tensor = self.op.save(tensors)[0]
        if self.offset:
            tensor = tensor.float() + self.offset
        if self.interleaved_head_dim is not None:
            tensor = tensor.unflatten(0, (-1, 2, self.interleaved_head_dim // 2)).transpose(1, 2).reshape(self.shape)
        return tensor


@dataclass(frozen=True)
class GGUFPlan:
    """Contents of a GGUF file except for its tokenizer."""

    source: HFCheckpoint
    arch: Architecture
    spec: DecoderSpec
    quant_type: QuantType
    entries: tuple[GGUFEntry, ...]
    shapes: Mapping[str, Shape]  # of model parameters
    rope_factors: RopeFactors  # tensors that are not weights
    notes: tuple[str, ...]  # warnings for the user

    def fields(self) -> dict[str, Any]:
        general = {Keys.General.TYPE: "model", Keys.General.FILE_TYPE: int(self.quant_type.file_type)}
        return general | {Keys.General.QUANTIZATION_VERSION: GGML_QUANT_VERSION} | model_fields(self.spec, self.arch)

    def num_bytes(self) -> int:
        return sum(tensor_bytes(entry.kind, entry.shape) for entry in self.entries)

    def tensors(self) -> Iterator[tuple[GGUFEntry, Tensor]]:
        """Iterate over the converted tensors of the file."""
        entries = {name: entry for entry in self.entries for name in entry.parameters}
        for name, values in self.rope_factors.items():
            yield entries[name], torch.tensor(values)
        pending: dict[str, Tensor] = {}
        for name, tensor in self.load_tensors():
            entry, pending[name] = entries[name], tensor
            if pending.keys() >= set(entry.parameters):
                yield entry, entry.transform([pending.pop(part_name) for part_name in entry.parameters])

    def load_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the model parameters. A tied head in the checkpoint must equal the embedding."""
        with self.source.reader() as tensors:
            for mapping in self.source.key_mappings:
                if TIED in mapping.ours and self.spec.tie_word_embeddings:
                    check_tied_head(self.source, mapping, tensors)
                else:
                    loaded = mapping.load([tensors[name] for name in mapping.hub], self.shapes)
                    yield from zip(mapping.ours, loaded, strict=True)


def build_gguf_plan(source: HFCheckpoint, quant_type: QuantType) -> GGUFPlan:
    """Plan the export of a checkpoint. Raises UserError if llama.cpp would compute a different model."""
    where = str(source.path)
    arch = get_architecture(source.config, where)
    spec, notes = limit_context(source.spec, arch)
    with torch.device("meta"):
        model = Decoder(source.spec)
    check_tensors(source, model.shapes)
    names = [name for mapping in source.key_mappings for name in mapping.ours]
    names = [name for name in names if not (name == TIED and spec.tie_word_embeddings)]
    mixers = map(attention_fields, reversed(spec.layers))
    last_rope = next((mixer for mixer in mixers if mixer.rope is not None), None)
    rope_factors = {} if last_rope is None else make_rope_factor_tensors(last_rope.rope, last_rope.head_dim)
    check_spec_matches(spec, GGUFSpec(model_fields(spec, arch), arch, names, rope_factors).spec(), arch.name, where)
    entries = [GGUFEntry((name,), name, (len(values),), Kind.F32) for name, values in rope_factors.items()]
    entries += [build_entry(match, model, arch, quant_type) for match in complete_matches(names, arch)]
    if any(not mapping.ours for mapping in source.all_key_mappings):
        notes = (*notes, "only the text model is exported, without vision and multi-token prediction modules")
    return GGUFPlan(source, arch, spec, quant_type, tuple(entries), model.shapes, rope_factors, notes)


def limit_context(spec: DecoderSpec, arch: Architecture) -> tuple[DecoderSpec, tuple[str, ...]]:
    """Limit the context to the sliding window if the architecture has no windows. Returns the spec and warnings."""
    windows = [attention_fields(layer).window for layer in spec.layers]
    window = min((window for window in windows if window is not None), default=None)
    if arch.window_period is not None or window is None:
        return spec, ()
    layers = tuple(replace(layer, mixer=replace(attention_fields(layer), window=None)) for layer in spec.layers)
    if window >= spec.context:
        return replace(spec, layers=layers), ()
    limit = f"limited to {window:,} of {spec.context:,} tokens"
    note = f"llama.cpp's {arch.name} has no sliding window: the context is {limit}"
    return replace(spec, layers=layers, context=window), (note,)


def complete_matches(names: Iterable[str], arch: Architecture) -> Iterator[KeyMatch]:
    """Yield the match of each GGUF tensor when all parameters that it is made of have appeared."""
    missing: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        match = match_name(name, arch.table)
        remaining = missing.setdefault(match.ours, set(match.ours))
        remaining.discard(name)
        if not remaining:
            yield match


def build_entry(match: KeyMatch, model: Decoder, arch: Architecture, quant_type: QuantType) -> GGUFEntry:
    """Type and conversion of one tensor."""
    first, op = match.ours[0], match.rule.op
    owner = first.rpartition(".")[0]
    module = model.get_submodule(owner)
    shape = tuple(op.save([torch.empty(model.shapes[name], device="meta") for name in match.ours])[0].shape)
    if isinstance(module, RMSNorm):
        return GGUFEntry(match.ours, match.hub[0], shape, Kind.F32, op, offset=module.spec.offset)
    if isinstance(module, Router) or 1 in (len(shape), shape[0]):  # router, vectors, a single row
        kind = Kind.F32
    else:
        kind = matrix_type(first, shape, model.spec.tie_word_embeddings, quant_type)
    is_interleaved = arch.interleaved_rope and owner.endswith((".q_proj", ".k_proj"))
    head_dim = attention_fields(model.spec.layers[int(match.index[0])]).head_dim if is_interleaved else None
    return GGUFEntry(match.ours, match.hub[0], shape, kind, op, interleaved_head_dim=head_dim)


def matrix_type(name: str, shape: Shape, is_tied: bool, quant_type: QuantType) -> Kind:
    """Type of a matrix."""
    if name == TIED or (name == EMBED and is_tied):
        override = quant_type.head
    elif name == EMBED:
        override = quant_type.embed
    else:
        override = quant_type.experts if len(shape) == 3 else None
    return fallback_type(quant_type.kind if override is None else override, shape)
