"""Rows become the same documents by however many processes; what is wrong is told, and nothing hangs or is left."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import LIMIT, until
from tunekit.config.user_code import load_user_choices
from tunekit.data.datasets import ChatDataset, PreferenceDataset, TextDataset
from tunekit.data.preprocess import preprocess, worker_pool
from tunekit.data.preprocess.tokenized_dataset import COLUMNS, Document, TokenizedDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.recipes.sft import SFTConfig

ROLES = ("user", "assistant")
WORKS_WITH = "numpy, tokenizers, jinja2"
OWN = '''"""Steps that a row may ask for."""

import os
import signal
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
        if "signal" in fields:
            os.kill(os.getpid(), fields["signal"])
        return None if fields.get("leave") else {"text": fields["text"] + self.suffix}
'''


@pytest.fixture
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["chatml"])


@pytest.fixture
def odd(tmp_path: Path) -> Callable[..., object]:
    """A person's own step, as `--import` brings it."""
    (tmp_path / "odd.py").write_text(OWN)
    return load_user_choices(SFTConfig, [tmp_path / "odd.py"]).own[0]


def write(path: Path, rows: list[dict | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chats(count: int) -> list[dict | str]:
    """Questions and answers of very different lengths."""
    said = ["Hello there. ", "What is 2 + 2? ", "It is 4. "]
    return [
        {"messages": [{"role": role, "content": f"{number} {said[number % 3] * (number % 7 + 1)}"} for role in ROLES]}
        for number in range(count)
    ]


def texts(count: int, **special: dict) -> list[dict | str]:
    return [{"text": f"row {number} " * 3, **special.get(f"row{number}", {})} for number in range(count)]


def flat(rows: ChatDataset | TextDataset, tokenizer: Tokenizer, workers: int) -> dict[str, np.ndarray]:
    """All columns of what rows become."""
    tokenizer = rows.prepare(tokenizer)
    parts = preprocess.tokenize_chunks(rows, tokenizer, open_dataset(rows.source, rows.split).chunks(), workers)
    found = [part.documents for part in parts]
    columns = {name: np.concatenate([one.flat.columns[name] for one in found]) for name in COLUMNS if name != "names"}
    return columns | {"where": np.array([one.where(i) for one in found for i in range(len(one))])}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_processes_gives_the_same(tmp_path: Path, tokenizer: Tokenizer, workers: int) -> None:
    rows = ChatDataset(source=str(write(tmp_path / "rows.jsonl", chats(1800))), max_length=40)
    want, got = flat(rows, tokenizer, 0), flat(rows, tokenizer, workers)
    assert want["where"][-1] == f"{rows.source}:1800"
    assert want["learnt"].any()
    for name, column in want.items():
        assert np.array_equal(column, got[name]), name


def test_documents_are_mapped_and_counted(tmp_path: Path, tokenizer: Tokenizer, place, monkeypatch) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path / "rows.jsonl", [*chats(5), {"messages": []}, "{", *chats(600)[5:]])
    rows = ChatDataset(source=str(source), on_bad_row="skip", max_length=60, excess_length_strategy="drop")
    found = preprocess.preprocess_dataset(rows, tokenizer, place())
    prepared = found.prepared
    assert (prepared.rows, prepared.skipped) == (602, 2)
    assert prepared.dropped > 0
    assert len(found) == 600 - prepared.dropped
    assert not found.tokens.flags.writeable
    assert prepared.bad_rows is not None
    listed = [json.loads(line) for line in prepared.bad_rows.read_text().splitlines()]
    assert [fault["where"] for fault in listed] == [f"{source}:6", f"{source}:7"]
    assert "the conversation is empty" in listed[0]["reason"]
    assert "malformed JSON" in listed[1]["reason"]


def test_rows_left_out_and_gone_on_with_are_counted(tmp_path: Path, tokenizer: Tokenizer, place, odd) -> None:
    source = write(tmp_path / "rows.jsonl", texts(40, row3={"leave": True}, row9={"text": "long " * 40}))
    rows = TextDataset(source=str(source), max_length=30, transforms=(odd(),))
    prepared = preprocess.preprocess_dataset(rows, tokenizer, place()).prepared
    assert (prepared.rows, prepared.left_out, prepared.split) == (40, 1, 1)
    pairs = [{"prompt": "Hi. ", "chosen": "Hello.", "rejected": "No."}] * 3
    found = preprocess.preprocess_dataset(
        PreferenceDataset(source=str(write(tmp_path / "pairs.jsonl", [*pairs]))), tokenizer, place()
    )
    assert (len(found), found.prepared.split) == (6, 0)
    with pytest.raises(UserError, match=re.escape("nothing is left to learn from: 1 row, 1 left out by a transform")):
        preprocess.preprocess_dataset(
            TextDataset(source=str(write(source, texts(1, row0={"leave": True}))), transforms=(odd(),)),
            tokenizer,
            place(),
        )


def test_why_nothing_is_left_is_told_by_the_first_row(tmp_path: Path, tokenizer: Tokenizer, place) -> None:
    source = write(tmp_path / "rows.jsonl", [{"text": 1}, {"text": None}])
    rows = TextDataset(source=str(source), on_bad_row="skip", max_bad_row_fraction=1.0)
    with pytest.raises(UserError, match=re.escape(f"; the first is {source}:1: text: want a string, this is a number")):
        preprocess.preprocess_dataset(rows, tokenizer, place())


@pytest.mark.parametrize("many", [False, True])
def test_a_full_disk_is_told_in_one_line(tmp_path: Path, tokenizer: Tokenizer, place, monkeypatch, many: bool) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    rows = TextDataset(source=str(write(tmp_path / "rows.jsonl", texts(3000 if many else 300))), num_proc=0)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if many else 10_000, old[1]))
        with pytest.raises(UserError) as caught:
            preprocess.preprocess_dataset(rows, tokenizer, place())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    told = str(caught.value)
    assert told.startswith(f"cannot write prepared rows to {tmp_path / 'cache' / 'data'}: file too large (")
    assert ("wanted" in told) == many, "of the first part nobody knows what it will need"
    assert "\n" not in told
    assert [path.suffix for path in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


@pytest.mark.parametrize("workers", [0, 3])
def test_the_first_bad_row_is_told_whoever_finds_one_first(
    tmp_path: Path, tokenizer: Tokenizer, place, odd, workers: int
) -> None:
    bad = {"row600": {"sleep": 0.5, "text": 3}, "row1200": {"text": None}, "row1700": {"text": 5}}
    source = write(tmp_path / "rows.jsonl", texts(1800, **bad))
    rows = TextDataset(source=str(source), num_proc=workers)
    for _ in range(2):
        with pytest.raises(UserError, match=f"{source}:601: text: want a string"):
            preprocess.preprocess_dataset(rows, tokenizer, place())


def test_too_many_bad_rows_are_too_many(tmp_path: Path, tokenizer: Tokenizer, place, monkeypatch) -> None:
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"row {number}"} if number % 10 else {"text": number} for number in range(100)]
    source = str(write(tmp_path / "rows.jsonl", [*rows[:55], {"no": 1}, *rows[56:]]))
    with pytest.raises(UserError) as caught:
        preprocess.preprocess_dataset(
            TextDataset(source=source, on_bad_row="skip", max_bad_row_fraction=0.1), tokenizer, place()
        )
    told = str(caught.value)
    assert (
        "11 of 100 rows cannot be learnt from, and `max_bad_row_fraction` allows 10.00%; 10 times: text: want a string"
        in told
    )
    assert f"the first is {source}:1)" in told
    assert "\n" not in told
    kept = preprocess.preprocess_dataset(
        TextDataset(source=source, on_bad_row="skip", max_bad_row_fraction=0.11), tokenizer, place()
    )
    assert (len(kept), kept.prepared.skipped) == (89, 11)
    with pytest.raises(UserError, match=f"{source}:1: text: want a string"):  # although what was skipped is kept
        preprocess.preprocess_dataset(TextDataset(source=source), tokenizer, place())
    with pytest.raises(UserError, match="11 of 100 rows cannot be learnt from"):
        preprocess.preprocess_dataset(
            TextDataset(source=source, on_bad_row="skip", max_bad_row_fraction=0.1), tokenizer, place()
        )


