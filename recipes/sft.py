"""Supervised fine-tuning: full or with adapters, on conversations, instructions or plain text.

tune run sft nano/tools_lora
tune run sft llama3_2/1b_lora data.length=2048 optimizer.lr=1e-4
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tunekit import assemble, card, leaks, losses, metrics, publish, verify
from tunekit.adapters import DoRA, Full, LoRA
from tunekit.checkpoint import atomic, read, save, workspace
from tunekit.checkpoint.folder import Folder
from tunekit.checkpoint.state import State
from tunekit.config.dump import dump, resolved
from tunekit.data.steps.ahead import Ahead
from tunekit.data.steps.batch import Batch
from tunekit.data.steps.loader import Loader, load
from tunekit.data.steps.mix import Learnable, check_ends
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError
from tunekit.formats import FP4, NF4, Plain
from tunekit.hub import fetch
from tunekit.look import inspection
from tunekit.losses import CrossEntropy
from tunekit.memory import Memory, Update
from tunekit.metrics import Log
from tunekit.models.decoder import Decoder
from tunekit.optim import SGD, WSD, AdamW, AdamW8bit, Constant, Cosine, Linear, Muon, Patience
from tunekit.parallel import Run, device_of
from tunekit.precision import Precision
from tunekit.publish import Publisher, Push

# Choices that may change between two starts of one run: they do not change what is learnt.
LIVE = frozenset({"out", "log", "keep", "save_every", "push", "checks"})


@dataclass(frozen=True)
class SFT:
    """Everything this recipe can be told. Each field is one choice; each class is one file to read."""

    model: str  # folder of a checkpoint, a Hub name, or tunekit/nano
    data: Learnable  # what to learn
    out: str  # folder of this run: config, metrics, state and the final checkpoint
    validation: Learnable | None = None  # held-out rows
    checks: Literal["stop", "tell"] = "stop"  # rows that nothing useful can be learnt from: no training, or a warning
    weights: Plain | NF4 | FP4 = Plain()  # how frozen weights are stored; nf4 with an adapter is QLoRA
    adapter: Full | LoRA | DoRA = Full()  # what is trained
    loss: CrossEntropy = CrossEntropy()
    optimizer: AdamW | AdamW8bit | Muon | SGD = AdamW()
    schedule: Cosine | Linear | Constant | WSD = Cosine()
    precision: Precision = Precision()
    memory: Memory = Memory()
    log: Log = Log()
    push: Push | None = None  # send the result to the Hub
    init: Literal["checkpoint", "random"] = "checkpoint"  # random: train from scratch what config.json describes
    tokenizer: str | None = None  # folder or name of the model whose tokenizer is used, if not its own
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch: int = 16  # rows in one optimizer step, over all devices
    micro_batch: int = 1  # rows in one forward pass, on one device
    epochs: int = 1  # passes over the rows
    steps: int | None = None  # optimizer steps, in place of epochs
    clip: float = 1.0  # longest gradient; 0: never shortened
    save_every: int = 500  # steps between two states to resume from
    keep: int = 1  # states to keep
    validate_every: int = 500  # steps between two validations
    patience: int | None = None  # validations without a better loss before the run ends early
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("batch", "micro_batch", "epochs", "steps", "save_every", "keep", "validate_every", "patience")
        if low := [name for name in counts if vars(self)[name] is not None and vars(self)[name] < 1]:
            raise FieldError(low[0], f"must be 1 or more, not {vars(self)[low[0]]}")
        if self.clip < 0:
            raise FieldError("clip", f"must not be below 0, not {self.clip}")
        if self.patience is not None and self.validation is None:
            raise FieldError("patience", "needs `validation` to watch")
        check_ends(self.data, self.steps, self.validation)
        if isinstance(self.weights, NF4) and isinstance(self.adapter, Full):
            told = "four bits are for frozen weights, and `adapter: full` trains all of them: use lora or dora"
            raise FieldError("weights", told)
        if refused := self.memory.refusal(self.clip, -(-self.batch // self.micro_batch)):
            raise FieldError("memory.step_in_backward", refused)
        if self.init == "random" and not isinstance(self.adapter, Full):
            raise FieldError("init", "random weights under an adapter are kept nowhere: train all of them")


RECIPE = SFT


def source_of(cfg: SFT, files: fetch.Files = fetch.READ) -> Folder:
    """The checkpoint, and whose tokenizer goes with it."""
    source = Folder.open(fetch.resolve(cfg.model, files), cfg.model)
    return source if cfg.tokenizer is None else replace(source, words=fetch.resolve(cfg.tokenizer, fetch.SMALL))


def words(cfg: SFT) -> Tokenizer:
    """The tokenizer that rows are written with; no weight is read for it."""
    source = source_of(cfg, fetch.SMALL)
    return Tokenizer.open(source.tokenizer).fitted(source.spec.vocab, source.tokenizer)


def check(cfg: SFT) -> None:
    """What can be known without reading weights: the folder, the family, the adapter's targets, the rows' files."""
    if cfg.device != "cuda":  # a config that wants a GPU may be checked where there is none
        cfg.memory.check(device_of(cfg.device))
    source = source_of(cfg, fetch.SMALL)
    shapes = assemble.outline(source, cfg.weights, cfg.adapter).shapes
    if cfg.init == "checkpoint" and fetch.commit(source.path) is None:  # the Hub's weights are not here yet
        read.check(source, shapes)
    tokenizer = Tokenizer.open(source.tokenizer).fitted(source.spec.vocab, source.tokenizer)
    for rows in filter(None, (cfg.data, cfg.validation)):
        rows.check()
        rows.prepare(tokenizer)


def main(cfg: SFT, fresh: bool = False) -> None:
    """Train until the last step, a signal, or the end of patience, and leave a checkpoint for others."""
    with Run(cfg.seed, cfg.device) as run, workspace.claim(Path(cfg.out), dump(cfg, "sft"), LIVE, fresh) as space:
        publish.check(cfg.push)
        if not fresh and atomic.is_whole(space.final):
            verify.insist(space.final)
            run.tell(f"{space.final} is there: nothing is left to do; --fresh starts over")
            publish.finish(cfg.push, space.folder, space.final)
            return
        source = source_of(cfg)
        if cfg.init == "checkpoint":  # before rows are prepared, which may take long
            read.check(source, assemble.outline(source, cfg.weights, cfg.adapter).shapes)
        tokenizer = Tokenizer.open(source.tokenizer).fitted(source.spec.vocab, source.tokenizer).dated(space.day)
        how = tokenizer, cfg.batch, cfg.micro_batch, run
        data = load(cfg.data, *how, space.folder)
        held = cfg.validation and load(cfg.validation, *how, space.folder / "validation")
        run.tell(f"data: {data.report}")
        inspection.begin(cfg, {"data": data, "validation": held}, tokenizer, run)
        scratch = cfg.init == "random"
        model = assemble.model(source, cfg.weights, cfg.adapter, cfg.precision, cfg.memory, run, scratch)
        space.begin()
        sender = Publisher(cfg.push, space.folder, lambda folder: save.final(cfg.adapter, folder, model, source), run)
        steps = train(cfg, model, data, held, space, run, sender)
        with atomic.whole(space.final) as folder:
            save.final(cfg.adapter, folder, model, source)
            found = verify.saved(folder, model, source, cfg.precision, run.device, cfg.weights)
            metrics.conclude(space.folder, steps, **found.figures)
            rows = {"data": data, "validation": held}
            card.write(folder, card.Made("sft", resolved(cfg, "sft"), space.folder, source, model, rows, run.device))
        run.tell(f"finished: {space.final}\n{found}")
        verify.insist(space.final)
        sender.finish(space.final)


def train(
    cfg: SFT, model: Decoder, data: Loader, held: Loader | None, space: workspace.Workspace, run: Run, sender: Publisher
) -> int:
    """Every step from the last saved one on; how many there were in all."""
    steps = cfg.steps or data.steps(cfg.epochs)
    inner = (p for layer in model.layers for p in layer.parameters())
    optimizer = cfg.optimizer.build(cfg.adapter.trained(model), inner)
    update = cfg.memory.update(optimizer, cfg.clip)
    schedule = cfg.schedule.build(optimizer, steps)
    patience = Patience(cfg.patience)
    ahead = Ahead(data, run.device)
    state = State(space.state, model, optimizer, schedule, cfg.keep, run, patience, ahead)
    done = start = state.restore()
    leaks.begin(model, data, run, start, steps)
    with cfg.log.open(space.folder, run, steps, start, resolved(cfg, "sft")) as log, ahead.over(start, steps):
        if held and start == 0:
            with log.aside():
                log.note(0, validation=losses.mean(cfg.loss, model, held, run))
        run.listen()
        for step in range(start, steps):
            if patience.over:
                run.tell(f"the validation loss got no better {cfg.patience} times: ended after step {step}")
                break
            run.seed_step(step)
            batches = ahead.take()
            rate = schedule.get_last_lr()[0]
            loss, norm = train_step(model, batches, cfg, update, run)
            schedule.step()

            done, real, learnt = step + 1, sum(b.real for b in batches), sum(b.learnt for b in batches)
            log.step(done, loss=loss, norm=norm, rate=rate, tokens=real, learnt=learnt, wait=ahead.wait)
            with log.aside():
                sender.step(done, steps)
                if held and (done % cfg.validate_every == 0 or done == steps):
                    log.note(done, validation=patience.watch(losses.mean(cfg.loss, model, held, run)))
                if done % cfg.save_every == 0 or done == steps or patience.over or run.stopping:
                    state.save(done)
                    run.leave(done, steps)  # in here: a signal that comes behind the `if` is for the next step
    return done


def train_step(model: Decoder, batches: list[Batch], cfg: SFT, update: Update, run: Run) -> tuple[Tensor, Tensor]:
    """One optimizer step. A learnt token weighs the same in every micro-batch and on every rank."""
    tokens = run.total(sum(batch.learnt for batch in batches))
    total = torch.zeros((), device=run.device)
    for i, batch in enumerate(batches, start=1):
        run.sync_gradients(model, on=i == len(batches))
        loss = cfg.loss(model, batch.to(run.device)) / tokens
        (loss * run.size).backward()  # sharding averages gradients over the ranks
        total += loss.detach()
    return run.sum(total), update()
