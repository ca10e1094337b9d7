"""PPO steps on two ranks, with each kind of parallelism, are those of one process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.training_methods import Case, RunResult, compare_runs, run_case, write_rows

# Each pair of layout, adapter and kind of rows is covered.
PACKED_FULL = [Case("ppo", "full", True), Case("ppo", "qlora", False)]
PADDED_FULL = [Case("ppo", "full", False), Case("ppo", "qlora", True)]
LAYOUTS = {"tp: 2": PACKED_FULL, "cp: 2": PADDED_FULL, "dp_shard: 2": PACKED_FULL, "dp_replicate: 2": PADDED_FULL}
BOUND = 1e-5


def run_layout(folder: Path, model: Path, layout: str, cases: list[Case]) -> list[RunResult]:
    """Results of all cases."""
    out = folder / (layout.replace(": ", "") or "one")
    suffix = f"parallel: {{{layout}}}\nvalue_lr: 0.1\n"
    return [run_case(case, folder, model, out / str(number), suffix) for number, case in enumerate(cases)]


@pytest.mark.multi
@pytest.mark.slow
def test_all_layouts_agree_with_one_process(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    write_rows(tmp_path)
    model = make_model(tmp_path / "made", hidden_size=64, intermediate_size=128, head_dim=32)
    cases = PACKED_FULL + PADDED_FULL
    (single,) = run_ranks(1, run_layout, tmp_path, model, "", cases, limit=600)
    expected = dict(zip(cases, single, strict=True))
    failures = []
    for layout, layout_cases in LAYOUTS.items():
        first, second = run_ranks(2, run_layout, tmp_path, model, layout, layout_cases, limit=600)
        assert first == second
        for case, actual in zip(layout_cases, first, strict=True):
            required = expected[case]
            assert len(required.metrics["loss"]) == 3
            assert required.metrics["val/explained_variance"][2] != 0, "the value head did not change"
            error = compare_runs(actual, required).error
            failures += [f"{layout} {case}: {error:.1e}"] if error > BOUND else []
    assert not failures, "\n".join(failures)
