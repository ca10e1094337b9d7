"""From a checkpoint and choices to a model ready to train or to answer. The one place that fixes the order."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Literal, Protocol

import torch

from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, peft_adapter
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.load_model import check_tensors, load_weights
from tunekit.checkpoint.run_dir import CONFIG, FINAL, METRICS, STATE
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.fsdp import allocate, apply_fsdp
from tunekit.distributed.parallel_dims import ParallelConfig, ParallelDims
from tunekit.distributed.parallelize import parallelize, parallelize_fake
from tunekit.distributed.sharding import register_shards
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.memory.config import MemoryConfig
from tunekit.models.compile import check_compile, compile_layers
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_init import init_weights
from tunekit.quantization.config import NoQuantization

PLAIN = NoQuantization()


class ModelChoices(Protocol):
    """The config keys of a training recipe that decide which model is built."""

    @property
    def model(self) -> str: ...
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

    Raises UserError if a tensor of the model is missing or has another shape.
    """
    checkpoint = read_checkpoint(cfg, download.READ)
    if cfg.init == "pretrained":
        check_tensors(checkpoint, build_meta_model(checkpoint, cfg.quantization, cfg.adapter).shapes)
    return checkpoint


def read_checkpoint(cfg: ModelChoices, files: download.Files = download.SMALL) -> HFCheckpoint:
    """The checkpoint to train, from its small files: nothing is known about its tensors."""
    checkpoint = HFCheckpoint.open(download.resolve_model_dir(cfg.model, files), cfg.model)
    if cfg.tokenizer is not None:
        checkpoint = replace(checkpoint, words=download.resolve_model_dir(cfg.tokenizer, download.SMALL))
    return cfg.with_head(checkpoint)


def open_tokenizer(checkpoint: HFCheckpoint, today: date | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint. Chat templates that print the date print `today`."""
    tokenizer = Tokenizer.open(checkpoint.tokenizer).fitted(checkpoint.spec.vocab, checkpoint.tokenizer)
    return tokenizer if today is None else tokenizer.dated(today)


def build_model(  # noqa: PLR0913
    source: HFCheckpoint,
    weights: NoQuantization,
    adapter: NoAdapter | LoRAConfig,
    precision: PrecisionConfig,
    memory: MemoryConfig,
    run: DistributedContext,
    fresh: bool = False,
    compile: bool = False,
) -> Decoder:
    """Build on no device, then fill in place. With `fresh`, weights are drawn and not read."""
    net = build_meta_model(source, weights, adapter)
    for line in weights.remarks(net):
        run.tell(line)
    parallelize(net, run)  # layers, rows and experts that ranks share
    precision.set_matmul_precision(run.device)
    precision.apply(net, {} if fresh else source.dtypes, run.device)  # how exact it is
    memory.apply(net, run.device)  # what is kept
    if compile:
        check_compile(run.device)
        compile_layers(net, run.tell)
    apply_fsdp(net, run)  # where it is
    allocate(net, run)
    net.tie()
    register_shards((*net.named_parameters(), *net.named_buffers()), net.splits)
    if fresh:
        init_weights(net, run.seed)
    else:
        load_weights(replace(source, exact=True) if weights.exact else source, net, run=run)
    adapter.initialize(net, run.seed)
    if adapter.adapter_path is not None:
        peft_adapter.load_adapter(Path(adapter.adapter_path), net, adapter, source)
    return net


def build_meta_model(source: HFCheckpoint, weights: NoQuantization, adapter: NoAdapter | LoRAConfig) -> Decoder:
    """The model before it holds a number. An adapter to start from must fit it."""
    with torch.device("meta"):
        net = Decoder(source.spec)
    weights.apply(net)  # what a weight is
    adapter.apply(net)  # what is trained
    if adapter.adapter_path is not None:
        peft_adapter.check_adapter_fits(Path(adapter.adapter_path), net, adapter, source)
    return net


def check_parallelizable(
    source: HFCheckpoint, weights: NoQuantization, adapter: NoAdapter | LoRAConfig, parallel: ParallelConfig
) -> None:
    """UserError where devices cannot share the model so, however many there are."""
    if parallel.least != ParallelDims():
        parallelize_fake(build_meta_model(source, weights, adapter), parallel.least)


def load_for_inference(
    name: str,
    precision: PrecisionConfig,
    run: DistributedContext,
    weights: NoQuantization = PLAIN,
    scores: bool = False,
) -> tuple[Decoder, Tokenizer]:
    """A model to ask, and its tokenizer: one that writes, or with `scores` any."""
    source, adapter, tokenizer = resolve_model(name)
    if not scores:
        require_language_model(source, name)
    return build_model(source, weights, adapter, precision, MemoryConfig(), run), tokenizer


def resolve_model(
    name: str, files: download.Files = download.READ
) -> tuple[HFCheckpoint, NoAdapter | LoRAConfig, Tokenizer]:
    """What a name stands for: a checkpoint, an adapter on its base, or what a finished run has left."""
    path = final_dir_of(download.resolve_model_dir(name, files=files))
    if not (path / peft_adapter.CONFIG).is_file():
        source = HFCheckpoint.open(path, name)
        return source, FrozenModel(), Tokenizer.open(path).fitted(source.spec.vocab, path)
    base = peft_adapter.base_model_name(path)
    source = peft_adapter.with_adapter_score_head(
        path, HFCheckpoint.open(download.resolve_model_dir(base, files=files), base)
    )
    adapter = replace(peft_adapter.read_adapter_config(path, source), adapter_path=str(path))
    own = path if (path / "tokenizer.json").is_file() else source.path
    return source, adapter, Tokenizer.open(own).fitted(source.spec.vocab, own)


def final_dir_of(path: Path) -> Path:
    """The checkpoint of a run's folder; any other folder is one itself."""
    if not (path / STATE).is_dir() and not (path / FINAL).is_dir() and not is_unsaved_run(path):
        return path
    final = atomic.find_complete_dir(path / FINAL)
    if final is None:
        raise UserError(f"{path}: this run has not ended, so there is no result yet: start it again to go on")
    return final


def is_unsaved_run(path: Path) -> bool:
    """Whether this is the folder of a run that has saved nothing yet."""
    return all((path / name).is_file() for name in (CONFIG, METRICS)) and not (path / "config.json").is_file()
