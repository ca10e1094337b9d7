"""What the files of a PEFT adapter hold, by our layers."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, TensorMeta, read_header, read_json
from tunekit.checkpoint.lora_weights import WEIGHT, LoRADelta, LoRATarget, transformers_key
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.spec import DecoderSpec
from tunekit.models.weight_map import KeyMapping, KeyMatch, Shape, load_mappings, match_hub_name

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
INNER = ".base_layer"  # PEFT puts it between a module and what it wraps
PARTS = "parts"  # metadata of our own files: ranks and scales of the layers whose updates are blocks of one
HEAD = "head"  # and names of the classes of a head that scores
NAME = re.compile(
    rf"(?P<module>.+?)(?P<inner>(?:{re.escape(INNER)})*)"
    r"\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
)
HEADS = ("classifier", "score")  # PEFT names both of any model that scores, whatever its head is called
KINDS = {frozenset({"lora_A", "lora_B"}), frozenset({"lora_embedding_A", "lora_embedding_B"})}
# What PEFT can say of a LoRA and we do not do; each must have one of these values.
PLAIN = {"lora_bias": (None, False), "layer_replication": (None,), "trainable_token_indices": (None, [], {})}
PLAIN |= {"use_qalora": (None, False), "alora_invocation_tokens": (None, []), "bias": ("none", "all", "lora_only")}
PLAIN |= dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config"), (None,))
# Other ways to begin change the weights of the model itself.
PLAIN |= {"init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal")}

Get = Callable[[str], Tensor]


@dataclass(frozen=True)
class PeftConfigFile:
    """adapter_config.json."""

    file: Path
    values: Mapping[str, Any]

    @staticmethod
    def open(folder: Path) -> "PeftConfigFile":
        c = read_json(folder / CONFIG)
        if c.get("peft_type") != "LORA":
            raise UserError(f"{folder / CONFIG}: peft_type {c.get('peft_type')!r} is not supported; LORA is")
        for key, plain in PLAIN.items():
            if c.get(key, plain[0]) not in plain:
                raise UserError(f"{folder / CONFIG}: {key} = {c[key]!r} is not supported")
        return PeftConfigFile(folder / CONFIG, c)

    @property
    def older(self) -> bool:
        """Whether a PEFT before 0.19 says that it wrote this: it took (E, in, out) for the shape of all experts."""
        found = re.match(r"0\.(\d+)", str(self.values.get("peft_version")))
        return found is not None and int(found[1]) < 19

    @property
    def base(self) -> str:
        """The name of the checkpoint that the adapter was trained for."""
        name = self.values.get("base_model_name_or_path")
        if not isinstance(name, str):
            raise UserError(f"{self.file}: no 'base_model_name_or_path', so the model it belongs to is not known")
        revision = self.values.get("revision")
        return f"{name}@{revision}" if isinstance(revision, str) and not Path(name).is_dir() else name

    @property
    def scores(self) -> bool:
        """Whether it belongs to a model whose head scores."""
        return self.task in ("SEQ_CLS", "TOKEN_CLS")

    @property
    def task(self) -> str | None:
        """What PEFT calls the kind of its model."""
        return self.values.get("task_type")

    @property
    def where(self) -> str:
        """The same for an error that there is in any case."""
        return f"this adapter was trained for {self.values.get('base_model_name_or_path') or 'another model'}"

    @property
    def choice(self) -> LoRAConfig:
        """Kind, rank and scale, wherever the patterns say nothing else."""
        c = self.values
        kind = DoRAConfig if c.get("use_dora") else LoRAConfig
        try:
            dropout, bias = float(c.get("lora_dropout") or 0), c.get("bias") or "none"
            return kind(int(c["r"]), float(c["lora_alpha"]), dropout, use_rslora=bool(c.get("use_rslora")), bias=bias)
        except KeyError as error:
            raise UserError(f"{self.file}: {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.file}: {error}") from error

    def size(self, key: str, plain: LoRAConfig) -> tuple[int, float]:
        """Rank and alpha of what PEFT calls `key`; the first pattern that fits its end counts."""
        return self.lookup("rank_pattern", key, plain.rank), self.lookup("alpha_pattern", key, plain.alpha)

    def lookup(self, table: str, key: str, default: Any) -> Any:
        for pattern, number in (self.values.get(table) or {}).items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", key):
                    return positive(type(default)(number))
            except (re.error, TypeError, ValueError) as error:
                raise UserError(f"{self.file}: {table}: {pattern}: {error}") from error
        return default

    def check_saved(self, modules: Iterable[str]) -> None:
        """Of all modules that are to be saved there are tensors."""
        usual = HEADS if self.scores else ()
        for wanted in self.values.get("modules_to_save") or []:
            if wanted not in usual and not any(module.endswith(wanted) for module in modules):
                raise UserError(f"{self.file}: modules_to_save names {wanted}, but {TENSORS} holds no tensor of it")

    def targets(self, tensor: str) -> bool:
        """Whether a tensor of the Hub is adapted as a parameter, not as the weight of a module."""
        return any(f".{tensor}".endswith(f".{target}") for target in self.values.get("target_parameters") or [])


def positive(number: Any) -> Any:
    if number <= 0:
        raise ValueError(f"must be above 0, not {number}")
    return number


@dataclass(frozen=True)
class PeftTensor:
    """The update of one of the Hub's tensors in a file."""

    names: Mapping[str, str]  # lora_A and so on, under their names in the file
    rank: int
    scale: float
    shape: Shape  # of the weight, (..., out, in)
    swapped: bool = False  # PEFT took the inputs of experts for their outputs

    def wanted(self) -> dict[str, Shape]:
        """The shapes that its tensors must have. Those of experts are flat: all ranks of the first, then the next."""
        *lead, outputs, inputs = self.shape
        inputs, outputs = (outputs, inputs) if self.swapped else (inputs, outputs)
        many = self.rank * (lead[0] if lead else 1)
        found = {"lora_A": (many, inputs), "lora_B": (outputs, many), "lora_magnitude_vector": (outputs,)}
        return found | {"lora_embedding_A": (self.rank, outputs), "lora_embedding_B": (inputs, self.rank)}

    def load(self, get: Get) -> LoRADelta:
        found = {kind: get(name) for kind, name in self.names.items()}
        if "lora_embedding_A" in found:
            return LoRADelta(found["lora_embedding_B"].T, found["lora_embedding_A"].T, self.scale)
        a, b = found["lora_A"], found["lora_B"]
        if len(self.shape) == 3:
            a, b = stacked(a, b, self.shape[0], self.swapped)
        return LoRADelta(a, b, self.scale, found.get("lora_magnitude_vector"))


