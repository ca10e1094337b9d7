"""Directories of PEFT adapters: adapter_config.json, adapter_model.safetensors, and possibly a tokenizer."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tunekit.checkpoint.model_dir import ModelDir
from tunekit.checkpoint.peft_config import CONFIG, TENSORS, PeftConfigFile
from tunekit.checkpoint.safetensors_io import SafetensorsHeader
from tunekit.errors import UserError
from tunekit.models.families import classifiers
from tunekit.models.spec import ScoreHead

PREFIX = "base_model.model."
# Metadata of adapter_model.safetensors, in files that tunekit has saved:
BLOCKS_KEY = "parts"  # ranks and scales of layers that are fused in one tensor
CONFIG_KEY = "config"  # changed keys of the base's config.json
HEAD_KEY = "head"  # class names of a score head


class AdapterDir(ModelDir):
    """Adapter on disk. Its config is read when it is opened, its header on first use, tensors when they are loaded."""

    def __init__(self, path: Path, peft: PeftConfigFile) -> None:
        super().__init__(path)
        self.peft = peft

    @staticmethod
    def is_adapter(path: Path) -> bool:
        """Whether a directory has an adapter instead of a checkpoint."""
        return (path / CONFIG).is_file()

    @classmethod
    def open(cls, path: Path) -> Self:
        if not cls.is_adapter(path):
            raise UserError(f"{path}: not an adapter directory (no {CONFIG})")
        return cls(path, PeftConfigFile.open(path))

    @property
    def file(self) -> Path:
        """The file with the tensors."""
        return self.path / TENSORS

    @cached_property
    def header(self) -> SafetensorsHeader:
        if not self.file.is_file():
            raise UserError(
                f"{self.path}: no {TENSORS}, the only file of weights that is read. Convert adapter_model.bin with "
                "PEFT: PeftModel.from_pretrained(base_model, path).save_pretrained(path)"
            )
        return SafetensorsHeader.read(self.file)

    def metadata(self, key: str) -> Mapping[str, Any]:
        """Metadata that tunekit has saved as a JSON object; empty in an adapter of another program."""
        try:
            value = json.loads(self.header.metadata.get(key, "{}")) if self.file.is_file() else {}
        except ValueError as error:
            raise UserError(f"{self.file}: metadata {key!r}: not valid JSON ({error})") from error
        if not isinstance(value, dict):
            raise UserError(f"{self.file}: metadata {key!r}: must be a JSON object")
        return value

    @property
    def config_changes(self) -> Mapping[str, Any]:
        """Overridden keys of the base's config.json; empty if the adapter was trained without any."""
        return self.metadata(CONFIG_KEY)

    @cached_property
    def score_head(self) -> ScoreHead | None:
        """Score head, if the adapter has one. Its pad token is that of the adapter's tokenizer, if there is one."""
        if not self.peft.has_score_head:
            return None
        tensors, name = self.header.tensors, PREFIX + classifiers.HEAD
        if f"{name}.weight" not in tensors:
            raise UserError(f"{self.file}: no {classifiers.HEAD}.weight for {self.peft.task_type} of {CONFIG}")
        pad = self.tokenizer.pad if self.has_tokenizer else None
        num_labels, per_token = tensors[f"{name}.weight"].shape[0], self.peft.task_type == "TOKEN_CLS"
        return ScoreHead(num_labels, per_token, f"{name}.bias" in tensors, pad)
