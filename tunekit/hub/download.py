"""Models by name: a folder, one that ships with the package, or one of the Hugging Face Hub."""

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP library that this version of the client uses # pyright: ignore[reportPrivateImportUsage]
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tunekit import assets
from tunekit.errors import UserError
from tunekit.hub import errors, resumable_download
from tunekit.hub.resumable_download import Files

RUNS = "runs/"  # where configs put runs: no such name is asked for on the Hub, which may be slow to say no
HINT = f"names that begin with {RUNS} are taken for folders of runs, and never looked for on the Hub"
OURS = "tunekit/"
READ = Files()
# All but the weights of a whole model.
SMALL = Files((*resumable_download.SMALL, "adapter_model.safetensors"))
PICKLED = Files(("pytorch_model*.bin", *resumable_download.SMALL))


def resolve_model_dir(name: str, files: Files = READ) -> Path:
    """The folder of a model. Nothing is fetched for a name that reads as a path.

    A name on the Hub may say a revision: `owner/model@branch`, a tag or a commit.
    """
    ours = assets.model_dir(name)
    if ours is not None:  # a directory with the same name does not shadow a bundled model
        return ours
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith(OURS):
        raise UserError(assets.suggest_asset(name))
    parts = split_repo_revision(name)
    if parts is None:
        hint = f": train it first, or name another model; {HINT}" if name.startswith(RUNS) else ""
        raise UserError(f"no such folder: {name}{hint}")
    repo, revision = parts
    place = download_repo(repo, revision, files)
    if files == READ and not any(place.glob("*.safetensors")):  # an old repository has its weights in another format
        return download_repo(repo, revision, PICKLED)
    return place


def split_repo_revision(name: str) -> tuple[str, str | None] | None:
    """Repository and revision of what can be a name on the Hub; None for a folder, and for what reads as one."""
    repo, _, revision = name.partition("@")
    local = name.startswith((".", "/", "~", RUNS, OURS)) or "\\" in name or repo.count("/") > 1
    return None if local or Path(name).is_dir() else (repo, revision or None)


def cached_commit(folder: Path) -> str | None:
    """The commit of a folder in the Hub's cache; None for any other."""
    known = folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name)
    return folder.name if known else None


def download_repo(
    name: str, revision: str | None = None, files: Files = READ, to: Path | None = None, token: str | None = None
) -> Path:
    """Fetch a repository into the Hub's cache, or into the folder `to`. What is there already is not fetched again."""

    def fetched() -> str:
        resumable_download.fetch(name, revision, files, to, token)
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(files.include),
            ignore_patterns=list(files.exclude),
            local_dir=to,
            token=token,
        )

    with errors.wrap_hub_errors(lambda error: explanation(error, name, revision), token):
        return Path(errors.retry(fetched, name))


def explanation(error: BaseException, name: str, revision: str | None) -> str:
    """One line that says what went wrong and how to mend it. The first kind that fits is the most particular."""
    hub, cause = constants.ENDPOINT, error.__cause__
    lines = {
        HFValidationError: f"'{name}' is neither a folder nor a name on the Hub (owner/model)",
        GatedRepoError: f"{name} is gated: accept its terms at {hub}/{name}, then `hf auth login` or set HF_TOKEN",
        RevisionNotFoundError: f"{name} has no revision '{revision}': see {hub}/{name}/tree/main",
        RepositoryNotFoundError: f"{hub} has no model '{name}' that you may see: check the name; "
        "a private or gated one needs `hf auth login` or HF_TOKEN",
        LocalEntryNotFoundError: f"{name} is no folder here, is not whole in the cache, and {unreachable(cause)}",
        OfflineModeIsEnabled: f"{name}: {unreachable(error)}",
        HfHubHTTPError: f"{name}: {unreachable(error)}",
        HTTPError: f"{name}: lost the connection to {hub}: start again, what has come is kept",
        OSError: f"cannot store {name}: {error}",
    }
    return next((line for kind, line in lines.items() if isinstance(error, kind)), f"{name}: {error}")


def unreachable(cause: BaseException | None) -> str:
    """Why nothing came from the Hub."""
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids to fetch it"
    if isinstance(cause, HfHubHTTPError):
        return f"{constants.ENDPOINT} answered {cause.response.status_code}: {advice(cause)}"
    return f"{constants.ENDPOINT} cannot be reached"


def advice(error: HfHubHTTPError) -> str:
    """What to do about an answer that is none."""
    if error.response.status_code in (401, 403):
        return "check the token (`hf auth login` or HF_TOKEN)"
    return "try again later" if errors.is_transient(error) else "the model's page may say why"
