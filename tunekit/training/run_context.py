"""The surroundings of a training run: processes, run directory, signals, intervals, profiler, uploads."""

import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import date
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from torch.optim.lr_scheduler import LRScheduler

from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint, run_dir, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.training_state import Checkpointer, Stateful
from tunekit.config.dump import dump_yaml, to_plain_config
from tunekit.config.secrets import hide_secrets, map_strings
from tunekit.data.check_target import Finding
from tunekit.data.dataloader.base import DataLoader
from tunekit.distributed import flight_recorder, worker_env
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.launcher import LOGS
from tunekit.distributed.signals import handle_stop_signals, stop_reason, write_notice
from tunekit.errors import RunStopped
from tunekit.loggers.metric_logger import MetricLogger, ThroughputCounter
from tunekit.models.decoder import Decoder
from tunekit.optim.train_optimizer import TrainOptimizer
from tunekit.plan import oom_report
from tunekit.publishing import publish
from tunekit.publishing.publish import HubUploader
from tunekit.report.run_info import RunStart
from tunekit.training.config import LIVE_KEYS, TrainConfig
from tunekit.training.early_stopping import EarlyStopping
from tunekit.training.intervals import StepPlan
from tunekit.training.profiler import Profiler

ConfigT = TypeVar("ConfigT", bound=TrainConfig)
SignalHandler = Callable[[int, FrameType | None], Any] | int | None


class Due(NamedTuple):
    """Actions that are due after a step."""

    push: bool
    eval: bool
    forgetting: bool
    save: bool  # also after the last step, and if a signal or the stop file asked to end the run

    @property
    def any(self) -> bool:
        return self.push or self.eval or self.forgetting or self.save


