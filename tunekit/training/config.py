"""What all recipes that train have in common: their choices, and the way from a checked config to a finished run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from tunekit import build, devices
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint, load_model, run_dir, verify
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.checkpoint.dcp_planner import reshard
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.config.dump import dump_yaml, to_plain_config
from tunekit.config.errors import FieldErrors
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader, build_dataloader
from tunekit.data.dataloader.mixture import MixtureBase, check_finite
from tunekit.data.dataloader.prefetch import Prefetcher
from tunekit.data.datasets import DatasetConfig
from tunekit.data.tokenizer import Tokenizer
from tunekit.devices import DeviceChoice
from tunekit.distributed import flight_recorder
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.launcher import LOGS
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import FieldError, UserError
from tunekit.hub import download
from tunekit.loggers import metric_logger
from tunekit.loggers.metric_logger import MetricLogger, ThroughputCounter, Tracker
from tunekit.memory.config import MemoryConfig, TrainOptimizer
from tunekit.models.compile import check_compile
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import (
    AdamW8bitConfig,
    AdamWConfig,
    ConstantLRConfig,
    CosineLRConfig,
    EarlyStopping,
    LinearLRConfig,
    MuonConfig,
    SGDConfig,
    WSDConfig,
)
from tunekit.plan import free_memory, oom_report
from tunekit.publishing import model_card, publish
from tunekit.publishing.publish import HubUploader, PushToHubConfig
from tunekit.quantization.config import Float8Config, FP4Config, NF4Config, NoQuantization
from tunekit.training import data_checks, packing_check
from tunekit.training.forgetting import ForgettingConfig, ForgettingMonitor
from tunekit.training.profiler import Profiler, ProfilerConfig, record_data_wait, resolve_profiler
from tunekit.training.step_guard import StepGuard, StepGuardConfig

# Choices that may change between two starts of one run: they do not change what is learnt.
LIVE = frozenset(
    {
        "output_dir",
        "log_every",
        "report_to",
        "save_total_limit",
        "save_every",
        "async_save",
        "push_to_hub",
        "data_checks",
        "parallel",
        "step_guard",
        "profiler",
        "forgetting",
        "deterministic",
    }
)

# How to go on behind a step that has ended a run.
MEND = "look at them, lower optimizer.lr, or go on without such steps: step_guard.on_nan=skip, step_guard.on_spike=skip"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Each field is one choice; each class is one file to read."""

    model: str  # folder of a checkpoint, a Hub name, or tunekit/nano
    data: DatasetConfig | MixtureBase  # what to learn; each recipe says which rows it reads
    output_dir: str  # Run directory: config, metrics, training states and the final checkpoint
    eval_data: DatasetConfig | MixtureBase | None = None  # held-out rows
    # What to do when the data checks find unusable data
    data_checks: Literal["error", "warn"] = (
        "error"  # rows that nothing useful can be learnt from: no training, or a warning
    )
    # How frozen weights are stored; `nf4` with an adapter is QLoRA
    quantization: NoQuantization | NF4Config | FP4Config | Float8Config = NoQuantization()
    adapter: NoAdapter | LoRAConfig | DoRAConfig = NoAdapter()  # what is trained
    optimizer: AdamWConfig | AdamW8bitConfig | MuonConfig | SGDConfig = AdamWConfig()
    # Learning rate schedule
    lr_scheduler: CosineLRConfig | LinearLRConfig | ConstantLRConfig | WSDConfig = CosineLRConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()  # how the devices share the work
    step_guard: StepGuardConfig = StepGuardConfig()  # Detect NaN, Inf and loss spikes
    forgetting: ForgettingConfig | None = None  # Stop when the loss on a held-out task rises (catastrophic forgetting)
    profiler: ProfilerConfig | bool = False  # Profile some steps with torch.profiler; `true` uses the defaults
    push_to_hub: PushToHubConfig | None = None  # Upload the result to the Hugging Face Hub
    init: Literal["pretrained", "random"] = "pretrained"  # `random`: train from scratch what config.json describes
    tokenizer: str | None = None  # folder or name of the model whose tokenizer is used, if not its own
    device: DeviceChoice = "auto"  # auto: the first of cuda, xpu, mps that torch finds, else cpu
    global_batch_size: int = 16  # Rows per optimizer step, over all devices
    micro_batch_size: int = 1  # Rows per forward pass on one device
    epochs: int = 1  # passes over the rows
    max_steps: int | None = None  # Optimizer steps; overrides `epochs`
    max_grad_norm: float = 1.0  # Maximum gradient norm; 0 disables clipping
    save_every: int = 500  # steps between two states to resume from
    # Write training states in the background, from a copy in host memory; `auto`: on GPUs
    async_save: bool | Literal["auto"] = "auto"
    save_total_limit: int = 1  # Number of training states to keep
    eval_every: int = 500  # Steps between two evaluations
    early_stopping_patience: int | None = None  # Evaluations without a lower loss before the run stops
    log_every: int = 1  # Steps between two metric lines; the device is only read then
    report_to: tuple[Tracker, ...] = ()  # Experiment trackers that receive the metrics, such as `[wandb]`
    compile: bool = False
    seed: int = 0
    # repeat a run bit for bit on the same device: slower on GPUs, and an error where torch has no such operation
    deterministic: bool = False

    def __post_init__(self) -> None:
        counts = (
            "global_batch_size",
            "micro_batch_size",
            "epochs",
            "max_steps",
            "save_every",
            "save_total_limit",
            "eval_every",
            "early_stopping_patience",
            "log_every",
        )
        low = [name for name in counts if vars(self)[name] is not None and vars(self)[name] < 1]
        wrong = [FieldError(name, f"must be 1 or more, not {vars(self)[name]}") for name in low]
        if self.max_grad_norm < 0:
            wrong.append(FieldError("max_grad_norm", f"must not be below 0, not {self.max_grad_norm}"))
        if wrong:
            raise FieldErrors(wrong)
        if self.early_stopping_patience is not None and self.eval_data is None:
            raise FieldError("early_stopping_patience", "requires eval_data")
        check_finite(self.data, self.max_steps, self.eval_data)
        if not self.quantization.trainable and isinstance(self.adapter, NoAdapter):
            told = "quantized weights cannot be trained. Set adapter=lora or adapter=dora"
            raise FieldError("quantization", told)
        if self.compile and self.memory.activation_checkpointing == "selective":
            told = "torch.compile decides itself what to recompute. Set it to none or full, or set compile=false"
            raise FieldError("memory.activation_checkpointing", told)
        if refused := self.memory.refusal(self.max_grad_norm):
            raise FieldError("memory.optimizer_in_bwd", refused)
        if refused := self.step_guard.refusal(self.memory.optimizer_in_bwd):
            raise FieldError("step_guard", refused)
        looked = resolve_profiler(self.profiler)
        if looked is not None and (refused := looked.refusal(self.max_steps)):
            raise FieldError("profiler.skip_first", refused)
        if self.init == "random" and not isinstance(self.adapter, NoAdapter):
            raise FieldError("init", "random weights under an adapter are kept nowhere: train all of them")

    def headed(self, source: HFCheckpoint) -> HFCheckpoint:
        """The checkpoint with the head that is trained: that of a language model."""
        require_language_model(source)
        return source


