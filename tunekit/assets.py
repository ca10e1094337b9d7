"""Files that ship with the package, by names in the form of Hub names: a small model, its datasets and tasks, presets.

A preset is the config.json of a public model without weights, for training from scratch and for planning.
"""

import difflib
import re
from pathlib import Path

BUNDLED = Path(__file__).parent / "bundled"  # written by scripts/nano/
MODELS = {"tunekit/nano": BUNDLED / "model"}
PRESETS = {f"tunekit/{folder.name}": folder for folder in sorted((BUNDLED.parent / "models/presets").iterdir())}
ENVIRONMENTS = ("calculator", "grid_world", "json_answer", "key_value_lookup", "python")
# Directories of datasets, with one `<split>.jsonl` per split
DATA = {f"tunekit/{name}": BUNDLED / name for name in ("preferences", "retrieval", "sums", "tools", *ENVIRONMENTS)}
TASKS = {f"nano/{name}": BUNDLED / f"tasks/{name}.jsonl" for name in ("facts", "copying", "stories")}
TASKS["nano/tools"] = BUNDLED / "tools/test.jsonl"
JSON_SCHEMAS = {"tunekit/json_answer": BUNDLED / "json_answer/schema.json"}


def model_dir(name: str) -> Path | None:
    """Directory of a bundled checkpoint or preset; None if `name` is neither."""
    return MODELS.get(name) or PRESETS.get(name)


# Components of model names that do not change the architecture: variants, dates and versions of the weights.
VARIANT = re.compile(r"meta|instruct|it|chat|base|hf|pt|thinking|\d{4}|v0\.\d|\d+k")


def find_preset(repo: str) -> str | None:
    """Preset with the architecture and size of a Hub model, found by its name; None if there is none."""
    words = re.split("[-_]", repo.partition("@")[0].rpartition("/")[2].lower())
    shape = "".join(word for word in words if not VARIANT.fullmatch(word)).replace(".", "")
    return next((name for name in PRESETS if name.partition("/")[2].replace("_", "") == shape), None)


def suggest_asset(name: str) -> str:
    """Error message for an unknown name under `tunekit/`, with similar names."""
    names = {known.partition("/")[2]: known for known in (*MODELS, *PRESETS)}
    matches = [names[match] for match in difflib.get_close_matches(name.partition("/")[2], names)]
    return f"no bundled model {name}." + (f" Did you mean {' or '.join(matches)}?" if matches else "")
