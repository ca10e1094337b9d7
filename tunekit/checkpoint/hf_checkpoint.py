"""Checkpoint directories in Hugging Face format: config.json, safetensors with or without an index, tokenizer files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, Self

import torch

from tunekit.checkpoint import dequantize
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.model_dir import ModelDir, read_json
from tunekit.checkpoint.safetensors_io import (
    CONFIG_DTYPES,
    RandomTensor,
    ResizedTensor,
    SafetensorsHeader,
    TensorMeta,
    TensorReader,
    read_pickle_header,
)
from tunekit.data.new_tokens import NewToken, TokenTexts, add_new_tokens
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.families.classifiers import is_base_model
from tunekit.models.families.config_overrides import model_section, override_config
from tunekit.models.families.registry import Family, find_family
from tunekit.models.spec import DecoderSpec
from tunekit.models.weight_map import (
    KeyMapping,
    KeyRule,
    MultiTokenPrediction,
    Shape,
    load_mappings,
    match_hub_name,
    to_hub_name,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# (default file, index of several files, pattern of other files) by format, in the order of preference.
LAYOUTS = ((WEIGHTS, INDEX, "*.safetensors"), (PICKLE, PICKLE_INDEX, PICKLE))
# RoPE buffers in early Llama checkpoints, which can be computed from config.json.
ROPE_BUFFER = ".rotary_emb.inv_freq"
EMBED, PER_LAYER_EMBED = "embed.weight", "per_layer.embed.weight"
MISSING = object()
ConfigValue = str | int | float | bool | None | tuple[str | int | float | bool, ...]  # of a key of config.json
ConfigOverrides = dict[str, ConfigValue | dict[str, ConfigValue | dict[str, ConfigValue]]]
# Weights with any other dtype are refused.
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def suggest_checkpoint(path: Path) -> str:
    """Return a hint for a directory that is an adapter or a run directory instead of a checkpoint."""
    final = path / "final"
    if (path / "adapter_config.json").is_file():
        merge = f"Merge it with `tune merge BASE {path} OUT`"
        return f" This directory is an adapter. {merge}, or continue training it with adapter.adapter_path={path}."
    if (final / "adapter_config.json").is_file():
        return f" This is a run directory with an adapter. Merge it with `tune merge BASE {path} OUT`."
    return f" This is a run directory. Use {final}." if (final / "config.json").is_file() else ""


class CheckpointDir(ModelDir):
    """Directory of a checkpoint. Headers are read on first use."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.shapes: dict[DecoderSpec, Mapping[str, Shape]] = {}
        self.unused_models: dict[DecoderSpec, Decoder] = {}

    @classmethod
    def open(cls, path: Path) -> Self:
        file = path / "config.json"
        if not file.is_file():
            raise UserError(f"{path}: not a checkpoint directory (no config.json).{suggest_checkpoint(path)}")
        directory = cls(path)
        dequantize.check_quant_format(directory.config, str(file))
        return directory

    def build_model(self, spec: DecoderSpec) -> Decoder:
        """A model on the meta device: the one that `model_shapes` has built, or a new one."""
        model = self.unused_models.pop(spec, None)
        if model is None:
            with torch.device("meta"):
                model = Decoder(spec)
            self.shapes[spec] = model.shapes
        return model

    def model_shapes(self, spec: DecoderSpec) -> Mapping[str, Shape]:
        """Shapes of all parameters of a model."""
        if spec not in self.shapes:
            self.unused_models[spec] = self.build_model(spec)
        return self.shapes[spec]

    @cached_property
    def tensor_meta(self) -> dict[str, TensorMeta]:
        """All tensors of the files by name. Raises UserError if they disagree with the index."""
        tensors: dict[str, TensorMeta] = {}
        for file in self.files:
            header = self.headers.get(file.name)
            for name, meta in (header.tensors if header else read_pickle_header(file)).items():
                if name in tensors:
                    raise UserError(f"{file}: tensor {name} is also in {tensors[name].file.name}")
                tensors[name] = meta
        if self.index is not None:
            check_index(self.index, self.tensor_names, tensors)
        return tensors

    @cached_property
    def headers(self) -> Mapping[str, SafetensorsHeader]:
        """Headers of the safetensors files by file name."""
        return {file.name: SafetensorsHeader.read(file) for file in self.files if file.suffix == ".safetensors"}

    @cached_property
    def files(self) -> list[Path]:
        """Weight files: those of the index, the file with the default name, or the only one."""
        if self.index is not None:
            return [self.path / name for name in sorted(set(self.tensor_names.values()))]
        for default, _, pattern in LAYOUTS:
            files = [self.path / default] if (self.path / default).is_file() else sorted(self.path.glob(pattern))
            if len(files) > 1:
                raise UserError(f"{self.path}: {len(files)} {pattern} files, but no {INDEX}")
            if files:
                return files
        remedy = "Set init=random to train from random weights"
        raise UserError(f"{self.path}: no weights (*.safetensors or {PICKLE}). {remedy}.")

    @cached_property
    def index(self) -> Path | None:
        """Index file of a sharded checkpoint. An index next to a file with the default name is stale and ignored."""
        for default, index, pattern in LAYOUTS:
            if (self.path / index).is_file() and not (self.path / default).is_file():
                return self.path / index
            if any(self.path.glob(pattern)):
                return None
        return None

    @cached_property
    def index_content(self) -> Mapping[str, Any]:
        """Content of the index; empty if there is none."""
        return {} if self.index is None else read_json(self.index)

    @cached_property
    def tensor_names(self) -> dict[str, str]:
        """File name by tensor name, from the index. Raises UserError if a file is missing."""
        if self.index is None:
            return {}
        weight_map = self.index_content.get("weight_map")
        is_mapping = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
        if not weight_map or not is_mapping:
            raise UserError(f"{self.index}: 'weight_map' must map tensor names to file names")
        files = {path.name for path in self.path.iterdir() if path.is_file()}
        for name in dict.fromkeys(weight_map.values()):
            if Path(name).name != name:
                raise UserError(f"{self.index}: {name!r} is outside the directory")
            if name not in files:
                raise UserError(f"{self.index}: file {name} not found. Download the checkpoint again.")
        return weight_map