class Stateful(ABC):
    """What a method's steps change besides the model: it is part of a run's state."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be as it was then."""


class Taken(NamedTuple):
    """A step of the optimizer: its loss, the length of its gradient, and what else people look at, by name."""

    loss: Tensor
    norm: Tensor
    figures: Mapping[str, Tensor | float] = MappingProxyType({})
    batches: Sequence[Batch] | None = None  # what it has learnt from, if these are not the rows that came

    def counts(self, came: Sequence[Batch]) -> tuple[int, int]:
        """Tokens of this rank, and how many of them are learnt."""
        batches = came if self.batches is None else self.batches
        return sum(batch.num_tokens for batch in batches), sum(batch.num_target_tokens for batch in batches)


def nothing(job: "Job") -> dict[str, Any]:
    return {}


class Method(NamedTuple):
    """What a recipe adds. `step(model, batches, cfg, update, run)` takes one step of the optimizer;
    `validate(model, held, cfg, run)` gives figures of held-out rows, of which `loss` is one.

    `beside(job)` makes what both work with besides the model, such as a reference: they get it by keyword.
    """

    name: str  # of the recipe
    step: Callable[..., Taken]
    validate: Callable[..., Mapping[str, float]]
    beside: Callable[["Job"], dict[str, Any]] = nothing


