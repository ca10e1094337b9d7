"""Adapters as files of PEFT: adapter_config.json and adapter_model.safetensors, both ways."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tunekit.adapters.config import TIED, DoRAConfig, LoRAConfig, lora_factors
from tunekit.checkpoint.atomic import DeferredError, check_free_space, wrap_write_errors
from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, TensorReader
from tunekit.checkpoint.lora_weights import WEIGHT, LoRADelta, LoRATarget, transformers_key
from tunekit.checkpoint.peft_reader import (
    CONFIG,
    HEAD,
    INNER,
    PARTS,
    PREFIX,
    TENSORS,
    AdapterContents,
    PeftConfigFile,
    read_contents,
    unstack_factors,
)
from tunekit.checkpoint.safetensors_io import FORMAT, Entries, SafetensorsWriter, read_header, read_metadata
from tunekit.checkpoint.save_model import GENERATION, copy_companion_files, full_weight
from tunekit.config.choices import kind_name
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import copy_to_shard, full_tensor, shard_slice
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.families import classifiers
from tunekit.models.linear import Embedding, Get, GroupedLinear, Linear
from tunekit.models.spec import ScoreHead
from tunekit.models.weight_map import KeyMatch, expand_experts

T = TypeVar("T")
Group = tuple[str, KeyMatch]
BIAS = ".bias"
ADDED = {"base_layer", "lora_A", "lora_B", "lora_dropout"}  # modules that PEFT adds before it looks for those to save
# In models with experts PEFT 0.21 takes layers of these names for experts, and looks for them in stacked weights.
# When their weights are named as parameters, it finds them.
TAKEN = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


@dataclass(frozen=True)
class PeftTensor:
    """The update of one of the Hub's tensors, ready to be written."""

    tensor: str
    update: LoRADelta
    parameter: bool  # adapted as such, not as the weight of a module
    embedding: bool
    swapped: bool  # PEFT takes the inputs of these experts for their outputs
    blocks: tuple[tuple[int, float], ...]  # ranks and scales of the layers of which it is made

    @property
    def key(self) -> str:
        """What PEFT calls it."""
        return self.tensor if self.parameter else self.tensor.removesuffix(WEIGHT)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        a, b, magnitude = self.update.a, self.update.b, self.update.magnitude
        if self.embedding:
            return {f"{prefix}.lora_embedding_A": b.T, f"{prefix}.lora_embedding_B": a.T}
        a, b = unstack_factors(a, b, self.swapped) if a.ndim == 3 else (a, b)
        found = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        return found if magnitude is None else found | {f"{prefix}.lora_magnitude_vector": magnitude}


