"""Maps the tensors of PEFT adapters to model layers."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunekit.adapters.config import DoRAConfig
from tunekit.checkpoint.adapter_dir import BLOCKS_KEY, PREFIX, AdapterDir
from tunekit.checkpoint.hf_checkpoint import EMBED, HFCheckpoint
from tunekit.checkpoint.lora_delta import WEIGHT, LoRADelta, LoRATarget, transformers_key
from tunekit.checkpoint.peft_config import TENSORS
from tunekit.checkpoint.safetensors_io import ReplacedRows, TensorMeta
from tunekit.errors import UserError
from tunekit.models.decoder import TIED
from tunekit.models.weight_map import KeyMapping, KeyMatch, Shape, load_mappings, match_hub_name

BASE_LAYER = ".base_layer"  # name of a module inside its PEFT wrapper
LORA_TENSOR = re.compile(
    rf"(?P<module>.+?)(?P<inner>(?:{re.escape(BASE_LAYER)})*)"
    r"\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
)
TOKEN_ADAPTER = ".token_adapter"  # name of the module with token rows inside an embedding or head
TOKEN_ROWS = f"{TOKEN_ADAPTER}.trainable_tokens_delta"
TOKEN_PARAMETERS = (EMBED, TIED)  # may have token rows
FACTOR_PAIRS = {frozenset({"lora_A", "lora_B"}), frozenset({"lora_embedding_A", "lora_embedding_B"})}

Get = Callable[[str], Tensor]


@dataclass(frozen=True)
class StoredDelta:
    """LoRA delta of one checkpoint tensor in an adapter file."""

    names: Mapping[str, str]  # names in the file by factor, such as lora_A
    rank: int
    scale: float
    shape: Shape  # of the weight, (..., out, in)
    swapped: bool = False  # PEFT has swapped the input and output dimensions of experts

    def expected_shapes(self) -> dict[str, Shape]:
        """Expected shapes by factor. Factors of experts are flattened: all ranks of the first expert, then the next."""
        *lead, outputs, inputs = self.shape
        inputs, outputs = (outputs, inputs) if self.swapped else (inputs, outputs)
        num_rows = self.rank * (lead[0] if lead else 1)
        shapes = {"lora_A": (num_rows, inputs), "lora_B": (outputs, num_rows), "lora_magnitude_vector": (outputs,)}
        return shapes | {"lora_embedding_A": (self.rank, outputs), "lora_embedding_B": (inputs, self.rank)}

    def load_delta(self, get: Get) -> LoRADelta:
        tensors = {kind: get(name) for kind, name in self.names.items()}
        if "lora_embedding_A" in tensors:
            return LoRADelta(tensors["lora_embedding_B"].T, tensors["lora_embedding_A"].T, self.scale)
        a, b = tensors["lora_A"], tensors["lora_B"]
        if len(self.shape) == 3:
            a, b = stack_factors(a, b, self.shape[0], self.swapped)
        return LoRADelta(a, b, self.scale, tensors.get("lora_magnitude_vector"))


@dataclass(frozen=True)
class TargetTensors:
    """Adapter tensors of the layers of one target."""

    target: LoRATarget
    tensors: tuple[StoredDelta, ...]
    blocks: tuple[tuple[int, float], ...]  # ranks and scales of the layers, if the file has them

    @property
    def has_experts(self) -> bool:
        """Whether the tensors are stacked weights of experts."""
        return any(len(tensor.shape) == 3 for tensor in self.tensors)

    def in_old_layout(self) -> "TargetTensors":
        """The same target, in the layout of PEFT before 0.19."""
        swapped = self.has_experts and self.target.op == self.target.output_op
        return replace(self, tensors=tuple(replace(tensor, swapped=swapped) for tensor in self.tensors))

    def load_deltas(self, get: Get, shapes: Mapping[str, Shape]) -> dict[str, LoRADelta]:
        """Deltas by layer name. `shapes` are those of the model parameters."""
        layer_shapes = [shapes[name + WEIGHT] for name in self.target.layers]
        deltas = self.target.from_checkpoint([tensor.load_delta(get) for tensor in self.tensors], layer_shapes)
        if self.blocks:
            starts = accumulate((rank for rank, _ in self.blocks), initial=0)
            deltas = [d.block(start, *block) for d, start, block in zip(deltas, starts, self.blocks, strict=False)]
        return {name: update for name, update in zip(self.target.layers, deltas, strict=True) if update.rank}


@dataclass(frozen=True)
class StoredRows:
    """Rows of an embedding or head that were trained on their own, in an adapter file."""

    ids: tuple[int, ...]
    name: str  # in the file


@dataclass(frozen=True)
class AdapterContents:
    """Tensors of an adapter by their targets in a model. They are not read yet."""

    directory: AdapterDir
    tensors: Mapping[str, TensorMeta]  # by name in the file
    targets: Sequence[TargetTensors]
    saved_mappings: Sequence[KeyMapping]  # of fully saved parameters
    file_names: Mapping[str, str]  # of fully saved tensors, by checkpoint name
    shapes: Mapping[str, Shape]  # of the model parameters
    token_rows: Mapping[str, StoredRows]  # by parameter name

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens whose rows are stored, ascending."""
        return tuple(sorted({token for rows in self.token_rows.values() for token in rows.ids}))

    @cached_property
    def meta_deltas(self) -> Mapping[str, LoRADelta]:
        """Deltas of all layers on the meta device."""
        return self.load_deltas(self.meta_tensor)

    def meta_tensor(self, name: str) -> Tensor:
        return torch.empty(self.tensors[name].shape, device="meta")

    def load_deltas(self, get: Get) -> dict[str, LoRADelta]:
        return {name: delta for target in self.targets for name, delta in target.load_deltas(get, self.shapes).items()}


