"""What all recipes that train have in common: their choices, and the way from a checked config to a finished run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from tunekit import assemble, card, devices, leaks, metrics, publish, verify
from tunekit.adapters import DoRA, Full, LoRA
from tunekit.checkpoint import atomic, read, save, workspace
from tunekit.checkpoint.folder import Folder
from tunekit.checkpoint.pieces import at_rest
from tunekit.checkpoint.score import insist_on_text
from tunekit.checkpoint.state import State
from tunekit.config.dump import dump, resolved
from tunekit.config.problems import FieldErrors
from tunekit.data.rows import Rows
from tunekit.data.steps.ahead import Ahead
from tunekit.data.steps.batch import Batch
from tunekit.data.steps.loader import Loader, load
from tunekit.data.steps.mix import Mixed, check_ends
from tunekit.data.tokenizer import Tokenizer
from tunekit.devices import DeviceChoice
from tunekit.errors import FieldError, UserError
from tunekit.forgetting import Forgetting, Skill
from tunekit.formats import FP4, NF4, Float8, Plain
from tunekit.guard import Guard, Watch
from tunekit.hub import fetch
from tunekit.look import inspection
from tunekit.memory import Memory, Update
from tunekit.metrics import Log, Meter, Sums
from tunekit.models.decoder import Decoder
from tunekit.optim import SGD, WSD, AdamW, AdamW8bit, Constant, Cosine, Linear, Muon, Patience
from tunekit.parallel import flight_recorder
from tunekit.parallel.choice import Parallel
from tunekit.parallel.group import LOGS
from tunekit.parallel.run import Run
from tunekit.plan import explain, free_memory
from tunekit.precision import Precision
from tunekit.profile import Profile, Profiler, chosen, waiting
from tunekit.publish import Publisher, Push

# Choices that may change between two starts of one run: they do not change what is learnt.
LIVE = frozenset(
    {
        "out",
        "log",
        "keep",
        "save_every",
        "save_async",
        "push",
        "checks",
        "parallel",
        "guard",
        "profile",
        "forgetting",
        "deterministic",
    }
)

# How to go on behind a step that has ended a run.
MEND = "look at them, lower optimizer.lr, or go on without such steps: guard.nan=skip, guard.answer=skip"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Each field is one choice; each class is one file to read."""

    model: str  # folder of a checkpoint, a Hub name, or tunekit/nano
    data: Rows | Mixed  # what to learn; each recipe says which rows it reads
    out: str  # folder of this run: config, metrics, state and the final checkpoint
    validation: Rows | Mixed | None = None  # held-out rows
    checks: Literal["stop", "tell"] = "stop"  # rows that nothing useful can be learnt from: no training, or a warning
    weights: Plain | NF4 | FP4 | Float8 = Plain()  # how frozen weights are stored; nf4 with an adapter is QLoRA
    adapter: Full | LoRA | DoRA = Full()  # what is trained
    optimizer: AdamW | AdamW8bit | Muon | SGD = AdamW()
    schedule: Cosine | Linear | Constant | WSD = Cosine()
    precision: Precision = Precision()
    memory: Memory = Memory()
    parallel: Parallel = Parallel()  # how the devices share the work
    log: Log = Log()
    guard: Guard = Guard()  # steps whose loss or gradient is no number, or a spike
    forgetting: Forgetting | None = None  # a skill that is to stay: end the run when it goes
    profile: Profile | bool = False  # where the time of a step goes; true: of three steps
    push: Push | None = None  # send the result to the Hub
    init: Literal["checkpoint", "random"] = "checkpoint"  # random: train from scratch what config.json describes
    tokenizer: str | None = None  # folder or name of the model whose tokenizer is used, if not its own
    device: DeviceChoice = "auto"  # auto: the first of cuda, xpu, mps that torch finds, else cpu
    batch: int = 16  # rows in one optimizer step, over all devices
    micro_batch: int = 1  # rows in one forward pass, on one device
    epochs: int = 1  # passes over the rows
    steps: int | None = None  # optimizer steps, in place of epochs
    clip: float = 1.0  # longest gradient; 0: never shortened
    save_every: int = 500  # steps between two states to resume from
    # training goes on while a state is written, from a copy in the memory of the host; auto: where there is a GPU
    save_async: bool | Literal["auto"] = "auto"
    keep: int = 1  # states to keep
    validate_every: int = 500  # steps between two validations
    patience: int | None = None  # validations without a better loss before the run ends early
    seed: int = 0
    # repeat a run bit for bit on the same device: slower on GPUs, and an error where torch has no such operation
    deterministic: bool = False

    def __post_init__(self) -> None:
        counts = ("batch", "micro_batch", "epochs", "steps", "save_every", "keep", "validate_every", "patience")
        low = [name for name in counts if vars(self)[name] is not None and vars(self)[name] < 1]
        wrong = [FieldError(name, f"must be 1 or more, not {vars(self)[name]}") for name in low]
        if self.clip < 0:
            wrong.append(FieldError("clip", f"must not be below 0, not {self.clip}"))
        if wrong:
            raise FieldErrors(wrong)
        if self.patience is not None and self.validation is None:
            raise FieldError("patience", "needs `validation` to watch")
        check_ends(self.data, self.steps, self.validation)
        if not self.weights.trainable and isinstance(self.adapter, Full):
            told = "few bits are for frozen weights, and `adapter: full` trains all of them: use lora or dora"
            raise FieldError("weights", told)
        if refused := self.memory.refusal(self.clip):
            raise FieldError("memory.step_in_backward", refused)
        if refused := self.guard.refusal(self.memory.step_in_backward):
            raise FieldError("guard", refused)
        looked = chosen(self.profile)
        if looked is not None and (refused := looked.refusal(self.steps)):
            raise FieldError("profile.start", refused)
        if self.init == "random" and not isinstance(self.adapter, Full):
            raise FieldError("init", "random weights under an adapter are kept nowhere: train all of them")

    def headed(self, source: Folder) -> Folder:
        """The checkpoint with the head that is trained: that of a language model."""
        insist_on_text(source)
        return source


