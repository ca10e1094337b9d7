"""Uploads files to a Hub repository in one atomic commit.

Large files are uploaded before the commit (Xet or Git LFS). Files that the repository already has are not uploaded.
Weights and configs of another model are removed in the same commit, because a repository with an adapter and merged
weights is ambiguous.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import file_digest, sha1
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, constants, get_token
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from tunekit.errors import UserError
from tunekit.hub.errors import print_line, retry_call, wrap_hub_errors

# Top-level files of a model. Those of another model are removed.
MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
MODEL_FILES += ("adapter_config.json", "verification.json", "curves.png")
Operation = CommitOperationAdd | CommitOperationDelete
MAX_TEXT_BYTES = 2**20  # larger files are not searched for a token


@dataclass(frozen=True)
class UploadTarget:
    """Repository, branch or pull request to upload to."""

    repo: str  # owner/name; without an owner, that of the token
    private: bool = False  # create a private repository, or require that an existing one is private
    branch: str | None = None
    pull_request: bool = False
    token: str | None = None  # default: HF_TOKEN or `hf auth login`

    @property
    def api(self) -> HfApi:
        return HfApi(token=self.token, library_name="tunekit")


@dataclass(frozen=True)
class UploadResult:
    """Result of an upload."""

    url: str  # of the repository, branch or pull request
    commit: str
    changed: tuple[str, ...] = ()  # files that were uploaded or removed


def upload_files(files: Mapping[str, Path], target: UploadTarget, message: str) -> UploadResult:
    """Upload files, given by path in the repository. Creates the repository and the branch if they do not exist."""
    token = target.token or get_token()
    with wrap_hub_errors(target.repo, target.branch, token):
        if leak := next((path for path, file in files.items() if token and contains_token(file, token)), None):
            raise UserError(f"{leak}: contains the Hub access token. Remove it. Nothing was uploaded.")
        name, parent = prepare_repo(target)
        changed, removed = retry_call(lambda: diff_files(target.api, name, parent, files), name)
        if not changed and not removed:
            return UploadResult(page_url(target, name), parent)
        size = sum(files[path].stat().st_size for path in changed)
        print_line(f"{name}: uploading {len(changed)} of {len(files)} files, {size / 1e6:,.1f} MB")
        # Reuse the operations in each attempt: the client stores in them which files are uploaded.
        operations = [CommitOperationAdd(path, files[path]) for path in changed]
        operations += [CommitOperationDelete(path) for path in removed]
        return create_commit(target, name, parent, operations, files, message)


def check_upload_access(target: UploadTarget) -> None:
    """Raise UserError if an upload would fail, because of the token, the repository name or missing permissions."""
    with wrap_hub_errors(target.repo, target.branch, target.token or get_token()):
        name, _ = prepare_repo(target)
        # Preupload of a file that is too small for LFS checks the permissions and uploads nothing.
        file = CommitOperationAdd("README.md", b"x")
        retry_call(lambda: target.api.preupload_lfs_files(name, [file], revision=target.branch), name)


def prepare_repo(target: UploadTarget) -> tuple[str, str]:
    """Create the repository and the branch if needed. Returns the full repository name and the parent commit."""
    api = target.api
    url = retry_call(lambda: api.create_repo(target.repo, private=target.private or None, exist_ok=True), target.repo)
    name = url.repo_id
    info = retry_call(lambda: api.model_info(name), name)
    if target.private and not info.private:
        raise UserError(
            f"{name}: the repository exists and is public. Make it private at {constants.ENDPOINT}/{name}/settings, "
            "or upload without the option private."
        )
    if target.branch is not None:
        info = retry_call(lambda: ensure_branch(api, name, target.branch or ""), name)
    assert info.sha is not None, name
    return name, info.sha


def ensure_branch(api: HfApi, name: str, branch: str) -> ModelInfo:
    """Info of the repository at a branch, which is created from main if it does not exist."""
    try:
        return api.model_info(name, revision=branch)
    except RevisionNotFoundError:
        api.create_branch(name, branch=branch, exist_ok=True)
        print_line(f"{name}: new branch {branch}")
        return api.model_info(name, revision=branch)


def diff_files(api: HfApi, name: str, revision: str, files: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """Return the files that are new or changed relative to a revision, and files of another model to remove."""
    entries = api.list_repo_tree(name, recursive=True, revision=revision)
    existing = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    changed = [path for path, file in files.items() if path not in existing or not is_same_file(file, existing[path])]
    top_level = [path for path in existing if path not in files and "/" not in path]
    return changed, [path for path in top_level if any(fnmatch(path, glob) for glob in MODEL_FILES)]


def is_same_file(file: Path, entry: RepoFile) -> bool:
    """Whether a local file equals a file in the repository, by size and checksum."""
    size = file.stat().st_size
    if size != entry.size:
        return False
    with file.open("rb") as stream:
        if entry.lfs is not None:
            return file_digest(stream, "sha256").hexdigest() == entry.lfs.sha256
        return sha1(b"blob %d\0" % size + stream.read()).hexdigest() == entry.blob_id


def create_commit(
    target: UploadTarget, name: str, parent: str, operations: list[Operation], files: Mapping[str, Path], message: str
) -> UploadResult:
    """Create a commit on `parent`. Before a retry, check whether the previous attempt succeeded."""
    api, is_retry = target.api, False

    def attempt() -> UploadResult:
        nonlocal is_retry
        if is_retry and (result := find_lost_commit(target, name, parent, files, message)):
            return result
        is_retry = True
        info = api.create_commit(
            name,
            operations,
            commit_message=message,
            revision=target.branch,
            create_pr=target.pull_request,
            parent_commit=parent,
        )
        return UploadResult(
            info.pr_url or page_url(target, name), info.oid, tuple(operation.path_in_repo for operation in operations)
        )

    return retry_call(attempt, name)


def find_lost_commit(
    target: UploadTarget, name: str, parent: str, files: Mapping[str, Path], message: str
) -> UploadResult | None:
    """Return the result of an earlier attempt whose response was lost, if the repository has all files."""
    api, paths = target.api, tuple(files)
    if not target.pull_request:
        head = api.model_info(name, revision=target.branch).sha or parent
        is_complete = head != parent and diff_files(api, name, head, files) == ([], [])
        return UploadResult(page_url(target, name), head, paths) if is_complete else None
    refs = api.list_repo_refs(name, include_pull_requests=True).pull_requests or []
    newest = max(refs, key=lambda ref: int(ref.ref.rpartition("/")[2]), default=None)
    if newest is None or api.list_repo_commits(name, revision=newest.ref)[0].title != message:
        return None
    is_complete = diff_files(api, name, newest.target_commit, files) == ([], [])
    url = f"{constants.ENDPOINT}/{name}/discussions/{newest.ref.rpartition('/')[2]}"
    return UploadResult(url, newest.target_commit, paths) if is_complete else None


def page_url(target: UploadTarget, name: str) -> str:
    """Web page of the repository or branch."""
    return f"{constants.ENDPOINT}/{name}" + (f"/tree/{quote(target.branch, safe='')}" if target.branch else "")


def contains_token(file: Path, token: str) -> bool:
    """Whether a small file contains a token."""
    return file.stat().st_size <= MAX_TEXT_BYTES and token.encode() in file.read_bytes()
