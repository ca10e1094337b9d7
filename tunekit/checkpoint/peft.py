"""Adapters as files of PEFT: adapter_config.json and adapter_model.safetensors, both ways."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tunekit.adapters import DoRA, LoRA, leaf
from tunekit.checkpoint.atomic import need
from tunekit.checkpoint.folder import Folder, Reader, Stored, header, read_json
from tunekit.checkpoint.write import companions
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.linear import Embedding, Linear
from tunekit.models.weights import hub_name, moves_in
from tunekit.parallel import put

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What PEFT can say of a LoRA and we do not do; each must have one of these values.
PLAIN = {"modules_to_save": (None, []), "bias": ("none",), "rank_pattern": (None, {}), "alpha_pattern": (None, {})}
PLAIN |= {"lora_bias": (None, False), "layer_replication": (None,), "trainable_token_indices": (None, [], {})}
PLAIN |= {"target_parameters": (None, []), "use_qalora": (None, False), "alora_invocation_tokens": (None, [])}
PLAIN |= dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), (None,))
# Other ways to begin change the weights of the model itself.
PLAIN |= {"init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal")}
FROZEN = ".base_layer.weight"  # a copy of an adapted embedding or head, which PEFT saves beside its update


def write(folder: Path, model: Decoder, adapter: LoRA, source: Folder) -> None:
    """Write the adapter of a model into a folder that is there, with the tokenizer beside it."""
    tensors = adapter_tensors(model, adapter, source)
    need(folder, sum(t.nbytes for t in tensors.values()))
    companions(source.path, folder, skip=("config.json", "generation_config.json", "model.safetensors.index.json"))
    (folder / CONFIG).write_text(json.dumps(config(model, adapter, source), indent=2) + "\n")
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})


def adapter_tensors(model: Decoder, adapter: LoRA, source: Folder) -> dict[str, Tensor]:
    """What was trained, under PEFT's names."""
    ours: dict[str, Tensor] = {}
    for name, layer in adapter.layers(model).items():
        ours |= {f"{name}.{key}": tensor for key, tensor in updates(layer, adapter).items()}
    table = source.family.table
    return {PREFIX + hub_name(name, table): t.detach().cpu().contiguous() for name, t in ours.items()}


def updates(layer: nn.Module, adapter: LoRA) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in layer.named_parameters() if "lora_" in name}
    if adapter.init != "pissa":
        return found
    if isinstance(layer, Embedding):  # one rank is said of all layers, and an embedding begins at zero
        return {name: torch.cat([p, torch.zeros_like(p)], dim=int("_B" in name)) for name, p in found.items()}
    # B A - B0 A0 is one update of twice the rank on the weight as it was.
    found["lora_A.weight"] = torch.cat([found["lora_A.weight"], layer.get_buffer("lora_A0")])
    found["lora_B.weight"] = torch.cat([found["lora_B.weight"], -layer.get_buffer("lora_B0")], dim=1)
    return found


def config(model: Decoder, adapter: LoRA, source: Folder) -> dict[str, Any]:
    growth = 2 if adapter.init == "pissa" else 1
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name(source),
        "r": adapter.rank * growth,
        "lora_alpha": adapter.alpha * (growth**0.5 if adapter.rslora else growth),
        "lora_dropout": adapter.dropout,
        "target_modules": target_modules(model, adapter, source),
        "use_rslora": adapter.rslora,
        "use_dora": isinstance(adapter, DoRA),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def base_name(source: Folder) -> str:
    """A name as it was given, a folder by its whole path: the adapter is opened from elsewhere."""
    return str(source.path.resolve()) if Path(source.name) == source.path else source.name


def target_modules(model: Decoder, adapter: LoRA, source: Folder) -> list[str]:
    """Last parts of names where every layer of that name is adapted, whole names where only some are."""
    adapted = adapter.layers(model)
    others = {leaf(n) for n, m in model.named_modules() if isinstance(m, Linear | Embedding) and n not in adapted}
    hub = {name: hub_name(name, source.family.table) for name in adapted}
    return sorted({hub[name] if leaf(name) in others else leaf(hub[name]) for name in adapted})


