"""What ships with the package, under names that read as Hub names: a small model, a data set, and presets.

A preset is the config.json of a public model and nothing more: what to train from scratch, or to plan with.
"""

import difflib
from pathlib import Path

HOME = Path(__file__).parent / "nano"
MODELS = {"tunekit/nano": HOME / "model"}
PRESETS = {f"tunekit/{folder.name}": folder for folder in sorted((HOME.parent / "models/presets").iterdir())}
DATA = {f"tunekit/{name}": HOME / name for name in ("preferences", "tools")}


def model_dir(name: str) -> Path | None:
    """Folder of a bundled checkpoint or preset; None if `name` is neither."""
    return MODELS.get(name) or PRESETS.get(name)


def suggest_asset(name: str) -> str:
    """What a name under `tunekit/` that is not known may have been meant to be."""
    names = {known.partition("/")[2]: known for known in (*MODELS, *PRESETS)}
    near = [names[one] for one in difflib.get_close_matches(name.partition("/")[2], names)]
    return f"no bundled model {name}: did you mean {' or '.join(near)}?" if near else f"no bundled model {name}"


def dataset_dir(name: str) -> Path | None:
    """Folder with one `<split>.jsonl` for each split of a bundled data set; None if `name` is no bundled data set."""
    return DATA.get(name)