def open_checkpoint(cfg: TrainConfig, files: download.Files = download.READ) -> HFCheckpoint:
    """The checkpoint, and whose tokenizer goes with it."""
    source = HFCheckpoint.open(download.resolve_model_dir(cfg.model, files), cfg.model)
    words = {} if cfg.tokenizer is None else {"words": download.resolve_model_dir(cfg.tokenizer, download.SMALL)}
    return cfg.headed(replace(source, **words))


def get_tokenizer(cfg: TrainConfig) -> Tokenizer:
    """The tokenizer that rows are written with; no weight is read for it."""
    return open_tokenizer(open_checkpoint(cfg, download.SMALL))


def open_tokenizer(source: HFCheckpoint) -> Tokenizer:
    return Tokenizer.open(source.tokenizer_path).with_vocab_size(source.spec.vocab, source.tokenizer_path)


def check_training(cfg: TrainConfig) -> None:
    """What can be known without reading weights: the folder, the family, the adapter's targets, the rows' files."""
    if cfg.device in ("auto", "cpu"):  # a config for a GPU may be checked on a machine without one
        device = devices.select(cfg.device)
        cfg.memory.check(device)
        if cfg.compile:
            check_compile(device)
        cfg.precision.check(device)
        cfg.parallel.check(device.type, 1)
    source = open_checkpoint(cfg, download.SMALL)
    shapes = build.build_meta_model(source, cfg.quantization, cfg.adapter).shapes
    build.check_parallelizable(source, cfg.quantization, cfg.adapter, cfg.parallel)
    if cfg.init == "pretrained" and download.cached_commit(source.path) is None:  # the Hub's weights are not here yet
        load_model.check_tensors(source, shapes)
    tokenizer = open_tokenizer(source)
    for rows in filter(None, (cfg.data, cfg.eval_data)):
        rows.check_source()
        rows.prepare_tokenizer(tokenizer)
    if cfg.forgetting is not None:
        cfg.forgetting.check(source.spec, tokenizer)


@dataclass
class Job:
    """All that a run works with once it has begun."""

    cfg: Any
    method: Method
    run: DistributedContext
    space: run_dir.RunDir
    source: HFCheckpoint
    data: DataLoader
    held: DataLoader | None
    model: Decoder
    skill: ForgettingMonitor
    beside: dict[str, Any] = field(default_factory=dict)  # what the method works with besides the model

    def write(self, folder: Path) -> None:
        """A checkpoint of the model as it is now."""
        final_checkpoint.save_final(self.cfg.adapter, folder, self.model, self.source, self.run)


