"""Results on the Hub: what of a folder is sent, what is refused, and sending in the course of a run."""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import ClassVar

from huggingface_hub.utils import disable_progress_bars

from tunekit import __version__, assets, build
from tunekit.adapters.config import FrozenModel, LoRAConfig
from tunekit.checkpoint import atomic, load_model, merge, peft_adapter, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.checkpoint.peft_reader import TENSORS
from tunekit.checkpoint.run_dir import UPLOAD
from tunekit.checkpoint.safetensors_io import read_header
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.hub import download, upload
from tunekit.hub.errors import print_line
from tunekit.models.families.registry import FAMILIES
from tunekit.publishing import model_card
from tunekit.publishing.base_model import CARD
from tunekit.quantization.config import NoQuantization

LEFT_OUT = (atomic.PARTIAL, atomic.PREVIOUS, ".incomplete")


@dataclass(frozen=True)
class PushToHubConfig:
    """Send the result of a run to the Hub when it ends, and checkpoints in its course. The token is never in a config:
    it comes from `hf auth login` or HF_TOKEN."""

    kind: ClassVar[str] = "push_to_hub"
    repo_id: str  # owner/name; created if it does not exist
    push_every: int | None = None  # Steps between two uploaded checkpoints; null: only the result
    private: bool = True  # who may see it
    revision: str | None = None  # Branch; created if it does not exist; null: main
    merge_adapter: bool = False  # Upload the merged model instead of the adapter

    def __post_init__(self) -> None:
        if self.push_every is not None and self.push_every < 1:
            raise FieldError("push_every", f"must be 1 or more, not {self.push_every}")

    @property
    def target(self) -> upload.UploadTarget:
        return upload.UploadTarget(self.repo_id, self.private, self.revision)

    @property
    def options(self) -> str:
        """The same choice in words of `tune push`."""
        words = ["--private"] * self.private + ["--merge-adapter"] * self.merge_adapter
        return shlex.join([self.repo_id, *words, *(["--revision", self.revision] if self.revision else [])])


class HubUploader:
    """Sends what a run makes, beside the training. Without a choice it does nothing.

    publish.check(cfg.push)                             # first of all: fails if the Hub would refuse what comes later
    uploader = HubUploader(cfg.push_to_hub, run_dir, dist)
    uploader.step(step, num_steps, save)                # after each step; `save` writes a checkpoint into a directory
    uploader.finish(final_dir)                          # when `final/` is complete and verified
    """

    def __init__(self, choice: PushToHubConfig | None, folder: Path, run: DistributedContext) -> None:
        self.choice, self.folder, self.run = choice, folder, run
        self.thread: Thread | None = None
        if run.is_main:
            atomic.remove_dir(folder / UPLOAD)

    def due(self, step: int, steps: int) -> bool:
        """Whether a copy is to be sent behind a step."""
        every = None if self.choice is None else self.choice.push_every
        return every is not None and step % every == 0 and step != steps

    def step(self, step: int, steps: int, save: Callable[[Path], object]) -> None:
        """Every `push_every` steps, write a checkpoint with `save` on all ranks and upload it in the background."""
        if self.choice is None or not self.due(step, steps):
            return
        if self.run.shared(self.is_busy):
            self.run.tell(f"step {step} is not sent: an earlier one is still on its way to {self.choice.repo_id}")
            return
        folder = self.folder / UPLOAD / f"{step:08d}"
        with atomic.SharedAtomicDir(folder, self.run) as place:
            save(place)
        about = f"This is step {step:,} of {steps:,} of a run that goes on."
        if self.run.is_main:
            self.thread = Thread(target=aside, args=(self.choice, folder, f"Step {step}", about), daemon=True)
            self.thread.start()

    def is_busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def finish(self, final: Path) -> None:
        """Send the result, after what is still on its way. If that fails, the error says how to repeat it."""
        self.run.shared(partial(self.send, final))

    def send(self, final: Path) -> None:
        if self.thread is not None:
            self.thread.join()
        atomic.remove_dir(self.folder / UPLOAD)
        push_result(self.choice, self.folder, final)


def check_push(choice: PushToHubConfig | None) -> None:
    """Fail now where sending would fail later."""
    if choice is not None:
        disable_progress_bars()  # the terminal belongs to those of the run
        upload.check_upload_access(choice.target)


def aside(choice: PushToHubConfig, folder: Path, message: str, about: str) -> None:
    """Send a checkpoint from a thread of its own, with a card. That it fails does no harm to the run."""
    try:
        sent = send(choice, folder, message, about)
        print_line(f"{message} is at {sent.url} (commit {sent.commit[:7]})")
    except UserError as error:
        print_line(f"{message} was not sent: {error}; training goes on")
    finally:
        atomic.remove_dir(folder)


def push_result(choice: PushToHubConfig | None, run: Path, final: Path) -> None:
    """Send the result of a run, also of one that ended before. If that fails, the error says how to repeat it."""
    if choice is None:
        return
    try:
        if why := find_problem(final, True):
            raise UserError(why)
        sent = send(choice, final, f"Result of a run with tunekit {__version__}")
    except UserError as error:
        again = f"tune push {shlex.quote(str(run))} {choice.options}"
        raise UserError(f"{error}; the result stays in {final}; to send it: {again}") from error
    print_line(f"the result is at {sent.url} (commit {sent.commit[:7]})")


