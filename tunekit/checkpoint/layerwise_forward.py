"""Logits of a checkpoint that is never whole in memory: a part is filled when its turn comes, and dropped behind it.

Tensors are used where they lie in the files, if they are there in the dtype that is wanted. So of an embedding only the
rows that are asked for are read, and of a head some rows at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tunekit.adapters.config import DoRAConfig, Layer, LoRAConfig, NoAdapter, lora_factors
from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, TensorReader
from tunekit.checkpoint.load_model import apply_mapping, check_tensors, key_mappings, load_tensor
from tunekit.checkpoint.peft_reader import read_contents
from tunekit.models.decoder import TIED, Decoder, Head
from tunekit.models.linear import Embedding, GroupedLinear, Linear
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_map import KeyMapping
from tunekit.quantization.config import NoQuantization

EMBED, PLAIN, FULL = "embed.weight", NoQuantization(), NoAdapter()
# Numbers that are in fp32 at once, and tokens of the vocabulary whose logits are. With more, what the allocator keeps
# for itself between such pieces was as much as a file of weights.
ROWS, COLUMNS = 2**19, 2048
Load = tuple[KeyMapping, Callable[[str], Tensor]]


@dataclass(frozen=True)
class LazyLogits:
    """Logits (tokens, vocab) that are made when they are read, some columns at a time; or scores (tokens, labels)."""

    vocab: int
    make: Callable[[slice], Tensor]
    scores: bool = False

    def parts(self) -> Iterator[Tensor]:
        return (self.make(slice(at, at + COLUMNS)) for at in range(0, self.vocab, COLUMNS))

    def whole(self) -> Tensor:
        return torch.cat([*self.parts()], dim=-1)


@torch.no_grad()
def checkpoint_logits(
    source: HFCheckpoint,
    adapter: NoAdapter | LoRAConfig,
    rows: Sequence[Sequence[int]],
    precision: PrecisionConfig,
    device: torch.device,
    weights: NoQuantization = PLAIN,
    written: Mapping[str, torch.dtype] | None = None,
) -> LazyLogits:
    """What `ask` gives for the model of a folder. The updates that an adapter starts from are in memory all the time.

    With `written`, the dtypes of other files by our names, it is what `rounded` gives.
    """
    with torch.device("meta"):
        net = Decoder(source.spec)
    weights.apply(net)
    adapter.apply(net)
    check_tensors(source, net.shapes)
    precision.apply(net, source.dtypes, device)
    net.tie()
    with (replace(source, exact=True) if weights.exact else source).reader() as tensors, ExitStack() as opened:
        started = start(net, adapter, source, device, opened)
        loads = [(move, tensors.lend) for move in key_mappings(source, net)]
        for name, module in model_parts(net):
            part = ModelPart(net, name, loads, started)
            if module is net.head:  # it is asked when the logits are read
                part.take(device)
            else:
                module.register_forward_pre_hook(lambda *_, part=part: part.take(device))
                module.register_forward_hook(lambda *_, part=part: part.drop())
        return (
            forward_logits(net, rows, device)
            if written is None
            else rounded_logits(net, rows, device, written, adapter)
        )


@torch.no_grad()
def forward_logits(model: Decoder, rows: Sequence[Sequence[int]], device: torch.device) -> LazyLogits:
    """Logits behind every token of the rows, one row after the other."""
    spec = model.spec
    return LazyLogits(spec.outputs, partial(columns, model.head, hidden(model, rows, device)), spec.score is not None)


@torch.no_grad()
def rounded_logits(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    dtypes: Mapping[str, torch.dtype],
    adapter: NoAdapter | LoRAConfig = FULL,
) -> LazyLogits:
    """The same of what files of these dtypes hold: weights with the updates in them, rounded."""
    kinds = {**dtypes, TIED: dtypes.get(TIED, dtypes[EMBED])}
    adapted = dict.fromkeys(adapter.layers(model), adapter) if isinstance(adapter, LoRAConfig) else {}
    with ExitStack() as hooks:
        for name, module in model_parts(model):
            part = RoundedPart(model, {n: kinds[n] for n in submodule_tensors(model, name) if n in kinds}, adapted)
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, part=part: part.take()))
            hooks.enter_context(module.register_forward_hook(lambda *_, part=part: part.drop(), prepend=True))
        states = hidden(model, rows, device)
    with torch.device("meta"):
        bare = Head(model.spec)

    @torch.no_grad()
    def make(some: slice) -> Tensor:
        held = {"weight": written(model.head, adapted.get("head"), some).to(kinds[TIED])}
        held |= {} if model.head.bias is None else {"bias": model.head.bias[some].to(kinds["head.bias"])}
        return functional_call(bare, held, (states,))

    return LazyLogits(model.spec.outputs, make, model.spec.score is not None)


def hidden(model: Decoder, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Hidden states (tokens, dim) behind the last norm."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    real = torch.arange(longest, device=device) < lengths[:, None]
    with asked(model):
        return model(tokens, read=lambda states, _: states[real])


@torch.no_grad()
def columns(head: Head, states: Tensor, some: slice) -> Tensor:
    """Logits (tokens, some). All that a head holds has a row for each token of the vocabulary, but for A."""
    held = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    with asked(head):
        return functional_call(head, {n: t[some] for n, t in held.items() if "lora_A" not in n}, (states,))


@contextmanager
def asked(module: nn.Module) -> Iterator[None]:
    """Without dropout for a while."""
    training = module.training
    module.eval()
    yield
    module.train(training)


class RoundedPart:
    """A part of a model whose weights are, while it works, what files of these dtypes hold of them."""

    def __init__(self, net: Decoder, kinds: Mapping[str, torch.dtype], adapted: Mapping[str, LoRAConfig]) -> None:
        self.net, self.kinds, self.adapted = net, kinds, adapted
        self.weights: dict[str, nn.Parameter] = {}
        self.updates: dict[str, Any] = {}

    def take(self) -> None:
        for name, dtype in self.kinds.items():
            owner, _, leaf = name.rpartition(".")
            module, adapter = self.net.get_submodule(owner), self.adapted.get(owner) if leaf == "weight" else None
            if isinstance(module, Embedding):
                self.update(owner, partial(looked_up, adapted=adapter is not None, dtype=dtype))
                continue
            self.weights[name] = weight = self.net.get_parameter(name)
            if adapter is None:
                made = weight.to(dtype)
            else:
                made = whole(module, adapter, dtype)
                self.update(owner, None)
            setattr(module, leaf, nn.Parameter(made, requires_grad=False))

    def update(self, owner: str, update: Any) -> None:
        module = self.net.get_submodule(owner)
        assert isinstance(module, Layer)
        self.updates[owner], module.update = module.update, update

    def drop(self) -> None:
        for name, weight in self.weights.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.net.get_submodule(owner), leaf, weight)
        for owner, update in [*self.updates.items()]:
            self.update(owner, update)
        self.weights, self.updates = {}, {}


def looked_up(layer: Embedding, tokens: Tensor, adapted: bool, dtype: torch.dtype) -> Tensor:
    """Rows of an embedding with its update in them, rounded."""
    rows = layer.product(tokens).float()
    if adapted:
        low = F.embedding(tokens, layer.lora_embedding_A.T).float() @ layer.lora_embedding_B.T.float()
        rows = rows + layer.lora_scale * low
    return rows.to(dtype)


def whole(layer: nn.Module, adapter: LoRAConfig, dtype: torch.dtype) -> Tensor:
    """The weight of an adapted layer with its update: sums in fp32, some rows or experts at a time."""
    assert isinstance(layer, Linear | GroupedLinear)
    made = torch.empty_like(layer.weight, dtype=dtype)
    step = max(1, ROWS // layer.weight[0].numel())
    for at in range(0, len(made), step):
        some = slice(at, at + step)
        made[some] = written(layer, adapter, some)
    return made


def written(layer: Linear | GroupedLinear, adapter: LoRAConfig | None, some: slice) -> Tensor:
    """Rows of the weight of a layer, or some of its experts, in fp32; with the update if it is adapted."""
    weight = layer.weight[some].float()
    if adapter is None:
        return weight
    a, b = lora_factors(layer)
    a, plus = (a[some], torch.baddbmm) if a.ndim == 3 else (a, torch.addmm)
    weight = plus(weight, b[some].float(), a.float(), alpha=layer.lora_scale)
    if isinstance(layer, Linear) and isinstance(adapter, DoRAConfig):
        weight = weight * (layer.lora_magnitude_vector[some] / weight.norm(dim=1))[:, None]
    return weight


def start(
    net: Decoder, adapter: NoAdapter | LoRAConfig, source: HFCheckpoint, device: torch.device, opened: ExitStack
) -> list[Load]:
    """Fill the updates that an adapter starts from. What it holds whole comes in later, as these moves say."""
    if adapter.adapter_path is None:
        return []
    allocate(net, [name for name in named_tensors(net) if ".lora_" in name], device)
    net.tie()
    peft_adapter.check_adapter_fits(Path(adapter.adapter_path), net, adapter, source)
    there = read_contents(Path(adapter.adapter_path), source)
    tensors = opened.enter_context(TensorReader(there.tensors))
    peft_adapter.load_lora_weights(net, there, tensors)
    return [(move, lambda name: tensors.lend(there.names[name])) for move in there.kept]


def model_parts(net: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """What is in memory at once: each layer, and whatever stands beside the layers."""
    for name, child in net.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{i}", layer) for i, layer in enumerate(child))
        else:
            yield name, child


class ModelPart:
    """A part of a model, in memory only while it works."""

    def __init__(self, net: Decoder, name: str, loads: Sequence[Load], kept: Sequence[Load]) -> None:
        """`kept` are the moves of what stands in for tensors of the checkpoint."""
        self.net, self.prefix = net, f"{name}."
        self.tied = {TIED} if net.spec.tied else set()  # filled as the embedding
        self.names = {n for n in submodule_tensors(net, name) if ".lora_" not in n} - self.tied
        instead = self.tied.union(*(move.ours for move, _ in kept))
        self.loads = [(*load, instead) for load in loads if self.holds(load[0], instead)]
        self.loads += [(*load, self.tied) for load in kept if self.holds(load[0], self.tied)]

    def holds(self, move: KeyMapping, elsewhere: set[str]) -> bool:
        return any(name.startswith(self.prefix) and name not in elsewhere for name in move.ours)

    def take(self, device: torch.device) -> None:
        allocate(self.net, self.names, device)
        self.net.tie()
        for move, get, elsewhere in self.loads:
            apply_mapping(self.net, move, get, partial(self.lay, elsewhere))

    def lay(self, elsewhere: set[str], name: str, tensor: Tensor) -> None:
        """A tensor as it is, if that fits: nobody writes to it."""
        if name in elsewhere:
            return
        owner, _, leaf = name.rpartition(".")
        target = named_tensors(self.net.get_submodule(owner), recurse=False).get(leaf)
        kind = tensor.dtype, tensor.device, tensor.stride()
        # The last bit of a product depends on where a weight lies; embedding and head are too large to copy for it.
        lies = tensor.data_ptr() % 64 == 0 or not self.prefix.startswith("layers.")
        if lies and target is not None and (target.dtype, target.device, target.stride()) == kind:
            target.data = tensor
        else:
            load_tensor(self.net, name, tensor)

    def drop(self) -> None:
        """A tied embedding stays: it comes again as the head."""
        if not (self.net.spec.tied and EMBED in self.names):
            allocate(self.net, self.names, torch.device("meta"))


def named_tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """All that a module holds, by name; a tied head under both of its names."""
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(recurse=recurse))


def submodule_tensors(net: Decoder, part: str) -> dict[str, Tensor]:
    """What a part holds, by its name in the model."""
    return {f"{part}.{name}": tensor for name, tensor in named_tensors(net.get_submodule(part)).items()}


def allocate(net: Decoder, names: Iterable[str], device: torch.device) -> None:
    """Give tensors of a model room on a device. What they held is gone."""
    tensors = named_tensors(net)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        empty = torch.empty_like(tensors[name], device=device)
        made = nn.Parameter(empty, requires_grad=False) if isinstance(tensors[name], nn.Parameter) else empty
        setattr(net.get_submodule(owner), leaf, made)
