"""Supervised fine-tuning: full or with adapters, on conversations, instructions or plain text.

tune run sft nano/tools_lora
tune run sft llama3_2/1b_lora data.max_length=2048 optimizer.lr=1e-4
tune run sft llama3_2/1b_full --nproc-per-node 8
"""

from dataclasses import dataclass

import torch

from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import SFTData
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.losses import cross_entropy
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import TrainOptimizer
from tunekit.models.decoder import Decoder
from tunekit.training import config as training
from tunekit.training.config import Method, Taken, TrainConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainConfig):
    """Everything this recipe can be told: what every training can, and what is minimised."""

    data: SFTData  # what to learn
    eval_data: SFTData | None = None  # held-out rows
    loss: CrossEntropy = CrossEntropy()


RECIPE = SFTConfig


def words(cfg: SFTConfig) -> Tokenizer:
    """The tokenizer that rows are written with."""
    return training.get_tokenizer(cfg)


def check(cfg: SFTConfig) -> None:
    """What can be known without reading weights."""
    training.check_training(cfg)


def main(cfg: SFTConfig, overwrite: bool = False) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    training.run(cfg, Method("sft", forward_backward, evaluate), overwrite)


def forward_backward(
    model: Decoder, batches: list[Batch], cfg: SFTConfig, update: TrainOptimizer, run: DistributedContext
) -> Taken:
    """One optimizer step. A learnt token weighs the same in every micro-batch and on every rank."""
    tokens = run.sum_counts(sum(batch.num_target_tokens for batch in batches))
    total = torch.zeros((), device=run.device)
    for i, batch in enumerate(batches, start=1):
        run.set_gradient_sync(model, enabled=i == len(batches))
        loss = cfg.loss(model, batch.to(run.device)) / tokens
        (loss * run.grad_scale).backward()  # sharding averages gradients over the ranks
        total += loss.detach()
    loss = run.all_reduce_sum(total)
    return Taken(loss, update(loss))


def evaluate(model: Decoder, held: DataLoader, cfg: SFTConfig, run: DistributedContext) -> dict[str, float]:
    """The loss of a learnt token of held-out rows."""
    return {"loss": cross_entropy.eval_loss(cfg.loss, model, held, run)}
