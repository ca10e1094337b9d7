"""Preprocessing gives the same documents with any number of processes, and fails cleanly."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.wait import TIMEOUT_SECONDS, has_exited, wait_until
from tunekit.config.user_code import load_user_choices
from tunekit.data.datasets import ChatDataset, PreferenceDataset, TextDataset
from tunekit.data.document import Document
from tunekit.data.preprocess import preprocess, worker_pool
from tunekit.data.preprocess.tokenized_dataset import COLUMNS, TokenizedDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.recipes.sft import SFTConfig

ROLES = ("user", "assistant")
DEPENDENCIES = "numpy, tokenizers, jinja2"
USER_TRANSFORM = '''"""A transform that sleeps, sends a signal, or drops the row if the row says so."""

import os
import signal
import sys
import time
from dataclasses import dataclass

from tunekit.data.transforms import RowTransform


@dataclass(frozen=True)
class Odd(RowTransform):
    suffix: str = ""

    def __call__(self, fields):
        print("seen")
        if "sleep" in fields:
            time.sleep(fields["sleep"])
        if "message" in fields:
            os.write(int(sys.argv[1]), fields["message"].encode())
        if "signal" in fields:
            os.kill(os.getpid(), fields["signal"])
        return None if fields.get("leave") else {"text": fields["text"] + self.suffix}
'''


@pytest.fixture
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["chatml"])


@pytest.fixture
def odd(tmp_path: Path) -> Callable[..., object]:
    """Load a user transform as `--import` does."""
    (tmp_path / "odd.py").write_text(USER_TRANSFORM)
    return load_user_choices(SFTConfig, [tmp_path / "odd.py"]).user_classes[0]


def write_rows(path: Path, rows: list[dict | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat_rows(count: int, length: int = 1) -> list[dict | str]:
    """Build questions and answers of very different lengths, up to 7 times `length` sentences."""
    texts = ["Hello there. ", "What is 2 + 2? ", "It is 4. "]
    return [
        {
            "messages": [
                {"role": role, "content": f"{number} {texts[number % 3] * (number % 7 + 1) * length}"} for role in ROLES
            ]
        }
        for number in range(count)
    ]


def text_rows(count: int, **special: dict) -> list[dict | str]:
    return [{"text": f"row {number} " * 3, **special.get(f"row{number}", {})} for number in range(count)]


def preprocess_columns(rows: ChatDataset | TextDataset, tokenizer: Tokenizer, workers: int) -> dict[str, np.ndarray]:
    """All columns of the preprocessed rows."""
    tokenizer = rows.prepare_tokenizer(tokenizer)
    chunks = preprocess.tokenize_chunks(rows, tokenizer, open_dataset(rows.source, rows.split).chunks(), workers)
    datasets = [TokenizedDataset(chunk.flat) for chunk in chunks]
    columns = {
        name: np.concatenate([dataset.flat.columns[name] for dataset in datasets])
        for name in COLUMNS
        if name != "file_ids"
    }
    return columns | {"where": np.array([dataset.row_location(i) for dataset in datasets for i in range(len(dataset))])}


@pytest.mark.parametrize("workers", [1, 3])
def test_number_of_processes_does_not_change_documents(tmp_path: Path, tokenizer: Tokenizer, workers: int) -> None:
    rows = ChatDataset(source=str(write_rows(tmp_path / "rows.jsonl", chat_rows(1800))), max_length=40)
    expected, columns = preprocess_columns(rows, tokenizer, 0), preprocess_columns(rows, tokenizer, workers)
    assert expected["where"][-1] == f"{rows.source}:1800"
    assert expected["loss_mask"].any()
    for name, column in expected.items():
        assert np.array_equal(column, columns[name]), name


def test_documents_are_memory_mapped_and_counted(tmp_path: Path, tokenizer: Tokenizer, make_dist, monkeypatch) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    source = write_rows(tmp_path / "rows.jsonl", [*chat_rows(5), {"messages": []}, "{", *chat_rows(600)[5:]])
    rows = ChatDataset(source=str(source), on_bad_row="skip", max_length=60, excess_length_strategy="drop")
    dataset = preprocess.preprocess_dataset(rows, tokenizer, make_dist())
    prepared = dataset.summary
    assert (prepared.rows, prepared.skipped) == (602, 2)
    assert prepared.dropped > 0
    assert len(dataset) == 600 - prepared.dropped
    assert not dataset.tokens.flags.writeable
    assert prepared.bad_rows is not None
    bad_rows = [json.loads(line) for line in prepared.bad_rows.read_text().splitlines()]
    assert [bad_row["where"] for bad_row in bad_rows] == [f"{source}:6", f"{source}:7"]
    assert "the conversation is empty" in bad_rows[0]["reason"]
    assert "malformed JSON" in bad_rows[1]["reason"]


def test_dropped_and_split_rows_are_counted(tmp_path: Path, tokenizer: Tokenizer, make_dist, odd) -> None:
    source = write_rows(tmp_path / "rows.jsonl", text_rows(40, row3={"leave": True}, row9={"text": "long " * 40}))
    rows = TextDataset(source=str(source), max_length=30, transforms=(odd(),))
    prepared = preprocess.preprocess_dataset(rows, tokenizer, make_dist()).summary
    assert (prepared.rows, prepared.filtered, prepared.split) == (40, 1, 1)
    pairs = [{"prompt": "Hi. ", "chosen": "Hello.", "rejected": "No."}] * 3
    pairs_dataset = preprocess.preprocess_dataset(
        PreferenceDataset(source=str(write_rows(tmp_path / "pairs.jsonl", [*pairs]))), tokenizer, make_dist()
    )
    assert (len(pairs_dataset), pairs_dataset.summary.split) == (6, 0)
    with pytest.raises(UserError, match=re.escape("1 row, 1 ")):
        preprocess.preprocess_dataset(
            TextDataset(source=str(write_rows(source, text_rows(1, row0={"leave": True}))), transforms=(odd(),)),
            tokenizer,
            make_dist(),
        )


def test_error_without_valid_rows_names_the_first_row(tmp_path: Path, tokenizer: Tokenizer, make_dist) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"text": 1}, {"text": None}])
    rows = TextDataset(source=str(source), on_bad_row="skip", max_bad_row_fraction=1.0)
    with pytest.raises(UserError, match=re.escape(f"{source}:1: text: ")):
        preprocess.preprocess_dataset(rows, tokenizer, make_dist())


@pytest.mark.parametrize("has_many_rows", [False, True])
def test_full_disk_is_an_error_of_one_line(
    tmp_path: Path, tokenizer: Tokenizer, make_dist, monkeypatch, has_many_rows: bool
) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    rows = TextDataset(
        source=str(write_rows(tmp_path / "rows.jsonl", text_rows(3000 if has_many_rows else 300))), num_proc=0
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if has_many_rows else 10_000, limits[1]))
        with pytest.raises(UserError) as caught:
            preprocess.preprocess_dataset(rows, tokenizer, make_dist())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = str(caught.value)
    assert str(tmp_path / "cache" / "data") in message and "file too large" in message
    assert "\n" not in message
    assert [path.suffix for path in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


@pytest.mark.parametrize("workers", [0, 3])
def test_first_bad_row_is_reported_with_any_number_of_processes(
    tmp_path: Path, tokenizer: Tokenizer, make_dist, odd, workers: int
) -> None:
    bad_rows = {"row600": {"sleep": 0.5, "text": 3}, "row1200": {"text": None}, "row1700": {"text": 5}}
    source = write_rows(tmp_path / "rows.jsonl", text_rows(1800, **bad_rows))
    rows = TextDataset(source=str(source), num_proc=workers)
    for _ in range(2):
        with pytest.raises(UserError, match=f"{source}:601: text: "):
            preprocess.preprocess_dataset(rows, tokenizer, make_dist())


def test_max_bad_row_fraction_is_enforced(tmp_path: Path, tokenizer: Tokenizer, make_dist, monkeypatch) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"row {number}"} if number % 10 else {"text": number} for number in range(100)]
    source = str(write_rows(tmp_path / "rows.jsonl", [*rows[:55], {"no": 1}, *rows[56:]]))
    with pytest.raises(UserError) as caught:
        preprocess.preprocess_dataset(
            TextDataset(source=source, on_bad_row="skip", max_bad_row_fraction=0.1), tokenizer, make_dist()
        )
    message = str(caught.value)
    assert "11 of 100 rows" in message and "max_bad_row_fraction=0.1" in message
    assert f"{source}:1" in message
    assert "\n" not in message
    dataset = preprocess.preprocess_dataset(
        TextDataset(source=source, on_bad_row="skip", max_bad_row_fraction=0.11), tokenizer, make_dist()
    )
    assert (len(dataset), dataset.summary.skipped) == (89, 11)
    with pytest.raises(UserError, match=f"{source}:1: text: "):  # although the cache has an entry that skips it
        preprocess.preprocess_dataset(TextDataset(source=source), tokenizer, make_dist())
    with pytest.raises(UserError, match="11 of 100 rows"):
        preprocess.preprocess_dataset(
            TextDataset(source=source, on_bad_row="skip", max_bad_row_fraction=0.1), tokenizer, make_dist()
        )


def test_user_transforms_run_in_other_processes(tmp_path: Path, tokenizer: Tokenizer, odd, capfd) -> None:
    rows = TextDataset(source=str(write_rows(tmp_path / "rows.jsonl", text_rows(1100))), transforms=(odd(suffix="!"),))
    expected, columns = preprocess_columns(rows, tokenizer, 0), preprocess_columns(rows, tokenizer, 2)
    assert all(np.array_equal(column, columns[name]) for name, column in expected.items())
    first = TokenizedDataset.from_documents(
        [Document(columns["tokens"][: columns["lengths"][0]], columns["loss_mask"][: columns["lengths"][0]], 1)]
    )
    assert tokenizer.decode(first.tokens.tolist()).endswith("!")
    capfd.readouterr()
    preprocess_columns(rows, tokenizer, 1)
    assert not capfd.readouterr().out, "output of user code would mix with that of the command"


def test_user_file_that_changes_is_an_error(tmp_path: Path, tokenizer: Tokenizer, odd) -> None:
    rows = TextDataset(source=str(write_rows(tmp_path / "rows.jsonl", text_rows(3))), transforms=(odd(),))
    dataset = open_dataset(rows.source, rows.split)
    with worker_pool.WorkerPool(rows, tokenizer, dataset.chunks(), 0) as pool:
        (tmp_path / "odd.py").write_text(USER_TRANSFORM + "\n")
        pool.workers.append(worker_pool.WorkerProcess(pool.task))
        with pytest.raises(UserError, match=r"odd\.py"):
            list(pool)


PART_OF_A_MESSAGE = "\0\0\1\0cut"  # 3 of 256 bytes


@pytest.mark.parametrize(
    ("number", "fields"),
    [(signal.SIGKILL, {}), (signal.SIGSEGV, {}), (signal.SIGKILL, {"message": PART_OF_A_MESSAGE})],
)
def test_dead_process_is_reported_with_its_rows(
    tmp_path: Path, tokenizer: Tokenizer, odd, number: signal.Signals, fields: dict[str, str]
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", text_rows(1800, row700={"signal": number, **fields}))
    rows = TextDataset(source=str(source), transforms=(odd(),))
    with pytest.raises(UserError) as caught:
        preprocess_columns(rows, tokenizer, 2)
    message = str(caught.value)
    assert f"{source}:513 " in message and "511 rows" in message and number.name in message
    assert ("memory" in message) == (number is signal.SIGKILL)


def test_row_that_takes_too_long_is_named(tmp_path: Path, tokenizer: Tokenizer, odd, monkeypatch) -> None:
    monkeypatch.setattr(worker_pool, "ROW_TIMEOUT", 3.0)
    source = write_rows(tmp_path / "rows.jsonl", text_rows(1100, row700={"sleep": 600}))
    with pytest.raises(UserError, match=f"{source}:701: .*3 seconds"):
        preprocess_columns(TextDataset(source=str(source), transforms=(odd(),)), tokenizer, 2)


def test_slow_rows_do_not_time_out(tmp_path: Path, tokenizer: Tokenizer, odd, monkeypatch) -> None:
    source = write_rows(tmp_path / "rows.jsonl", text_rows(520, **{f"row{i}": {"sleep": 0.25} for i in range(6)}))
    rows = TextDataset(source=str(source), transforms=(odd(),))
    expected = preprocess_columns(rows, tokenizer, 0)
    monkeypatch.setattr(worker_pool, "ROW_TIMEOUT", 1.0)
    columns = preprocess_columns(rows, tokenizer, 1)
    assert all(np.array_equal(column, columns[name]) for name, column in expected.items())


def test_small_datasets_and_notebook_classes_use_no_processes(tmp_path: Path, odd, monkeypatch) -> None:
    source = str(write_rows(tmp_path / "rows.jsonl", text_rows(3)))
    monkeypatch.setattr(worker_pool, "num_cpus", lambda: 8)
    num_workers = {
        number: preprocess.num_workers(TextDataset(source=source), number) for number in (3, 1999, 2000, 10**6, None)
    }
    assert num_workers == {3: 0, 1999: 0, 2000: 4, 10**6: 8, None: 8}
    assert preprocess.num_workers(TextDataset(source=source, num_proc=0), 10**6) == 0
    assert preprocess.num_workers(TextDataset(source=source, num_proc=5), 3) == 5
    monkeypatch.setattr(worker_pool, "num_cpus", lambda: 1)
    assert preprocess.num_workers(TextDataset(source=source), 10**6) == 0
    odd.__module__ = "__main__"
    assert preprocess.num_workers(TextDataset(source=source, num_proc=5, transforms=(odd(),)), 10**6) == 0


IMPORT_SCRIPT = """import sys, {}
print(sorted({{'torch', 'pandas', 'pyarrow', 'datasets'}} & set(sys.modules)))"""


def startup_seconds(module: str) -> float:
    """CPU seconds in which Python starts with a module. The slow packages must not be imported."""
    before = os.times()
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_SCRIPT.format(module)], capture_output=True, text=True, check=True
    )
    after = os.times()
    assert result.stdout == "[]\n"
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_worker_process_starts_fast() -> None:
    """Starting takes less than three times as long as importing its dependencies, best of three each."""
    seconds = {
        name: min(startup_seconds(name) for _ in range(3)) for name in ("tunekit.data.preprocess.worker", DEPENDENCIES)
    }
    assert seconds["tunekit.data.preprocess.worker"] < 3 * seconds[DEPENDENCIES], seconds


def test_process_ends_silently_if_the_pool_ends_during_a_message(
    tmp_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = TextDataset(source=str(write_rows(tmp_path / "rows.jsonl", text_rows(3))))
    worker = worker_pool.WorkerProcess(worker_pool.WorkerPool(rows, tokenizer, [], 1).task)
    assert worker.receive() is None, "it is ready"
    os.write(worker.pipe.fileno(), PART_OF_A_MESSAGE.encode())
    worker.pipe.close()
    assert worker.process.wait() == 0 and capfd.readouterr().err == ""


POOL_SCRIPT = """
import signal, sys, time
from pathlib import Path
from tunekit.data.preprocess import worker_pool
from tunekit.data.datasets import TextDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell may ignore SIGINT
rows = TextDataset(source=sys.argv[1])
chunks = open_dataset(rows.source, rows.split).chunks()
with worker_pool.WorkerPool(rows, Tokenizer.open(Path(sys.argv[2])), chunks, 2) as results:
    for result in results:
        print(*(worker.process.pid for worker in results.workers), flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_worker_processes_end_with_their_parent(
    tmp_path: Path, tokenizer_dirs: dict[str, Path], number: signal.Signals
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", text_rows(5000))
    command = [sys.executable, "-c", POOL_SCRIPT, str(source), str(tokenizer_dirs["chatml"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert not any(map(has_exited, workers))
        parent.send_signal(number)
        try:
            parent.wait(TIMEOUT_SECONDS)
        finally:
            parent.kill()
        wait_until(lambda: all(map(has_exited, workers)))
        output = parent.stderr.read()
        assert "worker" not in output, output


MEMORY_SCRIPT = """
import json, sys
from pathlib import Path
from tunekit.data.preprocess import preprocess
from tunekit.data.datasets import ChatDataset
from tunekit.data.tokenizer import Tokenizer

class FakeDist:
    is_main_process = True
    def log(self, message):
        print(message)

def peak_mib():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

tokenizer, results = Tokenizer.open(Path(sys.argv[1])), []
for source in sys.argv[2:]:
    rows = preprocess.preprocess_dataset(ChatDataset(source=source, num_proc=2), tokenizer, FakeDist())
    results.append([len(rows), peak_mib()])
print(json.dumps(results))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    """Peak memory of the parent in MiB: the tokens of the many rows alone are 12 MB."""
    small_file, large_file = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    write_rows(small_file, chat_rows(1500, 4))
    large_file.write_bytes(small_file.read_bytes() * 10)
    command = [sys.executable, "-c", MEMORY_SCRIPT, *map(str, (tokenizer_dirs["chatml"], small_file, large_file))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    few, many = json.loads(result.stdout)
    assert (few[0], many[0]) == (1500, 15_000)
    assert many[1] - few[1] < 8, (few, many)  # the allocator alone differed by 4.5 on a loaded machine
