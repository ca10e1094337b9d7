"""All methods with all adapters, on one and two ranks, padded and packed. `pytest -s` prints a table."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.training_methods import CASES, Case, run_all_cases, write_rows

LINE = "{:9} {:7} {:7} {:>10} {:>12} {:>12}"
COLUMNS = ("method", "adapter", "rows", "last loss", "2 processes", "packed")
BOUND = 1e-5


def max_difference(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """Maximum difference of any metric in any step, relative for values above 1."""
    assert actual.keys() == expected.keys()
    pairs = [pair for name in expected for pair in zip(actual[name], expected[name], strict=True)]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)


@pytest.mark.multi
@pytest.mark.slow
def test_all_methods_agree_on_two_ranks_and_with_packing(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    """KTO estimates its divergence with answers of other rows, which packing changes."""
    write_rows(tmp_path)
    make_model(tmp_path / "teacher", num_hidden_layers=3, initializer_range=0.3)
    model = make_model(tmp_path / "made", hidden_size=64, intermediate_size=128, head_dim=16)
    (single,) = run_ranks(1, run_all_cases, tmp_path, model, "one")
    two, _ = run_ranks(2, run_all_cases, tmp_path, model, "two")
    failures = []
    print("\n" + LINE.format(*COLUMNS))
    for number, case in enumerate(CASES):
        multi_rank_error = max_difference(two[number], single[number])
        padded = CASES.index(Case(case.method, case.adapter, False))
        packing_error = max_difference(single[number], single[padded]) if case.packed and case.method != "kto" else 0.0
        failures += [case] if max(multi_rank_error, packing_error) > BOUND else []
        kind = "packed" if case.packed else "padded"
        loss = f"{single[number]['loss'][-1]:.6f}"
        print(LINE.format(case.method, case.adapter, kind, loss, f"{multi_rank_error:.1e}", f"{packing_error:.1e}"))
        assert single[number]["loss"][-1] != single[number]["loss"][0], "the loss did not change"
    assert not failures
