"""A base and an adapter as one checkpoint that is nowhere: every tensor is merged when it is read."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from tunekit.checkpoint.folder import Folder
from tunekit.checkpoint.merge import Merging
from tunekit.checkpoint.tensors import Reader, Stored
from tunekit.checkpoint.updates import Contents, contents


class Merger(Reader):
    """Tensors of base and adapter together."""

    def __init__(self, base: Folder, held: Contents) -> None:
        super().__init__(base.tensors)
        self.updates = Reader(held.tensors)
        self.merging = Merging(base, held, Reader(base.tensors), self.updates)

    def __enter__(self) -> "Merger":
        return self

    def __exit__(self, *error: object) -> None:
        self.merging.tensors.__exit__(*error)
        self.updates.__exit__(*error)

    def __getitem__(self, name: str) -> Tensor:
        return self.merging.tensor(name)

    def lend(self, name: str) -> Tensor:
        return self[name]


@dataclass(frozen=True)
class Merged(Folder):
    """What `tune merge` would write."""

    base: Folder
    held: Contents

    @staticmethod
    def of(base: Folder, adapter: Path) -> "Merged":
        held = contents(adapter, base)
        with Merger(base, held) as tensors:
            tied = base.spec.tied and not tensors.merging.untied
        return Merged(base.path, base.name, base.config, base.family, replace(base.spec, tied=tied), base, held)

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        with self.reader() as tensors:
            found = tensors.merging.entries()
            files = {name: self.base.tensors[source].file for name, (_, source) in tensors.merging.sources.items()}
        return {name: Stored(files[name], shape, dtype) for name, (shape, dtype) in found.items()}

    def reader(self) -> Merger:
        return Merger(self.base, self.held)
