"""Publishes checkpoints on the Hub: selects and checks files, and uploads during and after a run."""

import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import ClassVar

from huggingface_hub.utils import disable_progress_bars

from tunekit import __version__, assets, build
from tunekit.adapters.config import LoRAConfig
from tunekit.checkpoint import atomic, load_model, merge, peft_config, verify
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint, read_json
from tunekit.checkpoint.peft_config import TENSORS
from tunekit.checkpoint.run_dir import UPLOAD
from tunekit.checkpoint.safetensors_io import SafetensorsHeader
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.hub import download, upload
from tunekit.hub.errors import print_line
from tunekit.models.families.registry import FAMILIES
from tunekit.publishing import model_card
from tunekit.publishing.base_model import CARD

EXCLUDED_SUFFIXES = (atomic.PARTIAL, atomic.PREVIOUS, ".incomplete")


@dataclass(frozen=True)
class PushToHubConfig:
    """Upload the result of a run to the Hub, and optionally checkpoints during training. The access token comes from
    `hf auth login` or HF_TOKEN, never from a config."""

    kind: ClassVar[str] = "push_to_hub"
    repo_id: str  # owner/name; created if it does not exist
    push_every: int | None = None  # Steps between two uploaded checkpoints; null: only the result
    private: bool = True  # Create a private repository
    revision: str | None = None  # Branch; created if it does not exist; null: main
    merge_adapter: bool = False  # Upload the merged model instead of the adapter

    def __post_init__(self) -> None:
        if self.push_every is not None and self.push_every < 1:
            raise FieldError("push_every", f"must be >= 1, got {self.push_every}")

    @property
    def target(self) -> upload.UploadTarget:
        return upload.UploadTarget(self.repo_id, self.private, self.revision)

    @property
    def cli_args(self) -> str:
        """Arguments of `tune push` for the same upload."""
        flags = ["--private"] * self.private + ["--merge-adapter"] * self.merge_adapter
        return shlex.join([self.repo_id, *flags, *(["--revision", self.revision] if self.revision else [])])


