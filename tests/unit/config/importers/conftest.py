"""Importers of other trainers: helpers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.imported_runs import write_model
from tunekit.cli import recipe_loader
from tunekit.config.load import load_config
from tunekit.importers import imported
from tunekit.importers.imported import Imported

Import = Callable[..., Imported]


@pytest.fixture
def import_text(tmp_path: Path) -> Import:
    """Function that imports the text of a config, whose result is valid."""

    def run(
        text: str, overrides: Sequence[str] = (), trainer: str | None = None, devices: int | None = None
    ) -> Imported:
        path = tmp_path / "theirs.yaml"
        path.write_text(text)
        result = imported.import_file(path, overrides, trainer, devices, recipe_loader.keys_of_recipe)
        load_config(recipe_loader.load_recipe(result.draft.recipe).CONFIG, result.text)
        return result

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama3")


def values(result: Imported, *keys: str) -> list[Any]:
    """Values of dotted keys of the result."""
    return [result.draft.get(key) for key in keys]
