"""All methods, on one and two ranks, padded and packed, with all weights and with one adapter each.

With TUNEKIT_TEST_ALL_ADAPTERS=1, each method runs with each adapter. `pytest -s` prints a table.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.training_methods import ALL_CASES, compare_runs, covering_cases, run_all_cases, write_rows

LINE = "{:9} {:7} {:7} {:>10} {:>12}"
COLUMNS = ("method", "adapter", "rows", "last loss", "difference")
BOUND = 1e-5
CASES = ALL_CASES if os.environ.get("TUNEKIT_TEST_ALL_ADAPTERS") == "1" else covering_cases()


@pytest.mark.multi
@pytest.mark.slow
def test_all_methods_agree_on_two_ranks_and_with_packing(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    """Two ranks, of which half of the cases pack their rows, equal one process with padded rows.

    KTO estimates its divergence with answers of other rows, which packing changes.
    """
    write_rows(tmp_path)
    make_model(tmp_path / "teacher", num_hidden_layers=3, initializer_range=0.3)
    model = make_model(tmp_path / "made", hidden_size=64, intermediate_size=128, head_dim=16)
    padded = [case._replace(packed=case.packed and case.method == "kto") for case in CASES]
    (single,) = run_ranks(1, run_all_cases, tmp_path, model, "one", padded)
    two, _ = run_ranks(2, run_all_cases, tmp_path, model, "two", CASES)
    failures, num_different = [], 0
    print("\n" + LINE.format(*COLUMNS))
    for case, actual, expected in zip(CASES, two, single, strict=True):
        difference = compare_runs(actual, expected)
        failures += [case] if difference.error > BOUND else []
        num_different += not difference.has_equal_answers
        kind = "packed" if case.packed else "padded"
        loss = expected.metrics["loss"]
        print(LINE.format(case.method, case.adapter, kind, f"{loss[-1]:.6f}", f"{difference.error:.1e}"))
        norms = expected.metrics["grad_norm"]  # the loss of RLOO is zero by construction, its gradients are not
        assert abs(norms[-1] - norms[0]) > 1e-3 * norms[0] > 0, "all steps have the same gradients"
    assert not failures
    assert num_different <= len(CASES) // 20  # by rounding; about a quarter of the cases sample answers
