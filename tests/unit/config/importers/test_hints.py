"""Imports and the hints in errors name the same keys, and configs of other trainers are answered with `tune import`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trl import ModelConfig, SFTConfig

from tests.helpers.imported_keys import VALUES
from tests.unit.config.test_foreign_keys import AXOLOTL_KEYS, KEYS, LLAMA_FACTORY_KEYS, names_of_fields
from tunekit.cli import main as cli
from tunekit.config.migration_hints import find_hint
from tunekit.errors import UserError
from tunekit.importers.axolotl.convert import import_axolotl
from tunekit.importers.foreign_keys import flatten
from tunekit.importers.imported import VALUE_ERRORS
from tunekit.importers.llama_factory.convert import import_llama_factory
from tunekit.importers.trl.convert import import_trl

# Keys that set other keys too, or whose hint is about another use of the name.
SEVERAL = {
    "adapter", "bf16", "num_epochs", "micro_batch_size", "per_device_train_batch_size", "val_set_size", "val_size",
    "test_datasets", "eval_dataset", "datasets", "dataset", "pretraining_dataset", "rl", "stage", "do_train",
}  # fmt: skip
ROWS = [{"path": "o/r", "type": "alpaca"}]
BASES: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "trl": (partial(import_trl, task="sft"), {"model_name_or_path": "o/m", "dataset_name": "o/r", "use_peft": True}),
    "axolotl": (import_axolotl, {"base_model": "o/m", "datasets": ROWS, "adapter": "lora"}),
    "llama-factory": (import_llama_factory, {"model_name_or_path": "o/m", "dataset": "o/r"}),
}


def changed_keys(trainer: str, key: str) -> set[str]:
    """Keys that some value of a foreign key changes."""
    convert, base = BASES[trainer]
    before = dict(flatten("", convert(dict(base))[0].tree))
    changed = set()
    for value in VALUES:
        try:
            after = dict(flatten("", convert({**base, key: value})[0].tree))
        except (UserError, *VALUE_ERRORS):
            continue
        changed |= {name[1:] for name in after.keys() | before.keys() if after.get(name) != before.get(name)}
    return changed


def names_of(trainer: str) -> list[str]:
    from_trl = names_of_fields(SFTConfig, ModelConfig)
    names = {"trl": from_trl, "axolotl": AXOLOTL_KEYS.split(), "llama-factory": LLAMA_FACTORY_KEYS.split()}[trainer]
    return sorted(name for name in set(names) - SEVERAL if "." not in name)


@pytest.mark.parametrize("trainer", BASES)
def test_imports_set_the_keys_that_errors_name(trainer: str) -> None:
    differences = {}
    for name in names_of(trainer):
        row, changed = find_hint((name,), KEYS["sft"]), changed_keys(trainer, name)
        section = row.key.partition(".")[0] if row is not None else ""
        if row is not None and row.key and changed and not any(key.partition(".")[0] == section for key in changed):
            differences[name] = (row.key, changed)
    assert differences == {}


def test_configs_of_other_trainers_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("base_model: o/m\ndatasets: [{path: o/r, type: alpaca}]\n")
    for command in (["run", str(path)], ["run", "sft", str(path)], ["validate", str(path)]):
        assert cli.main(command) == 2
        assert f"{path}: is a config of axolotl. Write one of tunekit with: tune import" in capsys.readouterr().err
