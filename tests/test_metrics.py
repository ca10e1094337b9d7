"""What a step writes: valid lines, sums that add up, one reading of the device in `every` steps, one line to see."""

import fcntl
import json
import math
import mmap
import os
import pty
import resource
import signal
import struct
import sys
import termios
import time
from types import SimpleNamespace

import pytest
import torch

from tests.waiting import until
from tunekit.errors import UserError
from tunekit.loggers import metric_logger
from tunekit.loggers.metric_logger import FILE, MetricLogger, ThroughputCounter, memory_stats, write_final_metrics

CPU = torch.device("cpu")


def alone(*values):
    return [*values]


MAIN = SimpleNamespace(is_main=True, device=CPU, rank=0, most=alone)
OTHER = SimpleNamespace(is_main=False, device=CPU, rank=1, most=alone)


def lines(folder):
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / FILE).read_text().splitlines()]


def step(meter, number, loss=1.0, **values):
    made = {"loss": loss, "grad_norm": 2.0, "lr": 1e-4}
    made |= {name: values.pop(name) for name in list(values) if name in made}
    meter.step(number, made, **{"tokens": 10, "learnt": 4, "wait": 0.5} | values)


class Watched(torch.Tensor):
    """Counts how often it is read."""

    reads = 0

    def tolist(self):
        Watched.reads += 1
        return super().tolist()


def watched(value):
    return torch.tensor(value).as_subclass(Watched)


def test_a_line_a_step(tmp_path):
    with MetricLogger(tmp_path, MAIN, total=3) as meter:
        for number in (1, 2, 3):
            step(meter, number, loss=torch.tensor(float(number)), grad_norm=torch.tensor(0.5))
    found = lines(tmp_path)
    assert [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in found] == [
        (number, number, 0.5, 1e-4) for number in (1, 2, 3)
    ]
    for line in found:
        assert line["target_tokens_per_second"] == pytest.approx(4 / line["step_time"])
        assert line["tokens_per_second"] == pytest.approx(10 / line["step_time"])
        assert 0 < line["memory_allocated"] <= line["peak_memory"]


def test_reads_the_device_once_in_every_steps(tmp_path):
    Watched.reads = 0
    with MetricLogger(tmp_path, MAIN, total=12, log_every=5) as meter:
        for number in range(1, 13):
            step(meter, number, watched(1.0), grad_norm=watched(1.0))
    assert [line["step"] for line in lines(tmp_path)] == [5, 10, 12]
    assert Watched.reads == 3, "loss and norm come together"


def test_sums_between_lines(tmp_path):
    with MetricLogger(tmp_path, MAIN, total=6, log_every=4) as meter:
        for number in range(1, 7):
            time.sleep(0.01)
            step(meter, number, tokens=number, learnt=torch.tensor(2 * number), wait=0.25)
    first, last = lines(tmp_path)
    assert (first["num_tokens"], first["num_target_tokens"], first["data_time"]) == (10, 20, 0.25)
    assert (last["num_tokens"], last["num_target_tokens"], last["data_time"]) == (21, 42, 0.25)
    assert first["step_time"] > 0.01
    assert first["target_tokens_per_second"] == pytest.approx(20 / (4 * first["step_time"]))


@pytest.fixture
def clock(monkeypatch):
    """The seconds that metrics read, which pass when a test says so."""
    now = [0.0]
    monkeypatch.setattr(metric_logger.time, "perf_counter", lambda: now[0])
    return now


def test_validation_is_no_part_of_a_step(tmp_path, clock):
    with MetricLogger(tmp_path, MAIN, total=2) as meter:
        step(meter, 1)
        clock[0] += 0.5
        with meter.aside():
            clock[0] += 3.0
        clock[0] += 0.25
        step(meter, 2)
    assert lines(tmp_path)[1]["step_time"] == 0.75


def test_what_validation_compiles_is_told_and_takes_no_time_from_a_step(tmp_path, monkeypatch, clock):
    spent = [0.0]
    monkeypatch.setattr(metric_logger, "compile_seconds", lambda: spent[0])
    with MetricLogger(tmp_path, MAIN, total=2) as meter:
        step(meter, 1)
        with meter.aside():
            clock[0] += 4.0
            spent[0] += 3.0
        clock[0] += 0.5
        step(meter, 2)
    line = lines(tmp_path)[1]
    assert line["compile_time"] == 3.0
    assert line["step_time"] == 0.5


