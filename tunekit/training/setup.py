"""Construction of the parts that all training recipes use: data, model, optimizer."""

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
from tunekit.training.run_context import RunContext


def open_dataloader(
    data: DatasetConfig | MixtureBase, tokenizer: Tokenizer, cfg: TrainConfig, run: RunContext, subdir: str = ""
) -> DataLoader:
    """Tokenize `data`, or read it from the cache. Skipped rows are listed in `subdir` of the run directory."""
    sizes = cfg.global_batch_size, cfg.micro_batch_size
    return build_dataloader(data, tokenizer, *sizes, run.dist, run.dir / subdir, run.overwrite)


def load_model(
    checkpoint: HFCheckpoint, cfg: TrainConfig, dist: DistributedContext, value_head: bool = False
) -> Decoder:
    """The model to train: this rank's shards, with weights and adapter, and with a new value head if asked for."""
    dist.heartbeat.record(0, "load")
    free_memory.check(cfg, dist)
    from_scratch = cfg.init == "random"
    if cfg.precision.compute_dtype == "auto" and (dtype := resolve_auto("auto", dist.device)) != "bf16":
        dist.log(f"precision.compute_dtype: auto selects {dtype}: this device has no fast bf16 matmuls")
    if cfg.adapter.adapter_path is not None:
        dist.log(f"continuing the training of adapter {cfg.adapter.adapter_path} (base: {checkpoint.name})")
    options = cfg.quantization, cfg.adapter, cfg.precision, cfg.memory
    model = build.build_model(checkpoint, *options, dist, from_scratch, cfg.compile, value_head)
    model.neftune_noise_alpha = cfg.neftune_noise_alpha
    return model


def build_optimizer(cfg: TrainConfig, model: Decoder, dist: DistributedContext) -> TrainOptimizer:
    """The optimizer of the trained weights. In fp16, the loss is scaled from now on."""
    if model.compute_dtype == torch.float16:
        if cfg.memory.optimizer_in_bwd:  # the config is checked for fp16, but `auto` depends on the device
            raise UserError(f"memory.optimizer_in_bwd: {NO_LOSS_SCALING}")
        dist.loss_scaler = DynamicLossScaler()
    reshard(model)  # forward passes before training may have gathered parameters, which are other tensors
    layer_params = (param for layer in model.layers for param in layer.parameters())
    trained = cfg.optimizer.apply_lr_pattern(cfg.adapter.param_groups(model), model)
    optimizer = cfg.optimizer.build(trained, layer_params)
    return cfg.memory.wrap_optimizer(optimizer, dist)
