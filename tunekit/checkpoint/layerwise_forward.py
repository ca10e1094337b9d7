"""Logits of a checkpoint with one layer in memory at a time: a layer is loaded before its forward and freed after it.

Tensors are memory-mapped if the files have the required dtype, so only the used rows of the embedding are read, and the
head is read in chunks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tunekit.adapters.config import DoRAConfig, FrozenModel, Layer, LoRAConfig, NoAdapter, lora_factors
from tunekit.adapters.token_rows import look_up_token_rows, replace_token_rows
from tunekit.checkpoint import load_adapter
from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.hf_checkpoint import EMBED, HFCheckpoint
from tunekit.checkpoint.load_model import apply_mapping, check_tensors, key_mappings, load_tensor
from tunekit.checkpoint.peft_reader import read_contents
from tunekit.checkpoint.safetensors_io import TensorReader
from tunekit.checkpoint.token_rows import load_stored_rows, load_token_rows
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.sharding import full_tensor, shard_slice
from tunekit.models.decoder import TIED, Decoder, Head
from tunekit.models.feed_forward import Router
from tunekit.models.linear import Embedding, GroupedLinear, Linear
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_map import KeyMapping
from tunekit.quantization.config import NoQuantization

FP32, UNQUANTIZED, FROZEN = PrecisionConfig("fp32"), NoQuantization(), FrozenModel()
# Elements that are in fp32 at a time, and vocabulary tokens whose logits are computed at a time. With larger chunks,
# the allocator cached as much memory as a weight file between two chunks.
CHUNK_NUMEL, CHUNK_COLUMNS = 2**19, 2048
Load = tuple[KeyMapping, Callable[[str], Tensor]]


@dataclass(frozen=True)
class Routing:
    """Logits (T, E) of all routers in a forward pass, on the CPU, and the experts (T, top_k) that were used."""

    logits: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)

    def mean_difference(self, other: "Routing") -> float:
        """Mean difference of the logits of each router, in standard deviations over the experts; the largest mean.

        Routers with one expert have no standard deviation, and are skipped.
        """
        pairs = ((a, b) for a, b in zip(self.logits, other.logits, strict=True) if a.shape[-1] > 1)
        means = [((a - b).abs() / a.std(-1, keepdim=True).clamp_min(1e-30)).mean().item() for a, b in pairs]
        return math.nan if any(map(math.isnan, means)) else max(means, default=0.0)


@dataclass(frozen=True)
class LazyLogits:
    """Logits (tokens, vocab), or scores (tokens, labels), that are computed in chunks of columns when they are read."""

    vocab: int
    compute: Callable[[slice], Tensor]
    is_score: bool = False
    routing: Routing = field(default_factory=Routing)

    def chunks(self) -> Iterator[Tensor]:
        return (self.compute(slice(start, start + CHUNK_COLUMNS)) for start in range(0, self.vocab, CHUNK_COLUMNS))

    def full(self) -> Tensor:
        return torch.cat([*self.chunks()], dim=-1)


LogitsFn = Callable[[Decoder, Sequence[Sequence[int]], torch.device], LazyLogits]


@dataclass(frozen=True)
class ModelSource:
    """Checkpoint and settings from which a model is built. By default, its matmuls are in fp32."""

    source: HFCheckpoint
    quantization: NoQuantization = UNQUANTIZED
    adapter: NoAdapter | LoRAConfig = FROZEN
    precision: PrecisionConfig = FP32

    def build_meta_model(self, device: torch.device) -> Decoder:
        """Build the unsharded model on the meta device."""
        net = self.source.build_meta_decoder()
        self.quantization.apply(net)
        self.adapter.apply(net)
        self.precision.apply(net, self.source.dtypes, device)
        return net


@torch.no_grad()
def checkpoint_logits(
    model: ModelSource,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    rounded_dtypes: Mapping[str, torch.dtype] | None = None,
    like: LazyLogits | None = None,
) -> LazyLogits:
    """Logits of a checkpoint with the initial weights of an adapter, by `forward_logits`.

    `rounded_dtypes` are dtypes by parameter name; with them, logits are computed by `rounded_logits`. Tokens use the
    experts that they use in `like`: a rounding error could route them to others.
    """
    source, adapter, net = model.source, model.adapter, model.build_meta_model(device)
    check_tensors(source, net.shapes)
    net.tie()
    unrounded = replace(source, keeps_prequantized=True) if model.quantization.keeps_prequantized else source
    with unrounded.reader() as tensors, ExitStack() as stack:
        initial = load_initial_adapter(net, adapter, source, device, stack)
        mappings = [(mapping, tensors.read_mapped) for mapping in key_mappings(source, net)]
        parts = {name: ModelPart(net, name, mappings, initial) for name, _ in model_parts(net)}
        load_on_demand(net, lambda name: parts[name].load(device), lambda name: parts[name].free())
        parts["head"].load(device)
        if rounded_dtypes is not None:
            return rounded_logits(net, rows, device, rounded_dtypes, adapter, like)
        return forward_logits(net, rows, device, like)


def load_on_demand(model: Decoder, load: Callable[[str], None], free: Callable[[str], None]) -> None:
    """Call `load` before and `free` after the forward of each part but the head, which is needed afterwards."""
    for name, module in model_parts(model):
        if module is not model.head:
            module.register_forward_pre_hook(lambda *_, name=name: load(name))
            module.register_forward_hook(lambda *_, name=name: free(name))


@torch.no_grad()
def forward_logits(
    model: Decoder, rows: Sequence[Sequence[int]], device: torch.device, like: LazyLogits | None = None
) -> LazyLogits:
    """Logits at every token of the rows, which are concatenated. Tokens use the experts that they use in `like`."""
    states, routing = hidden_states(model, rows, device, like)
    return LazyLogits(model.spec.outputs, partial(head_columns, model, states), model.spec.score is not None, routing)


@torch.no_grad()
def rounded_logits(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    dtypes: Mapping[str, torch.dtype],
    adapter: NoAdapter | LoRAConfig = FROZEN,
    like: LazyLogits | None = None,
) -> LazyLogits:
    """Logits of a model whose merged weights are rounded to these dtypes, as if they were saved and loaded."""
    all_dtypes = {**dtypes, TIED: dtypes.get(TIED, dtypes[EMBED])}
    adapted = dict.fromkeys(adapter.target_layers(model), adapter) if isinstance(adapter, LoRAConfig) else {}
    with ExitStack() as hooks:
        for name, module in model_parts(model):
            part_dtypes = {n: all_dtypes[n] for n in submodule_tensors(model, name) if n in all_dtypes}
            part = RoundedPart(model, part_dtypes, adapted)
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, part=part: part.round_weights()))
            restore = module.register_forward_hook(lambda *_, part=part: part.restore_weights(), prepend=True)
            hooks.enter_context(restore)
        states, routing = hidden_states(model, rows, device, like)
    with torch.device("meta"):
        head = Head(model.spec)

    @torch.no_grad()
    def compute(columns: slice) -> Tensor:
        parameters = {"weight": merged_rows(model.head, adapted.get("head"), columns).to(all_dtypes[TIED])}
        parameters |= {} if model.head.bias is None else {"bias": model.head.bias[columns].to(all_dtypes["head.bias"])}
        return functional_call(head, parameters, (states,))

    return LazyLogits(model.spec.outputs, compute, model.spec.score is not None, routing)


def hidden_states(
    model: Decoder, rows: Sequence[Sequence[int]], device: torch.device, like: LazyLogits | None
) -> tuple[Tensor, Routing]:
    """Hidden states (tokens, dim) after the final norm, and the routing of all tokens, with the experts of `like`."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    is_token = torch.arange(longest, device=device) < lengths[:, None]
    with eval_mode(model), traced_routers(model, like) as routing:
        return model(tokens, head_fn=lambda states, _: states[is_token]), routing


