"""The training loop of all recipes: what happens before the first optimizer step, between two steps, and at the end.

A recipe computes gradients and updates the weights; nothing here depends on the method.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.training_state import Checkpointer, Stateful
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.loggers.metric_logger import MetricLogger
from tunekit.models.decoder import Decoder
from tunekit.optim.train_optimizer import TrainOptimizer
from tunekit.training.cuda_graph import set_up_cuda_graphs
from tunekit.training.early_stopping import EarlyStopping
from tunekit.training.export import export_final
from tunekit.training.forgetting import ForgettingMonitor
from tunekit.training.generation_monitor import GenerationMonitor
from tunekit.training.packing_check import check_packing
from tunekit.training.run_context import RunContext
from tunekit.training.step_guard import StepGuard

Metrics = Mapping[str, Tensor | float]


class StepCheck(Protocol):
    """A check of each step's metrics that may end the run, without waiting for the device in each step."""

    def add(self, metrics: Metrics, logger: MetricLogger) -> None:
        """Take the metrics of a step into account. Raises UserError for earlier steps, as far as they are known."""
        ...

    def check(self) -> None:
        """Raise UserError if a step fails. Called before weights are saved or evaluated."""
        ...


@dataclass
class TrainStep:
    """One optimizer step."""

    number: int  # 0-based
    data_step: int  # step of the data loader: more than `number` after a rollback, which skips data
    lr: Tensor | float
    batches: list[Batch]  # micro-batches of this rank. A recipe that trains on others replaces them: tokens are counted
    guard: StepGuard
    metrics: Metrics = field(default_factory=dict)

    def accepts(self, loss: Tensor, grad_norm: Tensor) -> bool:
        """Whether the optimizer may use the gradients: no NaN, Inf or spike, as far as it is known yet."""
        return self.guard.accepts(self.number, loss, grad_norm)

    def log(self, loss: Tensor, grad_norm: Tensor, **metrics: Tensor | float) -> None:
        """Set the metrics of the step. Tensors are read from the device when a metric line is due."""
        if "lr" in metrics:
            raise UserError("step.log: the loop logs lr itself. Use another name.")
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.ndim:
                raise UserError(f"step.log: {name} must be one number, got shape {list(value.shape)}. Log its mean.")
        self.metrics = {"loss": loss, "grad_norm": grad_norm, "lr": self.lr, **metrics}


