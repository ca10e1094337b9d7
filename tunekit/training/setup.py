"""Construction of the parts that all training recipes use: data, model, optimizer."""

from tunekit import build
from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.build import DataLoader, build_dataloader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.datasets import DatasetConfig
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder
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


def load_model(checkpoint: HFCheckpoint, cfg: TrainConfig, dist: DistributedContext) -> Decoder:
    """The model to train: this rank's shards, with weights and adapter."""
    dist.heartbeat.record(0, "load")
    free_memory.check(cfg, dist)
    from_scratch = cfg.init == "random"
    return build.build_model(
        checkpoint, cfg.quantization, cfg.adapter, cfg.precision, cfg.memory, dist, from_scratch, cfg.compile
    )


def build_optimizer(cfg: TrainConfig, model: Decoder, dist: DistributedContext) -> TrainOptimizer:
    """The optimizer of the trained weights."""
    reshard(model)  # forward passes before training may have gathered parameters, which are other tensors
    layer_params = (param for layer in model.layers for param in layer.parameters())
    optimizer = cfg.optimizer.build(cfg.adapter.param_groups(model), layer_params)
    return cfg.memory.wrap_optimizer(optimizer, dist)