def test_what_is_not_finite_is_null(tmp_path):
    with MetricLogger(tmp_path, MAIN, total=1) as meter:
        step(meter, 1, torch.tensor(math.nan), grad_norm=torch.tensor(math.inf))
        meter.note(1, validation_loss=-math.inf)
    first, note = lines(tmp_path)
    assert first["loss"] is None
    assert first["grad_norm"] is None
    assert note == {"step": 1, "validation_loss": None}


def test_note_has_its_own_line(tmp_path, capsys):
    with MetricLogger(tmp_path, MAIN, total=20, log_every=10) as meter:
        step(meter, 1)
        meter.note(1, validation_loss=torch.tensor(2.5), perplexity=12.18)
    assert lines(tmp_path) == [{"step": 1, "validation_loss": 2.5, "perplexity": 12.18}]
    assert "step 1: validation_loss 2.5, perplexity 12.18" in capsys.readouterr().err


def test_resumed_run_has_every_step_once(tmp_path):
    with MetricLogger(tmp_path, MAIN, total=9) as meter:
        for number in range(1, 8):
            step(meter, number, float(number))
            if number % 2 == 0:
                meter.note(number, validation_loss=1.0)
    with MetricLogger(tmp_path, MAIN, total=9, start=4) as meter:
        for number in range(5, 10):
            step(meter, number, -float(number))
    found = lines(tmp_path)
    assert [line["step"] for line in found if "loss" in line] == list(range(1, 10))
    assert [line["step"] for line in found if "validation_loss" in line] == [2, 4]
    assert [line["loss"] > 0 for line in found if "loss" in line] == [True] * 4 + [False] * 5


def test_a_line_that_was_begun_goes_on_with_the_run(tmp_path, clock):
    sums = ThroughputCounter()
    with MetricLogger(tmp_path, MAIN, total=8, sums=sums, log_every=4) as meter:
        for number in range(1, 7):
            clock[0] += 1.0
            step(meter, number)
        with meter.aside():
            clock[0] += 50.0
            kept = sums.state_dict()
    clock[0], sums = 1000.0, ThroughputCounter()
    sums.load_state_dict(kept)
    with MetricLogger(tmp_path, MAIN, total=8, start=6, sums=sums, log_every=4) as meter:
        for number in (7, 8):
            clock[0] += 2.0
            step(meter, number)
    first, second = lines(tmp_path)
    names = "num_tokens", "num_target_tokens", "data_time", "step_time"
    assert [first[name] for name in names] == [40, 16, 0.5, 1.0]
    assert [second[name] for name in names] == [80, 32, 0.5, 1.5]


def test_lines_of_steps_that_come_again_are_taken_back(tmp_path):
    sums = ThroughputCounter()
    with MetricLogger(tmp_path, MAIN, total=6, sums=sums) as meter:
        meter.note(0, validation=3.0)
        for number in range(1, 5):
            step(meter, number, float(number))
            if number == 2:
                kept = sums.state_dict()
        sums.load_state_dict(kept)
        meter.back(2)
        for number in range(3, 7):
            step(meter, number, -float(number))
        assert meter.screen.done == 6
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4, 5, 6]
    assert [line.get("loss") for line in found] == [None, 1, 2, -3, -4, -5, -6]


def test_what_is_told_of_all_ranks_is_the_most_of_any(tmp_path):
    wide = SimpleNamespace(**vars(MAIN) | {"most": lambda *values: [value + 1 for value in values]})
    with MetricLogger(tmp_path, wide, total=1) as meter:
        step(meter, 1)
    (line,) = lines(tmp_path)
    assert line["data_time"] == 1.5
    assert line["num_tokens"] == 10
    assert line["peak_memory"] % 1024 == 1


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "lo', b'{"step": 3', b"\0\0\0\0\n", b"\xff\xfe\n", b"[]\n", b'{"loss": 1}\n']
)
def test_half_a_line_is_cut(tmp_path, tail):
    good = b'{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n'
    (tmp_path / FILE).write_bytes(good + tail)
    with MetricLogger(tmp_path, MAIN, total=9, start=3):
        pass
    assert (tmp_path / FILE).read_bytes() == good