class Moving(ABC):
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
        return sum(batch.real for batch in batches), sum(batch.learnt for batch in batches)


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


def source_of(cfg: Training, files: fetch.Files = fetch.READ) -> Folder:
    """The checkpoint, and whose tokenizer goes with it."""
    source = Folder.open(fetch.resolve(cfg.model, files), cfg.model)
    words = {} if cfg.tokenizer is None else {"words": fetch.resolve(cfg.tokenizer, fetch.SMALL)}
    return cfg.headed(replace(source, **words))


def words(cfg: Training) -> Tokenizer:
    """The tokenizer that rows are written with; no weight is read for it."""
    return tokenizer_of(source_of(cfg, fetch.SMALL))


def tokenizer_of(source: Folder) -> Tokenizer:
    return Tokenizer.open(source.tokenizer).fitted(source.spec.vocab, source.tokenizer)


def check(cfg: Training) -> None:
    """What can be known without reading weights: the folder, the family, the adapter's targets, the rows' files."""
    if cfg.device in ("auto", "cpu"):  # a config for a GPU may be checked on a machine without one
        device = devices.select(cfg.device)
        cfg.memory.check(device)
        cfg.precision.check(device)
        cfg.parallel.check(device.type, 1)
    source = source_of(cfg, fetch.SMALL)
    shapes = assemble.outline(source, cfg.weights, cfg.adapter).shapes
    assemble.divisible(source, cfg.weights, cfg.adapter, cfg.parallel)
    if cfg.init == "checkpoint" and fetch.commit(source.path) is None:  # the Hub's weights are not here yet
        read.check(source, shapes)
    tokenizer = tokenizer_of(source)
    for rows in filter(None, (cfg.data, cfg.validation)):
        rows.check()
        rows.prepare(tokenizer)
    if cfg.forgetting is not None:
        cfg.forgetting.check(source.spec, tokenizer)


@dataclass
class Job:
    """All that a run works with once it has begun."""

    cfg: Any
    method: Method
    run: Run
    space: workspace.Workspace
    source: Folder
    data: Loader
    held: Loader | None
    model: Decoder
    skill: Skill
    beside: dict[str, Any] = field(default_factory=dict)  # what the method works with besides the model

    def write(self, folder: Path) -> None:
        """A checkpoint of the model as it is now."""
        save.final(self.cfg.adapter, folder, self.model, self.source, self.run)