@dataclass(frozen=True)
class TargetTensors:
    """What a file holds for the layers of one site."""

    site: LoRATarget
    parts: tuple[PeftTensor, ...]
    blocks: tuple[tuple[int, float], ...]  # ranks and scales of its layers, if the file says that it is made of them

    def load(self, get: Get, shapes: Mapping[str, Shape]) -> dict[str, LoRADelta]:
        """Updates by our layers; `shapes` are those of the model."""
        ours = [shapes[name + WEIGHT] for name in self.site.ours]
        found = self.site.back([part.load(get) for part in self.parts], ours)
        if self.blocks:
            starts = [sum(rank for rank, _ in self.blocks[:i]) for i in range(len(self.blocks))]
            found = [u.part(at, *block) for u, at, block in zip(found, starts, self.blocks, strict=True)]
        return {name: update for name, update in zip(self.site.ours, found, strict=True) if update.rank}


@dataclass(frozen=True)
class AdapterContents:
    """An adapter as it lies on disk."""

    config: PeftConfigFile
    tensors: Mapping[str, TensorMeta]  # by their names in the file
    held: Sequence[TargetTensors]
    kept: Sequence[KeyMapping]  # tensors of the model itself, from the Hub's names to ours
    names: Mapping[str, str]  # the Hub's names of those tensors to the names in the file
    shapes: Mapping[str, Shape]  # of the model

    def outlines(self) -> dict[str, LoRADelta]:
        """The updates of all layers without their numbers."""
        return self.load(self.outline)

    def outline(self, name: str) -> Tensor:
        return torch.empty(self.tensors[name].shape, device="meta")

    def load(self, get: Get) -> dict[str, LoRADelta]:
        return {name: update for held in self.held for name, update in held.load(get, self.shapes).items()}


