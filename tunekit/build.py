"""Construction of models for training and inference. The only place that fixes the order of its steps."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from tunekit import env_info
from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, load_adapter, peft_adapter, token_rows
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.checkpoint.hf_checkpoint import CheckpointDir, HFCheckpoint
from tunekit.checkpoint.load_model import check_tensors, load_weights
from tunekit.checkpoint.merge import MergedCheckpoint
from tunekit.checkpoint.model_dir import ModelDir, ModelDirs
from tunekit.checkpoint.run_dir import CONFIG, FINAL, METRICS, STATE
from tunekit.data.chat_template.chat_format import with_chat_format
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig
from tunekit.data.new_tokens import TokenTexts
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.tokenizer_files import check_model_type
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.fsdp import allocate, apply_fsdp
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.distributed.parallelize import parallelize, parallelize_fake
from tunekit.distributed.sharding import register_shards, to_local
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.memory.config import MemoryConfig
from tunekit.models.compile import check_compile, compile_layers
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_init import init_weights
from tunekit.quantization.config import NoQuantization
from tunekit.system import format_bytes

UNQUANTIZED = NoQuantization()
NO_OVERRIDES: Mapping[str, Any] = {}
MIN_ADDRESS_SPACE = 700_000_000  # bytes, for threads, libraries that are loaded later and small models


class ModelChoices(Protocol):
    """The config keys of a training recipe that decide which model is built."""

    @cached_property
    def model_dirs(self) -> ModelDirs:
        """The open directories of the models below."""
        ...

    @property
    def model(self) -> str: ...
    @property
    def config_overrides(self) -> Mapping[str, Any]: ...
    @property
    def new_tokens(self) -> TokenTexts: ...
    @property
    def new_special_tokens(self) -> TokenTexts: ...
    @property
    def data(self) -> DatasetConfig | MixtureBase: ...
    @property
    def tokenizer(self) -> str | None: ...
    @property
    def init(self) -> Literal["pretrained", "random"]: ...
    @property
    def quantization(self) -> NoQuantization: ...
    @property
    def adapter(self) -> NoAdapter | LoRAConfig: ...
    @property
    def precision(self) -> PrecisionConfig: ...
    @property
    def memory(self) -> MemoryConfig: ...
    @property
    def compile(self) -> bool: ...

    def with_head(self, checkpoint: HFCheckpoint) -> HFCheckpoint:
        """The checkpoint with the head that the recipe trains. Raises UserError if that is not possible."""
        ...


def open_checkpoint(cfg: ModelChoices) -> HFCheckpoint:
    """The checkpoint to train and its tokenizer, downloaded if necessary. Reads config.json and tensor names.

    If all weights are trained and `model` is an adapter, it is merged into its base when weights are read. Raises
    UserError if a tensor of the model is missing or has another shape, or for an adapter on an adapter.
    """
    checkpoint, adapter = read_checkpoint_and_adapter(cfg, download.READ)
    if cfg.init == "pretrained":
        if adapter.adapter_path is not None and not isinstance(cfg.adapter, NoAdapter):
            base, path = checkpoint.name, adapter.adapter_path
            raise UserError(
                f"{cfg.model}: an adapter of {base}. To continue its training, set model={base} "
                f"adapter.adapter_path={path}. To train another one on top of it, run `tune merge {base} {path} OUT`, "
                "and set model=OUT."
            )
        checkpoint = MergedCheckpoint.with_adapter(checkpoint, adapter)
        check_tensors(checkpoint, checkpoint.shapes)
    return checkpoint


def read_checkpoint(cfg: ModelChoices) -> HFCheckpoint:
    """The checkpoint to train, from its small files, without its tensors; the base if `model` is an adapter."""
    return read_checkpoint_and_adapter(cfg, download.SMALL)[0]


def read_checkpoint_and_adapter(
    cfg: ModelChoices, files: download.Files
) -> tuple[HFCheckpoint, NoAdapter | LoRAConfig]:
    """The checkpoint to train with its tokenizer, and the adapter that `model` is, if it is one."""
    checkpoint, adapter = resolve_checkpoint(cfg.model, files, cfg.model_dirs)
    checkpoint = checkpoint.with_config_overrides(cfg.config_overrides)
    if cfg.adapter.adapter_path is not None:
        directory = cfg.model_dirs.open(AdapterDir, Path(cfg.adapter.adapter_path))
        checkpoint = token_rows.with_adapter_tokens(directory, checkpoint)
    start = checkpoint.adapter
    if cfg.tokenizer is not None:
        directory = cfg.model_dirs.open(ModelDir, download.resolve_model_dir(cfg.tokenizer, download.SMALL))
        checkpoint = replace(checkpoint, tokenizer_dir=directory)
        if directory.has_tokenizer and (hints := directory.tokenizer.class_hints) is not None:
            check_model_type(hints, directory.config, checkpoint.config)
    elif start is not None and (adapter.adapter_path or checkpoint.trained_ids) and start.has_tokenizer:
        checkpoint = replace(checkpoint, tokenizer_dir=start)
    if start is not None and (cfg.new_tokens or cfg.new_special_tokens):
        key = "new_tokens" if cfg.new_tokens else "new_special_tokens"
        remedy = "Remove the key, or merge it with `tune merge` and train the result."
        raise UserError(f"{key}: {start.path} is an adapter with its own tokens. {remedy}")
    checkpoint = checkpoint.with_new_tokens(cfg.new_tokens, cfg.new_special_tokens)
    data = MixtureBase.from_config(cfg.data)
    if data.chat_template is not None or data.chat_template_kwargs:
        tokenizer = with_chat_format(checkpoint.tokenizer, data.chat_template, data.chat_template_kwargs)
        checkpoint = replace(checkpoint, chat_tokenizer=tokenizer)
    return cfg.with_head(checkpoint), adapter


def open_tokenizer(checkpoint: HFCheckpoint, today: date | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint. Chat templates that print the date print `today`."""
    path, spec = checkpoint.tokenizer_path, checkpoint.spec
    tokenizer = checkpoint.tokenizer.with_vocab_size(spec.vocab, path, spec.context)
    return tokenizer if today is None else tokenizer.with_date(today)