def run(cfg: Any, method: Method, fresh: bool) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    flight_recorder.record_into(Path(cfg.out) / LOGS)
    with (
        Run(cfg.seed, cfg.device, cfg.parallel, cfg.deterministic) as here,
        explain.told(cfg, here.device, here.size, here.hosts),
        workspace.claim(Path(cfg.out), dump(cfg, method.name), LIVE, fresh, here, further(cfg)) as space,
    ):
        here.shared(partial(publish.check, cfg.push))
        cfg.memory.check_passes(-(-cfg.batch // here.sizes.readers), cfg.micro_batch)
        if not fresh and here.shared(partial(atomic.is_whole, space.final)):
            verify.insist(space.final)
            here.tell(f"{space.final} is there: nothing is left to do; --fresh starts over")
            here.shared(partial(publish.finish, cfg.push, space.folder, space.final))
            return
        job = begun(cfg, method, here, space)
        sender = Publisher(cfg.push, space.folder, job.write, here)
        steps = train(job, sender)
        finish(job, steps)
        sender.finish(space.final)


def further(cfg: Training) -> str:
    """What to say for a run that begins with what this one has made."""
    final = Path(cfg.out) / workspace.FINAL
    if isinstance(cfg.adapter, Full):
        return f"model={final}" + (" init=checkpoint" if cfg.init == "random" else "")
    if cfg.adapter.init == "zero":
        return f"adapter.start={final}"
    return f"`tune merge {cfg.model} {final} OUT`, then model=OUT"  # what was added is stored as twice the rank


def begun(cfg: Any, method: Method, run: Run, space: workspace.Workspace) -> Job:
    """Rows prepared and looked at, weights read: what an earlier run has left there goes only now."""
    run.beats.beat(0, "prepare")
    source = source_of(cfg)
    if cfg.init == "checkpoint":  # before rows are prepared, which may take long
        read.check(source, assemble.outline(source, cfg.weights, cfg.adapter).shapes)
    tokenizer = tokenizer_of(source).dated(space.day)
    how = tokenizer, cfg.batch, cfg.micro_batch, run
    data = load(cfg.data, *how, space.folder, space.fresh)
    held = cfg.validation and load(cfg.validation, *how, space.folder / "validation", space.fresh)
    skill = Skill.open(cfg.forgetting, tokenizer, (cfg.batch, cfg.micro_batch), run, space.folder, space.fresh)
    run.tell(f"data: {data.report}")
    inspection.begin(cfg, {"data": data, "validation": held}, tokenizer, run)
    scratch = cfg.init == "random"
    run.beats.beat(0, "load")
    free_memory.check(cfg, run)
    model = assemble.model(source, cfg.weights, cfg.adapter, cfg.precision, cfg.memory, run, scratch)
    job = Job(cfg, method, run, space, source, data, held, model, skill)
    job.beside = method.beside(job)
    at_rest(model)  # what it was asked there has gathered weights: an optimizer wants those that live here
    space.begin()
    return job


class Parts(NamedTuple):
    """What moves in the course of a run. All of it is in a state."""

    update: Update
    schedule: Any
    patience: Patience
    ahead: Ahead
    state: State
    watch: Watch
    sums: Sums


def parts(job: Job, steps: int) -> Parts:
    """As they are before the first of so many steps."""
    cfg, model = job.cfg, job.model
    inner = (p for layer in model.layers for p in layer.parameters())
    optimizer = cfg.optimizer.build(cfg.adapter.trained(model), inner)
    schedule, patience = cfg.schedule.build(optimizer, steps), Patience(cfg.patience)
    ahead = Ahead(job.data, job.run.device)
    watch, sums = Watch(cfg.guard, job.run.device), Sums()
    own = [one for one in job.beside.values() if isinstance(one, Moving)]
    kept = optimizer, schedule, cfg.keep, job.run, patience, ahead, watch, sums, job.skill, *own
    background = job.run.device.type != "cpu" if cfg.save_async == "auto" else cfg.save_async
    state = State(job.space.state, model, *kept, background=background)
    update = cfg.memory.update(optimizer, cfg.clip, job.run, watch.allows)
    return Parts(update, schedule, patience, ahead, state, watch, sums)


def train(job: Job, sender: Publisher) -> int:
    """Every step from the last saved one on; how many there were in all."""
    cfg, run, steps = job.cfg, job.run, job.cfg.steps or job.data.steps(job.cfg.epochs)
    update, schedule, patience, ahead, state, watch, sums = moving = parts(job, steps)
    done = start = state.restore()
    leaks.begin(job.model, job.data, run, start, steps)
    log = cfg.log.open(job.space.folder, run, steps, start, resolved(cfg, job.method.name), sums)
    profiler = Profiler(cfg.profile, job.space.folder, run)
    with state, log, profiler, ahead.over(watch.data(start), watch.data(steps)):
        if start == 0 and job.held:
            validate(job, 0, log)
        job.skill.begin(job.model, run, log.note, start)
        if start == 0 and cfg.guard.returns:
            state.save(0)
        run.listen(job.space.folder / workspace.STOP)
        for step in watch.over(start, steps):
            if patience.over:
                run.tell(f"the validation loss got no better {cfg.patience} times: ended after step {step}")
                break
            with log.aside():
                profiler.at(step)
            run.begin_step(step)
            with waiting():
                batches = ahead.take()
            rate = schedule.get_last_lr()[0]
            taken = job.method.step(job.model, batches, cfg, update, run, **job.beside)
            if settle(job, moving, log, last=False):
                continue  # from an earlier step on
            schedule.step()
            done, (real, learnt) = step + 1, run.totals(*taken.counts(batches))
            made = {"loss": taken.loss, "norm": taken.norm, "rate": rate, **taken.figures}
            log.step(done, made, tokens=real, learnt=learnt, wait=ahead.wait)
            with log.aside():
                if sender.due(done, steps):
                    settle(job, moving, log)
                    sender.step(done, steps)
                between(job, moving, done, steps, log)
    return done


def settle(job: Job, parts: Parts, log: Meter, last: bool = True) -> bool:
    """Answer what the guard has found; whether the run has gone back to a state for it.

    Where the `last` step need not be known, only those are read whose lines of metrics are to be written now.
    """
    watch, run = parts.watch, job.run
    if last:
        watch.look()
    elif log.pending or (log.reads(watch.step + 1) and not log.lag):
        watch.look(log.lag)
    if watch.fault is None:
        if last:
            log.flush()
        return False
    parts.ahead.rest()
    told = partial(watch.fault.told, job.data.where(watch.data(watch.fault.step)))
    if watch.fault.answer == "stop":
        log.drop(after=watch.fault.step)
        raise UserError(told("earlier states stay as they are; " + MEND))
    if back := watch.fault.answer == "back":
        parts.state.wait()
        at = watch.go_back(parts.state.restore)
        run.tell(told(f"back to step {at}, from which its rows and those before it are passed over"))
        parts.ahead.over(watch.data(at), watch.data(log.total))
        log.back(at)
    else:
        run.tell(told("it moves no weight"))
        watch.fault = None
    parts.ahead.begin()
    return back


def between(job: Job, parts: Parts, done: int, steps: int, log: Meter) -> None:
    """Behind a step: validate, save and leave, when it is time for it."""
    cfg, run, last = job.cfg, job.run, done == steps
    if job.held and (last or done % cfg.validate_every == 0):
        settle(job, parts, log)
        parts.patience.watch(validate(job, done, log))
    if job.skill.due(done, last):
        settle(job, parts, log)
        job.skill.measure(job.model, run, log.note, done)
    if last or done % cfg.save_every == 0 or parts.patience.over or job.skill.ends or run.stopping:
        settle(job, parts, log)
        run.beats.beat(done, "save")
        parts.state.save(done)
        run.leave(done, steps)  # in here: a signal that comes behind the `if` is for the next step
        job.skill.insist(done)
    parts.state.look()


def validate(job: Job, done: int, log: Meter) -> float:
    """The loss on held-out rows, which goes into the log with what else there is to say of them."""
    assert job.held is not None
    job.run.beats.beat(done, "validate")
    with log.aside():
        found = job.method.validate(job.model, job.held, job.cfg, job.run, **job.beside)
        others = {f"validation/{name}": value for name, value in found.items() if name != "loss"}
        log.note(done, validation=found["loss"], **others)
    return found["loss"]


def finish(job: Job, steps: int) -> None:
    """The result: for others, compared with the model that it was made of, and described."""
    cfg, space, run = job.cfg, job.space, job.run
    run.beats.beat(steps, "finish")
    made = verify.Made(job.source, cfg.weights, cfg.adapter, cfg.precision)
    with atomic.common(space.final, run) as folder:
        job.write(folder)
        with devices.full_fp32_matmuls():
            found = verify.saved(folder, job.model, made, run)
        run.shared(partial(describe, job, folder, steps, found))
    run.tell(f"finished: {space.final}\n{found}")
    verify.insist(space.final)


def describe(job: Job, folder: Path, steps: int, found: verify.Verification) -> None:
    """What people want to know of the result: figures and a card."""
    cfg, space = job.cfg, job.space
    rows, told = {"data": job.data, "validation": job.held}, resolved(cfg, job.method.name)
    with atomic.refused(folder):
        metrics.conclude(space.folder, steps, **found.figures)
        card.write(folder, card.Made(job.method.name, told, space.folder, job.source, job.model, rows, job.run.device))
