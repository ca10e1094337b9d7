"""Models by name: a directory, a model that ships with the package, or a repository of the Hugging Face Hub."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.file_download import repo_folder_name

from tunekit import assets
from tunekit.errors import UserError
from tunekit.hub import errors

RUNS = "runs/"  # configs write runs here: such a name is never looked up on the Hub, which can be slow to refuse
BUNDLED = "tunekit/"
WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Everything except weights. Model card and license are copied into what is trained from the model.
NO_WEIGHTS = ("*.json", "*.jinja", "tokenizer.model", "*.txt", "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*")


@dataclass(frozen=True)
class Files:
    """Files of a repository, as globs over their full paths. The default selects those that tunekit reads."""

    include: tuple[str, ...] = ("*.safetensors", *NO_WEIGHTS)
    exclude: tuple[str, ...] = ("original/*", "onnx/*", "consolidated*")  # copies for other programs


READ = Files()
SMALL = Files((*NO_WEIGHTS, "adapter_model.safetensors"))  # without the weights of a full model
PICKLED = Files(("pytorch_model*.bin", *NO_WEIGHTS))


def resolve_model_dir(name: str, files: Files = READ) -> Path:
    """Directory of a model; downloads it if `name` is a repository. A name that looks like a path is not looked up.

    A repository can have a revision: `owner/model@branch`, a tag or a commit.
    """
    local = find_local_dir(name)
    if local is not None:
        return local
    repo, revision = split_repo_revision(name) or (name, None)
    snapshot = download_repo(repo, revision, files)
    if files == READ and not any(snapshot.glob("*.safetensors")):  # an old repository that has only pickled weights
        return download_repo(repo, revision, PICKLED)
    return snapshot


def find_local_dir(name: str) -> Path | None:
    """Directory of a model on this machine; None for a repository. Raise UserError for a path that does not exist."""
    bundled = assets.model_dir(name)
    if bundled is not None:  # a directory with the same name does not shadow a bundled model
        return bundled
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if directory.suffix in WEIGHT_FILES:
        hint = "A model is a directory with config.json and safetensors, or a Hub name"
        raise UserError(f"{name}: a single {directory.suffix} file cannot be used as a model. {hint}.")
    if name.startswith(BUNDLED):
        raise UserError(assets.suggest_asset(name))
    if split_repo_revision(name) is None:
        hint = f"names that begin with {RUNS} are directories of runs and are never looked up on the Hub"
        hint = f". Train it first, or specify another model; {hint}." if name.startswith(RUNS) else ""
        raise UserError(f"{name}: directory not found{hint}")
    return None


def split_repo_revision(name: str) -> tuple[str, str | None] | None:
    """Repository and revision of a name on the Hub; None for a directory and for a name that looks like a path."""
    repo, _, revision = name.partition("@")
    local = name.startswith((".", "/", "~", RUNS, BUNDLED)) or "\\" in name or repo.count("/") > 1
    return None if local or Path(name).is_dir() else (repo, revision or None)


def cached_commit(folder: Path) -> str | None:
    """Commit of a snapshot in the Hub's cache; None for any other directory."""
    is_snapshot = folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name)
    return folder.name if is_snapshot else None


def download_repo(
    name: str, revision: str | None = None, files: Files = READ, to: Path | None = None, token: str | None = None
) -> Path:
    """Download a repository into the Hub's cache or into the directory `to`, except files that exist there.

    The client resumes a file when a connection is closed early, but deletes it when the connection is reset or the
    server fails. The download is then repeated, without limit as long as every attempt completes a file.
    """

    def download() -> str:
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(files.include),
            ignore_patterns=list(files.exclude),
            local_dir=to,
            token=token,
        )

    with errors.wrap_hub_errors(name, revision, token):
        root = to or Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
        before = list_files(root)
        snapshot = Path(errors.retry_call(download, name, progress=lambda: len(list_files(root))))
        if list_files(root) != before and (constants.HF_HUB_DISABLE_XET or find_spec("hf_xet") is None):
            errors.retry_call(lambda: check_files(snapshot, name, revision, token), name)
        return snapshot


def list_files(root: Path) -> dict[Path, int]:
    """Complete files below a directory, with the times they were written."""
    paths = (path for path in root.rglob("*") if ".cache" not in path.relative_to(root).parts)
    return {path: path.stat().st_mtime_ns for path in paths if path.is_file()}


def check_files(snapshot: Path, name: str, revision: str | None, token: str | None) -> None:
    """Compare files with the checksums of the Hub, which the client does for Xet only. Delete those that differ."""
    revision = cached_commit(snapshot) or revision
    result = HfApi(token=token).verify_repo_checksums(name, revision=revision, local_dir=snapshot)
    damaged = [mismatch["path"] for mismatch in result.mismatches]
    for path in damaged:
        (snapshot / path).resolve().unlink()
        (snapshot / path).unlink(missing_ok=True)
    if damaged:
        raise UserError(f"{name}: the checksum of {', '.join(damaged)} is wrong. Download it again.")