class HubUploader:
    """Uploads checkpoints in a background thread during training, and the result at its end. No-op without a config.

    publish.check_push(cfg.push_to_hub)                            # before training: fails early if the upload would
    uploader = HubUploader(cfg.push_to_hub, run_dir, dist)
    uploader.push_if_due(step, num_steps, save)                    # after each step; `save` writes a checkpoint
    uploader.finish(final_dir)                                     # when `final/` is complete and verified
    """

    def __init__(self, config: PushToHubConfig | None, folder: Path, dist: DistributedContext) -> None:
        self.config, self.folder, self.dist = config, folder, dist
        self.thread: Thread | None = None
        if dist.is_main_process:
            atomic.remove_dir(folder / UPLOAD)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether a checkpoint is uploaded after a step."""
        interval = None if self.config is None else self.config.push_every
        return interval is not None and step % interval == 0 and step != num_steps

    def push_if_due(self, step: int, num_steps: int, save: Callable[[Path], object]) -> None:
        """Every `push_every` steps, write a checkpoint with `save` on all ranks and upload it in the background."""
        if self.config is None or not self.is_due(step, num_steps):
            return
        if self.dist.run_on_main(lambda: self.thread is not None and self.thread.is_alive()):
            reason = f"the previous upload to {self.config.repo_id} is in progress"
            self.dist.log(f"warning: step {step} is not uploaded: {reason}")
            return
        folder = self.folder / UPLOAD / f"{step:08d}"
        with atomic.AtomicDir(folder, self.dist) as partial_dir:
            save(partial_dir)
        description = f"This is step {step:,} of {num_steps:,} of an unfinished run."
        if self.dist.is_main_process:
            args = self.config, folder, f"Step {step}", description
            self.thread = Thread(target=push_checkpoint, args=args, daemon=True)
            self.thread.start()

    def finish(self, final: Path) -> None:
        """Upload the result after the pending upload. An error message contains the command to repeat it."""

        def push_final() -> None:
            if self.thread is not None:
                self.thread.join()
            atomic.remove_dir(self.folder / UPLOAD)
            push_result(self.config, self.folder, final)

        self.dist.run_on_main(push_final)


def check_push(config: PushToHubConfig | None) -> None:
    """Raise UserError before training if the upload would fail."""
    if config is not None:
        disable_progress_bars()  # they would interfere with the progress bar of the run
        upload.check_upload_access(config.target)


def push_checkpoint(config: PushToHubConfig, folder: Path, message: str, description: str) -> None:
    """Upload a checkpoint with a model card, and delete it. Runs in a thread; errors are printed."""
    try:
        result = push_dir(config, folder, message, description)
        print_line(f"{message} uploaded to {result.url} (commit {result.commit[:7]})")
    except UserError as error:
        print_line(f"warning: {message} was not uploaded: {error}; training continues")
    finally:
        atomic.remove_dir(folder)


def push_result(config: PushToHubConfig | None, run: Path, final: Path) -> None:
    """Upload the result of a finished run. An error message contains the command to repeat it."""
    if config is None:
        return
    try:
        if problem := find_problem(final, True):
            raise UserError(problem)
        result = push_dir(config, final, f"Result of a run with tunekit {__version__}")
    except UserError as error:
        command = f"tune push {shlex.quote(str(run))} {config.cli_args}"
        raise UserError(f"{error}; the result is in {final}. Upload it with: {command}") from error
    print_line(f"result uploaded to {result.url} (commit {result.commit[:7]})")


def push_dir(config: PushToHubConfig, folder: Path, message: str, description: str = "") -> upload.UploadResult:
    """Upload a checkpoint directory in one commit, merged with `merge_adapter`. `description` adds a model card."""
    if description:
        model_card.write_minimal_card(folder, base_checkpoint(folder), about=description)
    if not config.merge_adapter or not AdapterDir.is_adapter(folder):
        warn_local_base(folder)
        return upload.upload_files(list_files(folder), config.target, message)
    with merged_dir(folder, device="cpu") as merged:  # the run may use all GPU memory
        if problem := find_problem(merged, True):
            raise UserError(problem)
        if description:
            model_card.write_minimal_card(merged, base_checkpoint(folder), about=description)
        return upload.upload_files(list_files(merged), config.target, message)


def find_result_dir(source: str) -> tuple[Path, bool]:
    """Directory to upload for a run, checkpoint or adapter, and whether a run has written it."""
    path = assets.model_dir(source) or Path(source).expanduser()
    if path.is_file():
        raise UserError(f"{source}: is a file, not a directory. Upload it with `hf upload OWNER/NAME {source}`.")
    if not path.is_dir():
        raise UserError(f"{source}: directory not found")
    folder = build.final_dir_of(path)
    if not any((folder / name).is_file() for name in ("config.json", peft_config.CONFIG)):
        raise UserError(f"{folder}: no config.json and no {peft_config.CONFIG}. Specify a run, checkpoint or adapter.")
    return folder, folder != path or atomic.is_complete(folder)


@contextmanager
def merged_dir(folder: Path, out: Path | None = None, device: str = "auto") -> Iterator[Path]:
    """Merge an adapter into its base and yield the directory: `out`, or a temporary one next to the adapter."""
    if not AdapterDir.is_adapter(folder):
        raise UserError(f"--merge-adapter: {folder} is not an adapter. Omit this option.")
    if out is not None and out.exists():
        raise UserError(f"--merged-dir: {out} exists. Specify another directory.")
    source, adapter, _ = build.resolve_model(str(folder))
    assert isinstance(adapter, LoRAConfig)
    with ExitStack() as stack:
        if out is None:
            try:
                out = Path(stack.enter_context(TemporaryDirectory(prefix=".merged-", dir=folder.parent)), folder.name)
            except OSError as error:
                problem = f"cannot create a directory, {error.strerror}"
                raise UserError(f"{folder.parent}: {problem}. Set --merged-dir.") from error
        with atomic.AtomicDir(out) as partial_dir:
            merge.merge_adapter(source, source.open_adapter(folder), partial_dir)
            if source.has_untrained_mtp:
                print_line(f"note: {model_card.UNTRAINED_MTP}")
            print_line(str(verify.verify_merge(partial_dir, source, adapter, DistributedContext(device=device).device)))
            model_card.write_merged_card(partial_dir, folder, source)
        yield out


@contextmanager
def stage_files(folder: Path, repo: str, is_unverified: bool, query_hub: bool) -> Iterator[dict[str, Path]]:
    """Yield the files to upload with a model card, by path in the repository. The directory itself is not modified.

    `is_unverified` adds a warning to the card. With `query_hub`, the base of an adapter may be looked up on the Hub.
    """
    with TemporaryDirectory() as temporary:
        staging_dir = Path(temporary, repo.rpartition("/")[2])
        for path, file in list_files(folder).items():
            (staging_dir / path).parent.mkdir(parents=True, exist_ok=True)
            (staging_dir / path).symlink_to(file.resolve())
        if (staging_dir / CARD).is_file():
            (staging_dir / CARD).unlink()
            shutil.copyfile(folder / CARD, staging_dir / CARD)
        else:
            model_card.write_minimal_card(staging_dir, base_checkpoint(folder) if query_hub else None)
        if is_unverified:
            model_card.add_unverified_warning(staging_dir)
        yield list_files(staging_dir)


def base_checkpoint(folder: Path) -> HFCheckpoint | None:
    """Base of an adapter, None if it cannot be resolved."""
    with suppress(UserError):
        return build.resolve_model(str(folder), download.SMALL)[0] if AdapterDir.is_adapter(folder) else None


def list_files(folder: Path) -> dict[str, Path]:
    """Files to publish by relative path, without hidden, incomplete and marker files."""
    files = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {path.as_posix(): file for path, file in files.items() if is_public_file(path)}


def warn_local_base(folder: Path) -> None:
    """Print a warning if the base of an adapter is a local directory, which other users cannot load."""
    base = peft_config.PeftConfigFile.open(folder).base_name if AdapterDir.is_adapter(folder) else ""
    if Path(base).is_absolute():
        problem = f"the base {base} is a local directory, so other users cannot load the adapter"
        print_line(f"warning: {peft_config.CONFIG}: {problem}. Use --merge-adapter.")


def is_public_file(path: Path) -> bool:
    """Whether a file, given by its relative path, is published."""
    is_hidden = any(component.startswith(".") or component.endswith(EXCLUDED_SUFFIXES) for component in path.parts)
    return not is_hidden and path.name != atomic.MARK


def find_problem(folder: Path, require_verified: bool) -> str | None:
    """Reason why files should not be published: changed, incomplete, failed verification, or `require_verified`."""
    try:
        verify.check_unchanged(folder)
        check_weights_complete(folder)
    except UserError as error:
        return str(error)
    verification = verify.read_verification(folder)
    if verification is None:
        return f"{folder}: the files were not verified (no {verify.FILE})" if require_verified else None
    return None if verification["passed"] is True else f"{folder}: the files failed verification, see {verify.FILE}"


def check_weights_complete(folder: Path) -> None:
    """Raise UserError if weights of a supported model are truncated or missing."""
    config, adapter = folder / "config.json", folder / TENSORS
    if adapter.is_file():
        SafetensorsHeader.read(adapter)
    elif config.is_file() and read_json(config).get("model_type") in FAMILIES:
        source = HFCheckpoint.open(folder)
        load_model.check_tensors(source, source.shapes)
