"""adapter_config.json of PEFT."""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.adapters.module_patterns import compile_pattern
from tunekit.checkpoint.model_dir import read_json
from tunekit.distributed import worker_env
from tunekit.errors import UserError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDING_TASK = "FEATURE_EXTRACTION"  # PEFT task type of a model without a head
HEAD_MODULES = ("classifier", "score")  # PEFT lists both in modules_to_save of any classifier
# Keys of unsupported PEFT features; each must have one of these values. The first is the default.
UNSUPPORTED = ("use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config", "layer_replication")
SUPPORTED_VALUES = {**dict.fromkeys(UNSUPPORTED, (None,)), "bias": ("none", "all", "lora_only")}
SUPPORTED_VALUES |= {"lora_bias": (None, False)}
SUPPORTED_VALUES |= {"use_qalora": (None, False), "alora_invocation_tokens": (None, [])}
# Other initializations change the base weights.
SUPPORTED_VALUES |= {"init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal")}
# In PEFT before 0.3, only some of the layers that are fused in a tensor had an adapter.
SUPPORTED_VALUES |= {"enable_lora": (None, [])}
# Keys of PEFT 0.21 that are read, or do not change the logits of the saved tensors.
KNOWN_KEYS = {"alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"}
KNOWN_KEYS |= {"eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"}
KNOWN_KEYS |= {"layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config"}
KNOWN_KEYS |= {"megatron_core", "merge_weights", "modules_to_save", "peft_type", "peft_version", "qalora_group_size"}
KNOWN_KEYS |= {"r", "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters", "task_type"}
KNOWN_KEYS |= {"trainable_token_indices", "use_dora", "use_rslora"}
OFF = (None, False, 0, "", [], {})  # values of a key that has no effect

LAYER_INDEX = re.compile(r".*?\.[^.]*\.(\d+)\.")  # as in PEFT: the first number in the name of a module

# Types of the values, and their names in errors. Keys other than `r` and `lora_alpha` may be missing or null.
NUMBER, NAMES, OBJECT = ((int, float), "a number"), ((list, str), "a list of names"), ((dict,), "an object")
TYPES: dict[str, tuple[tuple[type, ...], str]] = {"r": ((int,), "an integer"), "lora_alpha": NUMBER}
TYPES |= {"lora_dropout": NUMBER, "rank_pattern": OBJECT, "alpha_pattern": OBJECT}
TYPES |= dict.fromkeys(("use_rslora", "use_dora"), ((bool,), "true or false"))
TYPES |= dict.fromkeys(("target_modules", "target_parameters", "modules_to_save"), NAMES)


