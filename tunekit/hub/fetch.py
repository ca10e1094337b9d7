"""Models by name: a folder, one that ships with the package, or one of the Hugging Face Hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

from tunekit import bundled
from tunekit.errors import UserError


@dataclass(frozen=True)
class Files:
    """Which files of a repository, as globs over their whole paths. By default those that this toolkit reads."""

    include: tuple[str, ...] = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")
    exclude: tuple[str, ...] = ("original/*", "onnx/*", "consolidated*")  # copies for other programs


READ = Files()
# All but the weights of a whole model.
SMALL = Files(include=("*.json", "*.jinja", "tokenizer.model", "*.txt", "adapter_model.safetensors"))


def resolve(name: str, revision: str | None = None, files: Files = READ) -> Path:
    """The folder of a model. Nothing is fetched for a name that reads as a path."""
    ours = bundled.model(name)
    if ours is not None:  # before a folder: in a checkout of this project, `tunekit/nano` is one, but no checkpoint
        return ours
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1:
        raise UserError(f"no such folder: {name}")
    return download(name, revision, files)


def download(
    name: str, revision: str | None = None, files: Files = READ, to: Path | None = None, token: str | None = None
) -> Path:
    """Fetch a repository into the Hub's cache, or into the folder `to`. What is there already is not fetched again."""
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise UserError("the token holds characters that no token has: copy it again")
    with explained(name, revision):
        place = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(files.include),
            ignore_patterns=list(files.exclude),
            local_dir=to,
            token=token,
        )
    return Path(place)


@contextmanager
def explained(name: str, revision: str | None) -> Iterator[None]:
    """Turn what can go wrong between here and the Hub into one line. The cause is cut off: it may quote a header."""
    try:
        yield
    except (HFValidationError, HTTPError, OSError) as error:
        raise UserError(explanation(error, name, revision)) from None


def explanation(error: Exception, name: str, revision: str | None) -> str:
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
    return next(line for kind, line in lines.items() if isinstance(error, kind))


def unreachable(cause: BaseException | None) -> str:
    """Why nothing came from the Hub."""
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids to fetch it"
    if isinstance(cause, HfHubHTTPError):
        code = cause.response.status_code
        why = "check the token (`hf auth login` or HF_TOKEN)" if code in (401, 403) else "the model's page may say why"
        return f"{constants.ENDPOINT} answered {code}: {why}"
    return f"{constants.ENDPOINT} cannot be reached"
