"""Parity of all architectures: `pytest -s tests/parity/models/test_table.py` prints a table."""

import pytest
import transformers

from tests.helpers.random_checkpoints import SHAPES, shallow_shape
from tests.helpers.transformers_parity import measure_adapter_parity, measure_parity
from tunekit.adapters.config import LoRAConfig
from tunekit.models.families.registry import FAMILIES

COLUMNS = ("checkpoint", "model_type", "logits", "gradients", "generation", "files", "LoRA in peft", "and back")
LINE = "\n{:21} {:17} {:>8} {:>9}  {:10} {:10} {:>12} {:>8}"
FIRST_SHAPES = {shape["model_type"]: name for name, shape in reversed(SHAPES.items())}  # the first shape of each family


@pytest.fixture(scope="module", autouse=True)
def table_header() -> None:
    print(LINE.format(*COLUMNS))


@pytest.mark.parametrize("name", SHAPES)
def test_family_matches_transformers(name: str) -> None:
    """Logits, gradients, generation, saved files and both versions of config.json. Errors are relative; that of
    gradients is the maximum over all parameters.
    """
    errors = measure_parity(name)
    generation = "differs" if errors.generation else "equal"
    files = "differ" if errors.files else "bit by bit"
    numbers = f"{errors.logits:.1e}", f"{errors.gradients:.1e}"
    print(LINE.format(name, SHAPES[name]["model_type"], *numbers, generation, files, "-", "-"))
    assert errors.logits < 1e-5
    assert errors.gradients < 1e-4
    assert not errors.generation
    assert not errors.files
    assert not errors.config_versions


@pytest.mark.parametrize("name", FIRST_SHAPES.values())
def test_adapters_are_exchanged_with_peft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions, for one shape of each family."""
    monkeypatch.setitem(SHAPES, name, shallow_shape(name))
    errors = measure_adapter_parity(name, LoRAConfig(4))
    lora = f"{errors.in_peft:.1e}", f"{errors.from_peft:.1e}"
    print(LINE.format(name, SHAPES[name]["model_type"], *"----", *lora))
    assert max(errors.in_peft, errors.from_peft) < 1e-5


def test_all_families_are_compared() -> None:
    """Except the multimodal Gemma 3n, which transformers only builds with timm."""
    known = {kind for kind in FAMILIES if kind in transformers.CONFIG_MAPPING}
    assert known - {"gemma3n"} == FIRST_SHAPES.keys()
