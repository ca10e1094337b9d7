"""Models with a score head: rewards from pairs, rerankers, classes or values of texts, and correctness of steps.

tune run reward nano/reward
tune run reward llama3_2/1b_reward data.max_length=1024 loss.center_rewards_coefficient=0.01
"""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer
from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.sentence_transformers import reranker_files
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.reward_data import RewardData
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.losses.reward import BradleyTerry, RewardFamily, RewardMetrics, check_reward_data, class_names
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.run_context import RunContext, run_training
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.train_loop import TrainLoop


@dataclass(frozen=True, kw_only=True)
class RewardConfig(TrainConfig):
    """The keys of this recipe."""

    data: RewardData  # Training rows: preference pairs, labeled texts, or answers with labeled steps
    eval_data: RewardData | None = None  # Held-out rows for evaluation during training
    loss: RewardFamily = BradleyTerry()  # Meaning of the scores

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel.tp > 1:
            raise FieldError("parallel.tp", "a score head cannot be split over devices. Use parallel.dp_shard.")
        if self.generation_eval is not None:
            raise FieldError("generation_eval", "not supported by this recipe. Remove it.")
        check_reward_data(self.loss, self.data, self.eval_data)

    def with_head(self, checkpoint: HFCheckpoint) -> HFCheckpoint:
        """The checkpoint with a score head for the loss: a new one on a language model."""
        names = class_names(self.data)
        score = self.loss.score_head(checkpoint.tokenizer.pad, len(names))
        return with_score_head(checkpoint, score, self.seed, names, self.loss.problem_type)


CONFIG = RewardConfig


def check(cfg: RewardConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_training(cfg)
    eval_data = cfg.eval_data and MixtureBase.from_config(cfg.eval_data).resolve()
    check_reward_data(cfg.loss, MixtureBase.from_config(cfg.data).resolve(), eval_data)


def main(cfg: RewardConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write a model for sequence or token classification to `final/`."""
    run_training("reward", train, cfg, overwrite)


def train(cfg: RewardConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    checkpoint = replace(checkpoint, companions=reranker_files(train_data.mixture))
    with TrainLoop(run, checkpoint, tokenizer, (train_data, eval_data)) as loop:
        model = load_model(checkpoint, cfg, dist)
        cfg.loss.prepare_data(model, train_data, eval_data)
        if checkpoint.new_head is not None or cfg.init == "random":
            dist.log("head: {} x {} new weights instead of the lm_head".format(*model.shapes["head.weight"]))
        optimizer = build_optimizer(cfg, model, dist)
        # Resumes; between two steps it logs, evaluates, saves, uploads, rolls back or stops as the config says
        for step in loop.start(model, optimizer, partial(cfg.loss.evaluate, model, eval_data, dist)):
            loss, metrics = forward_backward(model, step.batches, cfg, dist)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not step.accepts(loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss, grad_norm, **metrics)


def forward_backward(
    model: Decoder, batches: list[Batch], cfg: RewardConfig, dist: DistributedContext
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the gradients of one optimizer step. Returns its loss and its other metrics, over all ranks.

    Every pair, document or step of an answer has the same weight, in every micro-batch and on every rank.
    """
    num_units = dist.sum_counts(sum(cfg.loss.num_units(batch, model.spec.outputs) for batch in batches))
    sums = RewardMetrics()
    for i, batch in enumerate(batches, start=1):
        dist.set_gradient_sync(model, enabled=i == len(batches))  # reduce gradients in the last micro-batch only
        output = cfg.loss(model, batch.to(dist.device))
        (output.loss / num_units * dist.grad_scale).backward()  # FSDP averages over ranks; this makes it a sum
        sums.add(output)
    metrics = sums.means(dist, num_units)
    return metrics.pop("loss"), metrics
