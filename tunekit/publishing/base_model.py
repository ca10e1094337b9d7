"""Origin of a model: name, commit and license of its base."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tunekit import assets
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.hub import download, redact

CARD = "README.md"
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?\r?\n)---\r?\n", re.S)
LICENSE_KEYS = ("license", "license_name", "license_link")
# Hub license ids by the first line of common license texts.
LICENSE_TITLES = {
    "Apache License": "apache-2.0",
    "MIT License": "mit",
    "The MIT License": "mit",
    "BSD 3-Clause License": "bsd-3-clause",
}


@dataclass(frozen=True)
class BaseModelInfo:
    """Base of a model."""

    name: str  # on the Hub, or of its directory
    repo: str | None  # on the Hub
    commit: str | None
    license: Mapping[str, str]  # entries of the model card's front matter

    @property
    def link(self) -> str:
        """Markdown link, or the name of a base that is not on the Hub."""
        if self.repo is None:
            return f"`{self.name}`"
        url = f"https://huggingface.co/{self.repo}"
        revision = f" at [`{self.commit[:7]}`]({url}/tree/{self.commit})" if self.commit else ""
        return f"[{self.repo}]({url}){revision}"


def read_base_model(source: HFCheckpoint) -> BaseModelInfo:
    """Read the origin of a checkpoint from its path and files."""
    commit = download.cached_commit(source.path)
    repo = source.path.parent.parent.name.removeprefix("models--").replace("--", "/", 1) if commit else None
    name = repo or (source.name if assets.model_dir(source.name) else redact.redact_path(str(source.path.resolve())))
    return BaseModelInfo(name, repo, commit, read_license(source.path, repo))


def read_license(folder: Path, repo: str | None) -> dict[str, str]:
    """License from the front matter of the base's model card, else from its license file; empty if it has neither."""
    card = read_front_matter(read_card(folder / CARD))
    license = {key: str(card[key]) for key in LICENSE_KEYS if isinstance(card.get(key), str)}
    if "license" in license:
        link = license.get("license_link")
        if link and repo and "://" not in link:
            license["license_link"] = f"https://huggingface.co/{repo}/blob/main/{link}"
        return license
    for file in sorted(folder.glob("LICENSE*")):
        title = next((line.strip() for line in read_card(file).splitlines() if line.strip()), "")
        if title in LICENSE_TITLES:
            return {"license": LICENSE_TITLES[title]}
        slug = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")[:60]
        return {"license": "other", "license_name": slug or "see-file", "license_link": file.name}
    return {}


def read_front_matter(text: str) -> dict[str, Any]:
    """YAML front matter of a model card; empty if it is missing or invalid."""
    match = FRONT_MATTER.match(text)
    try:
        value = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        value = None
    return value if isinstance(value, dict) else {}


def read_card(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.is_file() else ""
