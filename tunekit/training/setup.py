"""Construction of the parts that all training recipes use: data, model, optimizer."""

from dataclasses import replace

import torch

from tunekit import build
from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.build import DataLoader, build_dataloader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.loss_scaler import DynamicLossScaler
from tunekit.errors import UserError
from tunekit.memory.config import NO_LOSS_SCALING
from tunekit.models.decoder import Decoder
from tunekit.models.precision import resolve_auto
from tunekit.optim.train_optimizer import TrainOptimizer
from tunekit.plan import free_memory
from tunekit.training.config import TrainConfig
from tunekit.training.data_checks import check_data
from tunekit.training.run_context import RunContext
from tunekit.training.save_check import check_can_save


def open_dataloaders(cfg: TrainConfig, tokenizer: Tokenizer, run: RunContext) -> tuple[DataLoader, DataLoader | None]:
    """Tokenize `data` and `eval_data`, or read them from the cache. Raises UserError if rows are unusable."""
    train_data = open_dataloader(cfg.data, tokenizer, run)
    eval_data = None if cfg.eval_data is None else open_dataloader(cfg.eval_data, tokenizer, run, "eval")
    run.findings = check_data(cfg, {"data": train_data, "eval_data": eval_data}, tokenizer, run.dist)
    return train_data, eval_data


def open_dataloader(
    data: DatasetConfig | MixtureBase, tokenizer: Tokenizer, run: RunContext, subdir: str = ""
) -> DataLoader:
    """Tokenize `data`, or read it from the cache. Skipped rows are listed in `subdir` of the run directory."""
    sizes = run.cfg.global_batch_size, run.cfg.micro_batch_size
    return build_dataloader(data, tokenizer, *sizes, run.dist, run.dir / subdir, run.overwrite)


def load_model(
    checkpoint: HFCheckpoint, cfg: TrainConfig, dist: DistributedContext, value_head: bool = False
) -> Decoder:
    """The model to train: this rank's shards, with weights and adapter, and with a new value head if asked for."""
    dist.heartbeat.record(0, "load")
    model = build.build_meta_model(checkpoint, cfg.quantization, cfg.adapter, value_head)
    from_scratch = cfg.init == "random"
    cfg.precision.apply(model, {} if from_scratch else checkpoint.dtypes, dist.device)
    check_can_save(cfg, checkpoint, model, dist)
    free_memory.check(cfg, dist)
    if cfg.precision.compute_dtype == "auto" and (dtype := resolve_auto("auto", dist.device)) != "bf16":
        dist.log(f"precision.compute_dtype: auto selects {dtype}: this device has no fast bf16 matmuls")
    if cfg.adapter.adapter_path is not None:
        dist.log(f"continuing the training of adapter {cfg.adapter.adapter_path} (base: {checkpoint.name})")
    options = cfg.quantization, cfg.adapter, cfg.precision, cfg.memory
    model = build.build_model(checkpoint, *options, dist, from_scratch, cfg.compile, model)
    model.neftune_noise_alpha = cfg.neftune_noise_alpha
    return model


def build_optimizer(
    cfg: TrainConfig, model: Decoder, dist: DistributedContext, value_lr: float | None = None
) -> TrainOptimizer:
    """The optimizer of the trained weights. In fp16, the loss is scaled from now on.

    `value_lr`: learning rate of the value head, unless `optimizer.lr_pattern` sets it; None: as all others.
    """
    if model.compute_dtype == torch.float16:
        if cfg.memory.optimizer_in_bwd:  # the config is checked for fp16, but `auto` depends on the device
            raise UserError(f"memory.optimizer_in_bwd: {NO_LOSS_SCALING}")
        dist.loss_scaler = DynamicLossScaler()
    reshard(model)  # forward passes before training may have gathered parameters, which are other tensors
    layer_params = (param for layer in model.layers for param in layer.parameters())
    config = cfg.optimizer
    if value_lr is not None:
        config = replace(config, lr_pattern={"value_head": value_lr} | config.lr_pattern)
    optimizer = config.build(config.apply_lr_pattern(cfg.adapter.param_groups(model), model), layer_params)
    return cfg.memory.wrap_optimizer(optimizer, dist)