def build_model(  # noqa: PLR0913
    checkpoint: HFCheckpoint,
    quantization: NoQuantization,
    adapter: NoAdapter | LoRAConfig,
    precision: PrecisionConfig,
    memory: MemoryConfig,
    dist: DistributedContext,
    from_scratch: bool = False,
    compile: bool = False,
    model: Decoder | None = None,
) -> Decoder:
    """Allocate this rank's shards of the model that `build_meta_model` builds, and load or initialize the weights."""
    model = build_meta_model(checkpoint, quantization, adapter) if model is None else model
    if not from_scratch:
        check_tensors(checkpoint, model.shapes)  # before anything is allocated
    for warning in quantization.warnings(model):
        dist.log(warning)
    parallelize(model, dist)  # tensor, context and expert parallel
    precision.set_matmul_precision(dist.device)
    precision.apply(model, {} if from_scratch else checkpoint.dtypes, dist.device)
    memory.apply(model, dist.device)
    if compile:
        check_compile(dist.device)
        compile_layers(model, dist.log)
    apply_fsdp(model, dist)
    check_host_memory(checkpoint, model, dist)
    allocate(model, dist)
    model.tie()
    register_shards((*model.named_parameters(), *model.named_buffers()), model.shards)
    if from_scratch:
        init_weights(model, dist.seed)
    else:
        load_weights(
            replace(checkpoint, keeps_prequantized=True) if quantization.keeps_prequantized else checkpoint,
            model,
            dist=dist,
        )
    init_adapter(model, adapter, checkpoint, dist.seed)
    return model


def init_adapter(model: Decoder, adapter: NoAdapter | LoRAConfig, checkpoint: HFCheckpoint, seed: int) -> None:
    """Initialize the weights of a new adapter, or load those of an existing one; and those of a value head."""
    adapter.init_weights(model, seed)
    if model.value_head is not None:
        model.value_head.init_weights()
    if adapter.adapter_path is not None:
        load_adapter.load_adapter(checkpoint.open_adapter(adapter.adapter_path), model, checkpoint)


def check_host_memory(checkpoint: HFCheckpoint, model: Decoder, dist: DistributedContext) -> None:
    """Raise UserError if the local weights alone do not fit into host memory; otherwise the system kills the run.

    Also checks the limit of the address space, at which libraries crash in many ways.
    """
    available, address_space = env_info.available_memory(), env_info.available_address_space()
    if address_space is not None and address_space < MIN_ADDRESS_SPACE:
        sizes = f"{format_bytes(address_space)} of address space; at least {format_bytes(MIN_ADDRESS_SPACE)} are needed"
        raise UserError(f"not enough memory: `ulimit -v` leaves {sizes}. Raise the limit.")
    if dist.device.type != "cpu" or available is None:
        return
    tensors = (*model.parameters(), *model.buffers())
    needed = sum(to_local(tensor).nbytes for tensor in tensors)
    if needed > available:
        sizes = f"{format_bytes(needed)} for its weights; {format_bytes(available)} are available"
        raise UserError(f"{checkpoint.name}: not enough memory: this model needs {sizes}.")


