"""Models in memory beside the one that is trained: what preference is measured against, or a teacher."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tunekit import assemble
from tunekit.adapters import Frozen, Full, LoRA
from tunekit.checkpoint import peft
from tunekit.checkpoint.folder import Folder
from tunekit.formats import Plain
from tunekit.hub import fetch
from tunekit.layout.split import imagine
from tunekit.parallel.choice import Sizes
from tunekit.plan.probe import CPU, Step, Weight, asked, weights
from tunekit.precision import Precision

CONFIG = fetch.Files(("config.json", "adapter_config.json", "adapter_model.safetensors"))


class Held(NamedTuple):
    """What a rank has of a model: weights of the embedding, norm and head, of each layer, and bytes while it is asked
    beside them."""

    root: list[Weight]
    layers: list[list[Weight]]
    passing: int


HELD: dict[tuple[Any, str], Held] = {}  # by all that it depends on: other divisions of the student ask again


@dataclass(frozen=True)
class Second:
    """A model that is only asked."""

    name: str
    source: Folder
    weights: Plain
    precision: Precision
    adapter: Full | LoRA = Frozen()
    around: bool = False  # whether the model that is trained runs inside its pass

    def held(self, sizes: Sizes, step: Step) -> Held:
        """As a rank has it, which asks about the rows of a step."""
        how = sizes.tensor, sizes.expert, sizes.context, step.rows, step.length, step.device
        key = self.source.spec, repr((str(self.source.path), self.weights, self.precision, self.adapter, how))
        if key not in HELD:
            HELD[key] = self.looked_at(sizes, step)
        return HELD[key]

    def looked_at(self, sizes: Sizes, step: Step) -> Held:
        net = assemble.outline(self.source, self.weights, self.adapter)
        imagine(net, sizes)
        stored = self.source.dtypes if self.source.has_weights else dict.fromkeys(net.shapes, self.source.usual_dtype)
        self.precision.apply(net.requires_grad_(False), stored, CPU)
        layers = [list(weights(layer, {})) for layer in net.layers]
        inner = {id(p) for layer in net.layers for p in layer.parameters()}
        return Held(list(weights(net, {}, inner)), layers, asked(net, step))


def asks(said: dict[str, Any], models: tuple[Second, ...]) -> int:
    """Forward passes of the model itself that tell what it would expect without its updates."""
    reference = said.get("reference")
    return int(reference is not None and not models and reference.asks(said["loss"]))


def beside(said: dict[str, Any], source: Folder, precision: Precision) -> Iterator[Second]:
    """What a recipe's choices keep: a copy of what training begins with, a teacher that is asked in each step."""
    reference, teacher = said.get("reference"), said.get("teacher")
    if reference is not None and reference.copies(said["adapter"], said["loss"]):
        adapter = said["adapter"] if isinstance(said["adapter"], LoRA) else Frozen()
        yield Second("the copy", source, said["weights"], precision, unstarted(adapter))
    if teacher is not None and "folder" not in vars(teacher):
        own, adapter = described(teacher.model)
        yield Second("the teacher", own, teacher.weights, teacher.precision, adapter, around=True)


def described(name: str) -> tuple[Folder, Full | LoRA]:
    """A checkpoint, an adapter on its base, or what a run has left; no tokenizer is asked for."""
    path = assemble.finished(fetch.resolve(name, CONFIG))
    if not (path / peft.CONFIG).is_file():
        return Folder.open(path, name), Frozen()
    base = peft.base(path)
    source = peft.headed(path, Folder.open(fetch.resolve(base, CONFIG), base))
    return source, peft.described(path, source)


def unstarted(adapter: Full | LoRA) -> Full | LoRA:
    """As large as it is, without the numbers that it begins with."""
    return adapter if adapter.start is None else replace(adapter, start=None)  # pyright: ignore


def untold(said: dict[str, Any]) -> Iterator[str]:
    """What a plan leaves out, for people."""
    if (policy := said.get("on_policy")) is not None and policy.share:
        yield "not planned: the student's own answers, the time they take and the keys and values that they need"
    if said.get("reference") is not None:
        yield "planned as if no prompt were shared: those that are computed once save memory and time"
    if (teacher := said.get("teacher")) is not None and "folder" in vars(teacher):
        yield "not planned: the teacher, which is in memory only while it writes what it expects, once"
    if said.get("forgetting") is not None:
        yield "not planned: the time of looking for what is forgotten"