def test_killed_in_the_middle(tmp_path):
    child = os.fork()
    if child == 0:
        meter = MetricLogger(tmp_path, MAIN, total=10**9)
        for number in range(1, 10**9):
            step(meter, number)
    until(lambda: (tmp_path / FILE).exists() and (tmp_path / FILE).read_bytes().count(b"\n") >= 50)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with MetricLogger(tmp_path, MAIN, total=100, start=20) as meter:
        step(meter, 21)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 22))


def test_other_ranks_are_silent(tmp_path, capfd):
    with MetricLogger(tmp_path / "b", OTHER, total=1) as meter:
        step(meter, 1)
        meter.note(1, validation_loss=1.0)
    assert not (tmp_path / "b").exists()
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_there_is_no_flood(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(
        metric_logger.time, "monotonic", lambda: 0.0
    )  # on a busy machine it would be time for another line
    with MetricLogger(tmp_path, MAIN, total=500) as meter:
        for number in range(1, 501):
            step(meter, number)
    out, err = capfd.readouterr()
    assert out == ""
    assert "\r" not in err
    first, last = err.splitlines()
    assert first.startswith("step 1/500: loss 1.0000")
    assert last.startswith("step 500/500: loss 1.0000")
    for part in ("target tok/s", "B", "left"):
        assert part in last


def on_a_terminal(work, columns, lines=24):
    """What a child process draws on a terminal."""
    child, handle = pty.fork()
    if child == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        sys.stderr = os.fdopen(os.dup(2), "w")
        work()
        sys.stderr.flush()
        os._exit(0)
    drawn = b""
    try:
        while chunk := os.read(handle, 2**16):
            drawn += chunk
    except OSError:  # the other end is closed
        pass
    os.waitpid(child, 0)
    return drawn.decode()


@pytest.mark.parametrize(("columns", "lines"), [(0, 0), (0, 24), (100, 0), (100, 24)])
def test_one_line_of_the_terminal(tmp_path, columns, lines):
    def work():
        with MetricLogger(tmp_path, MAIN, total=40) as meter:
            for number in range(1, 41):
                time.sleep(0.02)
                step(meter, number, 1 / number)
                if number == 20:
                    meter.note(number, validation_loss=3.25)

    drawn = on_a_terminal(work, columns, lines)
    above = [line for line in drawn.replace("\r\n", "\n").split("\n") if line.strip()]
    assert len(above) == 2, above  # the note, and the bar at the end
    assert "step 20: validation_loss 3.25" in above[0]
    frames = [frame.rstrip() for frame in above[1].split("\r")]
    assert max(map(len, frames)) <= (columns or 80)
    last = frames[-1]
    for part in ("40/40", "loss 0.0250", "target tok/s", "B,", "left"):
        assert part in last


def test_compiling_is_apart(tmp_path, capsys):
    model = torch.compile(torch.nn.Linear(3, 3), backend="aot_eager")
    start = time.perf_counter()
    with MetricLogger(tmp_path, MAIN, total=3) as meter:
        for number in (1, 2, 3):
            model(torch.rand(2, 3)).sum().backward()
            step(meter, number)
            if number == 1:
                spent, line = time.perf_counter() - start, lines(tmp_path)[0]
                assert line["compile_time"] > 0
                assert 0 < line["step_time"] <= spent - line["compile_time"]
    assert ["compile_time" in line for line in lines(tmp_path)] == [True, False, False]
    assert capsys.readouterr().err.count("compiled for") == 1


def test_figures_of_the_allocator_of_a_gpu():
    stats = {"allocated_bytes.all.current": 600, "allocated_bytes.all.peak": 900, "num_alloc_retries": 2}
    found = metric_logger.allocator_stats(stats | {"reserved_bytes.all.current": 800, "reserved_bytes.all.peak": 1000})
    assert found == {
        "memory_allocated": 600, "peak_memory": 900, "memory_reserved": 800,
        "peak_memory_reserved": 1000, "memory_fragmentation": 0.25, "num_alloc_retries": 2,
    }  # fmt: skip
    assert set(metric_logger.allocator_stats({}).values()) == {0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_allocator_of_a_gpu_has_these_figures():
    x = torch.zeros(2**24, device="cuda")
    found = memory_stats(x.device)
    assert found["memory_allocated"] >= x.nbytes
    assert found["peak_memory_reserved"] >= found["memory_reserved"] >= found["memory_allocated"]


def test_memory_is_what_the_process_holds():
    piece, size = bytes(2**16), 2**26
    before = memory_stats(CPU)["memory_allocated"]
    with mmap.mmap(-1, size) as held:  # of the allocator, other tests may have left room
        for _ in range(size // len(piece)):
            held.write(piece)
        grown = memory_stats(CPU)["memory_allocated"] - before
    assert 0.8 * size < grown < 1.5 * size


def test_refused_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(UserError, match=FILE), MetricLogger(tmp_path, MAIN, total=99) as meter:
            for number in range(1, 100):
                step(meter, number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with MetricLogger(tmp_path, MAIN, total=99, start=3):
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_refuses_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match=FILE):
        MetricLogger(tmp_path / "a", MAIN, total=1)


def test_a_run_that_begins_again_has_what_stood_before_the_first_step_once(tmp_path):
    for _ in range(2):
        with MetricLogger(tmp_path, MAIN, total=9) as meter:
            meter.note(0, validation=3.0)
            step(meter, 1)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


@pytest.mark.parametrize("left", [b"", b'{"step": 2, "verify/mean_logit_diff": 0.5}\n', b'{"step": 2, "veri'])
def test_the_last_line_stands_there_once(tmp_path, left):
    with MetricLogger(tmp_path, MAIN, total=2) as meter:
        step(meter, 1)
        step(meter, 2)
    with (tmp_path / FILE).open("ab") as file:
        file.write(left)
    write_final_metrics(tmp_path, 2, **{"verify/mean_logit_diff": 0.25, "verify/max_logit_diff": math.inf})
    *steps, last = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2]
    assert last == {"step": 2, "verify/mean_logit_diff": 0.25, "verify/max_logit_diff": None}


def test_lines_are_read_up_to_half_a_one(tmp_path):
    assert metric_logger.read_metrics(tmp_path) == []
    (tmp_path / FILE).write_bytes(b'{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert metric_logger.read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]


FAR = SimpleNamespace(**vars(MAIN) | {"device": torch.device("meta")})  # on which the host does not wait


def test_a_device_is_read_one_step_later(tmp_path):
    """Lines have the numbers and the order that they have on the CPU."""
    Watched.reads = 0
    with MetricLogger(tmp_path / "far", FAR, total=4) as meter:
        for number in (1, 2):
            step(meter, number, watched(float(number)), tokens=number)
            assert Watched.reads == number - 1
            assert [line["step"] for line in lines(tmp_path / "far")] == [*range(1, number)]
        meter.note(2, validation=3.0)
        assert Watched.reads == 2, "what else is written comes behind"
        step(meter, 3, watched(3.0), tokens=3)
        step(meter, 4, watched(4.0), tokens=4)
    with MetricLogger(tmp_path / "near", MAIN, total=4) as meter:
        for number in range(1, 5):
            step(meter, number, float(number), tokens=number)
            if number == 2:
                meter.note(2, validation=3.0)
    names = "step", "loss", "grad_norm", "lr", "tokens", "learnt", "wait", "validation"
    far, near = ([[line.get(name) for name in names] for line in lines(tmp_path / where)] for where in ("far", "near"))
    assert far == near
    assert [line[0] for line in far] == [1, 2, 2, 3, 4]


def test_lines_of_steps_that_a_guard_refuses_are_dropped(tmp_path):
    with pytest.raises(UserError), MetricLogger(tmp_path, FAR, total=9) as meter:
        for number in (1, 2):
            step(meter, number)
        meter.drop(after=1)
        raise UserError("step 2: the loss is nan")
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_a_device_that_has_failed_is_not_read(tmp_path):
    Watched.reads = 0
    with pytest.raises(RuntimeError), MetricLogger(tmp_path, FAR, total=9) as meter:
        step(meter, 1, watched(1.0))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert Watched.reads == 0
    assert lines(tmp_path) == []


def test_a_way_back_writes_what_is_behind_first(tmp_path):
    sums = ThroughputCounter()
    with MetricLogger(tmp_path, FAR, total=4, sums=sums) as meter:
        step(meter, 1, 1.0)
        kept = sums.state_dict()
        step(meter, 2, 2.0)
        sums.load_state_dict(kept)
        meter.back(1)
        step(meter, 2, -2.0)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, -2.0)]