def run(cfg: Any, method: Method, overwrite: bool) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    flight_recorder.record_into(Path(cfg.output_dir) / LOGS)
    with (
        DistributedContext(cfg.seed, cfg.device, cfg.parallel, cfg.deterministic) as here,
        oom_report.report_oom(cfg, here.device, here.world_size, here.num_nodes),
        run_dir.open_run_dir(
            Path(cfg.output_dir), dump_yaml(cfg, method.name), LIVE, overwrite, here, continue_training_hint(cfg)
        ) as space,
    ):
        here.run_on_main(partial(publish.check_push, cfg.push_to_hub))
        cfg.memory.check_passes(-(-cfg.global_batch_size // here.dims.dp_size), cfg.micro_batch_size)
        if not overwrite and here.run_on_main(partial(atomic.is_complete, space.final)):
            verify.raise_if_failed(space.final)
            here.log(f"{space.final} is there: nothing is left to do; --overwrite trains again")
            here.run_on_main(partial(publish.push_result, cfg.push_to_hub, space.folder, space.final))
            return
        job = begun(cfg, method, here, space)
        sender = HubUploader(cfg.push_to_hub, space.folder, job.write, here)
        steps = train(job, sender)
        export_final(job, steps)
        sender.finish(space.final)


def continue_training_hint(cfg: TrainConfig) -> str:
    """What to say for a run that begins with what this one has made."""
    final = Path(cfg.output_dir) / run_dir.FINAL
    if isinstance(cfg.adapter, NoAdapter):
        return f"model={final}" + (" init=pretrained" if cfg.init == "random" else "")
    if cfg.adapter.init == "default":
        return f"adapter.adapter_path={final}"
    return f"`tune merge {cfg.model} {final} OUT`, then model=OUT"  # what was added is stored as twice the rank


def begun(cfg: Any, method: Method, run: DistributedContext, space: run_dir.RunDir) -> Job:
    """Rows prepared and looked at, weights read: what an earlier run has left there goes only now."""
    run.heartbeat.beat(0, "prepare")
    source = open_checkpoint(cfg)
    if cfg.init == "pretrained":  # before rows are prepared, which may take long
        load_model.check_tensors(source, build.build_meta_model(source, cfg.quantization, cfg.adapter).shapes)
    tokenizer = open_tokenizer(source).with_date(space.started_on)
    how = tokenizer, cfg.global_batch_size, cfg.micro_batch_size, run
    data = build_dataloader(cfg.data, *how, space.folder, space.overwrite)
    held = cfg.eval_data and build_dataloader(cfg.eval_data, *how, space.folder / "eval", space.overwrite)
    skill = ForgettingMonitor.open(
        cfg.forgetting, tokenizer, (cfg.global_batch_size, cfg.micro_batch_size), run, space.folder, space.overwrite
    )
    run.log(f"data: {data.summary}")
    data_checks.check_data(cfg, {"data": data, "eval_data": held}, tokenizer, run)
    scratch = cfg.init == "random"
    run.heartbeat.beat(0, "load")
    free_memory.check(cfg, run)
    model = build.build_model(
        source, cfg.quantization, cfg.adapter, cfg.precision, cfg.memory, run, scratch, cfg.compile
    )
    job = Job(cfg, method, run, space, source, data, held, model, skill)
    job.beside = method.beside(job)
    reshard(model)  # what it was asked there has gathered weights: an optimizer wants those that live here
    space.start()
    return job


class Parts(NamedTuple):
    """What moves in the course of a run. All of it is in a state."""

    update: TrainOptimizer
    schedule: Any
    patience: EarlyStopping
    ahead: Prefetcher
    state: Checkpointer
    watch: StepGuard
    sums: ThroughputCounter


def parts(job: Job, steps: int) -> Parts:
    """As they are before the first of so many steps."""
    cfg, model = job.cfg, job.model
    inner = (p for layer in model.layers for p in layer.parameters())
    optimizer = cfg.optimizer.build(cfg.adapter.param_groups(model), inner)
    schedule, patience = cfg.lr_scheduler.build(optimizer, steps), EarlyStopping(cfg.early_stopping_patience)
    ahead = Prefetcher(job.data, job.run.device)
    watch, sums = StepGuard(cfg.step_guard, job.run.device), ThroughputCounter()
    own = [one for one in job.beside.values() if isinstance(one, Stateful)]
    kept = optimizer, schedule, cfg.save_total_limit, job.run, patience, ahead, watch, sums, job.skill, *own
    background = job.run.device.type != "cpu" if cfg.async_save == "auto" else cfg.async_save
    state = Checkpointer(job.space.state, model, *kept, background=background)
    update = cfg.memory.update(optimizer, cfg.max_grad_norm, job.run, watch.allows)
    return Parts(update, schedule, patience, ahead, state, watch, sums)


def train(job: Job, sender: HubUploader) -> int:
    """Every step from the last saved one on; how many there were in all."""
    cfg, run, steps = job.cfg, job.run, job.cfg.max_steps or job.data.num_steps(job.cfg.epochs)
    update, schedule, patience, ahead, state, watch, sums = moving = parts(job, steps)
    done = start = state.restore()
    packing_check.check_packing(job.model, job.data, run, start, steps)
    resolved = to_plain_config(cfg, job.method.name)
    log = MetricLogger(job.space.folder, run, steps, start, resolved, sums, cfg.log_every, cfg.report_to)
    profiler = Profiler(cfg.profiler, job.space.folder, run)
    with state, log, profiler, ahead.start(watch.data(start), watch.data(steps)):
        if start == 0 and job.held:
            evaluate(job, 0, log)
        job.skill.begin(job.model, run, log.log, start)
        if start == 0 and cfg.step_guard.returns:
            state.save(0)
        run.listen(job.space.folder / run_dir.STOP)
        for step in watch.over(start, steps):
            if patience.triggered:
                run.log(f"early stopping at step {step}: {cfg.early_stopping_patience} evaluations, no lower loss")
                break
            with log.pause():
                profiler.at(step)
            run.begin_step(step)
            with record_data_wait():
                batches = ahead.next()
            rate = schedule.get_last_lr()[0]
            taken = job.method.step(job.model, batches, cfg, update, run, **job.beside)
            if settle(job, moving, log, last=False):
                continue  # from an earlier step on
            schedule.step()
            done, (real, learnt) = step + 1, run.sum_each_count(*taken.counts(batches))
            made = {"loss": taken.loss, "grad_norm": taken.norm, "lr": rate, **taken.figures}
            log.log_step(done, made, num_tokens=real, num_target_tokens=learnt, data_time=ahead.data_time)
            with log.pause():
                if sender.is_due(done, steps):
                    settle(job, moving, log)
                    sender.push_if_due(done, steps)
                between(job, moving, done, steps, log)
    return done


def settle(job: Job, parts: Parts, log: MetricLogger, last: bool = True) -> bool:
    """Answer what the guard has found; whether the run has gone back to a state for it.

    Where the `last` step need not be known, only those are read whose lines of metrics are to be written now.
    """
    watch, run = parts.watch, job.run
    if last:
        watch.look()
    elif log.pending or (log.is_due(watch.step + 1) and not log.lag):
        watch.look(log.lag)
    if watch.fault is None:
        if last:
            log.flush()
        return False
    parts.ahead.pause()
    told = partial(watch.fault.told, job.data.row_locations(watch.data(watch.fault.step)))
    if watch.fault.answer == "stop":
        log.discard_after(step=watch.fault.step)
        raise UserError(told("earlier states stay as they are; " + MEND))
    if back := watch.fault.answer == "rollback":
        parts.state.wait()
        at = watch.go_back(parts.state.restore)
        run.log(told(f"back to step {at}, from which its rows and those before it are passed over"))
        parts.ahead.start(watch.data(at), watch.data(log.total))
        log.rewind(at)
    else:
        run.log(told("it moves no weight"))
        watch.fault = None
    parts.ahead.resume()
    return back


def between(job: Job, parts: Parts, done: int, steps: int, log: MetricLogger) -> None:
    """Behind a step: validate, save and leave, when it is time for it."""
    cfg, run, last = job.cfg, job.run, done == steps
    if job.held and (last or done % cfg.eval_every == 0):
        settle(job, parts, log)
        parts.patience.update(evaluate(job, done, log))
    if job.skill.due(done, last):
        settle(job, parts, log)
        job.skill.measure(job.model, run, log.log, done)
    if last or done % cfg.save_every == 0 or parts.patience.triggered or job.skill.ends or run.stopping:
        settle(job, parts, log)
        run.heartbeat.beat(done, "save")
        parts.state.save(done)
        run.leave(done, steps)  # in here: a signal that comes behind the `if` is for the next step
        job.skill.insist(done)
    parts.state.poll()


def evaluate(job: Job, done: int, log: MetricLogger) -> float:
    """The loss on held-out rows, which goes into the log with what else there is to say of them."""
    assert job.held is not None
    job.run.heartbeat.beat(done, "validate")
    with log.pause():
        found = job.method.validate(job.model, job.held, job.cfg, job.run, **job.beside)
        others = {f"eval/{name}": value for name, value in found.items() if name != "loss"}
        log.log(done, **{"eval/loss": found["loss"]}, **others)
    return found["loss"]


def export_final(job: Job, steps: int) -> None:
    """The result: for others, compared with the model that it was made of, and described."""
    cfg, space, run = job.cfg, job.space, job.run
    run.heartbeat.beat(steps, "finish")
    made = verify.ModelSource(job.source, cfg.quantization, cfg.adapter, cfg.precision)
    with atomic.SharedAtomicDir(space.final, run) as folder:
        job.write(folder)
        with devices.full_fp32_matmuls():
            found = verify.verify_saved(folder, job.model, made, run)
        run.run_on_main(partial(write_model_card, job, folder, steps, found))
    run.log(f"finished: {space.final}\n{found}")
    verify.raise_if_failed(space.final)


def write_model_card(job: Job, folder: Path, steps: int, found: verify.VerificationResult) -> None:
    """What people want to know of the result: figures and a card."""
    cfg, space = job.cfg, job.space
    rows, told = {"data": job.data, "eval_data": job.held}, to_plain_config(cfg, job.method.name)
    with atomic.wrap_write_errors(folder):
        metric_logger.write_final_metrics(space.folder, steps, **found.metrics)
        model_card.write_model_card(
            folder,
            model_card.ModelCardInfo(job.method.name, told, space.folder, job.source, job.model, rows, job.run.device),
        )
