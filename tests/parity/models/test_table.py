"""Parity of all architectures: `pytest -s tests/parity/models/test_table.py` prints a table."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers

from tests.helpers.random_checkpoints import FIRST_SHAPES, SHAPES, WEIGHTLESS_OPTIONS, shallow_shape
from tests.helpers.transformers_parity import (
    check_merge,
    has_experts,
    max_gradient_rounding,
    max_logit_rounding,
    measure_adapter_parity,
    measure_parity,
)
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.models.families.registry import FAMILIES, find_family

COLUMNS = ("checkpoint", "model_type", "logits", "gradients", "generation", "files", "LoRA in peft", "reloaded", "kind")
LINE = "\n{:21} {:17} {:>8} {:>9}  {:10} {:10} {:>12} {:>8}  {}"


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
    print(LINE.format(name, SHAPES[name]["model_type"], *numbers, generation, files, "-", "-", ""))
    spec = find_family(SHAPES[name], name)[1]
    assert errors.logits < max_logit_rounding(spec)
    assert errors.gradients < max_gradient_rounding(spec)
    assert not errors.generation
    assert not errors.files
    assert not errors.config_versions


# All options at once. PEFT has no DoRA for experts, and none for models with them.
DENSE = LoRAConfig(
    4,
    use_rslora=True,
    rank_pattern={"up_proj": 5},
    alpha_pattern={"o_proj": 3.0},
    modules_to_save=("head", "embed", "norms"),
)
SPARSE = LoRAConfig(
    4,
    target_modules=("all-linear", "experts"),
    use_rslora=True,
    rank_pattern={"experts": 2, "o_proj": 5},
    alpha_pattern={"o_proj": 3.0, "down_proj": 9.0},
    modules_to_save=("router", "norms", "head"),
)
ENDS = LoRAConfig(4, target_modules=("o_proj", "embed", "head"))
KINDS = {
    "all options": (DENSE, SPARSE),
    "dora": (DoRAConfig(4), DoRAConfig(4, target_modules="attn")),
    "ends": (ENDS, ENDS),
    "modules to save": (
        LoRAConfig(4, modules_to_save=("head", "embed", "norms")),
        LoRAConfig(4, target_modules="attn", modules_to_save=("router", "norms", "embed")),
    ),
}


def adapter_for(shape: str, pair: tuple[LoRAConfig, LoRAConfig]) -> LoRAConfig:
    return pair[has_experts(find_family(SHAPES[shape], shape)[1])]


def family_cases(kinds: Sequence[str]) -> list[tuple[str, str]]:
    """(shape, kind): all sets of weight shapes, and the first kind and another one in every family, with and without
    experts.
    """
    families: dict[tuple[str, bool], dict[str, str]] = {}
    for name, shape in SHAPES.items():
        key = shape["model_type"], has_experts(find_family(shape, name)[1])
        weights = repr({option: value for option, value in shape.items() if option not in WEIGHTLESS_OPTIONS})
        families.setdefault(key, {}).setdefault(weights, name)
    return [
        (names[i % len(names)], kinds[1 + (number + i // 2) % (len(kinds) - 1)] if i % 2 else kinds[0])
        for number, names in enumerate(list(shapes.values()) for shapes in families.values())
        for i in range(max(len(names), 2))
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] != "all options")) for case in family_cases([*KINDS])],
)
def test_adapters_are_exchanged_with_peft_and_merged(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft opens the files of tunekit; tunekit its own, and those that peft saves if the adapter has all options."""
    monkeypatch.setitem(SHAPES, name, shallow_shape(name))
    adapter = adapter_for(name, KINDS[kind])
    model, errors = measure_adapter_parity(tmp_path, name, adapter, saved_by_peft=kind == "all options")
    lora = f"{errors.in_peft:.1e}", f"{errors.from_files:.1e}"
    print(LINE.format(name, SHAPES[name]["model_type"], *"----", *lora, kind))
    assert max(errors.in_peft, errors.from_files) < max_logit_rounding(model.spec)
    check_merge(tmp_path, model)


def test_all_families_are_compared() -> None:
    """Except the multimodal Gemma 3n, which transformers only builds with timm."""
    known = {kind for kind in FAMILIES if kind in transformers.CONFIG_MAPPING}
    assert known - {"gemma3n"} == FIRST_SHAPES.keys()