class TrainLoop:
    """The training of a run. `start` yields the optimizer steps; leaving the `with` block writes `final/`.

    with TrainLoop(run, checkpoint, tokenizer, (train_data, eval_data)) as loop:
        model, optimizer = ...
        for step in loop.start(model, optimizer, evaluate):
            ...                                             # gradients of step.batches
            grad_norm = optimizer.clip_grad_norm(cfg.max_grad_norm)
            if not step.accepts(loss, grad_norm):
                optimizer.zero_grad()                       # a step without gradients changes no weight
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss, grad_norm)

    `step` is the number of steps that are done. `loaders` have the training and the held-out rows.
    """

    model: Decoder
    optimizer: TrainOptimizer
    evaluate: Callable[[], Mapping[str, float]]
    checks: Sequence[StepCheck]
    logger: MetricLogger  # from the first step on
    lr_scheduler: LRScheduler
    checkpointer: Checkpointer

    def __init__(
        self,
        run: RunContext,
        checkpoint: HFCheckpoint,
        tokenizer: Tokenizer,
        loaders: tuple[DataLoader, DataLoader | None],
    ) -> None:
        self.run, self.checkpoint, self.loaders = run, checkpoint, loaders
        self.forgetting, self.generation = ForgettingMonitor(tokenizer, run), GenerationMonitor(tokenizer, run)
        self.prefetcher = Prefetcher(loaders[0], run.dist.device)
        self.guard = StepGuard(run.cfg.step_guard, run.dist, self.prefetcher)
        self.early_stopping = EarlyStopping(run.cfg)
        self.stack = ExitStack()
        self.step = self.num_steps = 0
        self.is_finished = False  # all steps are done, or early stopping has ended the run

    def __enter__(self) -> "TrainLoop":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stack.__exit__(kind, error, traceback)
        if error is None:
            if not self.is_finished:
                problem = f"the recipe has left the training loop after step {self.step}, so nothing is exported"
                raise UserError(f"{problem}. End a run early with max_steps, early_stopping_patience or a signal.")
            export_final(self.run, self.model, self.checkpoint, self.loaders, self.step)

    def start(
        self,
        model: Decoder,
        optimizer: TrainOptimizer,
        evaluate: Callable[[], Mapping[str, float]],
        checks: Sequence[StepCheck] = (),
        **stateful: Stateful,
    ) -> Iterator[TrainStep]:
        """Resume or begin the training, and yield each step.

        `evaluate` returns metrics of the held-out rows, none if there are none. `stateful`: what changes during
        training in addition to weights, optimizer and data, by its name in the training state.
        """
        self.model, self.optimizer, self.evaluate, self.checks = model, optimizer, evaluate, checks
        self.restore(stateful)
        self.begin()
        set_up_cuda_graphs(model, self.run.cfg, self.run.dist)
        while self.step < self.num_steps and not self.early_stopping.triggered:
            self.run.begin_step(self.step, self.logger)  # heartbeat, profiler, random seed of this step
            lr, data_step = self.lr_scheduler.get_last_lr()[0], self.guard.data_step(self.step)
            step = TrainStep(self.step, data_step, lr, self.prefetcher.next(), self.guard)
            yield step
            if not step.metrics:
                raise UserError(f"step {self.step + 1}: the recipe has logged no loss. Call step.log(loss, grad_norm).")
            self.finish_step(step)
        self.step = self.early_stopping.finish(self.checkpointer, self.step, self.num_steps)  # loads the best weights
        model.layer_graphs = None  # frees their memory
        self.is_finished = True

    def restore(self, stateful: Mapping[str, Stateful]) -> None:
        """Load the newest training state, if there is one, and open the metric files."""
        run, (train_data, eval_data) = self.run, self.loaders
        self.num_steps = run.begin(train_data)
        self.lr_scheduler = run.cfg.lr_scheduler.build(self.optimizer.inner, self.num_steps)
        self.checkpointer = run.open_checkpointer(
            self.model, self.optimizer, self.lr_scheduler, self.early_stopping, data=self.prefetcher, guard=self.guard,
            forgetting=self.forgetting, **stateful,
        )  # fmt: skip
        self.checkpointer.result_state = tuple(stateful)
        self.step = self.checkpointer.restore()  # 0 in a new run
        if self.step == 0:
            check_packing(self.model, train_data, run.dist)
        self.logger = run.open_logger(self.num_steps, self.step)
        run.write_info(self.model, {"data": train_data, "eval_data": eval_data}, self.num_steps, self.step)

    def begin(self) -> None:
        """Start to prefetch, measure the model before training, and handle signals from now on."""
        data_steps = self.guard.data_step(self.step), self.guard.data_step(self.num_steps)
        for context in (self.checkpointer, self.logger, self.run.profiler, self.prefetcher.start(*data_steps)):
            self.stack.enter_context(context)
        if self.step == 0 and self.run.cfg.has_evaluation:
            self.early_stopping.check_metric(self.log_evaluation())
        self.forgetting.begin(self.model, self.step, self.logger)
        self.guard.begin(self.step, self.checkpointer)  # saves step 0 if the run may roll back
        self.run.handle_signals()

    def finish_step(self, step: TrainStep) -> None:
        """Log a step and do what is due after it, or roll back if its loss or gradient norm is a spike."""
        self.lr_scheduler.step()
        for check in self.checks:
            check.add(step.metrics, self.logger)
        if self.guard.needs_rollback(self.logger):
            # To the last training state; skips the data since then
            self.step = self.guard.roll_back(self.checkpointer, self.logger)
            return
        self.step += 1
        self.logger.log_step(self.step, step.batches, self.prefetcher.data_time, **step.metrics)
        with self.logger.pause():  # not part of the step time
            self.run_due_actions()

    def run_due_actions(self) -> None:
        """Upload, evaluate and save as the config says. Raises RunStopped or UserError if the run must end."""
        step, due = self.step, self.run.due_after(self.step, self.num_steps)
        if due.any:
            self.guard.check_all(self.logger)  # raises if a step was not finite, before its weights are used
            for check in self.checks:
                check.check()
        if due.push:
            self.run.push_checkpoint(step, self.num_steps, self.model, self.checkpoint)
        if due.eval:
            self.early_stopping.update(step, self.log_evaluation())
        if due.forgetting:
            self.forgetting.evaluate(self.model, step, self.logger)
        if due.save or self.early_stopping.needs_save(step) or self.forgetting.exceeded:
            self.checkpointer.save(step)
            self.run.exit_if_stop_requested(step, self.num_steps)
            self.forgetting.raise_if_exceeded(step)
        self.checkpointer.poll()  # raises if a save in the background has failed

    def log_evaluation(self) -> Mapping[str, float]:
        """Metrics of the held-out rows and of answers to the prompts of `generation_eval`."""
        metrics = {**self.evaluate(), **self.generation.evaluate(self.model, self.step, self.logger)}
        return self.logger.log_eval(self.step, metrics)
