"""Files to a repository of the Hub, in one commit: all of them are there, or nothing has changed.

Large files go where the client puts them (Xet, or large objects of git), ahead of the commit that names them. What the
repository holds already is not sent. Weights and configs of another model that lay there are removed in that commit:
a folder that holds an adapter beside the weights of a merged model is opened as either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import file_digest, sha1
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP library that this version of the client uses # pyright: ignore[reportPrivateImportUsage]
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from tunekit.errors import UserError
from tunekit.hub.errors import TRIES, is_transient, print_line, retry, server_message, short_reason, wrap_hub_errors

# What describes a model, at the top of a repository: none of it may stay from another one.
OURS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json")
OURS += ("verification.json", "curves.png")
Operation = CommitOperationAdd | CommitOperationDelete
TEXT = 2**20  # bytes: longer files are not searched for a token


@dataclass(frozen=True)
class UploadTarget:
    """Where files go: a repository, its main branch or another one, or a pull request to it."""

    repo: str  # owner/name; a bare name is one of the token's owner
    private: bool = False  # for a new repository, and a promise for one that is there
    branch: str | None = None
    pull_request: bool = False
    token: str | None = None  # else HF_TOKEN, or that of `hf auth login`

    @property
    def api(self) -> HfApi:
        return HfApi(token=self.token, library_name="tunekit")


@dataclass(frozen=True)
class UploadResult:
    """What became of it."""

    url: str  # of the model, the branch or the pull request
    commit: str
    changed: tuple[str, ...] = ()  # files that were sent or removed; none if all was there


def upload_files(files: Mapping[str, Path], target: UploadTarget, message: str) -> UploadResult:
    """Send files, by their paths in the repository. It and the branch are made if they are not there."""
    token = target.token or get_token()
    with wrap_hub_errors(lambda error: explanation(error, target), token):
        if leak := next((path for path, file in files.items() if token and quotes(file, token)), None):
            raise UserError(f"{leak} holds your access token: take it out; nothing was sent")
        name, parent = ready(target)
        changed, gone = retry(lambda: difference(target.api, name, parent, files), name)
        if not changed and not gone:
            return UploadResult(page(target, name), parent)
        size = sum(files[path].stat().st_size for path in changed)
        print_line(f"{name}: sending {len(changed)} of {len(files)} files, {size / 1e6:,.1f} MB")
        # The same operations in each try: the client notes in them what has arrived.
        operations = [CommitOperationAdd(path, files[path]) for path in changed]
        operations += [CommitOperationDelete(path) for path in gone]
        return commit(target, name, parent, operations, files, message)


def check_upload_access(target: UploadTarget) -> None:
    """Fail now where a push would fail later: a bad token, a name that is taken, no right to write."""
    with wrap_hub_errors(lambda error: explanation(error, target), target.token or get_token()):
        name, _ = ready(target)
        # A file that is too short to be a large one: the Hub is asked how it would take it, and nothing is sent.
        file = CommitOperationAdd("README.md", b"x")
        retry(lambda: target.api.preupload_lfs_files(name, [file], revision=target.branch), name)


def ready(target: UploadTarget) -> tuple[str, str]:
    """Make what is not there. Returns the whole name of the repository, and the commit to build on."""
    api = target.api
    url = retry(lambda: api.create_repo(target.repo, private=target.private or None, exist_ok=True), target.repo)
    name = url.repo_id
    info = retry(lambda: api.model_info(name), name)
    if target.private and not info.private:
        raise UserError(
            f"{name} is there already and public: make it private at {constants.ENDPOINT}/{name}/settings, "
            "or push without asking for a private one"
        )
    if target.branch is not None:
        info = retry(lambda: at_branch(api, name, target.branch or ""), name)
    assert info.sha is not None, name
    return name, info.sha


def at_branch(api: HfApi, name: str, branch: str) -> ModelInfo:
    """The repository at a branch, which is made from main if there is none of that name."""
    try:
        return api.model_info(name, revision=branch)
    except RevisionNotFoundError:
        api.create_branch(name, branch=branch, exist_ok=True)
        print_line(f"{name}: new branch {branch}")
        return api.model_info(name, revision=branch)


def difference(api: HfApi, name: str, revision: str, files: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """Which files a revision lacks or has otherwise, and what it has of another model."""
    entries = api.list_repo_tree(name, recursive=True, revision=revision)
    there = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    changed = [path for path, file in files.items() if path not in there or not same(file, there[path])]
    others = [path for path in there if path not in files and "/" not in path]
    return changed, [path for path in others if any(fnmatch(path, glob) for glob in OURS)]


def same(file: Path, entry: RepoFile) -> bool:
    """Whether a file is the one that git or the store of large objects holds, by length and checksum."""
    size = file.stat().st_size
    if size != entry.size:
        return False
    with file.open("rb") as stream:
        if entry.lfs is not None:
            return file_digest(stream, "sha256").hexdigest() == entry.lfs.sha256
        return sha1(b"blob %d\0" % size + stream.read()).hexdigest() == entry.blob_id


def commit(
    target: UploadTarget, name: str, parent: str, operations: list[Operation], files: Mapping[str, Path], message: str
) -> UploadResult:
    """One commit on `parent`. When an answer was lost, look whether the commit is there before it is made again."""
    api, tried = target.api, False

    def made() -> UploadResult:
        nonlocal tried
        if tried and (found := arrived(target, name, parent, files, message)):
            return found
        tried = True
        info = api.create_commit(
            name,
            operations,
            commit_message=message,
            revision=target.branch,
            create_pr=target.pull_request,
            parent_commit=parent,
        )
        return UploadResult(info.pr_url or page(target, name), info.oid, tuple(one.path_in_repo for one in operations))

    return retry(made, name)


def arrived(
    target: UploadTarget, name: str, parent: str, files: Mapping[str, Path], message: str
) -> UploadResult | None:
    """The commit of a try whose answer was lost: what stands there now is what was sent."""
    api, changed = target.api, tuple(files)
    if not target.pull_request:
        head = api.model_info(name, revision=target.branch).sha or parent
        there = head != parent and difference(api, name, head, files) == ([], [])
        return UploadResult(page(target, name), head, changed) if there else None
    refs = api.list_repo_refs(name, include_pull_requests=True).pull_requests or []
    newest = max(refs, key=lambda ref: int(ref.ref.rpartition("/")[2]), default=None)
    if newest is None or api.list_repo_commits(name, revision=newest.ref)[0].title != message:
        return None
    there = difference(api, name, newest.target_commit, files) == ([], [])
    url = f"{constants.ENDPOINT}/{name}/discussions/{newest.ref.rpartition('/')[2]}"
    return UploadResult(url, newest.target_commit, changed) if there else None


def page(target: UploadTarget, name: str) -> str:
    """Where people look at what was pushed."""
    return f"{constants.ENDPOINT}/{name}" + (f"/tree/{quote(target.branch, safe='')}" if target.branch else "")


def quotes(file: Path, token: str) -> bool:
    """Whether a short file holds a token."""
    return file.stat().st_size <= TEXT and token.encode() in file.read_bytes()


def explanation(error: BaseException, target: UploadTarget) -> str:
    """One line that says what went wrong and how to mend it. The first kind that fits is the most particular."""
    hub, repo = constants.ENDPOINT, target.repo
    lines = {
        HFValidationError: f"'{repo}' is no name for a model on the Hub: owner/name, of letters, digits, '-', '_', '.'",
        RevisionNotFoundError: f"{repo} has no branch '{target.branch or 'main'}' to push to: see {hub}/{repo}",
        RepositoryNotFoundError: f"{hub} has no model '{repo}' that you may see: use `hf auth login` or HF_TOKEN",
        OfflineModeIsEnabled: f"{repo}: HF_HUB_OFFLINE forbids to push",
        HTTPError: f"{repo}: lost the connection to {hub}: push again, what has arrived is not sent again",
    }
    if isinstance(error, HfHubHTTPError) and not isinstance(error, (RevisionNotFoundError, RepositoryNotFoundError)):
        return refusal(error, target)
    other = f"{repo}: {error}" if isinstance(error, ValueError) else f"{repo}: the upload failed: {error}"
    return next((line for kind, line in lines.items() if isinstance(error, kind)), other)


def refusal(error: HfHubHTTPError, target: UploadTarget) -> str:
    """What to do about an answer that is none."""
    hub, repo, code = constants.ENDPOINT, target.repo, error.response.status_code
    if code == 401 and (target.token or get_token()):
        return f"{hub} refused this token: make a new one at {hub}/settings/tokens, then `hf auth login` or HF_TOKEN"
    if code == 401:
        return f"{hub} does not know you: log in with `hf auth login`, or set HF_TOKEN"
    if code == 403:
        return f"{hub} refuses to write {repo}: {server_message(error)} (the token needs the right to write there)"
    if code == 412:
        return f"{repo} got another commit meanwhile: look at {hub}/{repo}/commits, then push again"
    if is_transient(error):
        reason = short_reason(error)
        return f"{repo}: {reason}, also the {TRIES}th time: push again later, what has arrived is not sent again"
    return f"{hub} refuses {repo} ({code}): {server_message(error)}"
