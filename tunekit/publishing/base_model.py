"""Where the weights of a model come from: the name and commit of its base, and the licence that goes with them."""

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
FRONT = re.compile(r"\A---\r?\n(.*?\r?\n)---\r?\n", re.S)
LICENCE = ("license", "license_name", "license_link")
# How the texts of common licences begin, and what the Hub calls them.
TEXTS = {
    "Apache License": "apache-2.0",
    "MIT License": "mit",
    "The MIT License": "mit",
    "BSD 3-Clause License": "bsd-3-clause",
}


@dataclass(frozen=True)
class BaseModelInfo:
    """The base of a model."""

    name: str  # on the Hub, or that of its folder
    repo: str | None  # on the Hub
    commit: str | None
    licence: Mapping[str, str]  # as the front matter of a card says it

    @property
    def link(self) -> str:
        """Its name in Markdown."""
        if self.repo is None:
            return f"`{self.name}`"
        place = f"https://huggingface.co/{self.repo}"
        at = f" at [`{self.commit[:7]}`]({place}/tree/{self.commit})" if self.commit else ""
        return f"[{self.repo}]({place}){at}"


def read_base_model(source: HFCheckpoint) -> BaseModelInfo:
    """What a checkpoint folder tells of itself, wherever it lies."""
    commit = download.cached_commit(source.path)
    repo = source.path.parent.parent.name.removeprefix("models--").replace("--", "/", 1) if commit else None
    name = repo or (source.name if assets.model_dir(source.name) else redact.redact_path(str(source.path.resolve())))
    return BaseModelInfo(name, repo, commit, licence(source.path, repo))


def licence(folder: Path, repo: str | None) -> dict[str, str]:
    """From the front matter of the base's card, else from the text of its licence; nothing if it has neither."""
    card = read_front_matter(read_card(folder / CARD))
    told = {key: str(card[key]) for key in LICENCE if isinstance(card.get(key), str)}
    if "license" in told:
        link = told.get("license_link")
        if link and repo and "://" not in link:
            told["license_link"] = f"https://huggingface.co/{repo}/blob/main/{link}"
        return told
    for file in sorted(folder.glob("LICENSE*")):
        title = next((line.strip() for line in read_card(file).splitlines() if line.strip()), "")
        if title in TEXTS:
            return {"license": TEXTS[title]}
        slug = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-")[:60]
        return {"license": "other", "license_name": slug or "see-file", "license_link": file.name}
    return {}


def read_front_matter(text: str) -> dict[str, Any]:
    """The YAML at the head of a card; empty if there is none that can be read."""
    found = FRONT.match(text)
    try:
        value = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        value = None
    return value if isinstance(value, dict) else {}


def read_card(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.is_file() else ""
