"""Logits of a checkpoint that is never whole in memory: a part is filled when its turn comes, and dropped behind it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tunekit.adapters import DoRA, Full, Layer, LoRA, factors
from tunekit.checkpoint import peft
from tunekit.checkpoint.folder import Folder, Reader
from tunekit.checkpoint.read import check, fill, moves
from tunekit.formats import Plain
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.linear import Embedding, Linear
from tunekit.precision import Precision

EMBED, PLAIN = "embed.weight", Plain()
ROWS = 2**22  # numbers that are in fp32 at once


@torch.no_grad()
def logits(
    source: Folder,
    adapter: Full | LoRA,
    rows: Sequence[Sequence[int]],
    precision: Precision,
    device: torch.device,
    weights: Plain = PLAIN,
    merged: Mapping[str, torch.dtype] | None = None,
) -> Tensor:
    """What `ask` gives for the model of a folder. An adapter that it starts from is in memory all the time.

    With `merged`, the dtypes of other files by our names, the adapter is put into the weights, rounded to these.
    """
    with torch.device("meta"):
        net = Decoder(source.spec)
    weights.apply(net)
    adapter.apply(net)
    check(source, net.shapes)
    precision.apply(net, source.dtypes, device)
    net.tie()
    started = start(net, adapter, source, device)
    with (replace(source, exact=True) if weights.exact else source).reader() as tensors:
        for name, module in parts(net):
            part = Part(net, name, source, tensors, started)
            module.register_forward_pre_hook(lambda *_, part=part: part.take(device))
            module.register_forward_hook(lambda *_, part=part: part.drop())
            if merged is not None and isinstance(adapter, LoRA):
                exact = Merged(net, name, adapter, merged)
                module.register_forward_pre_hook(lambda *_, exact=exact: exact.take())
                module.register_forward_hook(lambda *_, exact=exact: exact.drop(), prepend=True)
        return ask(net, rows, device)


@torch.no_grad()
def ask(model: Decoder, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Logits (tokens, vocab) behind every token of the rows, one row after the other."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    real = torch.arange(longest, device=device) < lengths[:, None]
    training = model.training
    found = model.eval()(tokens, read=lambda hidden, head: head(hidden[real]))
    model.train(training)
    return found


@contextmanager
def rounded(model: Decoder, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """The model as files of these dtypes hold it: while a part works, its weights are what rounding leaves of them."""
    kinds = {**dtypes, TIED: dtypes[EMBED]} if model.spec.tied else dtypes
    with ExitStack() as hooks:
        for name, module in parts(model):
            part = Rounded({p: kinds[n] for n, p in below(model, name).items() if n in kinds})
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, part=part: part.take()))
            hooks.enter_context(module.register_forward_hook(lambda *_, part=part: part.drop()))
        yield


class Rounded:
    """A part of a model whose weights are rounded while it works."""

    def __init__(self, kinds: Mapping[Tensor, torch.dtype]) -> None:
        self.kinds = kinds
        self.whole: dict[Tensor, Tensor] = {}

    def take(self) -> None:
        self.whole = {p: p.data for p in self.kinds}
        for p, dtype in self.kinds.items():
            p.data = p.data.to(dtype).to(p.dtype)

    def drop(self) -> None:
        for p, data in self.whole.items():
            p.data = data
        self.whole = {}


def start(net: Decoder, adapter: Full | LoRA, source: Folder, device: torch.device) -> frozenset[str]:
    """Fill what an adapter trains from its files; the names."""
    if adapter.start is None:
        return frozenset()
    kept = adapter.kept(net, adapter.layers(net)) if isinstance(adapter, LoRA) else {}
    names = frozenset(n for n, p in net.named_parameters() if p.requires_grad) | frozenset(kept)
    place(net, names, device)
    net.tie()
    peft.read(Path(adapter.start), net, adapter, source)
    return names


def parts(net: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """What is in memory at once: each layer, and whatever stands beside the layers."""
    for name, child in net.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{i}", layer) for i, layer in enumerate(child))
        else:
            yield name, child


class Part:
    """A part of a model, in memory only while it works."""

    def __init__(self, net: Decoder, name: str, source: Folder, tensors: Reader, started: frozenset[str]) -> None:
        self.net, self.tensors = net, tensors
        self.elsewhere = started | ({TIED} if net.spec.tied else set())  # filled by others
        self.moves = [move for move in moves(source, net) if move.ours[0].startswith(f"{name}.")]
        self.names = set(below(net, name)) - self.elsewhere

    def take(self, device: torch.device) -> None:
        place(self.net, self.names, device)
        self.net.tie()
        for move in self.moves:
            loaded = move.load([self.tensors[name] for name in move.hub], self.net.shapes)
            for name, tensor in zip(move.ours, loaded, strict=True):
                if name not in self.elsewhere:
                    fill(self.net, name, tensor)

    def drop(self) -> None:
        """A tied embedding stays: it comes again as the head."""
        if not (self.net.spec.tied and EMBED in self.names):
            place(self.net, self.names, torch.device("meta"))


class Merged:
    """A part of a model with the updates put into its weights, rounded as files of these dtypes hold them."""

    def __init__(self, net: Decoder, name: str, adapter: LoRA, dtypes: Mapping[str, torch.dtype]) -> None:
        self.net, self.adapter, self.layers = net, adapter, adapter.layers(net)
        kinds = {**dtypes, TIED: dtypes.get(TIED, dtypes[EMBED])}
        self.kinds = {key: kinds[key] for key in below(net, name) if key in kinds}
        self.apart: dict[str, nn.Parameter] = {}

    def take(self) -> None:
        for name, dtype in self.kinds.items():
            owner, _, leaf = name.rpartition(".")
            layer, self.apart[name] = self.layers.get(owner), self.net.get_parameter(name)
            if layer is None or leaf != "weight":
                weight = self.apart[name].to(dtype)
            else:
                weight = whole(layer, self.adapter, dtype)
            self.put(name, nn.Parameter(weight, requires_grad=False))
            if layer is not None:
                layer.update = None

    def drop(self) -> None:
        """A tied head comes after the embedding, and wants the weight as it was."""
        for name, weight in self.apart.items():
            self.put(name, weight)
        self.apart = {}

    def put(self, name: str, weight: nn.Parameter) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(self.net.get_submodule(owner), leaf, weight)


def whole(layer: Layer, adapter: LoRA, dtype: torch.dtype) -> Tensor:
    """The weight of an adapted layer with its update: sums in fp32, some rows or experts at a time."""
    if isinstance(layer, Embedding):
        a, b = layer.lora_embedding_B.T, layer.lora_embedding_A.T
    else:
        a, b = factors(layer)
    made = torch.empty_like(layer.weight, dtype=dtype)
    step = max(1, ROWS // layer.weight[0].numel())
    for at in range(0, len(made), step):
        some = slice(at, at + step)
        update = b[some].float() @ (a[some] if a.ndim == 3 else a).float()
        part = layer.weight[some].float() + layer.lora_scale * update
        if isinstance(layer, Linear) and isinstance(adapter, DoRA):
            part = part * (layer.lora_magnitude_vector[some] / part.norm(dim=1))[:, None]
        made[some] = part
    return made


def held(net: Decoder) -> dict[str, Tensor]:
    """All that a model holds, by name; a tied head under both of its names."""
    return dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers())


def below(net: Decoder, part: str) -> dict[str, Tensor]:
    """What a part holds, by its name in the model."""
    return {name: tensor for name, tensor in held(net).items() if name.startswith(f"{part}.")}


def place(net: Decoder, names: Iterable[str], device: torch.device) -> None:
    """Give tensors of a model room on a device. What they held is gone."""
    tensors = held(net)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        empty = torch.empty_like(tensors[name], device=device)
        made = nn.Parameter(empty, requires_grad=False) if isinstance(tensors[name], nn.Parameter) else empty
        setattr(net.get_submodule(owner), leaf, made)
