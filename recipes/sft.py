"""Supervised fine-tuning: full or with adapters, on conversations, instructions or plain text.

tune run sft nano/tools_lora
tune run sft llama3_2/1b_lora data.length=2048 optimizer.lr=1e-4
tune run sft llama3_2/1b_full --gpus 8
"""

from dataclasses import dataclass

import torch

from tunekit import training
from tunekit.data.steps.batch import Batch
from tunekit.data.steps.loader import Loader
from tunekit.data.steps.mix import Learnable
from tunekit.data.tokenizer import Tokenizer
from tunekit.losses import likelihood
from tunekit.losses.likelihood import CrossEntropy
from tunekit.memory import Update
from tunekit.models.decoder import Decoder
from tunekit.parallel.run import Run
from tunekit.training import Method, Taken, Training


@dataclass(frozen=True, kw_only=True)
class SFT(Training):
    """Everything this recipe can be told: what every training can, and what is minimised."""

    data: Learnable  # what to learn
    validation: Learnable | None = None  # held-out rows
    loss: CrossEntropy = CrossEntropy()


RECIPE = SFT


def words(cfg: SFT) -> Tokenizer:
    """The tokenizer that rows are written with."""
    return training.words(cfg)


def check(cfg: SFT) -> None:
    """What can be known without reading weights."""
    training.check(cfg)


def main(cfg: SFT, fresh: bool = False) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    training.run(cfg, Method("sft", train_step, validate), fresh)


def train_step(model: Decoder, batches: list[Batch], cfg: SFT, update: Update, run: Run) -> Taken:
    """One optimizer step. A learnt token weighs the same in every micro-batch and on every rank."""
    tokens = run.total(sum(batch.learnt for batch in batches))
    total = torch.zeros((), device=run.device)
    for i, batch in enumerate(batches, start=1):
        run.sync_gradients(model, on=i == len(batches))
        loss = cfg.loss(model, batch.to(run.device)) / tokens
        (loss * run.averaged).backward()  # sharding averages gradients over the ranks
        total += loss.detach()
    loss = run.sum(total)
    return Taken(loss, update(loss))


def validate(model: Decoder, held: Loader, cfg: SFT, run: Run) -> dict[str, float]:
    """The loss of a learnt token of held-out rows."""
    return {"loss": likelihood.mean(cfg.loss, model, held, run)}