def save_adapter(
    folder: Path, model: Decoder, adapter: LoRAConfig, source: HFCheckpoint, run: DistributedContext | None = None
) -> None:
    """Write the adapter of a model into a folder that is there, with the tokenizer beside it.

    All ranks take part: each gathers the tensors of a layer, and those are written by one of them in turn.
    """
    run = run or DistributedContext(device="cpu")
    reshard(model)
    updates = sites(model, adapter, source)
    outlines = [piece for site in updates for piece in pieces(site, model, adapter, source, outline)]
    groups = kept_groups(model, adapter, source)
    saved = {name: t for group in groups for name, t in kept_tensors(group, model, adapter, outline).items()}
    prefixes = wrapped(outlines)
    tensors = {name: t for piece in outlines for name, t in piece.tensors(prefixes[piece.tensor]).items()} | saved
    entries = {PREFIX + name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    blocks = {piece.tensor: piece.blocks for piece in outlines if len(piece.blocks) > 1}
    told = FORMAT | ({PARTS: json.dumps(blocks)} if blocks else {}) | said_of_head(source)
    text = json.dumps(config(outlines, saved, model, adapter, source), indent=2)
    run.shared(partial(prepare, folder, source, entries, told, text))
    later = DeferredError()
    with SafetensorsWriter(folder / TENSORS, entries, told=told, made=True) as out:
        for turn, made in enumerate(made_of(updates, groups, prefixes, model, adapter, source)):
            if turn % run.size == run.rank:
                later(partial(lay, folder, out, made))
    run.together(later.tell)


def prepare(folder: Path, source: HFCheckpoint, entries: Entries, told: Mapping[str, str], text: str) -> None:
    """Everything but the numbers."""
    check_free_space(folder, sum(math.prod(shape) * kind.itemsize for shape, kind in entries.values()))
    with wrap_write_errors(folder), SafetensorsWriter(folder / TENSORS, entries, told=told):
        copy_companion_files(source.path, folder, skip=("config.json", GENERATION), tokenizer=source.words)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def made_of(
    updates: list[LoRATarget],
    groups: list[Group],
    prefixes: Mapping[str, str],
    model: Decoder,
    adapter: LoRAConfig,
    source: HFCheckpoint,
) -> Iterator[dict[str, Tensor]]:
    """The tensors of one site after the other, then those of the model itself, gathered."""
    for site in updates:
        made = pieces(site, model, adapter, source, full_tensor)
        yield {name: t for piece in made for name, t in piece.tensors(prefixes[piece.tensor]).items()}
    for group in groups:
        yield kept_tensors(group, model, adapter, full_tensor)


def lay(folder: Path, out: SafetensorsWriter, made: Mapping[str, Tensor]) -> None:
    with wrap_write_errors(folder):
        for name, tensor in made.items():
            out[PREFIX + name] = tensor.detach()


def outline(tensor: Tensor) -> Tensor:
    """The whole of it without its numbers."""
    return torch.empty(shard_slice(tensor).shape, dtype=tensor.dtype, device="meta")


def sites(model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> list[LoRATarget]:
    """Where there are updates, in the order of the model."""
    layers = adapter.layers(model)
    order = [name for name, _ in model.named_modules() if name in layers]
    return [*dict.fromkeys(LoRATarget.of(transformers_key(name + WEIGHT, source.family)) for name in order)]


def pieces(site: LoRATarget, model: Decoder, adapter: LoRAConfig, source: HFCheckpoint, get: Get) -> list[PeftTensor]:
    """The updates of a site, by the Hub's tensors."""
    layers, experts = adapter.layers(model), any(isinstance(m, GroupedLinear) for m in model.modules())
    updates = [update(model.get_submodule(name), name in layers, adapter, get) for name in site.ours]
    first, found = model.get_submodule(site.ours[0]), []
    blocks = tuple((u.rank, u.scale) for u in updates)
    for tensor, joined in zip(site.names(updates[0].a.shape[0]), site.out(updates), strict=True):
        taken = experts and tail(tensor.removesuffix(WEIGHT)) in TAKEN and joined.magnitude is None
        kinds = joined.a.ndim == 3 or taken, isinstance(first, Embedding), source.family.untold
        found.append(PeftTensor(tensor, joined, *kinds, blocks))
    return found


def update(layer: nn.Module, adapted: bool, adapter: LoRAConfig, get: Get) -> LoRADelta:
    """The update of a layer; one of no rank where a layer that shares its tensor is adapted and it is not."""
    if isinstance(layer, Embedding):
        return LoRADelta(get(layer.lora_embedding_B).T, get(layer.lora_embedding_A).T, layer.lora_scale)
    assert isinstance(layer, Linear | GroupedLinear)
    if not adapted:
        weight = layer.dense(get).float()
        a, b = weight[..., :0, :], weight[..., :0]
        return LoRADelta(a, b, 1.0, weight.norm(dim=-1) if isinstance(adapter, DoRAConfig) else None)
    a, b = map(get, lora_factors(layer))
    if isinstance(layer, Linear) and adapter.init == "pissa":
        # B A - B0 A0 is one update of twice the rank on the weight as it was.
        a, b = torch.cat([a, get(layer.lora_A0)]), torch.cat([b, -get(layer.lora_B0)], dim=1)
    magnitude = (
        get(layer.lora_magnitude_vector) if isinstance(adapter, DoRAConfig) and isinstance(layer, Linear) else None
    )
    return LoRADelta(a, b, layer.lora_scale, magnitude)


def wrapped(made: Iterable[PeftTensor]) -> dict[str, str]:
    """Where the update of each tensor stands. PEFT wraps a module of experts once for each of its tensors, the first
    innermost."""
    modules: dict[str, list[str]] = {}
    for piece in made:
        modules.setdefault(owner_module(piece.tensor), []).insert(0, piece.tensor)
    return {name: module + depth * INNER for module, names in modules.items() for depth, name in enumerate(names)}


def kept(model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> dict[str, KeyMatch]:
    """Tensors of the model itself that are saved, by our names. PEFT wants all tensors of a module of which one is."""
    trained = {*adapter.kept(model, adapter.layers(model))}
    if model.spec.tied and not trained.isdisjoint(name + WEIGHT for name in TIED):
        trained |= {name + WEIGHT for name in TIED}
    found = places(model, source)
    biases = {name for name in trained if name.endswith(BIAS) and name.removesuffix(BIAS) + WEIGHT not in trained}
    modules = {owner_module(hub) for name in trained - biases for hub in found[name].hub}
    whole = {name for name, match in found.items() if any(inside(hub, modules) for hub in match.hub)}
    return {name: match for name, match in found.items() if name in biases | whole}


def kept_groups(model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> list[Group]:
    """Those tensors, each with the others that the Hub has in one with it."""
    groups: dict[str, Group] = {}
    for name, match in kept(model, adapter, source).items():
        groups.setdefault(match.hub[0], (name, match))
    return [*groups.values()]


def kept_tensors(group: Group, model: Decoder, adapter: LoRAConfig, get: Get) -> dict[str, Tensor]:
    """Tensors of a group as the Hub has them."""
    name, match = group
    adapted = owner_module(name) in adapter.layers(model)
    ours = [full_weight(model, one, get) for one in match.ours]
    made = zip(expand_experts(match.hub, len(ours[0])), match.row.op.save(ours), strict=True)
    return {inner(n) if adapted else n: t for n, t in made}


def owner_module(name: str) -> str:
    return name.rpartition(".")[0]


def inside(name: str, modules: set[str]) -> bool:
    """Whether a name belongs to one of these modules, or to a part of one."""
    return any(name[:at] in modules for at, char in enumerate(name) if char == ".")


def inner(name: str) -> str:
    """What PEFT calls a tensor of a module that it has wrapped."""
    return owner_module(name) + INNER + name.removeprefix(owner_module(name))


def config(
    made: list[PeftTensor], saved: Iterable[str], model: Decoder, adapter: LoRAConfig, source: HFCheckpoint
) -> dict[str, Any]:
    """What PEFT must know to open the adapter. `saved` are tensors of the model itself."""
    sizes = {piece.key: (piece.update.rank, alpha(piece.update, adapter)) for piece in made}
    rank, usual = Counter(sizes.values()).most_common(1)[0][0]
    tensors, beside = {tensor for match in places(model, source).values() for tensor in match.hub}, names_beside(source)
    rest = tensors - {piece.tensor for piece in made}
    parameters = [piece.key for piece in made if piece.parameter]
    modules = [piece.key for piece in made if not piece.parameter]
    saved = {owner_module(name) for name in saved if not name.endswith(BIAS)}
    whole = {name for name in saved if not inside(name, saved)}
    return {
        "peft_type": "LORA",
        "task_type": task_type(source.spec.score),
        "base_model_name_or_path": base_model_ref(source)[0],
        "revision": base_model_ref(source)[1],
        "r": rank,
        "lora_alpha": usual,
        "rank_pattern": patterns({key: size[0] for key, size in sizes.items()}, rank),
        "alpha_pattern": patterns({key: size[1] for key, size in sizes.items()}, usual),
        "lora_dropout": 0.0 if parameters else adapter.dropout,  # PEFT has no dropout for parameters
        "target_modules": short(modules, {tail(tensor.removesuffix(WEIGHT)) for tensor in rest} | beside),
        "target_parameters": short(parameters, {tail(tensor, 2) for tensor in rest}, parts=2) or None,
        "modules_to_save": endings(whole, {owner_module(tensor) for tensor in tensors} - whole | beside) or None,
        "use_rslora": adapter.use_rslora,
        "use_dora": isinstance(adapter, DoRAConfig),
        "bias": adapter.bias,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def task_type(score: ScoreHead | None) -> str:
    """What PEFT calls the kind of a model. Of one that scores it trains the head whole, without being told."""
    return "CAUSAL_LM" if score is None else "TOKEN_CLS" if score.each else "SEQ_CLS"


def alpha(update: LoRADelta, adapter: LoRAConfig) -> float:
    """The alpha that gives an update its scale, without what the root of a rank leaves behind."""
    return float(f"{update.scale * (update.rank**0.5 if adapter.use_rslora else update.rank):.12g}")


def places(model: Decoder, source: HFCheckpoint) -> dict[str, KeyMatch]:
    """Where transformers has the tensors of the model, by our names."""
    return {name: transformers_key(name, source.family) for name in model.shapes}


def names_beside(source: HFCheckpoint) -> set[str]:
    """Names of modules that a checkpoint holds beside the model, such as those of a part that sees."""
    beside = [move for move in source.all_moves if not move.ours] if source.has_weights else []
    return {part for move in beside for tensor in move.hub for part in tensor.split(".")}


def short(names: Iterable[str], taken: set[str], parts: int = 1) -> list[str]:
    """The last parts of names where they mean no other; whole names where they would."""
    return sorted({name if tail(name, parts) in taken else tail(name, parts) for name in names})


def endings(names: Iterable[str], others: set[str]) -> list[str]:
    """The same where PEFT asks how a name ends: `norm` would mean every `..._norm`, `layer` every `base_layer`."""
    return sorted({n if any(other.endswith(tail(n)) for other in others | ADDED) else tail(n) for n in names})


def tail(name: str, parts: int = 1) -> str:
    return ".".join(name.split(".")[-parts:])


def patterns(values: Mapping[str, T], usual: T) -> dict[str, T]:
    """Values that differ from the usual one, by the last part of their names where all of such a name agree."""
    found: dict[str, T] = {}
    for key, value in values.items():
        last = tail(key, 2 if key.endswith(WEIGHT) else 1)
        agree = all(v == value for k, v in values.items() if f".{k}".endswith(f".{last}"))
        if value != usual:
            found[last if agree else key] = value
    return found


def base_model_ref(source: HFCheckpoint) -> tuple[str, str | None]:
    """A name and a revision as they were given, a folder by its whole path: the adapter is opened from elsewhere."""
    if Path(source.name) == source.path:
        return str(source.path.resolve()), None
    name, _, revision = source.name.partition("@")
    return name, revision or None


def read_base_name(folder: Path) -> str | None:
    """What an adapter says of its base, if it does."""
    return PeftConfigFile.open(folder).values.get("base_model_name_or_path")


def base_model_name(folder: Path) -> str:
    """The name of the checkpoint that an adapter was trained for."""
    return PeftConfigFile.open(folder).base


def with_adapter_score_head(folder: Path, source: HFCheckpoint) -> HFCheckpoint:
    """The base of an adapter with a head that scores, where the adapter holds one."""
    if not PeftConfigFile.open(folder).scores or source.spec.score is not None:
        return source
    score, said = read_score_head(folder), read_head_metadata(folder)
    score = score if score.pad is not None else replace(score, pad=Tokenizer.open(source.tokenizer).pad)
    names = tuple((said.get("id2label") or {}).values())
    return with_score_head(source, score, names=names, problem=said.get("problem_type"))


def said_of_head(source: HFCheckpoint) -> dict[str, str]:
    """Metadata that tell what its classes are called: adapter_config.json has no place for it."""
    if source.spec.score is None:
        return {}
    return {HEAD: json.dumps({key: source.config.get(key) for key in ("id2label", "problem_type")})}


def read_head_metadata(folder: Path) -> Mapping[str, Any]:
    """What the metadata of an adapter say of its head; nothing, if another program has written it."""
    return json.loads(read_metadata(folder / TENSORS).get(HEAD, "{}"))


def read_score_head(folder: Path) -> ScoreHead:
    """The head that an adapter holds. Where it has a tokenizer, what that pads with is no part of a document."""
    config, held, name = PeftConfigFile.open(folder), read_header(folder / TENSORS), PREFIX + classifiers.HEAD
    if f"{name}.weight" not in held:
        raise UserError(f"{folder / TENSORS}: no {classifiers.HEAD}.weight, but {CONFIG} says {config.task}")
    pad = Tokenizer.open(folder).pad if (folder / "tokenizer.json").is_file() else None
    return ScoreHead(held[f"{name}.weight"].shape[0], config.task == "TOKEN_CLS", f"{name}.bias" in held, pad)


def read_adapter_config(folder: Path, source: HFCheckpoint) -> LoRAConfig:
    """The adapter of a folder, ready to be applied, with just the layers and modules that its file holds."""
    held = read_contents(folder, source)
    plain, updates = held.config.choice, held.outlines()
    sizes = {name: (u.rank, alpha(u, plain)) for name, u in updates.items()}
    rank, usual = Counter(sizes.values()).most_common(1)[0][0]
    names = {name for move in held.kept for name in move.ours}
    whole = {owner_module(name) for name in names if plain.bias == "none" or not name.endswith(BIAS)}
    return replace(
        plain,
        rank=rank,
        alpha=usual,
        target_modules=tuple(map(re.escape, updates)),
        rank_pattern={re.escape(name): size[0] for name, size in sizes.items() if size[0] != rank},
        alpha_pattern={re.escape(name): size[1] for name, size in sizes.items() if size[1] != usual},
        modules_to_save=tuple(map(re.escape, sorted(whole))),
        untie_embeddings=source.spec.tied and not keeps_tied_head(held),
    )


def keeps_tied_head(held: AdapterContents) -> bool:
    """Whether the head of a tied model stays its embedding when an adapter replaces one of them or both."""
    ends = {owner_module(name): move for move in held.kept for name in move.ours if owner_module(name) in TIED}
    if not ends or (held.config.values.get("ensure_weight_tying") and "embed" in ends):
        return True
    with TensorReader(held.tensors) as tensors:
        found = [tensors[held.names[move.hub[0]]] for move in ends.values()]
    return len(found) == len(TIED) and torch.equal(*found)


def load_adapter(folder: Path, model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> None:
    """Fill what a folder of PEFT holds into a model."""
    check_adapter_fits(folder, model, adapter, source)
    held = read_contents(folder, source)
    with TensorReader(held.tensors) as tensors:
        load_lora_weights(model, held, tensors)
        for move in held.kept:
            loaded = move.load([tensors[held.names[name]] for name in move.hub], held.shapes)
            for name, tensor in zip(move.ours, loaded, strict=True):
                copy_to_shard(model.get_parameter(name), tensor)


def load_lora_weights(model: Decoder, held: AdapterContents, tensors: TensorReader) -> None:
    for one in held.held:
        for name, found in one.load(tensors.__getitem__, held.shapes).items():
            fill(model.get_submodule(name), found)


def fill(layer: nn.Module, found: LoRADelta) -> None:
    """Give an adapted layer the numbers of its update."""
    if isinstance(layer, Embedding):
        copy_to_shard(layer.lora_embedding_A, found.b.T)
        copy_to_shard(layer.lora_embedding_B, found.a.T)
        return
    assert isinstance(layer, Linear | GroupedLinear)
    for target, numbers in zip(lora_factors(layer), (found.a, found.b), strict=True):
        copy_to_shard(target, numbers)
    if isinstance(layer, Linear) and found.magnitude is not None:
        copy_to_shard(layer.lora_magnitude_vector, found.magnitude)


def check_adapter_fits(folder: Path, model: Decoder, adapter: LoRAConfig, source: HFCheckpoint) -> set[str]:
    """The parameters of a model that a folder fills, once it is sure that the adapter is the one that was chosen."""
    held = read_contents(folder, source)
    mine, theirs = adapter.layers(model), held.outlines()
    names = {name for move in held.kept for name in move.ours}
    wanted = {*kept(model, adapter, source)}
    optional = {name + WEIGHT for name in TIED} if model.spec.tied else set()
    family, other = source.family, f"{held.config.where}, or with other targets"
    if extra := [*(name + WEIGHT for name in theirs if name not in mine), *sorted(names - wanted)]:
        raise UserError(
            f"{folder / TENSORS}: {transformers_key(extra[0], family).hub[0]} has no place in this model; {other}"
        )
    if missing := [*(name + WEIGHT for name in mine if name not in theirs), *sorted(wanted - names - optional)]:
        raise UserError(f"{folder / TENSORS}: nothing for {transformers_key(missing[0], family).hub[0]}; {other}")
    there = read_adapter_config(folder, source)
    agree(folder, adapter, there if source.spec.tied else replace(there, untie_embeddings=adapter.untie_embeddings))
    sizes = adapter.sizes(mine)
    for name, found in theirs.items():
        for key, one, another in zip(("rank", "alpha"), sizes[name], (found.rank, alpha(found, adapter)), strict=True):
            if not math.isclose(one, another, rel_tol=1e-9):
                raise UserError(f"adapter.{key}: {one}, but the adapter in {folder} has {another} for {name}")
    return names | {name for name, _ in model.named_parameters() if ".lora_" in name}


def agree(folder: Path, adapter: LoRAConfig, there: LoRAConfig) -> None:
    """Kind and scale of a choice are those of the files."""
    mine, theirs = ({"kind": kind_name(type(one)), **vars(one)} for one in (adapter, there))
    for key in ("kind", "use_rslora", "bias", "untie_embeddings"):
        if mine[key] != theirs[key]:
            raise UserError(f"adapter.{key}: {mine[key]}, but the adapter in {folder} has {theirs[key]}")
