"""A virtual checkpoint of a base with an adapter: every tensor is merged when it is read."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.merge import MergedTensors
from tunekit.checkpoint.peft_reader import AdapterContents, read_contents
from tunekit.checkpoint.safetensors_io import TensorMeta, TensorReader


class LazyMerger(TensorReader):
    """Reads tensors of a base with an adapter merged."""

    def __init__(self, base: HFCheckpoint, contents: AdapterContents) -> None:
        super().__init__(base.tensors)
        self.adapter_tensors = TensorReader(contents.tensors)
        self.merged = MergedTensors(base, contents, TensorReader(base.tensors), self.adapter_tensors)

    def __enter__(self) -> "LazyMerger":
        return self

    def __exit__(self, *error: object) -> None:
        self.merged.tensors.__exit__(*error)
        self.adapter_tensors.__exit__(*error)

    def __getitem__(self, name: str) -> Tensor:
        return self.merged.read(name)

    def read_mapped(self, name: str) -> Tensor:
        return self[name]


@dataclass(frozen=True)
class LazyMergedCheckpoint(HFCheckpoint):
    """Virtual checkpoint with the contents that `tune merge` would write."""

    base: HFCheckpoint
    adapter: AdapterContents

    @staticmethod
    def with_adapter(base: HFCheckpoint, adapter: NoAdapter | LoRAConfig) -> HFCheckpoint:
        """The base with the weights of an adapter; the base itself without any."""
        if adapter.adapter_path is None:
            return base
        contents = read_contents(Path(adapter.adapter_path), base)
        with LazyMerger(base, contents) as tensors:
            tied = base.spec.tie_word_embeddings and not tensors.merged.untied
        spec = replace(base.spec, tie_word_embeddings=tied)
        fields = base.path, base.name, base.config, base.family, spec, base, contents
        return LazyMergedCheckpoint(
            *fields,
            tokenizer_dir=base.tokenizer_dir,
            chat_tokenizer=base.chat_tokenizer,
            config_changes=base.config_changes,
            new_head=base.new_head,
        )

    @cached_property
    def tensors(self) -> dict[str, TensorMeta]:
        with self.reader() as tensors:
            entries = tensors.merged.entries()
            files = {name: self.base.tensors[source].file for name, (_, source) in tensors.merged.sources.items()}
        return {name: TensorMeta(files[name], shape, dtype) for name, (shape, dtype) in entries.items()}

    def reader(self) -> LazyMerger:
        return LazyMerger(self.base, self.adapter)
