"""Keys of TrainingArguments, whose defaults differ between TRL, axolotl and LLaMA-Factory."""

from typing import Any

import pytest
import yaml

from tests.unit.config.importers.conftest import Import

BASES: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "o/m", "dataset_name": "o/r", "packing": True},
    "axolotl": {"base_model": "o/m", "datasets": [{"path": "o/r", "type": "alpaca"}]},
    "llama-factory": {"model_name_or_path": "o/m", "dataset": "o/r", "stage": "sft", "template": "llama3"},
}


@pytest.fixture
def import_keys(import_text: Import) -> Any:
    """Function that imports the smallest config of a trainer with other keys."""
    return lambda trainer, **keys: import_text(yaml.safe_dump({**BASES[trainer], **keys}), trainer=trainer)


@pytest.mark.parametrize(
    ("trainer", "keys", "expected"),
    [
        ("trl", {"hub_model_id": "o/r"}, None),
        ("llama-factory", {"hub_model_id": "o/r"}, None),
        ("axolotl", {"hub_model_id": "o/r"}, {"repo_id": "o/r", "private": True}),
        ("trl", {"hub_model_id": "o/r", "push_to_hub": True}, {"repo_id": "o/r", "private": False}),
        ("trl", {"hub_model_id": "o/r", "push_to_hub": "true", "hub_private_repo": True},
         {"repo_id": "o/r", "private": True}),
        ("axolotl", {"hub_model_id": "o/r", "push_to_hub": False}, None),
        ("trl", {"push_to_hub": True}, None),
    ],
)  # fmt: skip
def test_results_are_pushed_where_the_original_pushes(trainer: str, keys: Any, expected: Any, import_keys: Any) -> None:
    result = import_keys(trainer, **keys)
    assert result.draft.get("push_to_hub") == expected
    reported = {finding.key: finding.value for finding in result.draft.findings}
    assert expected is not None or reported.items() & keys.items()