class RunContext:
    """One run of a training recipe on this process, for as long as the `with` block lasts.

    dist: device, rank and collectives. dir: the run directory, locked against other runs. is_complete: whether an
    earlier start has written `final/` already.
    """

    def __init__(self, cfg: TrainConfig, recipe: str, overwrite: bool) -> None:
        self.cfg, self.recipe, self.overwrite = cfg, recipe, overwrite
        self.dist = DistributedContext(cfg.seed, cfg.device, cfg.parallel, cfg.deterministic)
        self.dir = Path(cfg.output_dir)
        self.stack = ExitStack()
        self.findings: list[Finding] = []  # about the rows, for the report
        self.handlers: dict[int, SignalHandler] = {}  # replaced by `handle_signals`

    def __enter__(self) -> "RunContext":
        cfg, dist = self.cfg, self.dist
        flight_recorder.record_into(self.dir / LOGS)
        with ExitStack() as stack:
            stack.enter_context(dist)
            stack.enter_context(oom_report.report_oom(cfg, dist.device, dist.world_size, dist.num_nodes))
            resolved, hint = hide_secrets(dump_yaml(cfg, self.recipe)), continue_training_hint(cfg)
            self.files = stack.enter_context(
                run_dir.open_run_dir(self.dir, resolved, LIVE_KEYS, self.overwrite, dist, hint)
            )
            dist.run_on_main(partial(publish.check_push, cfg.push_to_hub))
            cfg.memory.check_num_micro_batches(-(-cfg.global_batch_size // dist.dims.dp_size), cfg.micro_batch_size)
            self.is_complete = not self.overwrite and dist.run_on_main(partial(atomic.is_complete, self.final_dir))
            if self.is_complete:
                verify.raise_if_failed(self.final_dir)
                dist.run_on_main(partial(run_dir.check_final_files, self.dir))
                dist.log(f"{self.final_dir}: this run is complete. Pass --overwrite to train again.")
            self.profiler = Profiler(cfg.profiler, self.dir, dist)
            self.uploader = HubUploader(cfg.push_to_hub, self.dir, dist)
            dist.heartbeat.record(0, "prepare")
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        return self.stack.__exit__(*error)

    @property
    def final_dir(self) -> Path:
        return self.dir / run_dir.FINAL

    @property
    def start_date(self) -> date:
        """The day on which the run started: chat templates may print it, and a resumed run must print the same."""
        return self.files.started_on

    def begin(self, train_data: DataLoader) -> int:
        """Everything is loaded and checked. Write config.yaml; with --overwrite, first erase the previous results.

        Returns the number of optimizer steps.
        """
        self.files.start()
        self.plan = StepPlan(self.cfg.max_steps or train_data.num_steps(self.cfg.epochs), train_data)
        return self.plan.num_steps

    def open_checkpointer(
        self,
        model: Decoder,
        optimizer: TrainOptimizer,
        lr_scheduler: LRScheduler,
        early_stopping: EarlyStopping,
        **stateful: Stateful,
    ) -> Checkpointer:
        """The training states of this run. `stateful`: everything else that changes during a run, by name."""
        cfg = self.cfg
        background = self.dist.device.type != "cpu" if cfg.async_save == "auto" else cfg.async_save
        options = cfg.save_total_limit, self.dist, background
        directory = self.dir / run_dir.STATE
        if self.dist.loss_scaler.state_dict():  # in fp16
            stateful["loss_scaler"] = self.dist.loss_scaler
        self.throughput = ThroughputCounter()
        stateful |= {"early_stopping": early_stopping, "throughput": self.throughput}
        checkpointer = Checkpointer(directory, model, optimizer.inner, lr_scheduler, *options, **stateful)
        checkpointer.step_to_keep = lambda: early_stopping.step_to_keep
        return checkpointer

    def open_logger(self, num_steps: int, step: int) -> MetricLogger:
        """The metric logger of a run that starts or resumes at `step`, after its training state was restored."""
        if step:
            self.dist.log(f"resuming from step {step} of {num_steps}")
        config = map_strings(to_plain_config(self.cfg, self.recipe), hide_secrets)  # trackers are shared
        return MetricLogger(
            self.dir, self.dist, num_steps, step, config, self.throughput, self.cfg.log_every, self.cfg.report_to
        )

    def write_info(self, model: Decoder, loaders: Mapping[str, DataLoader | None], num_steps: int, step: int) -> None:
        """Write the facts about a run that starts or resumes at `step`, for its report."""
        start = RunStart(self.cfg, model, loaders, self.findings, num_steps, step, self.dist)
        self.dist.run_on_main(partial(start.write, self.dir))

    # In the training loop

    def begin_step(self, step: int, logger: MetricLogger) -> None:
        """Send a heartbeat, start or stop the profiler, and seed the random numbers of this step."""
        if self.plan.is_due(self.cfg.save_every, step) and self.files.restore_deleted():
            self.dist.log(f"warning: {self.dir} was deleted during the run. Its config and metrics are written again.")
        with logger.pause():
            self.profiler.begin_step(step)
        self.dist.begin_step(step)

    def due_after(self, step: int, num_steps: int) -> Due:
        """Actions that are due after `step` steps. All ranks get the same answer."""
        cfg, plan, is_last = self.cfg, self.plan, step == num_steps
        return Due(
            push=self.uploader.is_due(step, num_steps),
            eval=cfg.has_evaluation and (is_last or plan.is_due(cfg.eval_every, step)),
            forgetting=cfg.forgetting is not None and (is_last or plan.is_due(cfg.forgetting.eval_every, step)),
            save=is_last or plan.is_due(cfg.save_every, step) or self.dist.stopping is not None,
        )

    def push_checkpoint(self, step: int, num_steps: int, model: Decoder, checkpoint: HFCheckpoint) -> None:
        """Write a checkpoint of the model and upload it in the background."""

        def save(directory: Path) -> None:
            final_checkpoint.save_final(self.cfg.adapter, directory, model, checkpoint, self.dist)

        self.uploader.push_if_due(step, num_steps, save)

    def push_result(self) -> None:
        """Upload `final/` if `push_to_hub` is set. If that fails, the error says how to repeat it."""
        self.uploader.finish(self.final_dir)

    # Signals

    def handle_signals(self) -> None:
        """From now on, stop signals end the run after the current step, with a saved training state.

        A second signal ends it at once. The stop file is reported as SIGTERM by the process that watches for it.
        """
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other thread
            self.handlers = handle_stop_signals(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = self.dist.requested_signal is None
        self.dist.requested_signal = signal.Signals(number)
        # `tune` ends its workers at the second signal: schedulers send each signal to all processes.
        if not worker_env.is_tune_worker():
            signal.signal(number, self.handlers[number])
        if self.dist.is_main_process and is_first:  # not through print: the signal may have interrupted one
            name = stop_reason(self.dist.requested_signal, self.stop_file)
            repeat = "a second signal" if name == self.dist.requested_signal.name else self.dist.requested_signal.name
            write_notice(number, f"\n{name}: saving after this step; {repeat} ends the run at once\n")

    @property
    def stop_file(self) -> Path:
        return self.dir / run_dir.STOP

    def exit_if_stop_requested(self, step: int, num_steps: int) -> None:
        """Raise RunStopped if a signal asked to end the run and steps are left. The training state has been saved."""
        if (number := self.dist.stopping) is not None and step < num_steps:
            reason = stop_reason(number, self.stop_file)
            text = f"stopped by {reason} after step {step} of {num_steps}. Run the same command to resume."
            raise RunStopped(text, 128 + number)


def run_training(recipe: str, train: Callable[[ConfigT, RunContext], None], cfg: ConfigT, overwrite: bool) -> None:
    """Train in the run directory of the config, unless the run is complete; upload the result if the config says so."""
    with RunContext(cfg, recipe, overwrite) as run:
        if not run.is_complete:
            train(cfg, run)
        run.push_result()


def continue_training_hint(cfg: TrainConfig) -> str:
    """Overrides for a new run that starts from the result of this one."""
    final = Path(cfg.output_dir) / run_dir.FINAL
    if isinstance(cfg.adapter, NoAdapter):
        return f"model={final}" + (" init=pretrained" if cfg.init == "random" else "")
    if cfg.adapter.init == "default":
        return f"adapter.adapter_path={final}"
    return f"`tune merge {cfg.model} {final} OUT`, then model=OUT"  # a PiSSA adapter is saved with twice the rank