def base(folder: Path) -> str:
    """The name of the checkpoint that an adapter was trained for."""
    name = read_json(folder / CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str):
        raise UserError(f"{folder / CONFIG}: no 'base_model_name_or_path', so the model it belongs to is not known")
    return name


def choice(folder: Path) -> LoRA:
    """The adapter that a folder of PEFT describes, ready to be applied."""
    c = read_json(folder / CONFIG)
    if c.get("peft_type") != "LORA":
        raise UserError(f"{folder / CONFIG}: peft_type {c.get('peft_type')!r} is not supported; LORA is")
    for key, plain in PLAIN.items():
        if c.get(key, plain[0]) not in plain:
            raise UserError(f"{folder / CONFIG}: {key} = {c[key]!r} is not supported")
    kind = DoRA if c.get("use_dora") else LoRA
    try:
        return kind(
            int(c["r"]), float(c["lora_alpha"]), float(c.get("lora_dropout") or 0), rslora=bool(c.get("use_rslora"))
        )
    except KeyError as error:
        raise UserError(f"{folder / CONFIG}: {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error


def stored(folder: Path, source: Folder) -> dict[str, tuple[str, Stored]]:
    """Tensors of an adapter by our names: their names in the file, and what its header says."""
    file = folder / TENSORS
    if not file.is_file():
        raise UserError(f"{folder}: no {TENSORS}, so this is no adapter")
    held = {name: one for name, one in header(file).items() if not name.endswith(FROZEN)}
    if odd := [name for name in held if not name.startswith(PREFIX)]:
        raise UserError(f"{file}: {odd[0]} is no tensor of a PEFT adapter")
    moves, unknown = moves_in([name.removeprefix(PREFIX) for name in held], source.family.table)
    if unknown:
        raise UserError(f"{file}: {unknown[0]} belongs to no layer of a {source.config['model_type']} model")
    if whole := [move.hub[0] for move in moves if ".lora_" not in move.ours[0]]:
        raise UserError(f"{file}: {whole[0]} is a tensor of the model itself; only low-rank updates are read")
    return {move.ours[0]: (PREFIX + move.hub[0], held[PREFIX + move.hub[0]]) for move in moves}


def described(folder: Path, source: Folder) -> LoRA:
    """The adapter of a folder with just the layers that its file holds."""
    names = {re.sub(r"\.lora_.*", "", name) for name in stored(folder, source)}
    plain = choice(folder)
    return type(plain)(plain.rank, plain.alpha, plain.dropout, tuple(map(re.escape, sorted(names))), plain.rslora)


def read(folder: Path, model: Decoder, adapter: LoRA, source: Folder) -> None:
    """Fill the updates of a model from a folder."""
    found = fitting(folder, model, adapter, source)
    with Reader({hub: held for hub, held in found.values()}) as tensors:
        for name, (hub, _) in found.items():
            put(model.get_parameter(name), tensors[hub])


def fitting(folder: Path, model: Decoder, adapter: LoRA, source: Folder) -> dict[str, tuple[str, Stored]]:
    """What `stored` says, once it is sure that these are the updates of this model."""
    agree(folder, adapter)
    found, mine = stored(folder, source), dict(model.named_parameters())
    wanted = {name for name in mine if ".lora_" in name}
    other = f"this adapter was trained for {base(folder)}, or with other targets"
    for name, (hub, held) in found.items():
        if name not in wanted:
            raise UserError(f"{held.file}: {hub} has no place in this model; {other}")
        if held.shape != tuple(mine[name].shape):
            raise UserError(f"{held.file}: {hub} is {list(held.shape)}, wanted {list(mine[name].shape)}; {other}")
    if missing := sorted(wanted - set(found)):
        raise UserError(f"{folder / TENSORS}: no {missing[0]}; {other}")
    return found


def agree(folder: Path, adapter: LoRA) -> None:
    """Rank, scale and kind of a choice are those of the files."""
    there = choice(folder)
    mine: Mapping[str, Any] = {"kind": type(adapter).__name__.lower(), **vars(adapter)}
    for key, value in {"kind": type(there).__name__.lower(), **vars(there)}.items():
        if key in ("kind", "rank", "alpha", "rslora") and mine[key] != value:
            raise UserError(f"adapter.{key}: {mine[key]}, but the adapter in {folder} has {value}")
