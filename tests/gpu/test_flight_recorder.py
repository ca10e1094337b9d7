"""Collectives of the flight recorder: written on request, read without running code, quoted in the report of a hang."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.flight_recorder.components.loader import read_dump

from tunekit.distributed import flight_recorder
from tunekit.distributed.context import DistributedContext, dump_flight_recorders
from tunekit.distributed.flight_recorder import (
    BACKENDS,
    CHANNEL,
    PREFIX,
    Recorders,
    file_of,
    parse_dump,
    quote_dumps,
    recorder_variables,
)
from tunekit.distributed.launch_config import LaunchConfig, RendezvousInfo, WorkerSpec
from tunekit.distributed.launcher import worker_environment


def entry(number: int, state: str, **changes: Any) -> dict[str, Any]:
    """An entry as NCCL records it, version 2.10."""
    frames = [
        {"filename": "/venv/lib/torch/distributed/distributed_c10d.py", "line": 99, "name": "all_gather_into_tensor"},
        {"filename": "/src/tunekit/distributed/collectives.py", "line": 62, "name": "fill"},
    ]
    fields = {"collective_seq_id": number, "process_group": ("4", "mesh_shard"), "profiling_name": "nccl:all_gather"}
    fields |= {"input_sizes": [[128, 64]], "state": state, "time_created_ns": 1000 + number, "frames": frames}
    return fields | changes


def write(folder: Path, rank: int, *entries: dict[str, Any]) -> None:
    file_of(folder, "nccl", rank).write_bytes(pickle.dumps({"version": "2.10", "entries": list(entries)}, protocol=2))


def test_a_rank_writes_its_collectives_on_request(
    one_rank: DistributedContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The backend is gloo; torch's own reader finds the same."""
    one_rank.all_gather_objects("to be recorded")
    (tmp_path / "gloo-trace-0").write_text("of an earlier start")
    recorders = Recorders(tmp_path, 0, 1)
    assert not any(tmp_path.iterdir())
    recorders.request(5.0)
    assert not any(tmp_path.iterdir()), "a rank that has not started yet is not waited for"
    monkeypatch.setenv(
        CHANNEL, recorders.environment(0)[CHANNEL].replace(f"{recorders.files[0]}:", f"{os.dup(recorders.files[0])}:")
    )
    flight_recorder.serve_dumps(lambda: dump_flight_recorders(one_rank.device), 0)
    recorders.pairs[0][0].recv(1, 2)  # MSG_PEEK: until the thread is ready
    recorders.request(5.0)
    collectives = parse_dump(file_of(tmp_path, "gloo", 0))
    oracle: list[Any] = read_dump("gloo-trace-", str(file_of(tmp_path, "gloo", 0)))["entries"]  # type: ignore[assignment]
    assert [(c.name, c.number, c.group) for c in collectives] == [
        (e["profiling_name"], e["collective_seq_id"], e["process_group"][0]) for e in oracle
    ]
    assert "all_gather_objects (distributed/context.py" in collectives[-1].caller
    assert "gloo:all_gather" in quote_dumps(tmp_path, [0])[1]
    recorders.close()


def test_a_report_names_the_ranks_that_lag(tmp_path: Path) -> None:
    write(tmp_path, 0, entry(7, "completed"), entry(8, "started"))
    write(tmp_path, 1, entry(6, "completed"), entry(7, "completed"))
    assert quote_dumps(tmp_path, [0, 1, 2]) == [
        "last collectives:",
        "  rank 0: nccl:all_gather #8 of mesh_shard (128x64), started, from fill (distributed/collectives.py:62)",
        "  rank 1: nccl:all_gather #7 of mesh_shard (128x64), completed, from fill (distributed/collectives.py:62)",
        "  mesh_shard: rank 1 is at #7, the others at #8",
    ]


def test_groups_of_one_name_on_other_ranks_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path, 0, entry(8, "started"))
    write(tmp_path, 1, entry(7, "started", process_group=("5", "mesh_shard")))
    assert not [line for line in quote_dumps(tmp_path, [0, 1]) if "others" in line]


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(Attack()), pickle.dumps({"entries": [Attack()]})])
def test_files_that_are_no_plain_values_are_ignored(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path, "nccl", 0).write_bytes(content)
    assert parse_dump(file_of(tmp_path, "nccl", 0)) == [] and quote_dumps(tmp_path, [0]) == []
    assert not (tmp_path / "attacked").exists()


def test_ranks_record_into_the_folder_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    job = WorkerSpec((), LaunchConfig(gpus=2), tmp_path, 1.0)
    variables_of_rank = worker_environment(job, RendezvousInfo(0, 2, "127.0.0.1", 0), 1)
    assert variables_of_rank["TORCH_FR_DUMP_TEMP_FILE"] + "1" == str(file_of(tmp_path / "logs", "nccl", 1))
    assert variables_of_rank["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert variables_of_rank["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "the user's own"


def test_old_names_of_variables_count_as_set() -> None:
    old = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "10", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/x"}
    assert recorder_variables(Path(PREFIX), old) == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_other_launchers_get_the_variables_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {})
    flight_recorder.record_into(tmp_path / "logs")
    assert not os.environ, "a single process records nothing"
    monkeypatch.setattr(os, "environ", {"RANK": "0"})
    flight_recorder.record_into(tmp_path / "logs")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "logs" / PREFIX)
    assert (tmp_path / "logs").is_dir() and BACKENDS[0] in PREFIX and dist.is_available()