def test_own_steps_work_in_other_processes(tmp_path: Path, tokenizer: Tokenizer, odd, capfd) -> None:
    rows = TextDataset(source=str(write(tmp_path / "rows.jsonl", texts(1100))), transforms=(odd(suffix="!"),))
    want, got = flat(rows, tokenizer, 0), flat(rows, tokenizer, 2)
    assert all(np.array_equal(column, got[name]) for name, column in want.items())
    first = TokenizedDataset([Document(got["tokens"][: got["lengths"][0]], got["learnt"][: got["lengths"][0]], 1)])
    assert tokenizer.decode(first.tokens.tolist()).endswith("!")
    capfd.readouterr()
    flat(rows, tokenizer, 1)
    assert not capfd.readouterr().out, "what own code prints would stand in the output of a command"


def test_a_file_that_changes_on_the_way_is_told(tmp_path: Path, tokenizer: Tokenizer, odd) -> None:
    rows = TextDataset(source=str(write(tmp_path / "rows.jsonl", texts(3))), transforms=(odd(),))
    table = open_dataset(rows.source, rows.split)
    with worker_pool.WorkerPool(rows, tokenizer, table.chunks(), 0) as answers:
        (tmp_path / "odd.py").write_text(OWN + "\n")
        answers.workers.append(worker_pool.WorkerProcess(answers.task))
        with pytest.raises(UserError, match="odd.py: has changed since this command began"):
            list(answers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_is_told_with_its_rows(
    tmp_path: Path, tokenizer: Tokenizer, odd, number: signal.Signals
) -> None:
    source = write(tmp_path / "rows.jsonl", texts(1800, row700={"signal": number}))
    rows = TextDataset(source=str(source), transforms=(odd(),))
    with pytest.raises(UserError) as caught:
        flat(rows, tokenizer, 2)
    told = str(caught.value)
    assert f"{source}:513 and the 511 rows behind it: the process that prepared them was ended by {number.name}" in told
    assert ("memory" in told) == (number is signal.SIGKILL)


def test_a_row_that_takes_for_ever_is_named(tmp_path: Path, tokenizer: Tokenizer, odd, monkeypatch) -> None:
    """Where the whole machine stands still, no row is slow: one of ten waits is over before anybody could answer."""
    poll = Connection.poll
    monkeypatch.setattr(Connection, "poll", lambda pipe, timeout: any(poll(pipe, timeout / 10) for _ in range(10)))
    monkeypatch.setattr(worker_pool, "PATIENCE", 1.0)
    monkeypatch.setattr(worker_pool, "ROW_PATIENCE", 3.0)
    source = write(tmp_path / "rows.jsonl", texts(1100, row700={"sleep": 600}))
    with pytest.raises(UserError, match=f"{source}:701: it takes more than 3 seconds to prepare"):
        flat(TextDataset(source=str(source), transforms=(odd(),)), tokenizer, 2)


def test_slow_rows_are_waited_for(tmp_path: Path, tokenizer: Tokenizer, odd, monkeypatch) -> None:
    source = write(tmp_path / "rows.jsonl", texts(520, **{f"row{i}": {"sleep": 0.25} for i in range(6)}))
    rows = TextDataset(source=str(source), transforms=(odd(),))
    want = flat(rows, tokenizer, 0)
    monkeypatch.setattr(worker_pool, "PATIENCE", 1.0)
    got = flat(rows, tokenizer, 1)
    assert all(np.array_equal(column, got[name]) for name, column in want.items())


def test_few_rows_and_classes_of_a_notebook_stay_here(tmp_path: Path, odd, monkeypatch) -> None:
    source = str(write(tmp_path / "rows.jsonl", texts(3)))
    monkeypatch.setattr(worker_pool, "num_cpus", lambda: 8)
    count = {
        number: preprocess.num_workers(TextDataset(source=source), number) for number in (3, 1999, 2000, 10**6, None)
    }
    assert count == {3: 0, 1999: 0, 2000: 4, 10**6: 8, None: 8}
    assert preprocess.num_workers(TextDataset(source=source, num_proc=0), 10**6) == 0
    assert preprocess.num_workers(TextDataset(source=source, num_proc=5), 3) == 5
    monkeypatch.setattr(worker_pool, "num_cpus", lambda: 1)
    assert preprocess.num_workers(TextDataset(source=source), 10**6) == 0
    odd.__module__ = "__main__"
    assert preprocess.num_workers(TextDataset(source=source, num_proc=5, transforms=(odd(),)), 10**6) == 0


START = """import sys, {}
print(sorted({{'torch', 'pandas', 'pyarrow', 'datasets'}} & set(sys.modules)))"""


def started(module: str) -> float:
    """Seconds of a processor in which Python starts with a module, and without those that take long."""
    before = os.times()
    done = subprocess.run([sys.executable, "-c", START.format(module)], capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout == "[]\n"
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_a_process_starts_fast() -> None:
    """In less than three times what it takes to load what it works with, each the best of three on a busy machine."""
    found = {name: min(started(name) for _ in range(3)) for name in ("tunekit.data.preprocess.worker", WORKS_WITH)}
    assert found["tunekit.data.preprocess.worker"] < 3 * found[WORKS_WITH], found


LEFT = """
import signal, sys, time
from pathlib import Path
from tunekit.data.preprocess import worker_pool
from tunekit.data.datasets import TextDataset
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer

signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background may have it ignored
rows = TextDataset(source=sys.argv[1])
chunks = open_dataset(rows.source, rows.split).chunks()
with worker_pool.WorkerPool(rows, Tokenizer.open(Path(sys.argv[2])), chunks, 2) as found:
    for part in found:
        print(*(worker.process.pid for worker in found.workers), flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_do_not_outlive_who_asked_them(
    tmp_path: Path, folders: dict[str, Path], number: signal.Signals
) -> None:
    source = write(tmp_path / "rows.jsonl", texts(5000))
    line = [sys.executable, "-c", LEFT, str(source), str(folders["chatml"])]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(alive, workers))
        parent.send_signal(number)
        try:
            parent.wait(LIMIT)
        finally:
            parent.kill()
        until(lambda: not any(map(alive, workers)))
        said = parent.stderr.read()
        assert "worker" not in said, said


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


GROWTH = """
import json, sys
from pathlib import Path
from tunekit.data.preprocess import preprocess
from tunekit.data.datasets import ChatDataset
from tunekit.data.tokenizer import Tokenizer

class Alone:
    is_main = True
    def tell(self, text):
        print(text)

def most():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

tokenizer = Tokenizer.open(Path(sys.argv[1]))
found = preprocess.preprocess_dataset(ChatDataset(source=sys.argv[2], num_proc=2), tokenizer, Alone())
print(json.dumps([len(found), most()]))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Most of all memory of who asks, in MiB: the rows alone are 25 MB, their documents 60 MB and more."""
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    write(few, chats(20_000))
    many.write_bytes(few.read_bytes() * 10)
    found = {}
    for file in (few, many):
        line = [sys.executable, "-c", GROWTH, str(folders["chatml"]), str(file)]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        found[file.stem] = json.loads(done.stdout)
    assert (found["few"][0], found["many"][0]) == (20_000, 200_000)
    assert found["many"][1] - found["few"][1] < 16, found
