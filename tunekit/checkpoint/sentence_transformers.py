"""Files with which sentence-transformers opens a checkpoint or adapter as an embedding model: pooling and prompts."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from tunekit.checkpoint.hf_checkpoint import read_json
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.embedding_datasets import Pooling, RerankingDataset, RerankingPairsDataset
from tunekit.errors import UserError

MODULES, PROMPTS, TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
POOLING = "1_Pooling/config.json"
FILES = (MODULES, PROMPTS, TRANSFORMER, POOLING)
# Key of each pooling mode in 1_Pooling/config.json, as written by all versions before 6 and read by all.
POOLING_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class EmbeddingModules:
    """The modules of an embedding model after the decoder."""

    dim: int
    pooling: Pooling
    normalize: bool
    max_length: int  # tokens; longer texts are truncated
    prompts: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, str]:
        """Contents by file name."""
        kinds = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if self.normalize else {})
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds.items())
        ]
        pooling: dict[str, Any] = {key: mode == self.pooling for key, mode in POOLING_KEYS.items()}
        config = {"prompts": self.prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        contents = {
            MODULES: modules,
            PROMPTS: config,
            TRANSFORMER: {"max_seq_length": self.max_length, "do_lower_case": False},
            POOLING: {"word_embedding_dimension": self.dim, **pooling, "include_prompt": True},
        }
        return to_json(contents)


def reranker_files(mixture: MixtureBase) -> dict[str, str]:
    """Files with which CrossEncoder encodes pairs of texts as `mixture` does; none for other rows.

    Without them, it would render the texts with the chat template of the model, if there is one.
    """
    kinds = RerankingDataset | RerankingPairsDataset
    if not all(isinstance(dataset, kinds) for dataset in mixture.dataset_configs):
        return {}
    transformer = "sentence_transformers.base.modules.transformer.Transformer"
    contents = {
        MODULES: [{"idx": 0, "name": "0", "path": "", "type": transformer}],
        PROMPTS: {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid", "prompts": {}},
        TRANSFORMER: {
            "transformer_task": "sequence-classification",
            "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            "module_output_name": "scores",
            "max_seq_length": mixture.max_length,
        },
    }
    return to_json(contents)


def to_json(contents: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}


def read_pooling(*directories: Path | str | None) -> Pooling | None:
    """Pooling of the first of these directories that is an embedding model; None if there is none."""
    files = (Path(directory) / POOLING for directory in directories if directory is not None)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    config = read_json(file)
    mode = config.get("pooling_mode") or next((mode for key, mode in POOLING_KEYS.items() if config.get(key)), None)
    pooling: Pooling | None = next((known for known in POOLING_KEYS.values() if known == mode), None)
    if pooling is None or not config.get("include_prompt", True):
        problem = "without prompts (include_prompt)" if pooling else f"with {mode or 'another mode'}"
        raise UserError(f"{file}: pooling {problem} is not supported. Set pooling={' or '.join(get_args(Pooling))}.")
    return pooling


def copy_modules(source: Path, target: Path) -> None:
    """Copy the files of an embedding model, if it is one."""
    for name in FILES:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)