@dataclass(frozen=True)
class PeftConfigFile:
    """adapter_config.json."""

    file: Path
    values: Mapping[str, Any]

    @staticmethod
    def open(folder: Path) -> "PeftConfigFile":
        config = read_json(folder / CONFIG)
        if config.get("peft_type") != "LORA":
            raise UserError(f"{folder / CONFIG}: unsupported peft_type {config.get('peft_type')!r}; must be 'LORA'")
        for key, allowed in SUPPORTED_VALUES.items():
            if config.get(key, allowed[0]) not in allowed:
                raise UserError(f"{folder / CONFIG}: unsupported value {key}={config[key]!r}")
        for key, (types, expected) in TYPES.items():
            is_optional = key not in ("r", "lora_alpha")
            if key in config and type(config[key]) not in types and not (is_optional and config[key] is None):
                raise UserError(f"{folder / CONFIG}: {key}: must be {expected}, got {json.dumps(config[key])}")
        check_token_indices(folder / CONFIG, config.get("trainable_token_indices"))
        unknown = config.keys() - KNOWN_KEYS - SUPPORTED_VALUES.keys()
        if keys := sorted(key for key in unknown if config[key] not in OFF):
            warn_unknown_keys(folder / CONFIG, ", ".join(keys))
        return PeftConfigFile(folder / CONFIG, config)

    @property
    def is_before_0_19(self) -> bool | None:
        """Whether PEFT before 0.19 saved this adapter; None if unknown: PEFT before 0.18 did not save its version."""
        match = re.match(r"(\d+)\.(\d+)", str(self.values.get("peft_version")))
        return None if match is None else (int(match[1]), int(match[2])) < (0, 19)

    @property
    def base_name(self) -> str:
        """Name of the base checkpoint, with its revision. Raises UserError if there is none."""
        name = self.values.get("base_model_name_or_path")
        if not isinstance(name, str):
            raise UserError(f"{self.file}: no 'base_model_name_or_path', so the base model is unknown")
        revision = self.values.get("revision")
        return f"{name}@{revision}" if isinstance(revision, str) and not Path(name).is_dir() else name

    @property
    def has_score_head(self) -> bool:
        """Whether the adapter belongs to a model with a score head."""
        return self.task_type in ("SEQ_CLS", "TOKEN_CLS")

    @property
    def task_type(self) -> str | None:
        """PEFT task type."""
        return self.values.get("task_type")

    @property
    def trained_for(self) -> str:
        """Clause for error messages that names the base model."""
        return f"this adapter was trained for {self.values.get('base_model_name_or_path') or 'another model'}"

    @property
    def adapter(self) -> LoRAConfig:
        """Adapter config without rank_pattern and alpha_pattern."""
        config = self.values
        adapter_class = DoRAConfig if config.get("use_dora") else LoRAConfig
        bias, use_rslora = config.get("bias") or "none", bool(config.get("use_rslora"))
        try:
            rank, alpha, dropout = int(config["r"]), float(config["lora_alpha"]), float(config.get("lora_dropout") or 0)
            return adapter_class(rank, alpha, dropout, use_rslora=use_rslora, bias=bias)
        except KeyError as error:
            raise UserError(f"{self.file}: {error} is missing") from error
        except (OverflowError, TypeError, ValueError) as error:
            raise UserError(f"{self.file}: {error}") from error

    def rank_and_alpha(self, key: str, adapter: LoRAConfig) -> tuple[int, float]:
        """Rank and alpha of the PEFT name `key`, from the first pattern that matches its end."""
        rank = self.lookup_pattern("rank_pattern", key, adapter.rank)
        return rank, self.lookup_pattern("alpha_pattern", key, adapter.alpha)

    def lookup_pattern(self, table: str, key: str, default: Any) -> Any:
        for pattern, value in (self.values.get(table) or {}).items():
            try:
                compile_pattern(pattern)  # a pattern of a downloaded adapter may take exponential time
                if not re.match(rf"(.*\.)?({pattern})$", key):
                    continue
                if (number := type(default)(value)) <= 0:
                    raise ValueError(f"must be > 0, got {number}")
                return number
            except (OverflowError, TypeError, ValueError) as error:
                raise UserError(f"{self.file}: {table}: {pattern}: {error}") from error
        return default

    def key_that_excludes(self, module: str) -> str | None:
        """Key by which PEFT gives a module no adapter, and ignores its tensors; None if there is none.

        Lists of names are compared, patterns of exclude_modules and target_modules are not.
        """
        excluded, targets = self.values.get("exclude_modules"), self.values.get("target_modules")
        if isinstance(excluded, list) and is_listed(module, excluded):
            return "exclude_modules"
        if not isinstance(targets, list) or module in targets or self.values.get("target_parameters"):
            return None
        if not is_listed(module, targets):
            return "target_modules"
        layers = self.values.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers or []
        index = None if self.values.get("layers_pattern") else LAYER_INDEX.match(module)
        return "layers_to_transform" if layers and index and int(index[1]) not in layers else None

    def check_modules_to_save(self, modules: Iterable[str]) -> None:
        """Raise UserError if a module in modules_to_save has no tensors."""
        optional = HEAD_MODULES if self.has_score_head else ()
        for required in self.values.get("modules_to_save") or []:
            if required not in optional and not any(module.endswith(required) for module in modules):
                raise UserError(f"{self.file}: modules_to_save contains {required}, but {TENSORS} has no tensors of it")

    def token_ids(self, module: str) -> tuple[int, ...]:
        """Ids of the token rows of a module, in the order of the file."""
        value = self.values.get("trainable_token_indices") or []
        ids = value if isinstance(value, list) else next((v for k, v in value.items() if module.endswith(k)), [])
        return tuple(ids)

    def is_target_parameter(self, tensor: str) -> bool:
        """Whether a checkpoint tensor is in target_parameters instead of target_modules."""
        return any(f".{tensor}".endswith(f".{target}") for target in self.values.get("target_parameters") or [])


def is_listed(module: str, names: list[str]) -> bool:
    """Whether a name is that of a module, or the end of it."""
    return any(f".{module}".endswith(f".{name}") for name in names)


@cache
def warn_unknown_keys(file: Path, keys: str) -> None:
    """Print a line about keys that are ignored, once for each file."""
    if worker_env.is_main_worker():
        tqdm.write(
            f"warning: {file}: unknown keys are ignored: {keys}. Check that they do not matter.", file=sys.stderr
        )


def check_token_indices(file: Path, value: Any) -> None:
    """Raise UserError unless `trainable_token_indices` is a list of ids, or lists by module."""
    lists = [*value.values()] if isinstance(value, dict) else [value or []]
    if not all(isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) for ids in lists):
        raise UserError(f"{file}: trainable_token_indices must be a list of token ids, or such lists by module")
