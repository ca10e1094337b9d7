"""Config keys that describe a model: loaded, of a run, or by name."""

import os
from typing import Any

from tunekit.api.model import Model, is_changed
from tunekit.api.result import Run
from tunekit.config.choices import field_slots
from tunekit.config.dump import to_plain_value
from tunekit.errors import UserError

KEYS = ("quantization", "config_overrides", "chat_template", "chat_template_kwargs", "precision", "device")


def model_values(model: Model | Run | str | os.PathLike[str], where: str) -> dict[str, Any]:
    """The model by its name, and how it was loaded. Raises UserError if its weights are not those of its files."""
    if isinstance(model, Run):
        return {"model": str(model.directory)}
    if not isinstance(model, Model):
        return {"model": os.fspath(model)}
    if is_changed(model):
        problem = f"the weights of {model.name} were changed in memory, but are read from its files"
        raise UserError(f"{where}: model: {problem}. Save them as a checkpoint, and pass its directory.")
    cfg, slots = model.config, field_slots(type(model.config))
    values = {key: to_plain_value(vars(cfg)[key], slots[key].hint) for key in KEYS}
    defaults = {key: to_plain_value(slots[key].default, slots[key].hint) for key in KEYS}
    return {"model": cfg.model} | {key: value for key, value in values.items() if value != defaults[key]}
