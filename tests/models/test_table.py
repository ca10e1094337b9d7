"""Every architecture in a table: `pytest -s tests/models/test_table.py` prints it."""

import transformers

from tests.checkpoints import SHAPES
from tests.parity import measure_adapter_parity, measure_parity
from tunekit.adapters.config import LoRAConfig
from tunekit.models.families.registry import FAMILIES

HEADS = ("checkpoint", "model_type", "logits", "gradients", "generation", "files", "LoRA in peft", "and back")
LINE = "{:21} {:17} {:>8} {:>9}  {:10} {:10} {:>12} {:>8}"
KINDS = {shape["model_type"]: name for name, shape in reversed(SHAPES.items())}  # and the first shape of each


def row(name: str) -> tuple[str | float, ...]:
    """Errors are relative: of logits, and the worst of the gradients of all parameters."""
    found, kind = measure_parity(name), SHAPES[name]["model_type"]
    generation = "differs" if found.generation else "equal"
    files = "differ" if found.files else "bit by bit"
    lora = measure_adapter_parity(name, LoRAConfig(4)) if name in KINDS.values() else None
    return (
        name,
        kind,
        found.logits,
        found.gradients,
        generation,
        files,
        *((lora.in_peft, lora.from_peft) if lora else "--"),
    )


def test_table() -> None:
    """One shape of each family also trains an adapter, which peft opens; and we open what peft then writes."""
    assert {kind for kind in FAMILIES if kind in transformers.CONFIG_MAPPING} == KINDS.keys()
    print("\n" + LINE.format(*HEADS))
    for name in SHAPES:
        values = row(name)
        print(LINE.format(*(f"{x:.1e}" if isinstance(x, float) else x for x in values)))
        _, _, logits, gradients, *equal, there, back = values
        assert logits < 1e-5 and gradients < 1e-4
        assert equal == ["equal", "bit by bit"]
        assert (there, back) == ("-", "-") or max(there, back) < 1e-5
