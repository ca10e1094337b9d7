"""Supervised fine-tuning: full or with adapters, on conversations, instructions or plain text.

tune run sft nano/tools_lora
tune run sft llama3_2/1b_lora data.max_length=2048 optimizer.lr=1e-4
tune run sft llama3_2/1b_full --nproc-per-node 8
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer, read_checkpoint
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import SFTData
from tunekit.distributed.context import DistributedContext
from tunekit.losses.cross_entropy import CrossEntropy, eval_loss
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.run_context import RunContext, run_training
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.train_loop import TrainLoop


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainConfig):
    """The keys of this recipe."""

    data: SFTData  # Training rows
    eval_data: SFTData | None = None  # Held-out rows for evaluation during training
    loss: CrossEntropy = CrossEntropy()


CONFIG = SFTConfig


def check(cfg: SFTConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_training(cfg)
    cfg.loss.check_routers(read_checkpoint(cfg).spec, cfg.compile)


def main(cfg: SFTConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write the result to `final/` in the run directory."""
    run_training("sft", train, cfg, overwrite)


def train(cfg: SFTConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    with TrainLoop(run, checkpoint, tokenizer, (train_data, eval_data)) as loop:
        model = load_model(checkpoint, cfg, dist)
        cfg.loss.prepare(model)
        optimizer = build_optimizer(cfg, model, dist)
        # Resumes; between two steps it logs, evaluates, saves, uploads, rolls back or stops as the config says
        for step in loop.start(model, optimizer, partial(evaluate, model, eval_data, dist)):
            loss = forward_backward(model, step.batches, cfg, dist)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not step.accepts(loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss, grad_norm, **cfg.loss.pop_metrics(model, dist))


def forward_backward(model: Decoder, batches: list[Batch], cfg: SFTConfig, dist: DistributedContext) -> Tensor:
    """Compute the gradients of one optimizer step. Returns the mean loss of its target tokens, over all ranks.

    Every target token has the same weight, in every micro-batch and on every rank, unless its message has a `weight`.
    """
    (denominator,) = dist.sum_numbers(sum(batch.loss_denominator for batch in batches))
    total = torch.zeros((), device=dist.device)
    for i, batch in enumerate(batches, start=1):
        dist.set_gradient_sync(model, enabled=i == len(batches))  # reduce gradients in the last micro-batch only
        loss = cfg.loss(model, batch.to(dist.device)) / denominator
        (loss * dist.grad_scale).backward()  # FSDP averages gradients over ranks; this makes it a sum
        total += loss.detach()
    return dist.all_reduce_sum(total)


def evaluate(model: Decoder, eval_data: DataLoader | None, dist: DistributedContext) -> dict[str, float]:
    """Metrics of the held-out rows: plain cross-entropy, so that runs with different losses can be compared."""
    return {} if eval_data is None else {"loss": eval_loss(CrossEntropy(), model, eval_data, dist)}