def expert_modules(source: HFCheckpoint) -> Mapping[str, list[str]]:
    """Transformers modules with stacked experts, and their tensors in the order in which PEFT wraps them."""
    modules: dict[str, dict[str, None]] = {}
    for name, shape in source.shapes.items():
        if name.endswith(WEIGHT) and len(shape) == 3:
            for tensor in transformers_key(name, source.family).hub:
                modules.setdefault(tensor.rpartition(".")[0], {})[tensor] = None
    return {module: list(tensors) for module, tensors in modules.items()}


def stack_factors(a: Tensor, b: Tensor, experts: int, swapped: bool) -> tuple[Tensor, Tensor]:
    """A (E, rank, in) and B (E, out, rank) of experts, from PEFT's (E rank, in) and (out, rank E), or transposed."""
    a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    return (b.mT, a.mT) if swapped else (a, b)


def unstack_factors(a: Tensor, b: Tensor, swapped: bool) -> tuple[Tensor, Tensor]:
    """Inverse of `stack_factors`."""
    a, b = (b.mT, a.mT) if swapped else (a, b)
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def read_contents(adapter: AdapterDir, source: HFCheckpoint) -> AdapterContents:
    """Match the tensors of a PEFT adapter. Raises UserError if one does not match the model of `source`."""
    file, config, tensors = adapter.file, adapter.peft, adapter.header.tensors
    if unknown_prefix := [name for name in tensors if not name.startswith(PREFIX)]:
        raise UserError(f"{file}: {unknown_prefix[0]} is not a PEFT tensor name")
    matches = {name: contents for name in tensors if (contents := LORA_TENSOR.fullmatch(name.removeprefix(PREFIX)))}
    if not matches:
        raise UserError(f"{file}: no LoRA tensors")
    tensors, rows = read_token_rows(adapter, source)
    names = {saved_name(name): name for name in tensors if name not in matches and is_saved_name(name)}
    mappings, unknown = load_mappings(names, source.family.table)
    if unknown:
        raise unknown_tensor_error(file, unknown[0], source)
    targets = AdapterReader(adapter, tensors, source).group_by_target(matches)
    contents = AdapterContents(adapter, tensors, targets, mappings, names, source.shapes, rows)
    for mapping in mappings:
        check_saved_mapping(file, mapping, contents, source)
    config.check_modules_to_save({name[:i] for name in names for i, char in enumerate(name) if char == "."})
    return contents


def is_saved_name(name: str) -> bool:
    """Whether a tensor other than LoRA weights is a trained one. PEFT also saves a copy of an adapted embedding or
    head, and embeddings with token rows if they were resized."""
    return not name.endswith((BASE_LAYER + WEIGHT, TOKEN_ROWS)) or name.endswith(TOKEN_ADAPTER + BASE_LAYER + WEIGHT)


def saved_name(name: str) -> str:
    """Checkpoint name of a fully saved tensor."""
    return name.removeprefix(PREFIX).replace(TOKEN_ADAPTER, "").replace(BASE_LAYER, "")


