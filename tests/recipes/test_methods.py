"""Every method with every adapter, on one process and on two, padded and packed: `pytest -s` on this prints a table."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.ranks import on
from tests.recipes.methods import CASES, Case, stepped, write_rows

LINE = "{:9} {:7} {:7} {:>10} {:>12} {:>12}"
HEADS = ("method", "adapter", "rows", "last loss", "2 processes", "packed")
BOUND = 1e-5


def furthest(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> float:
    """The largest difference of any figure of any step, relative where it is above 1."""
    assert found.keys() == wanted.keys()
    pairs = [pair for name in wanted for pair in zip(found[name], wanted[name], strict=True)]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)


@pytest.mark.multi
@pytest.mark.slow
def test_all_methods_take_the_same_steps_whatever_holds_their_rows(tmp_path: Path, make: Callable[..., Path]) -> None:
    """The divergence of KTO is estimated with answers of other rows, and packing changes which these are."""
    write_rows(tmp_path)
    make(tmp_path / "teacher", num_hidden_layers=3, initializer_range=0.3)
    model = make(tmp_path / "made", hidden_size=64, intermediate_size=128, head_dim=16)
    (one,) = on(1, stepped, tmp_path, model, "one")
    two, _ = on(2, stepped, tmp_path, model, "two")
    wrong = []
    print("\n" + LINE.format(*HEADS))
    for number, case in enumerate(CASES):
        beside = furthest(two[number], one[number])
        padded = CASES.index(Case(case.method, case.adapter, False))
        packed = furthest(one[number], one[padded]) if case.packed and case.method != "kto" else 0.0
        wrong += [case] if max(beside, packed) > BOUND else []
        kind = "packed" if case.packed else "padded"
        loss = f"{one[number]['loss'][-1]:.6f}"
        print(LINE.format(case.method, case.adapter, kind, loss, f"{beside:.1e}", f"{packed:.1e}"))
        assert one[number]["loss"][-1] != one[number]["loss"][0], "nothing was learnt"
    assert not wrong
