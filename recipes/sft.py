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
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.distributed.context import DistributedContext
from tunekit.losses.cross_entropy import CrossEntropy, eval_loss
from tunekit.models.decoder import Decoder
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.cuda_graph import BackwardPass, check_cuda_graph, graph_backward_pass
from tunekit.training.early_stopping import EarlyStopping
from tunekit.training.export import export_final
from tunekit.training.forgetting import ForgettingMonitor
from tunekit.training.generation_monitor import GenerationMonitor
from tunekit.training.packing_check import check_packing
from tunekit.training.run_context import RunContext
from tunekit.training.setup import build_optimizer, load_model, open_dataloaders
from tunekit.training.step_guard import StepGuard


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainConfig):
    """The keys of this recipe."""

    data: SFTData  # Training rows
    eval_data: SFTData | None = None  # Held-out rows for evaluation during training
    loss: CrossEntropy = CrossEntropy()
    # Launch the kernels of a micro-batch as one CUDA graph, which is faster if the model or the micro-batch is small.
    # For dense models on one GPU, in bf16
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graph:
            check_cuda_graph(self, self.loss)


CONFIG = SFTConfig


def check(cfg: SFTConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_training(cfg)
    cfg.loss.check_routers(read_checkpoint(cfg).spec, cfg.compile)


def main(cfg: SFTConfig, overwrite: bool = False) -> None:
    """Train, or resume training, and write the result to `final/` in the run directory."""
    with RunContext(cfg, "sft", overwrite) as run:
        if not run.is_complete:
            train(cfg, run)
        run.push_result()


def train(cfg: SFTConfig, run: RunContext) -> None:
    """Everything between an open run directory and the exported result."""
    dist = run.dist  # collectives; the identity on one process
    checkpoint = open_checkpoint(cfg)  # config.json and tensor names; weights are read by load_model
    tokenizer = open_tokenizer(checkpoint, run.start_date)
    train_data, eval_data = open_dataloaders(cfg, tokenizer, run)
    forgetting = ForgettingMonitor(tokenizer, run)
    generation = GenerationMonitor(tokenizer, run)
    model = load_model(checkpoint, cfg, dist)
    cfg.loss.prepare(model)
    num_steps = run.begin(train_data)

    optimizer = build_optimizer(cfg, model, dist)
    run_pass = graph_backward_pass(partial(backward_pass, model, cfg, dist), model, dist) if cfg.cuda_graph else None
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
        if step == 0 and cfg.has_evaluation:
            metrics = evaluate(model, eval_data, dist) | generation.evaluate(model, 0, logger)
            early_stopping.check_metric(logger.log_eval(0, metrics))
        forgetting.begin(model, step, logger)
        guard.begin(step, checkpointer)  # saves step 0 if the run may roll back
        run.handle_signals()
        while step < num_steps and not early_stopping.triggered:
            run.begin_step(step, logger)  # heartbeat, profiler, random seed of this step
            batches = prefetcher.next()  # the micro-batches of this rank
            loss = forward_backward(model, batches, cfg, dist, run_pass)
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
            metrics = cfg.loss.pop_metrics(model, dist)
            logger.log_step(step, batches, prefetcher.data_time, loss=loss, grad_norm=grad_norm, lr=lr, **metrics)

            due = run.due_after(step, num_steps)
            with logger.pause():  # not part of the step time
                if due.any:
                    guard.check_all(logger)  # raises if a step was not finite, before its weights are used
                if due.push:
                    run.push_checkpoint(step, num_steps, model, checkpoint)
                if due.eval:
                    metrics = evaluate(model, eval_data, dist) | generation.evaluate(model, step, logger)
                    early_stopping.update(step, logger.log_eval(step, metrics))
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
    model: Decoder, batches: list[Batch], cfg: SFTConfig, dist: DistributedContext, run_pass: BackwardPass | None = None
) -> Tensor:
    """Compute the gradients of one optimizer step. Returns the mean loss of its target tokens, over all ranks.

    Every target token has the same weight, in every micro-batch and on every rank, unless its message has a `weight`.
    `run_pass` runs `backward_pass`, possibly as a CUDA graph; by default, it is called.
    """
    run_pass = run_pass or partial(backward_pass, model, cfg, dist)
    (denominator,) = dist.sum_numbers(sum(batch.loss_denominator for batch in batches))
    total = torch.zeros((), device=dist.device)
    for i, batch in enumerate(batches, start=1):
        dist.set_gradient_sync(model, enabled=i == len(batches))  # reduce gradients in the last micro-batch only
        total += run_pass(batch.to(dist.device), denominator)
    return dist.all_reduce_sum(total)


def backward_pass(
    model: Decoder, cfg: SFTConfig, dist: DistributedContext, batch: Batch, denominator: float | Tensor
) -> Tensor:
    """Add the gradients of a micro-batch. Returns its part of the loss of the step.

    With `cuda_graph`, only its kernels run again, with further targets of weight 0: Python code here runs at capture.
    """
    loss = cfg.loss(model, batch) / denominator
    (loss * dist.grad_scale).backward()  # FSDP averages gradients over ranks; this makes it a sum
    return loss.detach()


def evaluate(model: Decoder, eval_data: DataLoader | None, dist: DistributedContext) -> dict[str, float]:
    """Metrics of the held-out rows: plain cross-entropy, so that runs with different losses can be compared."""
    return {} if eval_data is None else {"loss": eval_loss(CrossEntropy(), model, eval_data, dist)}
