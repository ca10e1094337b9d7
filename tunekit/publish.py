"""Results on the Hub: what of a folder is sent, what is refused, and sending in the course of a run."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from huggingface_hub.utils import disable_progress_bars

from tunekit import __version__, assemble, bundled, verify
from tunekit.checkpoint import atomic, peft
from tunekit.checkpoint.workspace import UPLOAD
from tunekit.errors import FieldError, UserError
from tunekit.hub import push
from tunekit.hub.trouble import tell

LEFT_OUT = (atomic.PARTIAL, atomic.PREVIOUS, ".incomplete")


@dataclass(frozen=True)
class Push:
    """Send the result of a run to the Hub when it ends, and checkpoints in its course. The token is never in a config:
    it comes from `hf auth login` or HF_TOKEN."""

    repo: str  # owner/name; made if it is not there
    every: int | None = None  # steps between two checkpoints that are sent; none: only the result
    private: bool = True  # who may see it
    branch: str | None = None  # made if it is not there; none: main

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise FieldError("every", f"must be 1 or more, not {self.every}")

    @property
    def target(self) -> push.Target:
        return push.Target(self.repo, self.private, self.branch)

    @property
    def options(self) -> str:
        """The same choice in words of `tune push`."""
        words = ["--private"] * self.private + ["--branch", self.branch or ""] * (self.branch is not None)
        return shlex.join([self.repo, *words])


class Publisher:
    """Sends what a run makes, beside the training. Without a choice it does nothing.

    publisher = Publisher(cfg.push, space.folder)       # fails at once if the Hub would refuse what comes later
    publisher.step(done, steps, write)                  # after each step; `write` writes a checkpoint into a folder
    publisher.finish(space.final)                       # at the end, when `final/` is whole and verified
    """

    def __init__(self, choice: Push | None, run: Path) -> None:
        self.choice, self.run = choice, run
        self.thread: Thread | None = None
        if choice is not None:
            disable_progress_bars()  # the terminal belongs to the run's own
            push.check(choice.target)
            atomic.remove(run / UPLOAD)

    def step(self, step: int, steps: int, write: Callable[[Path], object]) -> None:
        """Every so many steps: a copy of the model goes on its way, and training goes on."""
        if self.choice is None or self.choice.every is None or step % self.choice.every or step == steps:
            return
        if self.thread is not None and self.thread.is_alive():
            tell(f"step {step} is not sent: an earlier one is still on its way to {self.choice.repo}")
            return
        folder = self.run / UPLOAD / f"{step:08d}"
        with atomic.whole(folder) as place:
            write(place)
        self.thread = Thread(target=self.aside, args=(self.choice, folder, f"Step {step}"), daemon=True)
        self.thread.start()

    def aside(self, choice: Push, folder: Path, message: str) -> None:
        """Send a checkpoint. That it fails does no harm to the run."""
        try:
            sent = push.push(contents(folder), choice.target, message)
            tell(f"{message.lower()} is at {sent.url} (commit {sent.commit[:7]})")
        except UserError as error:
            tell(f"{message.lower()} was not sent: {error}; training goes on")
        finally:
            atomic.remove(folder)

    def finish(self, final: Path) -> None:
        """Send the result. If that fails, the error says how to repeat it."""
        if self.choice is None:
            return
        if self.thread is not None:
            self.thread.join()
        try:
            refuse(final, needed=True)
            sent = push.push(contents(final), self.choice.target, f"Result of a run, with tunekit {__version__}")
        except UserError as error:
            again = f"tune push {shlex.quote(str(self.run))} {self.choice.options}"
            raise UserError(f"{error}; the result stays in {final}; send it with: {again}") from error
        tell(f"the result is at {sent.url} (commit {sent.commit[:7]})")


def result(word: str) -> tuple[Path, bool]:
    """The folder that is sent for a run, a checkpoint or an adapter, and whether a run left it."""
    given = bundled.model(word) or Path(word).expanduser()
    if not given.is_dir():
        raise UserError(f"no such folder: {word}")
    folder = assemble.finished(given)
    if not any((folder / name).is_file() for name in ("config.json", peft.CONFIG)):
        raise UserError(f"{folder}: neither config.json nor {peft.CONFIG}, so this is no model")
    return folder, folder != given or atomic.is_whole(folder)


def contents(folder: Path) -> dict[str, Path]:
    """The files to send, by their paths in the repository: nothing hidden, no marks, nothing half written."""
    files = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {path.as_posix(): file for path, file in files.items() if is_sent(path)}


def is_sent(path: Path) -> bool:
    """Whether a file is for others, by its path in the folder."""
    hidden = any(part.startswith(".") or part.endswith(LEFT_OUT) for part in path.parts)
    return not hidden and path.name != atomic.MARK


def refuse(folder: Path, needed: bool) -> None:
    """UserError for files that are not what the model was, or that nobody has compared with it if that is `needed`."""
    if bad := damaged(folder):
        raise UserError(f"{bad} is no longer what was written: the disk or a person has changed it")
    found = verify.read(folder)
    if found is None and needed:
        raise UserError(f"{folder}: nobody has compared these files with the model, there is no {verify.FILE}")
    if found is not None and found.get("passed") is not True:
        raise UserError(f"{folder}: these files do not behave as the model did, see {verify.FILE}")


def damaged(folder: Path) -> Path | None:
    """Weights that have changed since they were written and marked. A card may be edited."""
    if not atomic.is_whole(folder):
        return None
    sums = json.loads((folder / atomic.MARK).read_text("utf-8"))
    weights = {folder / name: value for name, value in sums.items() if name.endswith(".safetensors")}
    return next((file for file, value in weights.items() if atomic.checksum(file) != value), None)
