"""Parity of all architectures: `pytest -s tests/parity/models/test_table.py` prints a table."""

import transformers

from tests.helpers.random_checkpoints import SHAPES
from tests.helpers.transformers_parity import measure_adapter_parity, measure_parity
from tunekit.adapters.config import LoRAConfig
from tunekit.models.families.registry import FAMILIES

COLUMNS = ("checkpoint", "model_type", "logits", "gradients", "generation", "files", "LoRA in peft", "and back")
LINE = "{:21} {:17} {:>8} {:>9}  {:10} {:10} {:>12} {:>8}"
FIRST_SHAPES = {shape["model_type"]: name for name, shape in reversed(SHAPES.items())}  # the first shape of each family


def table_row(name: str) -> tuple[str | float, ...]:
    """Relative errors of logits, and the maximum over the gradients of all parameters."""
    errors, kind = measure_parity(name), SHAPES[name]["model_type"]
    generation = "differs" if errors.generation else "equal"
    files = "differ" if errors.files else "bit by bit"
    lora = measure_adapter_parity(name, LoRAConfig(4)) if name in FIRST_SHAPES.values() else None
    return (
        name,
        kind,
        errors.logits,
        errors.gradients,
        generation,
        files,
        *((lora.in_peft, lora.from_peft) if lora else "--"),
    )


def test_parity_table() -> None:
    """For one shape of each family, an adapter is also exchanged with peft in both directions."""
    assert {kind for kind in FAMILIES if kind in transformers.CONFIG_MAPPING} == FIRST_SHAPES.keys()
    print("\n" + LINE.format(*COLUMNS))
    for name in SHAPES:
        values = table_row(name)
        print(LINE.format(*(f"{x:.1e}" if isinstance(x, float) else x for x in values)))
        _, _, logits, gradients, *comparisons, in_peft, from_peft = values
        assert logits < 1e-5 and gradients < 1e-4
        assert comparisons == ["equal", "bit by bit"]
        assert (in_peft, from_peft) == ("-", "-") or max(in_peft, from_peft) < 1e-5