@cache
def shapes(spec: DecoderSpec) -> Mapping[str, Shape]:
    """Shapes of all weights of a model."""
    with torch.device("meta"):
        return Decoder(spec).shapes


def containers(source: HFCheckpoint) -> Mapping[str, list[str]]:
    """Modules of the Hub that hold stacked experts, and their tensors in the order in which PEFT wraps them."""
    found: dict[str, dict[str, None]] = {}
    for name, shape in shapes(source.spec).items():
        if name.endswith(WEIGHT) and len(shape) == 3:
            for tensor in transformers_key(name, source.family).hub:
                found.setdefault(tensor.rpartition(".")[0], {})[tensor] = None
    return {module: list(tensors) for module, tensors in found.items()}


def stacked(a: Tensor, b: Tensor, experts: int, swapped: bool) -> tuple[Tensor, Tensor]:
    """A (E, rank, in) and B (E, out, rank) of experts, from (E rank, in) and (out, rank E), or of the transposed."""
    a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    return (b.mT, a.mT) if swapped else (a, b)


def unstack_factors(a: Tensor, b: Tensor, swapped: bool) -> tuple[Tensor, Tensor]:
    """The way back from `stacked`."""
    a, b = (b.mT, a.mT) if swapped else (a, b)
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def read_contents(folder: Path, source: HFCheckpoint) -> AdapterContents:
    """What is in a folder of PEFT, once it is sure that all of it belongs to a model like `source`."""
    file = folder / TENSORS
    if not file.is_file():
        raise UserError(f"{folder}: no {TENSORS}, so this is no adapter")
    config, tensors = PeftConfigFile.open(folder), read_header(file)
    if odd := [name for name in tensors if not name.startswith(PREFIX)]:
        raise UserError(f"{file}: {odd[0]} is no tensor of a PEFT adapter")
    updates = {name: found for name in tensors if (found := NAME.fullmatch(name.removeprefix(PREFIX)))}
    if not updates:
        raise UserError(f"{file}: holds no low-rank updates")
    # PEFT saves a copy of an adapted embedding or head beside its update.
    rest = [name for name in tensors if name not in updates and not name.endswith(INNER + WEIGHT)]
    names = {name.removeprefix(PREFIX).replace(INNER, ""): name for name in rest}
    kept, unknown = load_mappings(names, source.family.table)
    if unknown:
        raise stranger(file, unknown[0], source)
    held = AdapterReader(config, file, tensors, source).held(updates)
    found = AdapterContents(config, tensors, held, kept, names, shapes(source.spec))
    for move in kept:
        check_kept(file, move, found, source)
    config.check_saved({name[:at] for name in names for at, char in enumerate(name) if char == "."})
    return found


def check_kept(file: Path, move: KeyMapping, held: AdapterContents, source: HFCheckpoint) -> None:
    """Tensors of the model itself are all there, in the shapes of the model."""
    if not move.ours or any(name not in held.shapes for name in move.ours):
        raise stranger(file, move.hub[0], source)
    wanted = move.hub_shapes(held.shapes)
    for name, wants in zip(move.hub, wanted, strict=len(move.hub) == len(wanted)):
        if name not in held.names:
            raise UserError(f"{file}: {name} is missing")
        if (has := held.tensors[held.names[name]].shape) != wants:
            raise UserError(f"{file}: {name} is {list(has)}, wanted {list(wants)}; {held.config.where}")


def stranger(file: Path, name: str, source: HFCheckpoint) -> UserError:
    return UserError(f"{file}: {name} belongs to no layer of a {source.config['model_type']} model")