def send(choice: PushToHubConfig, folder: Path, message: str, about: str = "") -> upload.UploadResult:
    """One commit; in place of an adapter the whole model, if that was chosen. `about` makes a card that says so."""
    if about:
        model_card.write_minimal_card(folder, base_of(folder), about=about)
    if not choice.merge_adapter or not (folder / peft_adapter.CONFIG).is_file():
        warn_local_base(folder)
        return upload.upload_files(list_files(folder), choice.target, message)
    with merged_dir(folder, device="cpu") as whole:  # the run may need all that the GPU has
        if why := find_problem(whole, True):
            raise UserError(why)
        if about:
            model_card.write_minimal_card(whole, base_of(folder), about=about)
        return upload.upload_files(list_files(whole), choice.target, message)


def find_result_dir(word: str) -> tuple[Path, bool]:
    """The folder that is sent for a run, a checkpoint or an adapter, and whether a run left it."""
    given = assets.model_dir(word) or Path(word).expanduser()
    if not given.is_dir():
        raise UserError(f"no such folder: {word}")
    folder = build.final_dir_of(given)
    if not any((folder / name).is_file() for name in ("config.json", peft_adapter.CONFIG)):
        raise UserError(f"{folder}: neither config.json nor {peft_adapter.CONFIG}, so this is no model")
    return folder, folder != given or atomic.is_complete(folder)


@contextmanager
def merged_dir(folder: Path, out: Path | None = None, device: str = "auto") -> Iterator[Path]:
    """The whole model that an adapter makes of its base: in `out`, or beside the adapter for as long as it is used."""
    if not (folder / peft_adapter.CONFIG).is_file():
        raise UserError(f"{folder} is no adapter, so there is nothing to merge: leave --merge-adapter out")
    if out is not None and out.exists():
        raise UserError(f"{out} is there already: give --merged-dir another folder")
    source, adapter, _ = build.resolve_model(str(folder))
    assert isinstance(adapter, LoRAConfig)
    with ExitStack() as stack:
        if out is None:
            try:
                out = Path(stack.enter_context(TemporaryDirectory(prefix=".merged-", dir=folder.parent)), folder.name)
            except OSError as error:
                raise UserError(f"cannot write in {folder.parent}: {error.strerror}: use --merged-dir") from error
        with atomic.AtomicDir(out) as place:
            merge.merge_adapter(source, folder, place)
            print_line(str(verify.verify_merge(place, source, adapter, DistributedContext(device=device).device)))
            model_card.write_merged_card(place, folder, source)
        yield out


@contextmanager
def stage_files(folder: Path, repo: str, doubtful: bool, ask: bool) -> Iterator[dict[str, Path]]:
    """The files to send, by their paths in the repository, with a card. The folder itself stays as it is.

    The card says if the files are doubtful. The Hub may be asked about the base of an adapter to describe it.
    """
    with TemporaryDirectory() as temporary:
        place = Path(temporary, repo.rpartition("/")[2])
        for path, file in list_files(folder).items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).symlink_to(file.resolve())
        if (place / CARD).is_file():
            (place / CARD).unlink()
            shutil.copyfile(folder / CARD, place / CARD)
        else:
            model_card.write_minimal_card(place, base_of(folder) if ask else None)
        if doubtful:
            model_card.add_unverified_warning(place)
        yield list_files(place)


def base_of(folder: Path) -> HFCheckpoint | None:
    """What an adapter was made of, if that can be found out."""
    with suppress(UserError):
        return build.resolve_model(str(folder), download.SMALL)[0] if (folder / peft_adapter.CONFIG).is_file() else None


def list_files(folder: Path) -> dict[str, Path]:
    """The files for others, by their paths in the folder: nothing hidden, no marks, nothing half written."""
    files = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {path.as_posix(): file for path, file in files.items() if is_sent(path)}


def warn_local_base(folder: Path) -> None:
    """Tell if others could not open an adapter, because its base lies on this machine."""
    base = peft_adapter.base_model_name(folder) if (folder / peft_adapter.CONFIG).is_file() else ""
    if Path(base).is_absolute():
        print_line(
            f"{peft_adapter.CONFIG} names a base on this machine, {base}: others cannot open the adapter; "
            "`--merge-adapter` helps"
        )


def is_sent(path: Path) -> bool:
    """Whether a file is for others, by its path in the folder."""
    hidden = any(part.startswith(".") or part.endswith(LEFT_OUT) for part in path.parts)
    return not hidden and path.name != atomic.MARK


def find_problem(folder: Path, ours: bool) -> str | None:
    """Why files should not be given away: they are not what the model was, or nobody has compared ours with it."""
    if bad := damaged(folder):
        return f"{bad} is no longer what was written: the disk or a person has changed it"
    try:
        check_weights_complete(folder)
    except UserError as error:
        return str(error)
    found = verify.read_verification(folder)
    if found is None:
        return f"{folder}: nobody has compared these files with the model, there is no {verify.FILE}" if ours else None
    return None if found["passed"] is True else f"{folder}: these files are not what the model was, see {verify.FILE}"


def check_weights_complete(folder: Path) -> None:
    """UserError where weights that we know are cut off or missing: whoever fetches them could not open them."""
    config, adapter = folder / "config.json", folder / TENSORS
    if adapter.is_file():
        read_header(adapter)
    elif config.is_file() and read_json(config).get("model_type") in FAMILIES:
        source = HFCheckpoint.open(folder)
        load_model.check_tensors(source, build.build_meta_model(source, NoQuantization(), FrozenModel()).shapes)


def damaged(folder: Path) -> Path | None:
    """Weights that have changed since they were written and marked. A card may be edited."""
    if not atomic.is_complete(folder):
        return None
    sums = json.loads((folder / atomic.MARK).read_text("utf-8"))
    weights = {folder / name: value for name, value in sums.items() if name.endswith(".safetensors")}
    return next((file for file, value in weights.items() if atomic.checksum(file) != value), None)
