"""In-memory storage of the test Hub: repositories with commits, branches and pull requests."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cached_property
from hashlib import sha1, sha256

import yaml

ATTRIBUTES = b"".join(f"{glob} filter=lfs diff=lfs merge=lfs -text\n".encode()
                      for glob in ("*.safetensors", "*.bin", "*.gguf", "*.model", "*.png"))  # fmt: skip
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
REGULAR = 10 * 2**20  # size limit of files that are part of a commit
LICENSES = """apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0
cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0
openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
other"""
NAME = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_][\w.-]{0,94}[A-Za-z0-9_]|[A-Za-z0-9_]")


@dataclass(frozen=True)
class Blob:
    """A file. Large files are a pointer in git, and their bytes are in the object storage."""

    data: bytes
    large: bool = False

    @cached_property
    def sha256(self) -> str:
        return sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        return POINTER.format(self.sha256, len(self.data)).encode()

    @cached_property
    def oid(self) -> str:
        """Object id that git computes for the contents."""
        contents = self.pointer if self.large else self.data
        return sha1(b"blob %d\0" % len(contents) + contents).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid

    def entry(self, path: str) -> dict:
        """Entry in a directory listing."""
        entry = {"type": "file", "path": path, "size": len(self.data), "oid": self.oid}
        lfs = {"oid": self.sha256, "size": len(self.data), "pointerSize": len(self.pointer)}
        return entry | ({"lfs": lfs} if self.large else {})

    def sibling(self, path: str) -> dict:
        """Entry in the model info."""
        lfs = {"sha256": self.sha256, "size": len(self.data), "pointerSize": len(self.pointer)}
        entry = {"rfilename": path, "size": len(self.data), "blobId": self.oid}
        return entry | ({"lfs": lfs} if self.large else {})


@dataclass(frozen=True)
class Commit:
    """A snapshot of all files."""

    files: Mapping[str, Blob]
    title: str
    author: str
    parent: str | None = None
    description: str = ""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat().replace("+00:00", "Z"))

    @cached_property
    def oid(self) -> str:
        tree = {path: blob.oid for path, blob in sorted(self.files.items())}
        fields = [self.title, self.description, self.author, self.parent, self.date]
        return sha1(json.dumps([tree, fields]).encode()).hexdigest()


@dataclass
class Repo:
    """A model repository. `members` can read it if it is private or gated."""

    name: str
    private: bool = False
    gated: bool = False
    members: set[str] = field(default_factory=set)
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branches by name, pull requests as refs/pr/1
    tags: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # large objects that were uploaded, by sha256

    def add(self, ref: str, commit: Commit) -> Commit:
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit

    def find(self, revision: str) -> Commit | None:
        """Find a branch, tag, pull request or commit. A commit id can be abbreviated."""
        oid = self.refs.get(revision) or self.tags.get(revision)
        if oid is None and re.fullmatch("[0-9a-f]{7,40}", revision):
            oid = next((known for known in self.commits if known.startswith(revision)), None)
        return self.commits[oid] if oid else None

    def history(self, revision: str) -> list[Commit]:
        """Commits of a revision, newest first."""
        commits, commit = [], self.find(revision)
        while commit is not None:
            commits.append(commit)
            commit = self.commits.get(commit.parent or "")
        return commits

    @property
    def files(self) -> dict[str, bytes]:
        """Files of main, without those that the Hub created."""
        return {path: blob.data for path, blob in self.commits[self.refs["main"]].files.items() if path[0] != "."}

    def is_large(self, path: str, size: int, commit: Commit) -> bool:
        """Return whether git stores only a pointer to this file."""
        rules = commit.files.get(".gitattributes", Blob(b"")).data.decode().splitlines()
        globs = [rule.split()[0] for rule in rules if "filter=lfs" in rule]
        return size > REGULAR or any(fnmatch(path.rpartition("/")[2], glob) for glob in globs)


def first_commit(author: str) -> Commit:
    return Commit({".gitattributes": Blob(ATTRIBUTES)}, "initial commit", author)


def card_problems(text: str) -> tuple[list[str], list[str]]:
    """Errors and warnings of the Hub for the YAML front matter of a README.md."""
    match = re.match(r"---\r?\n(.*?\n)?---\r?(\n|$)", text, re.DOTALL)
    if match is None:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        metadata = yaml.safe_load(match[1] or "")
    except yaml.YAMLError as error:
        return [f"bad indentation or syntax: {error}"], []
    if not isinstance(metadata, dict):
        return ["metadata must be a mapping"], []
    errors = [f'"{key}" must be a string or a list of strings' for key in ("language", "tags", "base_model", "datasets")
             if not all(isinstance(item, str) for item in as_list(metadata.get(key)))]  # fmt: skip
    if not errors:
        errors += [f'"base_model" with value "{name}" is not valid. Use a model id from https://hf.co/models.'
                  for name in as_list(metadata.get("base_model")) if not is_id(name)]  # fmt: skip
        errors += [f'"datasets" with value "{name}" is not valid. Use a dataset id from https://hf.co/datasets.'
                  for name in as_list(metadata.get("datasets")) if not is_id(name)]  # fmt: skip
    if any(name not in LICENSES.split() for name in as_list(metadata.get("license"))):
        errors.append(f'"license" must be one of [{", ".join(LICENSES.split())}]')
    for key in ("library_name", "pipeline_tag", "license_name", "license_link"):
        if key in metadata and not isinstance(metadata[key], str):
            errors.append(f'"{key}" must be a string')
    return errors + index_problems(metadata.get("model-index")), []


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def is_id(name: str) -> bool:
    """Return whether the name is `owner/name`, or a legacy name without owner."""
    return name.count("/") <= 1 and all(NAME.fullmatch(part) for part in name.split("/"))


def index_problems(index: object) -> list[str]:
    """Errors of results without a task, dataset or metrics."""
    if index is None:
        return []
    for model in as_list(index):
        if not isinstance(model, dict) or not isinstance(model.get("name"), str):
            return ['"model-index[0].name" is required']
        for result in as_list(model.get("results")):
            task, data, metrics = (result.get(key) for key in ("task", "dataset", "metrics"))
            if not (isinstance(task, dict) and isinstance(task.get("type"), str)):
                return ['"model-index[0].results[0].task.type" is required']
            if data is not None and not {"name", "type"} <= set(data):
                return ['"model-index[0].results[0].dataset" needs a name and a type']
            if not all("type" in metric and "value" in metric for metric in as_list(metrics)):
                return ['"model-index[0].results[0].metrics" need a type and a value']
    return []