@contextmanager
def traced_routers(model: Decoder, like: LazyLogits | None) -> Iterator[Routing]:
    """Collect the routing of a forward pass, and replace the experts by those of `like`."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    routing, experts = Routing(), iter([] if like is None else like.routing.experts)

    def override(logits: Tensor, chosen: Tensor) -> Tensor:
        chosen = chosen if like is None else next(experts).to(chosen.device)
        routing.logits.append(logits.float().cpu())
        routing.experts.append(chosen.cpu())
        return chosen

    for router in routers:
        router.override = override
    try:
        yield routing
    finally:
        for router in routers:
            router.override = None


@torch.no_grad()
def head_columns(model: Decoder, states: Tensor, columns: slice) -> Tensor:
    """Logits (tokens, columns). All tensors of a head except LoRA A have one row per vocabulary token."""
    head, tensors = model.head, named_tensors(model.head)
    if head.token_ids:  # the head has no LoRA weights and no bias
        with torch.device("meta"):
            head, tensors = Head(model.spec), {}
        tensors["weight"] = replace_token_rows(model.head, model.head.weight[columns], columns.start)
    else:
        tensors = {name: tensor[columns] for name, tensor in tensors.items() if "lora_A" not in name}
    with eval_mode(head):
        return functional_call(head, tensors, (states,))


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Disable dropout inside the block."""
    training = module.training
    module.eval()
    yield
    module.train(training)


