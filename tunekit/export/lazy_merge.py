"""A base and an adapter as one checkpoint that is nowhere: every tensor is merged when it is read."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.merge import MergedTensors
from tunekit.checkpoint.peft_reader import AdapterContents, read_contents
from tunekit.checkpoint.safetensors_io import TensorMeta, TensorReader


class LazyMerger(TensorReader):
    """Tensors of base and adapter together."""

    def __init__(self, base: HFCheckpoint, held: AdapterContents) -> None:
        super().__init__(base.tensors)
        self.updates = TensorReader(held.tensors)
        self.merging = MergedTensors(base, held, TensorReader(base.tensors), self.updates)

    def __enter__(self) -> "LazyMerger":
        return self

    def __exit__(self, *error: object) -> None:
        self.merging.tensors.__exit__(*error)
        self.updates.__exit__(*error)

    def __getitem__(self, name: str) -> Tensor:
        return self.merging.tensor(name)

    def lend(self, name: str) -> Tensor:
        return self[name]


@dataclass(frozen=True)
class LazyMergedCheckpoint(HFCheckpoint):
    """What `tune merge` would write."""

    base: HFCheckpoint
    held: AdapterContents

    @staticmethod
    def of(base: HFCheckpoint, adapter: Path) -> "LazyMergedCheckpoint":
        held = read_contents(adapter, base)
        with LazyMerger(base, held) as tensors:
            tied = base.spec.tied and not tensors.merging.untied
        return LazyMergedCheckpoint(
            base.path, base.name, base.config, base.family, replace(base.spec, tied=tied), base, held
        )

    @cached_property
    def tensors(self) -> dict[str, TensorMeta]:
        with self.reader() as tensors:
            found = tensors.merging.entries()
            files = {name: self.base.tensors[source].file for name, (_, source) in tensors.merging.sources.items()}
        return {name: TensorMeta(files[name], shape, dtype) for name, (shape, dtype) in found.items()}

    def reader(self) -> LazyMerger:
        return LazyMerger(self.base, self.held)
