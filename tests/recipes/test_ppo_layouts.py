"""PPO steps on two ranks, with each kind of parallelism, are those of one process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.training_methods import Case, RunResult, compare_runs, run_case, write_rows

CASES = [Case("ppo", "full", True), Case("ppo", "full", False), Case("ppo", "qlora", True)]
LAYOUTS = ("tp: 2", "cp: 2", "dp_shard: 2", "dp_replicate: 2")
BOUND = 1e-5


def run_layout(folder: Path, model: Path, layout: str) -> list[RunResult]:
    """Results of all cases."""
    out = folder / (layout.replace(": ", "") or "one")
    suffix = f"parallel: {{{layout}}}\nvalue_lr: 0.1\n"
    return [run_case(case, folder, model, out / str(number), suffix) for number, case in enumerate(CASES)]


@pytest.mark.multi
@pytest.mark.slow
def test_all_layouts_agree_with_one_process(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    write_rows(tmp_path)
    model = make_model(tmp_path / "made", hidden_size=64, intermediate_size=128, head_dim=32)
    (expected,) = run_ranks(1, run_layout, tmp_path, model, "", limit=600)
    failures = []
    for layout in LAYOUTS:
        first, second = run_ranks(2, run_layout, tmp_path, model, layout, limit=600)
        assert first == second
        for case, actual, required in zip(CASES, first, expected, strict=True):
            assert len(required.metrics["loss"]) == 3
            assert required.metrics["val/explained_variance"][2] != 0, "the value head did not change"
            error = compare_runs(actual, required).error
            failures += [f"{layout} {case}: {error:.1e}"] if error > BOUND else []
    assert not failures, "\n".join(failures)
