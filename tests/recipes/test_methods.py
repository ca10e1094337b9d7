"""All methods with all adapters, on one and two ranks, padded and packed. `pytest -s` prints a table."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.training_methods import CASES, Case, compare_runs, run_all_cases, write_rows

LINE = "{:9} {:7} {:7} {:>10} {:>12} {:>12}"
COLUMNS = ("method", "adapter", "rows", "last loss", "2 processes", "packed")
BOUND = 1e-5


@pytest.mark.multi
@pytest.mark.slow
def test_all_methods_agree_on_two_ranks_and_with_packing(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    """KTO estimates its divergence with answers of other rows, which packing changes."""
    write_rows(tmp_path)
    make_model(tmp_path / "teacher", num_hidden_layers=3, initializer_range=0.3)
    model = make_model(tmp_path / "made", hidden_size=64, intermediate_size=128, head_dim=16)
    (single,) = run_ranks(1, run_all_cases, tmp_path, model, "one")
    two, _ = run_ranks(2, run_all_cases, tmp_path, model, "two")
    failures, num_different = [], 0
    print("\n" + LINE.format(*COLUMNS))
    for number, case in enumerate(CASES):
        multi_rank = compare_runs(two[number], single[number])
        padded = CASES.index(Case(case.method, case.adapter, False))
        packing = compare_runs(single[number], single[padded if case.packed and case.method != "kto" else number])
        failures += [case] if max(multi_rank.error, packing.error) > BOUND else []
        num_different += not multi_rank.has_equal_answers or not packing.has_equal_answers
        kind = "packed" if case.packed else "padded"
        loss = f"{single[number].metrics['loss'][-1]:.6f}"
        print(LINE.format(case.method, case.adapter, kind, loss, f"{multi_rank.error:.1e}", f"{packing.error:.1e}"))
        assert single[number].metrics["loss"][-1] != single[number].metrics["loss"][0], "the loss did not change"
    assert not failures
    assert num_different <= 3  # by rounding; 24 cases sample answers
