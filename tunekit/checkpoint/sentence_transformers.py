"""Files with which sentence-transformers opens a checkpoint or adapter as an embedding model: pooling and prompts."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from tunekit.checkpoint.model_dir import read_json, read_json_value
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.embedding_datasets import Pooling, RerankingDataset, RerankingPairsDataset
from tunekit.errors import UserError

MODULES, PROMPTS, TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
MODULE_FILES = (MODULES, PROMPTS, TRANSFORMER)
POOLING = "1_Pooling/config.json"
SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")
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


def is_cross_encoder(directory: Path) -> bool:
    """Whether a directory has the files of a reranker."""
    file = directory / PROMPTS
    return file.is_file() and read_json(file).get("model_type") == "CrossEncoder"


def choose_pooling(pooling: Pooling | None, *directories: Path | str | None) -> Pooling | None:
    """`pooling`, or else that of the first of these directories that is an embedding model; None if there is none.

    Raise UserError if the embedding model has other modules than a transformer, pooling and normalization.
    """
    files = (find_pooling(Path(directory)) for directory in directories if directory is not None)
    file = next(filter(None, files), None)
    return pooling if pooling or file is None else read_pooling(file)


def find_pooling(directory: Path) -> Path | None:
    """Config file of the pooling module; None for a directory that is not an embedding model."""
    paths = {module_class(module): directory / module["path"] for module in read_modules(directory)}
    if not paths or is_cross_encoder(directory):
        return None
    if unsupported := [name for name in paths if name not in SUPPORTED_MODULES]:
        problem = f"module {unsupported[0]} is not supported"
        raise UserError(f"{directory / MODULES}: {problem}. Remove it in a copy of the model to train without it.")
    return paths["Pooling"] / "config.json" if "Pooling" in paths else None


def read_modules(directory: Path) -> list[dict[str, Any]]:
    """Modules of a model of sentence-transformers; none for other directories."""
    file = directory / MODULES
    modules = read_json_value(file) if file.is_file() else []
    if not isinstance(modules, list) or not all(
        isinstance(item, dict) and item.keys() >= {"type", "path"} for item in modules
    ):
        raise UserError(f"{file}: must be a list of modules, each with `type` and `path`")
    return modules


def is_embedding_model(directory: Path) -> bool:
    return any(module_class(module) == "Pooling" for module in read_modules(directory))


def module_class(module: Mapping[str, Any]) -> str:
    """Class name, which is the same in all versions of sentence-transformers; the full name of other classes."""
    name: str = module["type"]
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name


def read_pooling(file: Path) -> Pooling:
    """Pooling mode of a config file."""
    config = read_json(file)
    modes = config.get("pooling_mode") or [
        POOLING_KEYS.get(key, key) for key, on in config.items() if key.startswith("pooling_mode_") and on
    ]
    mode = modes if isinstance(modes, str) else " and ".join(modes)
    pooling: Pooling | None = next((known for known in POOLING_KEYS.values() if known == mode), None)
    if pooling is None or not config.get("include_prompt", True):
        problem = "without prompts (include_prompt)" if pooling else f"with {mode or 'no mode'}"
        raise UserError(f"{file}: pooling {problem} is not supported. Set pooling={' or '.join(get_args(Pooling))}.")
    return pooling


def copy_modules(source: Path, target: Path) -> None:
    """Copy the files of a model of sentence-transformers, if it is one, with the weights of modules after the first."""
    for name in MODULE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    for path in (module["path"] for module in read_modules(source)[1:]):
        is_inside = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", path)
        if is_inside and (source / path).is_dir():  # a module without options may have none
            shutil.copytree(source / path, target / path, dirs_exist_ok=True)
