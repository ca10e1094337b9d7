"""The small model and the data set that ship with the package, under names that read as Hub names."""

from pathlib import Path

HOME = Path(__file__).parent / "nano"
MODELS = {"tunekit/nano": HOME / "model"}
DATA = {"tunekit/tools": HOME / "tools"}


def model(name: str) -> Path | None:
    """Folder of a bundled checkpoint; None if `name` is no bundled model."""
    return MODELS.get(name)


def data(name: str) -> Path | None:
    """Folder with one `<split>.jsonl` for each split of a bundled data set; None if `name` is no bundled data set."""
    return DATA.get(name)
