"""Answers to many prompts from files: recipe `generate`, with rewards, environments and rejection sampling."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tunekit import devices
from tunekit.api.evaluate import rows_source
from tunekit.api.model import Model
from tunekit.api.model_values import model_values
from tunekit.api.result import Run
from tunekit.api.rows import Rows
from tunekit.api.session import api_call, free_memory, isolated_torch
from tunekit.api.values import PlainValues
from tunekit.cli import recipe_loader
from tunekit.config.overrides import KeywordValues
from tunekit.errors import UserError
from tunekit.recipes import generate as recipe


def generate(
    model: Model | Run | str | os.PathLike[str], rows: Rows | None = None, **keys: Any
) -> list[dict[str, Any]]:
    """Answer the prompts of `rows`, as recipe `generate`, and return the lines that it writes to `output_path`.

    `rows` have a column `prompt`, or conversations. Keys are those of the recipe, such as `rewards`, and
    `output_format="sft"` for rows of training data from the best answers. `Model.generate` answers with less to set.
    """
    where = "generate(...)"
    if isinstance(model, Model) and model.adapter is not None:
        raise UserError(f"{where}: model: is {model.name} with {model.adapter}. Pass the adapter alone.")
    with (
        api_call(where),
        rows_source(rows, f"{where}: rows", "source") as source,
        TemporaryDirectory(prefix="tunekit-") as directory,
    ):
        values = {"output_path": f"{directory}/answers.jsonl", **model_values(model, where), **source, **keys}
        keywords = KeywordValues(where, PlainValues(where)(values))
        cfg = recipe_loader.load_recipe_config(recipe, None, (), (), keywords)
        recipe.check(cfg)
        device = devices.select_device(cfg.device)
        with isolated_torch(device):
            recipe.main(cfg)
        free_memory(device)
        return [json.loads(line) for line in Path(cfg.output_path).read_bytes().splitlines()]