def read_token_rows(
    adapter: AdapterDir, source: HFCheckpoint
) -> tuple[Mapping[str, TensorMeta], Mapping[str, StoredRows]]:
    """Rows of tokens by parameter name. Rows of a weight that is also in the file are put into this weight."""
    config, tensors = adapter.peft, adapter.header.tensors
    rows, changed, names = {}, dict(tensors), [name for name in tensors if name.endswith(TOKEN_ROWS)]
    if config.values.get("trainable_token_indices") and not names:
        raise UserError(f"{config.file}: trainable_token_indices is set, but {TENSORS} has no such rows")
    for name in names:
        module = name.removeprefix(PREFIX).removesuffix(TOKEN_ROWS)
        match, ids, meta = match_hub_name(module + WEIGHT, source.family.table), config.token_ids(module), tensors[name]
        if match is None or match.ours[0] not in TOKEN_PARAMETERS:
            raise unknown_tensor_error(meta.file, module, source)
        if meta.shape != (len(ids), source.spec.dim) or max(ids, default=0) >= source.spec.vocab:
            expected = f"expected [{len(ids)}, {source.spec.dim}] for {len(ids)} ids < {source.spec.vocab}"
            raise UserError(f"{meta.file}: {name} has shape {list(meta.shape)}, {expected}; {config.trained_for}")
        if base := changed.get(full := f"{PREFIX}{module}{TOKEN_ADAPTER}{BASE_LAYER}{WEIGHT}"):
            changed[full] = ReplacedRows(base.file, base.shape, base.dtype, base, meta, ids)
        else:
            rows[match.ours[0]] = StoredRows(ids, name)
    if source.spec.tie_word_embeddings and len({item.ids for item in rows.values()}) > 1:
        raise UserError(f"{config.file}: trainable_token_indices: embedding and head are tied, but have different ids")
    return changed, rows


def check_saved_mapping(file: Path, mapping: KeyMapping, contents: AdapterContents, source: HFCheckpoint) -> None:
    """Raise UserError if tensors of fully saved parameters are missing or have wrong shapes."""
    if not mapping.ours or any(name not in contents.shapes for name in mapping.ours):
        raise unknown_tensor_error(file, mapping.hub[0], source)
    expected = mapping.hub_shapes(contents.shapes)
    for name, shape in zip(mapping.hub, expected, strict=len(mapping.hub) == len(expected)):
        if name not in contents.file_names:
            raise UserError(f"{file}: {name} is missing")
        if (actual := contents.tensors[contents.file_names[name]].shape) != shape:
            shapes = f"has shape {list(actual)}, expected {list(shape)}"
            raise UserError(f"{file}: {name} {shapes}; {contents.directory.peft.trained_for}")


def unknown_tensor_error(file: Path, name: str, source: HFCheckpoint) -> UserError:
    return UserError(f"{file}: {name} matches no layer of a {source.config['model_type']} model")


