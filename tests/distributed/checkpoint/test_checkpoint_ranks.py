"""States and checkpoints that several ranks write and read equal those of one process."""

import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_ranks import (
    MODELS,
    OPTIMIZERS,
    RESULTS,
    Case,
    kill_one_rank,
    resume_and_train,
    run_on_four,
    run_on_two,
    save_result,
    write_checkpoint,
)
from tests.helpers.ranks import run_ranks
from tunekit.checkpoint import atomic
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig

pytestmark = [pytest.mark.multi, pytest.mark.slow]
SINGLE_PROCESS = DistributedContext(device="cpu")
IN_USE_MESSAGES = ("process", "process", "seed", ".lock config.yaml")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    for name, config in MODELS.items():
        write_checkpoint(folder / name, config)
    return folder


def train_on_one(base: Path, out: Path, model: str, steps: int, stop: int) -> dict[str, Any]:
    """Trained tensors of one process with each optimizer. Its states are kept."""
    return {
        name: resume_and_train(
            Case(base / model, optimizer=optimizer), out / f"one-{name}", SINGLE_PROCESS, steps, stop, False
        )
        for name, optimizer in OPTIMIZERS.items()
    }


def assert_same(actual: Any, expected: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def assert_same_files(actual: Path, expected: Path) -> None:
    names = {str(path.relative_to(actual)) for path in actual.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file()}
    for name in names:
        assert (actual / name).read_bytes() == (expected / name).read_bytes(), name
    assert atomic.find_corrupt_file(expected) is None


def test_two_ranks_equal_one_process(base: Path, tmp_path: Path) -> None:
    expected = train_on_one(base, tmp_path, "dense", 2, 4)
    verifications = {name: save_result(name, base, tmp_path / "one", SINGLE_PROCESS) for name in RESULTS}
    day = date.today()
    ranks = run_ranks(2, run_on_two, base, tmp_path)
    for results in ranks:
        for name in OPTIMIZERS:
            assert_same(results[f"background {name}"], expected[name])
            assert_same(results[f"restored {name}"], expected[name])
            assert_same(results[f"of one {name}"], expected[name])
        for name, verification in verifications.items():
            assert results[name] == verification and verification["passed"], name
        for background in (False, True):
            message, _, file_names = results[f"refused {background}"]
            assert "file too large" in message and "00000001" in message
            assert file_names == "00000001"
        failures = {rank_results["refused True"][:2] for rank_results in ranks}
        assert len(failures) == 1, "all ranks report the same error in the same step"
    state = tmp_path / "damaged" / "00000001"
    assert ranks[0]["damaged"] == ranks[1]["damaged"]
    files = [state / name for name in (".metadata", "progress.pt")]
    assert all(str(path) in message for path, message in zip(files, ranks[0]["damaged"], strict=True))
    assert {"config.json", "complete"} < set(ranks[0]["sent"]) and ranks[1]["sent"] == [], "only one rank uploads"
    assert ranks[0]["claimed"][0] == ranks[1]["claimed"][0]
    assert ranks[0]["claimed"][0] in (str(day), str(date.today())), "the date can change during the test"
    assert ranks[0]["claimed"][1:] == ranks[1]["claimed"][1:]
    assert [part in text for part, text in zip(IN_USE_MESSAGES, ranks[0]["claimed"][1:], strict=True)] == [True] * 4
    for name in RESULTS:
        assert_same_files(tmp_path / "one" / name, tmp_path / "two" / name)
    for name, optimizer in OPTIMIZERS.items():
        case = Case(base / "dense", optimizer=optimizer)
        assert_same(resume_and_train(case, tmp_path / f"two-{name}", SINGLE_PROCESS, 2, 4, False), expected[name])
    for background in (False, True):
        states = sorted(path.name for path in (tmp_path / f"refused-{background}").iterdir())
        assert states == ["00000001", "00000003"]


LAYOUTS = {
    "copies": (ParallelConfig(dp_replicate=2, dp_shard=2), "dense"),
    "layers and experts": (ParallelConfig(tp=2, ep=2), "experts"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_equal_one_process(layout: str, base: Path, tmp_path: Path) -> None:
    parallel, model = LAYOUTS[layout]
    expected = train_on_one(base, tmp_path, model, 2, 4)
    for name in OPTIMIZERS:
        shutil.copytree(tmp_path / f"one-{name}", tmp_path / f"four-{name}")
    verification = save_result(model, base, tmp_path / "one", SINGLE_PROCESS)
    for results in run_ranks(4, run_on_four, base, tmp_path, parallel, model):
        assert_same(results["adamw"], expected["adamw"])
        assert_same(results["muon"], expected["muon"])
        assert results[model] == verification
        assert ("256" in results.get("refused", "")) == (parallel.tp > 1)
    assert_same_files(tmp_path / "one" / model, tmp_path / "four" / model)
    for name in ("adamw", "muon"):
        case = Case(base / model, optimizer=OPTIMIZERS[name])
        assert_same(resume_and_train(case, tmp_path / f"four-{name}", SINGLE_PROCESS, 3, 4, False), expected[name])


def test_sigkill_of_one_rank_leaves_no_complete_state(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(AssertionError, match="exit code 9"):
        run_ranks(2, kill_one_rank, base, out)
    assert (out / f"00000002{atomic.PARTIAL}").is_dir() and not atomic.is_complete(out / "00000002")
    expected = resume_and_train(Case(base / "dense"), tmp_path / "other", SINGLE_PROCESS, 1, 3, False)
    assert_same(resume_and_train(Case(base / "dense"), out, SINGLE_PROCESS, 1, 3, False), expected)
    assert [path.name for path in sorted(out.iterdir())] == ["00000001", "written"]
