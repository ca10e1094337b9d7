"""Saves and loads adapters in PEFT format: adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tunekit.adapters.config import TIED_MODULES, DoRAConfig, LoRAConfig, lora_factors
from tunekit.adapters.module_patterns import is_inside
from tunekit.checkpoint import token_rows
from tunekit.checkpoint.adapter_dir import BLOCKS_KEY, CONFIG_KEY, HEAD_KEY, PREFIX, AdapterDir
from tunekit.checkpoint.atomic import check_free_space, wrap_write_errors
from tunekit.checkpoint.classification_head import with_score_head, without_head
from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.lora_delta import WEIGHT, LoRADelta, LoRATarget, transformers_key
from tunekit.checkpoint.peft_config import CONFIG, EMBEDDING_TASK, TENSORS
from tunekit.checkpoint.peft_reader import (
    BASE_LAYER,
    AdapterContents,
    read_contents,
    unstack_factors,
)
from tunekit.checkpoint.safetensors_io import FORMAT, Entries, SafetensorsWriter, TensorReader
from tunekit.checkpoint.save_model import (
    GENERATION_CONFIG,
    copy_companion_files,
    full_weight,
    write_chat_format,
    write_companions,
)
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import full_tensor, shard_slice
from tunekit.errors import DeferredError, UserError
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Embedding, Gather, GroupedLinear, Linear
from tunekit.models.spec import ScoreHead
from tunekit.models.weight_map import KeyMatch, expand_experts

T = TypeVar("T")
SavedGroup = tuple[str, KeyMatch]
BIAS = ".bias"
VOCAB_SIZE = "vocab_size"  # changed key of config.json: the base was resized for new tokens
# Modules that PEFT adds before it matches modules_to_save.
PEFT_MODULES = {"base_layer", "lora_A", "lora_B", "lora_dropout"}
# In MoE models, PEFT 0.21 treats all modules with these names as experts and searches for them in stacked weights.
# They are found if they are listed in target_parameters instead of target_modules.
EXPERT_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


@dataclass(frozen=True)
class SavedDelta:
    """LoRA delta of one checkpoint tensor, to be saved."""

    name: str
    delta: LoRADelta
    is_parameter: bool  # listed in target_parameters, not in target_modules
    is_embedding: bool
    swapped: bool  # PEFT swaps the input and output dimensions of these experts
    blocks: tuple[tuple[int, float], ...]  # ranks and scales of the layers that are fused in this tensor

    @property
    def key(self) -> str:
        """Name in the PEFT config."""
        return self.name if self.is_parameter else self.name.removesuffix(WEIGHT)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        a, b, magnitude = self.delta.a, self.delta.b, self.delta.magnitude
        if self.is_embedding:
            return {f"{prefix}.lora_embedding_A": b.T, f"{prefix}.lora_embedding_B": a.T}
        a, b = unstack_factors(a, b, self.swapped) if a.ndim == 3 else (a, b)
        tensors = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        return tensors if magnitude is None else tensors | {f"{prefix}.lora_magnitude_vector": magnitude}


class AdaptedModel(NamedTuple):
    """A model, the names of its layers with an adapter, and whether it has experts."""

    model: Decoder
    adapter: LoRAConfig
    source: HFCheckpoint
    layers: Collection[str]
    experts: bool

    @staticmethod
    def open(model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> "AdaptedModel":
        experts = any(isinstance(module, GroupedLinear) for module in model.modules())
        return AdaptedModel(model, adapter, source, adapter.target_layers(model), experts)


class AdapterPlan(NamedTuple):
    """The files of an adapter, without its tensors."""

    entries: Entries
    metadata: Mapping[str, str]  # of the file with the tensors
    config_text: str
    prefixes: Mapping[str, str]  # module prefixes of the LoRA tensors

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.entries.values())


def save_adapter(
    folder: Path, model: Decoder, adapter: LoRAConfig, source: HFCheckpoint, dist: DistributedContext | None = None
) -> None:
    """Save the adapter of a model and its tokenizer into an existing directory.

    Must be called on all ranks. Every rank gathers all adapter tensors; ranks take turns writing those of a layer.
    """
    dist = dist or DistributedContext(device="cpu")
    reshard(model)
    adapted = AdaptedModel.open(model, adapter, source)
    plan = plan_adapter(adapted)
    dist.run_on_main(partial(create_adapter_files, folder, source, plan))
    deferred = DeferredError()
    with SafetensorsWriter(folder / TENSORS, plan.entries, metadata=plan.metadata, exists=True) as out:
        for i, tensors_to_write in enumerate(iter_file_tensors(adapted, plan.prefixes)):
            if i % dist.world_size == dist.rank:
                deferred(partial(write_tensors, folder, out, tensors_to_write))
    dist.run_on_all(deferred.raise_error)


def plan_adapter(adapted: AdaptedModel) -> AdapterPlan:
    """Names, shapes and dtypes of the tensors, and the config. The model may be on the meta device."""
    model, adapter, source, _, _ = adapted
    planned = [tensor for target in lora_targets(adapted) for tensor in peft_tensors(target, adapted, to_meta)]
    groups = saved_groups(adapted)
    saved_meta = {name: t for group in groups for name, t in saved_tensors(group, adapted, to_meta).items()}
    prefixes = module_prefixes(planned)
    tensors = {name: t for tensor in planned for name, t in tensor.tensors(prefixes[tensor.name]).items()} | saved_meta
    tensors |= token_rows.stored_rows(model, source, to_meta)
    entries = {PREFIX + name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    # Of fused layers, and of experts: the reader knows their layout.
    blocks = {tensor.name: tensor.blocks for tensor in planned if len(tensor.blocks) > 1 or tensor.delta.a.ndim == 3}
    metadata = FORMAT | ({BLOCKS_KEY: json.dumps(blocks)} if blocks else {}) | head_metadata(source)
    metadata |= {CONFIG_KEY: json.dumps(source.saved_changes)} if source.saved_changes else {}
    config_text = json.dumps(peft_config(planned, saved_meta, model, adapter, source), indent=2)
    return AdapterPlan(entries, metadata, config_text, prefixes)


def create_adapter_files(folder: Path, source: HFCheckpoint, plan: AdapterPlan) -> None:
    """Create all files of the adapter except the tensor data. Raises UserError if the disk is too small."""
    check_free_space(folder, plan.num_bytes)
    with wrap_write_errors(folder), SafetensorsWriter(folder / TENSORS, plan.entries, metadata=plan.metadata):
        skipped = ("config.json", GENERATION_CONFIG)
        copy_companion_files(source, folder, skip=skipped)
        write_chat_format(folder, source)
        write_companions(folder, source)
        (folder / CONFIG).write_text(plan.config_text + "\n", encoding="utf-8")


def iter_file_tensors(adapted: AdaptedModel, prefixes: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
    """Gather the tensors of one target after the other, then the fully trained parameters and rows."""
    for target in lora_targets(adapted):
        tensors = peft_tensors(target, adapted, full_tensor)
        yield {name: t for tensor in tensors for name, t in tensor.tensors(prefixes[tensor.name]).items()}
    for group in saved_groups(adapted):
        yield saved_tensors(group, adapted, full_tensor)
    yield token_rows.stored_rows(adapted.model, adapted.source, full_tensor)


def write_tensors(folder: Path, out: SafetensorsWriter, tensors: Mapping[str, Tensor]) -> None:
    with wrap_write_errors(folder):
        for name, tensor in tensors.items():
            out[PREFIX + name] = tensor.detach()


def to_meta(tensor: Tensor) -> Tensor:
    """Full tensor on the meta device."""
    return torch.empty(shard_slice(tensor).shape, dtype=tensor.dtype, device="meta")


def lora_targets(adapted: AdaptedModel) -> list[LoRATarget]:
    """Targets of all adapted layers, in model order."""
    order, family = [n for n, _ in adapted.model.named_modules() if n in adapted.layers], adapted.source.family
    return [*dict.fromkeys(LoRATarget.from_match(transformers_key(name + WEIGHT, family)) for name in order)]


def peft_tensors(target: LoRATarget, adapted: AdaptedModel, get: Gather) -> list[SavedDelta]:
    """LoRA deltas of a target, one per checkpoint tensor."""
    model, adapter, source, layers, experts = adapted
    deltas = [layer_delta(model.get_submodule(name), name in layers, adapter, get) for name in target.layers]
    layer, tensors = model.get_submodule(target.layers[0]), []
    blocks = tuple((u.rank, u.scale) for u in deltas)
    for tensor, delta in zip(target.tensor_names(deltas[0].a.shape[0]), target.to_checkpoint(deltas), strict=True):
        is_expert = experts and last_components(tensor.removesuffix(WEIGHT)) in EXPERT_NAMES and delta.magnitude is None
        flags = delta.a.ndim == 3 or is_expert, isinstance(layer, Embedding), source.family.transposed_experts
        tensors.append(SavedDelta(tensor, delta, *flags, blocks))
    return tensors


def layer_delta(layer: nn.Module, adapted: bool, adapter: LoRAConfig, get: Gather) -> LoRADelta:
    """LoRA delta of a layer; of rank 0 if only other layers that share its checkpoint tensor are adapted."""
    if isinstance(layer, Embedding):
        return LoRADelta(get(layer.lora_embedding_B).T, get(layer.lora_embedding_A).T, layer.lora_scale)
    assert isinstance(layer, Linear | GroupedLinear)
    if not adapted:
        weight = layer.dequantize(get).float()
        a, b = weight[..., :0, :], weight[..., :0]
        return LoRADelta(a, b, 1.0, weight.norm(dim=-1) if isinstance(adapter, DoRAConfig) else None)
    a, b = map(get, lora_factors(layer))
    if isinstance(layer, Linear) and adapter.init == "pissa":
        # Relative to the original weight, the delta is B A - B0 A0, of twice the rank.
        a, b = torch.cat([a, get(layer.lora_A0)]), torch.cat([b, -get(layer.lora_B0)], dim=1)
    magnitude = None
    if isinstance(adapter, DoRAConfig) and isinstance(layer, Linear):
        magnitude = get(layer.lora_magnitude_vector)
    return LoRADelta(a, b, layer.lora_scale, magnitude)


def module_prefixes(tensors: Iterable[SavedDelta]) -> dict[str, str]:
    """Module prefix of each tensor. PEFT wraps an expert module once per adapted tensor, the first one innermost."""
    modules: dict[str, list[str]] = {}
    for tensor in tensors:
        modules.setdefault(owner_module(tensor.name), []).insert(0, tensor.name)
    return {name: module + depth * BASE_LAYER for module, names in modules.items() for depth, name in enumerate(names)}


def saved_parameters(model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> dict[str, KeyMatch]:
    """Parameters that are saved in full, by name. If one parameter of a module is saved, PEFT requires all of them."""
    trained = {*adapter.modules_to_save_params(model, adapter.target_layers(model))}
    if model.spec.tie_word_embeddings and not trained.isdisjoint(name + WEIGHT for name in TIED_MODULES):
        trained |= {name + WEIGHT for name in TIED_MODULES}
    keys = transformers_keys(model, source)
    biases = {name for name in trained if name.endswith(BIAS) and name.removesuffix(BIAS) + WEIGHT not in trained}
    modules = {owner_module(hub) for name in trained - biases for hub in keys[name].hub}
    required = {name for name, match in keys.items() if any(is_inside(hub, modules) for hub in match.hub)}
    return {name: match for name, match in keys.items() if name in biases | required}


def saved_groups(adapted: AdaptedModel) -> list[SavedGroup]:
    """Fully saved parameters, one entry per group that is fused in checkpoint tensors.

    Raises UserError for a weight that is fused with one that has an adapter: PEFT cannot save both.
    """
    groups: dict[str, SavedGroup] = {}
    for name, match in saved_parameters(adapted.model, adapted.adapter, adapted.source).items():
        others = [owner for parameter in match.ours if (owner := owner_module(parameter)) in adapted.layers]
        if match.tail == WEIGHT and others:
            problem = f"{owner_module(name)} and {others[0]}, which has an adapter, are one tensor in files"
            remedy = "Remove one from modules_to_save or target_modules, or list both in modules_to_save."
            raise UserError(f"adapter.modules_to_save: {problem} ({match.hub[0]}). {remedy}")
        groups.setdefault(match.hub[0], (name, match))
    return [*groups.values()]


def saved_tensors(group: SavedGroup, adapted: AdaptedModel, get: Gather) -> dict[str, Tensor]:
    """Checkpoint tensors of a group by name."""
    name, match = group
    is_adapted = owner_module(name) in adapted.layers
    weights = [full_weight(adapted.model, parameter, get) for parameter in match.ours]
    tensors = zip(expand_experts(match.hub, len(weights[0])), match.rule.op.save(weights), strict=True)
    return {base_layer_name(key) if is_adapted else key: t for key, t in tensors}


def owner_module(name: str) -> str:
    return name.rpartition(".")[0]


def base_layer_name(name: str) -> str:
    """Name of a tensor in a module that PEFT has wrapped."""
    return owner_module(name) + BASE_LAYER + name.removeprefix(owner_module(name))


def peft_config(
    updates: list[SavedDelta], saved: Iterable[str], model: Decoder, adapter: LoRAConfig, source: HFCheckpoint
) -> dict[str, Any]:
    """Contents of adapter_config.json. `saved` are the names of fully saved tensors."""
    sizes = {item.key: (item.delta.rank, effective_alpha(item.delta, adapter)) for item in updates}
    rank, alpha = Counter(sizes.values()).most_common(1)[0][0]
    tensors = {tensor for match in transformers_keys(model, source).values() for tensor in match.hub}
    unrelated = unrelated_module_names(source)
    other_tensors = tensors - {item.name for item in updates}
    parameters = [item.key for item in updates if item.is_parameter]
    modules = [item.key for item in updates if not item.is_parameter]
    saved = {owner_module(name) for name in saved if not name.endswith(BIAS)}
    modules_to_save = {name for name in saved if not is_inside(name, saved)}
    used_modules = {last_components(tensor.removesuffix(WEIGHT)) for tensor in other_tensors} | unrelated
    used_parameters = {last_components(tensor, 2) for tensor in other_tensors}
    other_modules = {owner_module(tensor) for tensor in tensors} - modules_to_save | unrelated
    return {
        "peft_type": "LORA",
        "task_type": EMBEDDING_TASK if source.is_base_model else task_type(source.spec.score),
        "base_model_name_or_path": base_model_ref(source)[0],
        "revision": base_model_ref(source)[1],
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": build_patterns({key: size[0] for key, size in sizes.items()}, rank),
        "alpha_pattern": build_patterns({key: size[1] for key, size in sizes.items()}, alpha),
        "lora_dropout": 0.0 if parameters else adapter.dropout,  # PEFT has no dropout for parameters
        "target_modules": shorten_names(modules, used_modules),
        "target_parameters": shorten_names(parameters, used_parameters, num=2) or None,
        "modules_to_save": shorten_suffixes(modules_to_save, other_modules) or None,
        "use_rslora": adapter.use_rslora,
        "use_dora": isinstance(adapter, DoRAConfig),
        "bias": adapter.bias,
        **token_rows.token_indices(model, source),
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def task_type(score: ScoreHead | None) -> str:
    """PEFT task type. For SEQ_CLS and TOKEN_CLS, PEFT saves the score head without modules_to_save."""
    return "CAUSAL_LM" if score is None else "TOKEN_CLS" if score.per_token else "SEQ_CLS"


def effective_alpha(delta: LoRADelta, adapter: LoRAConfig) -> float:
    """Alpha that gives a delta its scale, rounded to 12 digits to remove the rounding error of sqrt(rank)."""
    return float(f"{delta.scale * (delta.rank**0.5 if adapter.use_rslora else delta.rank):.12g}")


def transformers_keys(model: Decoder, source: HFCheckpoint) -> dict[str, KeyMatch]:
    """Transformers keys of all parameters by name."""
    return {name: transformers_key(name, source.family) for name in model.shapes}


def unrelated_module_names(source: HFCheckpoint) -> set[str]:
    """Components of the names of tensors that the model does not load, such as a vision tower."""
    mappings = [mapping for mapping in source.all_key_mappings if not mapping.ours] if source.has_weights else []
    return {component for mapping in mappings for tensor in mapping.hub for component in tensor.split(".")}


def shorten_names(names: Iterable[str], used: set[str], num: int = 1) -> list[str]:
    """Last `num` components of each name, or the full name where these are in `used`."""
    return sorted({name if last_components(name, num) in used else last_components(name, num) for name in names})


def shorten_suffixes(names: Iterable[str], other_names: set[str]) -> list[str]:
    """Last component of each name, or the full name where another name ends with it.

    PEFT compares suffixes as strings: `norm` also matches `q_norm`, and `layer` matches `base_layer`.
    """
    suffixes = {name: last_components(name) for name in names}
    all_names = other_names | PEFT_MODULES
    return sorted({n if any(other.endswith(end) for other in all_names) else end for n, end in suffixes.items()})


def last_components(name: str, num: int = 1) -> str:
    return ".".join(name.split(".")[-num:])


def build_patterns(values: Mapping[str, T], default: T) -> dict[str, T]:
    """Values other than the default by name, or by name suffix if all names with this suffix have the same value."""
    patterns: dict[str, T] = {}
    for key, value in values.items():
        suffix = last_components(key, 2 if key.endswith(WEIGHT) else 1)
        is_uniform = all(v == value for k, v in values.items() if f".{k}".endswith(f".{suffix}"))
        if value != default:
            patterns[suffix if is_uniform else key] = value
    return patterns


def base_model_ref(source: HFCheckpoint) -> tuple[str, str | None]:
    """Name and revision of the base as given by the user. A local path is made absolute."""
    if Path(source.name) == source.path:
        return str(source.path.resolve()), None
    name, _, revision = source.name.partition("@")
    return name, revision or None


def with_adapter_config(adapter: AdapterDir, source: HFCheckpoint) -> HFCheckpoint:
    """Return the base with the config overrides, new tokens and score head of the adapter, or without a head."""
    changes = {key: value for key, value in adapter.config_changes.items() if key != VOCAB_SIZE}
    source = token_rows.with_adapter_tokens(adapter, source.with_config_overrides(changes))
    if adapter.peft.task_type == EMBEDDING_TASK:
        return without_head(source)
    score, metadata = adapter.score_head, adapter.metadata(HEAD_KEY)
    if score is None or source.spec.score is not None:
        return source
    if score.pad_token_id is None:
        score = replace(score, pad_token_id=source.tokenizer.pad)
    names = tuple((metadata.get("id2label") or {}).values())
    return with_score_head(source, score, names=names, problem=metadata.get("problem_type"))


def head_metadata(source: HFCheckpoint) -> dict[str, str]:
    """File metadata with the class names of a score head, which adapter_config.json cannot contain."""
    if source.spec.score is None:
        return {}
    return {HEAD_KEY: json.dumps({key: source.config.get(key) for key in ("id2label", "problem_type")})}


def read_adapter_config(
    adapter: AdapterDir, source: HFCheckpoint, contents: AdapterContents | None = None
) -> LoRAConfig:
    """Config that loads an adapter, with exactly the layers and modules that are in its file."""
    contents = contents or read_contents(adapter, source)
    return adapter_config(contents, source.spec.tie_word_embeddings and not keeps_tied_head(contents))


def adapter_config(contents: AdapterContents, untied: bool) -> LoRAConfig:
    """Adapter config of an adapter file. `untied`: the head of a tied model gets weights of its own."""
    adapter, deltas = contents.directory.peft.adapter, contents.meta_deltas
    sizes = {name: (delta.rank, effective_alpha(delta, adapter)) for name, delta in deltas.items()}
    rank, alpha = Counter(sizes.values()).most_common(1)[0][0]
    names = {name for mapping in contents.saved_mappings for name in mapping.ours}
    full_modules = {owner_module(name) for name in names if adapter.bias == "none" or not name.endswith(BIAS)}
    return replace(
        adapter,
        rank=rank,
        alpha=alpha,
        target_modules=tuple(map(re.escape, deltas)),
        rank_pattern={re.escape(name): size[0] for name, size in sizes.items() if size[0] != rank},
        alpha_pattern={re.escape(name): size[1] for name, size in sizes.items() if size[1] != alpha},
        modules_to_save=tuple(map(re.escape, sorted(full_modules))),
        untie_embeddings=untied,
        trainable_token_indices=contents.token_ids,
        adapter_path=str(contents.directory.path),
    )


def keeps_tied_head(contents: AdapterContents) -> bool:
    """Whether the embedding and head of a tied model stay equal when an adapter replaces them."""
    mappings = {owner_module(name): mapping for mapping in contents.saved_mappings for name in mapping.ours}
    tied_mappings = {name: mapping for name, mapping in mappings.items() if name in TIED_MODULES}
    if not tied_mappings or (contents.directory.peft.values.get("ensure_weight_tying") and "embed" in tied_mappings):
        return True
    if len(tied_mappings) < len(TIED_MODULES):
        return False
    with TensorReader(contents.tensors) as tensors:
        return torch.equal(*(tensors[contents.file_names[mapping.hub[0]]] for mapping in tied_mappings.values()))