class AdapterReader:
    """Sorts the updates of a file by our layers, and checks their shapes."""

    def __init__(
        self, config: PeftConfigFile, file: Path, tensors: Mapping[str, TensorMeta], source: HFCheckpoint
    ) -> None:
        self.config, self.file, self.tensors, self.source = config, file, tensors, source
        self.plain, self.shapes = config.choice, shapes(source.spec)
        self.containers = containers(source)
        with safe_open(file, framework="pt") as opened:
            self.blocks = json.loads((opened.metadata() or {}).get(PARTS, "{}"))

    def held(self, names: Mapping[str, re.Match[str]]) -> list[TargetTensors]:
        """What the file holds, site by site. `names` are parsed."""
        modules: dict[tuple[str, int], dict[str, str]] = {}
        for name, found in names.items():
            modules.setdefault((found["module"], found["inner"].count(INNER)), {})[found["kind"]] = name
        sites: dict[LoRATarget, dict[str, dict[str, str]]] = {}
        for (module, depth), kinds in modules.items():
            match = self.match(self.tensor(module, depth))
            tensor = match.hub[match.part].replace("*", str(match.expert))
            sites.setdefault(LoRATarget.of(match), {})[tensor] = self.complete(module, kinds)
        return [self.joined(site, parts) for site, parts in sites.items()]

    def complete(self, module: str, kinds: dict[str, str]) -> dict[str, str]:
        """The tensors of one update, if none is missing."""
        lengths = {"lora_magnitude_vector"} if isinstance(self.plain, DoRAConfig) else set()
        if not any(kinds.keys() == pair | lengths for pair in KINDS):
            wanted = next((pair | lengths for pair in KINDS if pair & kinds.keys()), lengths)
            odd = sorted(wanted ^ kinds.keys())[0]
            raise UserError(f"{self.file}: {module}: {'no' if odd in wanted else 'unexpected'} {odd}")
        return kinds

    def tensor(self, module: str, depth: int) -> str:
        """The adapted tensor of the Hub. PEFT wraps a module of experts once for each of its adapted tensors."""
        if module not in self.containers:
            return module + WEIGHT
        adapted = [name for name in self.containers[module] if self.config.targets(name)]
        if depth >= len(adapted):
            raise UserError(f"{self.config.file}: target_parameters does not say what is adapted in {module}")
        return adapted[-1 - depth]

    def match(self, tensor: str) -> KeyMatch:
        match = match_hub_name(tensor, self.source.family.table)
        if match is None or not match.ours or any(name not in self.shapes for name in match.ours):
            raise stranger(self.file, tensor.removesuffix(WEIGHT), self.source)
        return match

    def joined(self, site: LoRATarget, parts: Mapping[str, dict[str, str]]) -> TargetTensors:
        """All updates of a site, in its order."""
        ours = [self.shapes[name + WEIGHT] for name in site.ours]
        tensors = site.names(ours[0][0])
        if missing := [tensor for tensor in tensors if tensor not in parts]:
            raise UserError(f"{self.file}: adapts {next(iter(parts))}, but not {missing[0]}, which belongs to it")
        swapped = site.op == site.rows if self.config.older else self.source.family.untold
        made = [self.part(t, parts[t], shape, swapped) for t, shape in zip(tensors, site.shapes(ours), strict=True)]
        return TargetTensors(site, tuple(made), self.sound(self.blocks.get(tensors[0]), site, made))

    def sound(self, blocks: Any, site: LoRATarget, parts: list[PeftTensor]) -> tuple[tuple[int, float], ...]:
        """Blocks that make up the whole; none where another program has changed the file around what it says."""
        found = tuple((int(rank), float(scale)) for rank, scale in blocks or ())
        fits = len(found) == len(site.ours) and sum(rank for rank, _ in found) == sum(part.rank for part in parts)
        return found if fits else ()

    def part(self, tensor: str, names: dict[str, str], shape: Shape, swapped: bool) -> PeftTensor:
        key = tensor if self.config.targets(tensor) else tensor.removesuffix(WEIGHT)
        rank, alpha = self.config.size(key, self.plain)
        part = PeftTensor(names, rank, self.plain.scale(rank, alpha), shape, len(shape) == 3 and swapped)
        if len(shape) == 3 and self.tensors[names["lora_A"]].shape != part.wanted()["lora_A"]:
            part = replace(part, swapped=not part.swapped)  # an older one that says no version
        for kind, name in names.items():
            if self.tensors[name].shape != part.wanted()[kind]:
                has, wants = list(self.tensors[name].shape), list(part.wanted()[kind])
                why = f"{self.config.where}, or its rank is not {rank}"
                raise UserError(f"{self.file}: {name.removeprefix(PREFIX)} is {has}, wanted {wants}; {why}")
        return part
