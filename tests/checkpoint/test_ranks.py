"""States and files that several ranks write and read, against those of one process."""

import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.ranks import (
    MODELS,
    OPTIMIZERS,
    RESULTS,
    Case,
    checkpoint,
    gone_on,
    killed,
    on_four,
    on_two,
    result,
)
from tests.parallel.ranks import on
from tunekit.checkpoint import atomic
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig

pytestmark = [pytest.mark.multi, pytest.mark.slow]
ALONE = DistributedContext(device="cpu")
CLAIMED = ("in use by process", "in use by process", "seed: 1 there, 2 now", ".lock config.yaml")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    for name, config in MODELS.items():
        checkpoint(folder / name, config)
    return folder


def one(base: Path, out: Path, model: str, steps: int, stop: int) -> dict[str, Any]:
    """What one process comes to with each optimizer; its states stay."""
    return {
        name: gone_on(Case(base / model, optimizer=optimizer), out / f"one-{name}", ALONE, steps, stop, False)
        for name, optimizer in OPTIMIZERS.items()
    }


def same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def same_files(one: Path, other: Path) -> None:
    names = {str(path.relative_to(one)) for path in one.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()}
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert atomic.find_corrupt_file(other) is None


def test_two_ranks(base: Path, tmp_path: Path) -> None:
    wanted = one(base, tmp_path, "dense", 2, 4)
    verdicts = {name: result(name, base, tmp_path / "one", ALONE) for name in RESULTS}
    day = date.today()
    ranks = on(2, on_two, base, tmp_path)
    for found in ranks:
        for name in OPTIMIZERS:
            same(found[f"background {name}"], wanted[name])
            same(found[f"again {name}"], wanted[name])
            same(found[f"of one {name}"], wanted[name])
        for name, verdict in verdicts.items():
            assert found[name] == verdict and verdict["passed"], name
        for background in (False, True):
            told, _, left = found[f"refused {background}"]
            assert "file too large" in told and "last complete state is" in told and "00000001" in told
            assert left == "00000001"
        looks = {one["refused True"][:2] for one in ranks}
        assert len(looks) == 1, "all are told the same at the same moment"
    state = tmp_path / "damaged" / "00000001"
    told = [f"cannot read {state / name}: it is damaged or cut off" for name in (".metadata", "progress.pt")]
    assert ranks[0]["damaged"] == ranks[1]["damaged"] == told
    assert {"config.json", "complete"} < set(ranks[0]["sent"]) and ranks[1]["sent"] == [], "one sends"
    assert ranks[0]["claimed"][0] == ranks[1]["claimed"][0]
    assert ranks[0]["claimed"][0] in (str(day), str(date.today())), "it may be midnight"
    assert ranks[0]["claimed"][1:] == ranks[1]["claimed"][1:]
    assert [word in told for word, told in zip(CLAIMED, ranks[0]["claimed"][1:], strict=True)] == [True] * 4
    for name in RESULTS:
        same_files(tmp_path / "one" / name, tmp_path / "two" / name)
    for name, optimizer in OPTIMIZERS.items():
        case = Case(base / "dense", optimizer=optimizer)
        same(gone_on(case, tmp_path / f"two-{name}", ALONE, 2, 4, False), wanted[name])
    for background in (False, True):
        states = sorted(path.name for path in (tmp_path / f"refused-{background}").iterdir())
        assert states == ["00000001", "00000003"]


LAYOUTS = {
    "copies": (ParallelConfig(dp_replicate=2, dp_shard=2), "dense"),
    "layers and experts": (ParallelConfig(tp=2, ep=2), "experts"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks(layout: str, base: Path, tmp_path: Path) -> None:
    parallel, model = LAYOUTS[layout]
    wanted = one(base, tmp_path, model, 2, 4)
    for name in OPTIMIZERS:
        shutil.copytree(tmp_path / f"one-{name}", tmp_path / f"four-{name}")
    verdict = result(model, base, tmp_path / "one", ALONE)
    for found in on(4, on_four, base, tmp_path, parallel, model):
        same(found["adamw"], wanted["adamw"])
        same(found["muon"], wanted["muon"])
        assert found[model] == verdict
        assert ("where no block of 256 ends" in found.get("refused", "")) == (parallel.tp > 1)
    same_files(tmp_path / "one" / model, tmp_path / "four" / model)
    for name in ("adamw", "muon"):
        case = Case(base / model, optimizer=OPTIMIZERS[name])
        same(gone_on(case, tmp_path / f"four-{name}", ALONE, 3, 4, False), wanted[name])


def test_one_of_two_is_killed_in_the_middle(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(AssertionError, match="exit code 9"):
        on(2, killed, base, out)
    assert (out / f"00000002{atomic.PARTIAL}").is_dir() and not atomic.is_complete(out / "00000002")
    wanted = gone_on(Case(base / "dense"), tmp_path / "other", ALONE, 1, 3, False)
    same(gone_on(Case(base / "dense"), out, ALONE, 1, 3, False), wanted)
    assert [path.name for path in sorted(out.iterdir())] == ["00000001", "written"]