class RoundedPart:
    """A part of a model whose weights, with their LoRA deltas merged, are rounded to dtypes during its forward."""

    def __init__(self, net: Decoder, dtypes: Mapping[str, torch.dtype], adapted: Mapping[str, LoRAConfig]) -> None:
        self.net, self.dtypes, self.adapted = net, dtypes, adapted
        self.weights: dict[str, nn.Parameter] = {}
        self.updates: dict[str, Any] = {}

    def round_weights(self) -> None:
        for name, dtype in self.dtypes.items():
            owner, _, leaf = name.rpartition(".")
            module, adapter = self.net.get_submodule(owner), self.adapted.get(owner) if leaf == "weight" else None
            if isinstance(module, Embedding):
                self.swap_update(owner, partial(lookup_rounded, is_adapted=adapter is not None, dtype=dtype))
                continue
            self.weights[name] = weight = self.net.get_parameter(name)
            if adapter is None:
                rounded = weight.to(dtype)
            else:
                rounded = merged_weight(module, adapter, dtype)
                self.swap_update(owner, None)
            setattr(module, leaf, nn.Parameter(rounded, requires_grad=False))

    def swap_update(self, owner: str, update: Any) -> None:
        module = self.net.get_submodule(owner)
        assert isinstance(module, Layer)
        self.updates[owner], module.update = module.update, update

    def restore_weights(self) -> None:
        for name, weight in self.weights.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.net.get_submodule(owner), leaf, weight)
        for owner, update in [*self.updates.items()]:
            self.swap_update(owner, update)
        self.weights, self.updates = {}, {}


def lookup_rounded(
    layer: Embedding, tokens: Tensor, _: torch.dtype | None, *, is_adapted: bool, dtype: torch.dtype
) -> Tensor:
    """Rows of an embedding with its LoRA delta, rounded to `dtype`."""
    rows = look_up_token_rows(layer, tokens, layer.embed(tokens).float())
    if is_adapted:
        delta = F.embedding(tokens, layer.lora_embedding_A.T).float() @ layer.lora_embedding_B.T.float()
        rows = rows + layer.lora_scale * delta
    return rows.to(dtype)


