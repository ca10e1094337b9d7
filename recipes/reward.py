"""Models with a score head: rewards from pairs, rerankers, classes or values of texts, and correctness of steps.

tune run reward nano/reward
tune run reward llama3_2/1b_reward data.max_length=1024 loss.center_rewards_coefficient=0.01
"""

from dataclasses import dataclass, replace

from torch import Tensor

from tunekit.build import open_checkpoint, open_tokenizer
from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.sentence_transformers import reranker_files
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.data.dataloader.reward_data import RewardData
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.losses.reward import BradleyTerry, RewardFamily, RewardMetrics, check_reward_data, class_names
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.early_stopping import EarlyStopping
from tunekit.training.export import export_final
from tunekit.training.forgetting import ForgettingMonitor
from tunekit.training.packing_check import check_packing
from tunekit.training.run_context import RunContext
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.step_guard import StepGuard


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
        score = self.loss.score_head(Tokenizer.open(checkpoint.tokenizer_path).pad, len(names))
        return with_score_head(checkpoint, score, self.seed, names, self.loss.problem_type)


CONFIG = RewardConfig


def check(cfg: RewardConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_training(cfg)
    eval_data = cfg.eval_data and MixtureBase.from_config(cfg.eval_data).resolve()
    check_reward_data(cfg.loss, MixtureBase.from_config(cfg.data).resolve(), eval_data)


def main(cfg: RewardConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write a model for sequence or token classification to `final/`."""
    with RunContext(cfg, "reward", overwrite) as run:
        if not run.is_complete:
            train(cfg, run)
        run.push_result()


def train(cfg: RewardConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    forgetting = ForgettingMonitor(tokenizer, run)
    checkpoint = replace(checkpoint, companions=reranker_files(train_data.mixture))
    model = load_model(checkpoint, cfg, dist)
    cfg.loss.prepare_data(model, train_data, eval_data)
    if checkpoint.new_head is not None or cfg.init == "random":
        dist.log("head: {} x {} new weights instead of the lm_head".format(*model.shapes["head.weight"]))
    num_steps = run.begin(train_data)

    optimizer = build_optimizer(cfg, model, dist)
    lr_scheduler = cfg.lr_scheduler.build(optimizer.inner, num_steps)
    prefetcher = Prefetcher(train_data, dist.device)
    guard = StepGuard(cfg.step_guard, dist, prefetcher)
    early_stopping = EarlyStopping(cfg)
    checkpointer = run.open_checkpointer(
        model, optimizer, lr_scheduler, early_stopping, data=prefetcher, guard=guard, forgetting=forgetting
    )
    step = checkpointer.restore()  # 0 in a new run
    if step == 0:
        check_packing(model, train_data, dist)
    logger = run.open_logger(num_steps, step)

    with checkpointer, logger, run.profiler, prefetcher.start(guard.data_step(step), guard.data_step(num_steps)):
        if step == 0 and eval_data:
            early_stopping.check_metric(logger.log_eval(0, cfg.loss.evaluate(model, eval_data, dist)))
        forgetting.begin(model, step, logger)
        guard.begin(step, checkpointer)  # saves step 0 if the run may roll back
        run.handle_signals()
        while step < num_steps and not early_stopping.triggered:
            run.begin_step(step, logger)  # heartbeat, profiler, random seed of this step
            batches = prefetcher.next()  # the micro-batches of this rank
            loss, metrics = forward_backward(model, batches, cfg, dist)
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not guard.accepts(step, loss, grad_norm):  # NaN, Inf or a spike
                optimizer.zero_grad()  # without gradients, `step` changes no weight
            optimizer.step()
            optimizer.zero_grad()
            lr = lr_scheduler.get_last_lr()[0]
            lr_scheduler.step()
            if guard.needs_rollback(logger):
                step = guard.roll_back(checkpointer, logger)  # to the last training state; skips the data since then
                continue
            step += 1
            logger.log_step(step, batches, prefetcher.data_time, loss=loss, grad_norm=grad_norm, lr=lr, **metrics)

            due = run.due_after(step, num_steps)
            with logger.pause():  # not part of the step time
                if due.any:
                    guard.check_all(logger)  # raises if a step was not finite, before its weights are used
                if due.push:
                    run.push_checkpoint(step, num_steps, model, checkpoint)
                if due.eval and eval_data:
                    early_stopping.update(step, logger.log_eval(step, cfg.loss.evaluate(model, eval_data, dist)))
                if due.forgetting:
                    forgetting.evaluate(model, step, logger)
                if due.save or early_stopping.needs_save(step) or forgetting.exceeded:
                    checkpointer.save(step)
                    run.exit_if_stop_requested(step, num_steps)
                    forgetting.raise_if_exceeded(step)
                checkpointer.poll()  # raises if a save in the background has failed
        step = early_stopping.finish(checkpointer, step, num_steps)  # loads the best weights
    export_final(run, model, checkpoint, (train_data, eval_data), step)


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