@dataclass(frozen=True)
class HFCheckpoint:
    """A checkpoint on disk. Headers are read on first use, tensors one at a time."""

    directory: CheckpointDir
    name: str  # as given by the user: a Hub name, a bundled name or a path
    config: Mapping[str, Any]
    family: Family
    spec: DecoderSpec
    adapter: AdapterDir | None = field(default=None, kw_only=True)  # from which training starts, or to be loaded
    tokenizer_dir: ModelDir | None = field(default=None, kw_only=True)  # overrides `directory`
    chat_tokenizer: Tokenizer | None = field(default=None, kw_only=True)  # has the chat template to save
    keeps_prequantized: bool = field(default=False, kw_only=True)  # read 4-bit weights as fp32, unrounded
    config_changes: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # overridden keys of config.json
    new_head: int | None = field(default=None, kw_only=True)  # seed of a score head that is not in the files
    companions: Mapping[str, str] = field(default_factory=dict, kw_only=True)  # further files to save, by name
    new_tokens: tuple[NewToken, ...] = field(default=(), kw_only=True)  # tokens that are not in the files
    new_rows: Mapping[str, int] = field(default_factory=dict, kw_only=True)  # rows not in the files, by parameter
    trained_ids: tuple[int, ...] = field(default=(), kw_only=True)  # tokens whose embeddings an adapter trains

    @property
    def is_base_model(self) -> bool:
        """Whether it has no head: an embedding model."""
        return is_base_model(self.config)

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def tokenizer_path(self) -> Path:
        """Directory of the tokenizer."""
        return (self.tokenizer_dir or self.directory).path

    @property
    def has_tokenizer(self) -> bool:
        return (self.tokenizer_dir or self.directory).has_tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with new tokens and the chat template of the run."""
        return self.chat_tokenizer or (self.tokenizer_dir or self.directory).tokenizer

    @staticmethod
    def open(path: Path, name: str | None = None) -> "HFCheckpoint":
        return HFCheckpoint.from_dir(CheckpointDir.open(path), name)

    @staticmethod
    def from_dir(directory: CheckpointDir, name: str | None = None) -> "HFCheckpoint":
        path, config = directory.path, directory.config
        return HFCheckpoint(directory, name or str(path), config, *find_family(config, str(path / "config.json")))

    def open_adapter(self, path: str | Path) -> AdapterDir:
        """The adapter in a directory: the one that was opened with this checkpoint, or another."""
        path = Path(path)
        return self.adapter if self.adapter is not None and self.adapter.path == path else AdapterDir.open(path)

    def with_config_overrides(self, overrides: Mapping[str, Any]) -> "HFCheckpoint":
        """Copy with overridden keys of config.json. Raises UserError for unknown keys or invalid values."""
        if not overrides:
            return self
        try:
            config = override_config(self.config, overrides)
        except ValueError as error:
            raise UserError(f"config_overrides.{error}") from error
        family, spec = find_family(config, f"{self.path / 'config.json'} with `config_overrides`")
        saved = model_section(dict(self.config))
        changes = {key: value for key, value in model_section(config).items() if saved.get(key, MISSING) != value}
        return replace(self, config=config, family=family, spec=spec, config_changes=changes)

    def with_vocab_size(self, size: int) -> "HFCheckpoint":
        """Copy with additional rows in the embedding and the head, unless they have `size` rows."""
        spec, sizes = self.spec, {"vocab_size": size}
        if size <= spec.vocab:
            return self
        file = str(self.path / "config.json")
        if spec.extra_embeddings or (spec.per_layer is not None and spec.per_layer.vocab < spec.vocab):
            problem = f"the embeddings of model type {self.config.get('model_type')} cannot get new rows"
            raise UserError(f"{file}: {problem}. Use tokens that the tokenizer has.")
        if spec.per_layer is not None:
            sizes["vocab_size_per_layer_input"] = max(size, spec.per_layer.vocab)
        try:
            config = override_config(self.config, sizes)
        except ValueError as error:
            raise UserError(f"{file} with {size} tokens: {error}") from error
        family, resized = find_family(config, file)
        parameters: list[str] = [EMBED, TIED] if spec.score is None else [EMBED]
        new_rows = dict.fromkeys(parameters, size - spec.vocab)
        if spec.per_layer is not None and resized.per_layer is not None:
            new_rows[PER_LAYER_EMBED] = resized.per_layer.vocab - spec.per_layer.vocab
        return replace(self, config=config, family=family, spec=resized, new_rows=new_rows)

    def with_new_tokens(self, tokens: TokenTexts, special_tokens: TokenTexts) -> "HFCheckpoint":
        """Copy with new tokens in the tokenizer and rows for them. Embeddings may have unused rows, which come first.

        Raises UserError for tokens that cannot be added.
        """
        if not tokens and not special_tokens:
            return self
        tokenizer, new_tokens = add_new_tokens(self.tokenizer, tokens, special_tokens)
        trained = {token.id for token in new_tokens} | {*range(self.spec.vocab, tokenizer.size)}
        resized = self.with_vocab_size(tokenizer.size)
        return replace(resized, chat_tokenizer=tokenizer, new_tokens=new_tokens, trained_ids=tuple(sorted(trained)))

    def build_meta_decoder(self) -> Decoder:
        """The model on the meta device, without quantization and adapter."""
        model = self.directory.build_model(self.spec)
        model.trained_ids = self.trained_ids
        return model

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all parameters of the model."""
        return self.directory.model_shapes(self.spec)

    def resize_tensor(self, name: str, meta: TensorMeta) -> TensorMeta:
        """Add the rows of new tokens to an embedding or head; other tensors are unchanged."""
        match = match_hub_name(name, self.family.table)
        parameter = match.ours[0] if match is not None and match.ours else ""
        has_tokens = parameter == EMBED or (parameter == TIED and self.spec.score is None)
        sources = tuple((token.id, token.init_ids) for token in self.new_tokens) if has_tokens else ()
        if not sources and parameter not in self.new_rows:
            return meta
        shape = (meta.shape[0] + self.new_rows.get(parameter, 0), *meta.shape[1:])
        return ResizedTensor(meta.file, shape, meta.dtype, meta, sources)

    @property
    def saved_changes(self) -> dict[str, Any]:
        """Changed keys of config.json that an adapter saves, with the `rope_theta` that a new scaling needs."""
        needs_theta = "rope_scaling" in self.config_changes and "rope_theta" in self.config
        theta = {"rope_theta": self.config["rope_theta"]} if needs_theta else {}
        return theta | {**self.config_changes} | ({"vocab_size": self.spec.vocab} if self.new_rows else {})

    @cached_property
    def tensors(self) -> dict[str, TensorMeta]:
        """All tensors by checkpoint name, in file order. A group of quantized tensors appears as one weight."""
        dtype = self.default_dtype if self.config_dtype else torch.bfloat16
        tensors = dequantize.logical_tensors(self.directory.tensor_meta, self.config, dtype)
        tensors = {name: meta for name, meta in tensors.items() if not name.endswith(ROPE_BUFFER)}
        unused_heads = self.family.unused_heads
        weights = {name: meta for name, meta in tensors.items() if match_hub_name(name, unused_heads) is None}
        if self.new_rows or self.new_tokens:
            weights = {name: self.resize_tensor(name, meta) for name, meta in weights.items()}
        if self.new_head is None:
            return weights
        return {**weights, **self.random_tensors([*weights.values()][-1].file, self.new_head)}

    def random_tensors(self, file: Path, seed: int) -> Mapping[str, TensorMeta]:
        """Randomly initialized score head, for a checkpoint without one. `file` is where it would be saved."""
        score, name = self.spec.score, to_hub_name("head", self.family.table)
        assert score is not None
        shape, std = (score.labels, self.spec.dim), self.spec.initializer_range
        weight = RandomTensor(file, shape, self.default_dtype, seed, std)
        bias = {f"{name}.bias": replace(weight, shape=(score.labels,), std=0.0)} if score.bias else {}
        return {f"{name}.weight": weight} | bias

    @cached_property
    def all_key_mappings(self) -> list[KeyMapping]:
        """Mapping of every checkpoint tensor. Raises UserError for unknown, missing or invalid tensors."""
        mappings, unknown = load_mappings(self.tensors, self.family.table)
        if unknown:
            first, suffix = unknown[0], f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            problem = f"unknown tensor {first}{suffix} for model_type {self.config['model_type']}"
            explanation = explain_unknown_key(first, self.family.table)
            raise UserError(f"{self.tensors[first].file}: {problem}{explanation}")
        for mapping in mappings:
            self.check_mapping(mapping)
        if self.spec.tie_word_embeddings and not any(EMBED in mapping.ours for mapping in mappings):
            # Some programs save a tied embedding under the name of the head.
            mappings = [replace(mapping, ours=(EMBED,)) if mapping.ours == (TIED,) else mapping for mapping in mappings]
        return mappings

    def check_mapping(self, mapping: KeyMapping) -> None:
        """Raise UserError if a tensor of a mapping is missing or has a dtype that cannot be loaded."""
        for name in mapping.hub:
            if name not in self.tensors:
                present = [key for key in mapping.hub if key in self.tensors]
                file, group = (self.tensors[present[0]].file, f" ({present[0]} exists)") if present else (self.path, "")
                raise UserError(f"{file}: tensor {name} is missing{group}. Download the checkpoint again.")
            meta = self.tensors[name]
            if mapping.ours and meta.dtype not in WEIGHT_DTYPES:
                dtypes = ", ".join(map(dtype_name, WEIGHT_DTYPES))
                raise UserError(f"{meta.file}: {name} has dtype {dtype_name(meta.dtype)}; supported: {dtypes}")

    @cached_property
    def key_mappings(self) -> list[KeyMapping]:
        """Mappings of the tensors that the model loads."""
        return [mapping for mapping in self.all_key_mappings if mapping.ours]

    @property
    def has_untrained_mtp(self) -> bool:
        """Whether it has layers for multi-token prediction, which are copied from the base."""
        mappings = self.all_key_mappings if self.has_weights else []
        return any(isinstance(mapping.op, MultiTokenPrediction) for mapping in mappings)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype by parameter name. A parameter made of several tensors has the dtype that can represent all of them."""
        return {
            name: reduce(torch.promote_types, (self.tensors[key].dtype for key in mapping.hub))
            for mapping in self.key_mappings
            for name in mapping.ours
        }

    @cached_property
    def has_weights(self) -> bool:
        """False for a directory with only a config, and for one whose weights are not downloaded yet."""
        return any(any(self.path.glob(name)) for layout in LAYOUTS for name in layout)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which the parameter `name` is stored, or would be saved."""
        return self.dtypes.get(name, self.default_dtype) if self.has_weights else self.default_dtype

    @property
    def config_dtype(self) -> str | None:
        """Name of the dtype in config.json, of the model or of its text model."""
        configs = [config for config in (self.config, self.config.get("text_config")) if isinstance(config, Mapping)]
        return next((config[key] for config in configs for key in ("dtype", "torch_dtype") if config.get(key)), None)

    @property
    def default_dtype(self) -> torch.dtype:
        """Dtype of config.json, fp32 if it has none. Used for tensors that are not in the checkpoint."""
        name = self.config_dtype or "float32"
        if not isinstance(name, str) or name not in CONFIG_DTYPES:
            problem = f"dtype must be one of {', '.join(CONFIG_DTYPES)}, got {name!r}"
            raise UserError(f"{self.path / 'config.json'}: {problem}")
        return CONFIG_DTYPES[name]

    def reader(self) -> "TensorReader":
        return TensorReader(dequantize.exact_tensors(self.tensors) if self.keeps_prequantized else self.tensors)


def check_index(index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorMeta]) -> None:
    """Raise UserError unless the files contain exactly the tensors of the index."""
    for name, file in weight_map.items():
        actual = tensors[name].file.name if name in tensors else None
        if file != actual:
            location = "missing" if actual is None else f"in {actual}"
            raise UserError(f"{index}: {name} must be in {file}, but is {location}. Download both again.")
    for name, meta in tensors.items():
        if name not in weight_map:
            raise UserError(f"{meta.file}: tensor {name} is not in {index.name}. Download both again.")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def explain_unknown_key(name: str, table: tuple[KeyRule, ...]) -> str:
    """Explain an unknown tensor name that would be known with or without a common prefix; else return ''."""
    if match_hub_name(f"model.{name}", table):
        return ". Tensor names lack the prefix 'model.'. Save the full model including its head."
    prefix, _, suffix = name.partition(".")
    while suffix:
        if match_hub_name(suffix, table):
            return f". Tensor names have the extra prefix {prefix + '.'!r}. Save the model without its wrapper."
        component, _, suffix = suffix.partition(".")
        prefix = f"{prefix}.{component}"
    return ""