def merged_weight(layer: nn.Module, adapter: LoRAConfig, dtype: torch.dtype) -> Tensor:
    """Weight of an adapted layer with its delta merged in fp32, in chunks of rows or experts."""
    assert isinstance(layer, Linear | GroupedLinear)
    output = torch.empty_like(layer.weight, dtype=dtype)
    step = max(1, CHUNK_NUMEL // layer.weight[0].numel())
    for start in range(0, len(output), step):
        rows = slice(start, start + step)
        output[rows] = merged_rows(layer, adapter, rows)
    return output


def merged_rows(layer: Linear | GroupedLinear, adapter: LoRAConfig | None, rows: slice) -> Tensor:
    """Rows of a weight, or a subset of experts, in fp32; with the LoRA delta if the layer is adapted."""
    weight = layer.weight[rows].float()
    if adapter is None:
        return weight if isinstance(layer, GroupedLinear) else replace_token_rows(layer, weight, rows.start)
    a, b = lora_factors(layer)
    a, multiply_add = (a[rows], torch.baddbmm) if a.ndim == 3 else (a, torch.addmm)
    weight = multiply_add(weight, b[rows].float(), a.float(), alpha=layer.lora_scale)
    if isinstance(layer, Linear) and isinstance(adapter, DoRAConfig):
        weight = weight * (layer.lora_magnitude_vector[rows] / weight.norm(dim=1))[:, None]
    return weight


def load_initial_adapter(
    net: Decoder, adapter: NoAdapter | LoRAConfig, source: HFCheckpoint, device: torch.device, stack: ExitStack
) -> list[Load]:
    """Load the LoRA weights of `adapter_path`. Returns mappings for the parameters that the adapter has in full."""
    if adapter.adapter_path is None:
        return []
    allocate(net, [name for name in named_tensors(net) if ".lora_" in name], device)
    net.tie()
    directory = source.open_adapter(adapter.adapter_path)
    load_adapter.check_adapter_fits(directory, net, adapter, source)
    contents = read_contents(directory, source)
    tensors = stack.enter_context(TensorReader(contents.tensors))
    load_adapter.load_lora_weights(net, contents, tensors)
    load_token_rows(net, source)
    load_stored_rows(net, contents.token_rows, tensors)

    def read(name: str) -> Tensor:
        return tensors.read_mapped(contents.file_names[name])

    return [(mapping, read) for mapping in contents.saved_mappings]


def model_parts(net: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that are loaded one at a time: every layer, and the modules outside the layers."""
    for name, child in net.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{i}", layer) for i, layer in enumerate(child))
        else:
            yield name, child


class ModelPart:
    """A submodule that is in memory only during its forward."""

    def __init__(self, net: Decoder, name: str, loads: Sequence[Load], replacements: Sequence[Load]) -> None:
        """`replacements` load parameters from an adapter instead of the checkpoint."""
        self.net, self.prefix = net, f"{name}."
        self.tied = {TIED} if net.spec.tie_word_embeddings else set()  # loaded with the embedding
        self.names = {n for n in submodule_tensors(net, name) if ".lora_" not in n} - self.tied
        replaced = self.tied.union(*(mapping.ours for mapping, _ in replacements))
        self.loads = [(*load, replaced) for load in loads if self.is_needed(load[0], replaced)]
        self.loads += [(*load, self.tied) for load in replacements if self.is_needed(load[0], self.tied)]

    def is_needed(self, mapping: KeyMapping, excluded: set[str]) -> bool:
        return any(name.startswith(self.prefix) and name not in excluded for name in mapping.ours)

    def load(self, device: torch.device) -> None:
        allocate(self.net, self.names, device)
        self.net.tie()
        for mapping, get, excluded in self.loads:
            apply_mapping(self.net, mapping, get, partial(self.assign, excluded))

    def assign(self, excluded: set[str], name: str, tensor: Tensor) -> None:
        """Use a memory-mapped tensor without copying if its layout matches; nothing writes to it."""
        if name in excluded:
            return
        owner, _, leaf = name.rpartition(".")
        target = named_tensors(self.net.get_submodule(owner), recurse=False).get(leaf)
        layout = tensor.dtype, tensor.device, tensor.stride()
        # The last bit of a matmul depends on the alignment of the weight. Embedding and head are too large to copy.
        is_aligned = tensor.data_ptr() % 64 == 0 or not self.prefix.startswith("layers.")
        if is_aligned and target is not None and (target.dtype, target.device, target.stride()) == layout:
            target.data = tensor
        else:
            load_tensor(self.net, name, tensor)

    def free(self) -> None:
        """Move the tensors to the meta device. A tied embedding stays, because the head needs it."""
        if not (self.net.spec.tie_word_embeddings and EMBED in self.names):
            allocate(self.net, self.names, torch.device("meta"))


def named_tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers of a module by name; a tied weight under both names."""
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(recurse=recurse))


def submodule_tensors(net: Decoder, part: str) -> dict[str, Tensor]:
    """Parameters and buffers of a submodule, by full name."""
    return {f"{part}.{name}": tensor for name, tensor in named_tensors(net.get_submodule(part)).items()}


def allocate(net: Decoder, names: Iterable[str], device: torch.device) -> None:
    """Replace tensors of a model by uninitialized ones on a device."""
    tensors = named_tensors(net)
    for name in names:
        set_tensor(net, name, torch.empty_like(tensors[name], device=device), tensors[name])


def set_tensor(net: Decoder, name: str, values: Tensor, like: Tensor) -> None:
    """Replace a tensor of a model. The new one is a frozen parameter if `like` is a parameter, else a buffer."""
    owner, _, leaf = name.rpartition(".")
    is_parameter = isinstance(like, nn.Parameter)
    setattr(net.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False) if is_parameter else values)


def is_fully_local(model: nn.Module) -> bool:
    """Whether all parameters are unsharded tensors on this rank."""
    return all(type(p.data) is Tensor and shard_slice(p).shape == p.shape for p in model.parameters())


@torch.no_grad()
def gathered_logits(
    model: Decoder, meta_model: Decoder, rows: Sequence[Sequence[int]], dist: DistributedContext, logits_fn: LogitsFn
) -> LazyLogits | None:
    """Return the result of `logits_fn` on the main process, None on other ranks. Must be called on all ranks.

    Logits are computed by an unsharded copy, `meta_model`, whose layers are filled before and freed after their
    forward. They depend on the weights only, not on the parallel layout.
    """
    reshard(model)
    tensors = named_tensors(model)
    names = {name: [*submodule_tensors(meta_model, name)] for name, _ in model_parts(meta_model)}
    if not dist.is_main_process:
        for name in (name for part_names in names.values() for name in part_names):
            full_tensor(tensors[name])
        return None

    def fill(part: str) -> None:  # in the same order on all ranks
        for name in names[part]:
            set_tensor(meta_model, name, full_tensor(tensors[name]).to(dist.device), tensors[name])

    load_on_demand(meta_model, fill, lambda part: allocate(meta_model, names[part], torch.device("meta")))
    logits = logits_fn(meta_model, rows, dist.device)
    fill("head")
    return logits