class AdapterReader:
    """Groups the LoRA tensors of a file by target layers and checks their shapes."""

    def __init__(self, directory: AdapterDir, tensors: Mapping[str, TensorMeta], source: HFCheckpoint) -> None:
        self.config, self.file, self.tensors, self.source = directory.peft, directory.file, tensors, source
        self.adapter, self.shapes, self.blocks = directory.peft.adapter, source.shapes, directory.metadata(BLOCKS_KEY)
        self.expert_modules = expert_modules(source)

    def group_by_target(self, names: Mapping[str, re.Match[str]]) -> list[TargetTensors]:
        """Group LoRA tensors by target. `names` maps names in the file to matches of `LORA_TENSOR`."""
        modules: dict[tuple[str, int], dict[str, str]] = {}
        for name, parsed in names.items():
            modules.setdefault((parsed["module"], parsed["inner"].count(BASE_LAYER)), {})[parsed["kind"]] = name
        targets: dict[LoRATarget, dict[str, dict[str, str]]] = {}
        for (module, depth), kinds in modules.items():
            match = self.match_key(self.adapted_tensor(module, depth))
            key = None if match.ours[0] in TOKEN_PARAMETERS else self.config.key_that_excludes(module)
            if key is not None:  # a tied head may have the adapter of the embedding
                problem = f"{TENSORS} has tensors of {module}, which {key} excludes, so that PEFT would ignore them"
                raise UserError(f"{self.config.file}: {problem}. Correct {key}, or remove the tensors.")
            tensor = match.hub[match.position].replace("*", str(match.expert))
            targets.setdefault(LoRATarget.from_match(match), {})[tensor] = self.check_complete(module, kinds)
        parsed = self.choose_layout([self.build_target(site, tensors) for site, tensors in targets.items()])
        for delta in (delta for target in parsed for delta in target.tensors):
            self.check_shapes(delta)
        return parsed

    def choose_layout(self, targets: list[TargetTensors]) -> list[TargetTensors]:
        """The targets, or the same in the layout of PEFT before 0.19, which assumed the shape (E, in, out) for experts.

        The shapes of all experts decide. Those of square weights fit both, so that the version must be known.
        """
        old = [target.in_old_layout() for target in targets]
        if old == targets or not self.has_expected_experts(old):
            return targets
        is_old = not self.has_expected_experts(targets) or self.config.is_before_0_19
        if is_old is None and all(target.blocks for target in targets if target.has_experts):  # saved by tunekit
            is_old = False
        if is_old is None:
            raise UserError(
                f"{self.config.file}: no 'peft_version', and the shapes do not show in which layout the experts are. "
                'Add "peft_version": "0.17.0" if PEFT before 0.19 saved this adapter, else "0.19.0".'
            )
        return old if is_old else targets

    def has_expected_experts(self, targets: Iterable[TargetTensors]) -> bool:
        """Whether the tensors of all experts have the expected shapes."""
        experts = (delta for target in targets if target.has_experts for delta in target.tensors)
        return all(self.wrong_factor(delta) is None for delta in experts)

    def wrong_factor(self, delta: StoredDelta) -> str | None:
        """First factor whose tensor does not have the expected shape."""
        expected = delta.expected_shapes()
        return next((kind for kind, name in delta.names.items() if self.tensors[name].shape != expected[kind]), None)

    def check_shapes(self, delta: StoredDelta) -> None:
        """Raise UserError if a factor does not have the expected shape."""
        if (kind := self.wrong_factor(delta)) is not None:
            name, expected = delta.names[kind], list(delta.expected_shapes()[kind])
            hint = f"{self.config.trained_for}, or its rank is not {delta.rank}"
            shapes = f"has shape {list(self.tensors[name].shape)}, expected {expected}"
            raise UserError(f"{self.file}: {name.removeprefix(PREFIX)} {shapes}; {hint}")

    def check_complete(self, module: str, kinds: dict[str, str]) -> dict[str, str]:
        """Return the factors of one module. Raises UserError if one is missing or unexpected."""
        extra = {"lora_magnitude_vector"} if isinstance(self.adapter, DoRAConfig) else set()
        if not any(kinds.keys() == pair | extra for pair in FACTOR_PAIRS):
            expected = next((pair | extra for pair in FACTOR_PAIRS if pair & kinds.keys()), extra)
            name = sorted(expected ^ kinds.keys())[0]
            raise UserError(f"{self.file}: {module}: {'no' if name in expected else 'unexpected'} {name}")
        return kinds

    def adapted_tensor(self, module: str, depth: int) -> str:
        """Name of the adapted checkpoint tensor. PEFT wraps an expert module once per adapted tensor."""
        if module not in self.expert_modules:
            return module + WEIGHT
        adapted = [name for name in self.expert_modules[module] if self.config.is_target_parameter(name)]
        if depth >= len(adapted):
            raise UserError(f"{self.config.file}: target_parameters lists too few tensors of {module}")
        return adapted[-1 - depth]

    def match_key(self, tensor: str) -> KeyMatch:
        match = match_hub_name(tensor, self.source.family.table)
        if match is None or not match.ours or any(name not in self.shapes for name in match.ours):
            raise unknown_tensor_error(self.file, tensor.removesuffix(WEIGHT), self.source)
        return match

    def build_target(self, target: LoRATarget, factors: Mapping[str, dict[str, str]]) -> TargetTensors:
        """Tensors of a target, in its order."""
        layer_shapes = [self.shapes[name + WEIGHT] for name in target.layers]
        tensors = target.tensor_names(layer_shapes[0][0])
        if missing := [tensor for tensor in tensors if tensor not in factors]:
            raise UserError(f"{self.file}: adapts {next(iter(factors))}, but not {missing[0]} of the same layer")
        shapes = zip(tensors, target.shapes(layer_shapes), strict=True)
        parsed = [self.build_tensor(tensor, factors[tensor], shape) for tensor, shape in shapes]
        return TargetTensors(target, tuple(parsed), self.valid_blocks(self.blocks.get(tensors[0]), target, parsed))

    def valid_blocks(
        self, blocks: Any, target: LoRATarget, tensors: list[StoredDelta]
    ) -> tuple[tuple[int, float], ...]:
        """Ranks and scales of the fused layers; empty if they do not match the tensors, which may have been edited."""
        parsed = tuple((int(rank), float(scale)) for rank, scale in blocks or ())
        same_rank = sum(rank for rank, _ in parsed) == sum(tensor.rank for tensor in tensors)
        return parsed if same_rank and len(parsed) == len(target.layers) else ()

    def build_tensor(self, tensor: str, names: dict[str, str], shape: Shape) -> StoredDelta:
        key = tensor if self.config.is_target_parameter(tensor) else tensor.removesuffix(WEIGHT)
        rank, alpha = self.config.rank_and_alpha(key, self.adapter)
        swapped = len(shape) == 3 and self.source.family.transposed_experts
        return StoredDelta(names, rank, self.adapter.scale(rank, alpha), shape, swapped)