def build_meta_model(
    checkpoint: HFCheckpoint, quantization: NoQuantization, adapter: NoAdapter | LoRAConfig, value_head: bool = False
) -> Decoder:
    """The quantized model with its adapter on the meta device. Raises UserError if an existing adapter does not fit."""
    model = checkpoint.build_meta_decoder()
    quantization.apply(model)
    adapter.apply(model)
    if value_head:
        model.add_value_head()  # after the adapter, which freezes the other weights
    if adapter.adapter_path is not None:
        directory = checkpoint.open_adapter(adapter.adapter_path)
        load_adapter.check_adapter_fits(directory, model, adapter, checkpoint)
    return model


def check_parallelizable(
    checkpoint: HFCheckpoint,
    quantization: NoQuantization,
    adapter: NoAdapter | LoRAConfig,
    parallel: ParallelConfig,
) -> None:
    """Raise UserError if the model cannot be split as `parallel` asks, on any number of devices."""
    if parallel.minimal_dims != ParallelDims():
        parallelize_fake(build_meta_model(checkpoint, quantization, adapter), parallel.minimal_dims)


def load_for_inference(
    name: str,
    precision: PrecisionConfig,
    dist: DistributedContext,
    quantization: NoQuantization = UNQUANTIZED,
    allow_score_head: bool = False,
    config_overrides: Mapping[str, Any] = NO_OVERRIDES,
    dirs: ModelDirs | None = None,
) -> tuple[Decoder, Tokenizer]:
    """The model of a checkpoint, adapter or run, in eval mode, and its tokenizer.

    Raises UserError without a language model head, unless `allow_score_head`.
    """
    checkpoint, adapter, tokenizer = resolve_model(name, download.READ, config_overrides, dirs)
    if not allow_score_head:
        require_language_model(checkpoint, name)
    return build_model(checkpoint, quantization, adapter, precision, MemoryConfig(), dist).eval(), tokenizer


def resolve_model(
    name: str,
    files: download.Files = download.READ,
    config_overrides: Mapping[str, Any] = NO_OVERRIDES,
    dirs: ModelDirs | None = None,
) -> tuple[HFCheckpoint, NoAdapter | LoRAConfig, Tokenizer]:
    """Checkpoint, adapter and tokenizer of a directory, Hub name or finished run. An adapter comes with its base."""
    checkpoint, adapter = resolve_checkpoint(name, files, dirs)
    checkpoint = checkpoint.with_config_overrides(config_overrides)
    if checkpoint.adapter is not None and checkpoint.adapter.has_tokenizer:
        checkpoint = replace(checkpoint, tokenizer_dir=checkpoint.adapter)
    return checkpoint, adapter, open_tokenizer(checkpoint)


def resolve_checkpoint(
    name: str, files: download.Files, dirs: ModelDirs | None = None
) -> tuple[HFCheckpoint, NoAdapter | LoRAConfig]:
    """Checkpoint and adapter, as `resolve_model` returns them. Needs no tokenizer. `dirs` may be open already."""
    dirs = dirs or ModelDirs()
    directory = download.resolve_model_dir(name, files)
    path = final_dir_of(directory)
    if path != directory:
        name = str(path)  # an adapter that is trained on a run names its `final/` as its base
    if not AdapterDir.is_adapter(path):
        return HFCheckpoint.from_dir(dirs.open(CheckpointDir, path), name), FrozenModel()
    adapter = dirs.open(AdapterDir, path)
    base = dirs.open(CheckpointDir, resolve_base_dir(adapter, files))
    checkpoint = peft_adapter.with_adapter_config(adapter, HFCheckpoint.from_dir(base, adapter.peft.base_name))
    return checkpoint, peft_adapter.read_adapter_config(adapter, checkpoint)


def resolve_base_dir(adapter: AdapterDir, files: download.Files) -> Path:
    """Directory of the base of an adapter, which may have been trained on another machine."""
    base = adapter.peft.base_name
    try:
        return download.resolve_model_dir(base, files)
    except UserError as error:
        remedy = (
            f"Set base_model_name_or_path to another directory or Hub name, or run `tune merge BASE {adapter.path} OUT`"
        )
        raise UserError(
            f"{adapter.peft.file}: the base model of this adapter cannot be opened "
            f"({str(error).removesuffix('.')}). {remedy} and use OUT."
        ) from error


def final_dir_of(path: Path) -> Path:
    """`final/` of a run directory; any other directory as it is. Raises UserError for an unfinished run."""
    if not (path / STATE).is_dir() and not (path / FINAL).is_dir() and not is_unsaved_run(path):
        return path
    final = atomic.find_complete_dir(path / FINAL)
    if final is None:
        raise UserError(f"{path}: this run is not complete and has no result. Resume it with the same command.")
    return final


def is_unsaved_run(path: Path) -> bool:
    """Whether this is a run directory without any training state."""
    return all((path / name).is_file() for name in (CONFIG, METRICS)) and not (path / "config.json").is_file()
