"""Metric lines: valid JSON, sums over steps, one device read per line, and progress on the terminal."""

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

from tests.helpers.wait import wait_until
from tunekit.distributed.loss_scaler import LossScaler
from tunekit.errors import UserError
from tunekit.loggers import metric_logger, metrics_file
from tunekit.loggers.metric_logger import MetricLogger, ThroughputCounter, memory_stats
from tunekit.loggers.metrics_file import FILE, write_final_metrics

CPU = torch.device("cpu")


def identity(*values):
    return [*values]


MAIN = SimpleNamespace(
    is_main_process=True,
    device=CPU,
    rank=0,
    max_over_ranks=identity,
    sum_each_count=identity,
    loss_scaler=LossScaler(),
)
OTHER = SimpleNamespace(**vars(MAIN) | {"is_main_process": False, "rank": 1})


def read_lines(folder, name=FILE):
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / name).read_text().splitlines()]


def log_step(logger, step, loss=1.0, **values):
    metrics = {"loss": loss, "grad_norm": 2.0, "lr": 1e-4}
    metrics |= {name: values.pop(name) for name in list(values) if name in metrics}
    batch = SimpleNamespace(
        num_tokens=values.pop("num_tokens", 10), num_target_tokens=values.pop("num_target_tokens", 4)
    )
    logger.log_step(step, [batch], values.pop("data_time", 0.5), **metrics)
    assert not values


class CountingTensor(torch.Tensor):
    """Counts host reads."""

    reads = 0

    def tolist(self):
        CountingTensor.reads += 1
        return super().tolist()


def counting_tensor(value):
    return torch.tensor(value).as_subclass(CountingTensor)


def test_each_step_writes_a_line(tmp_path):
    with MetricLogger(tmp_path, MAIN, num_steps=3) as logger:
        for step in (1, 2, 3):
            log_step(logger, step, loss=torch.tensor(float(step)), grad_norm=torch.tensor(0.5))
    lines = read_lines(tmp_path)
    assert [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines] == [
        (step, step, 0.5, 1e-4) for step in (1, 2, 3)
    ]
    for line in lines:
        assert line["target_tokens_per_second"] == pytest.approx(4 / line["step_time"])
        assert line["tokens_per_second"] == pytest.approx(10 / line["step_time"])
        assert 0 < line["memory_allocated"] <= line["peak_memory"]


def test_completions_end_where_a_run_resumes_or_rolls_back_to(tmp_path):
    def log(start, *steps, rewind=None):
        with MetricLogger(tmp_path, MAIN, num_steps=9, start=start) as logger:
            for step in steps:
                logger.log_completions(step, [{"prompt": "a", "completion": str(step)}] * 2, 0)
            if rewind is not None:
                logger.rewind(rewind)
        return [line["completion"] for line in read_lines(tmp_path, "completions.jsonl")]

    assert log(0, 0, 1, 2, 3) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert log(2, 4) == ["0", "0", "1", "1", "2", "2", "4", "4"]
    assert log(4, 5, rewind=2) == ["0", "0", "1", "1", "2", "2"]
    assert log(2, rewind=1) == ["0", "0", "1", "1"], "before the first answers of a resumed run"
    assert log(0, 0) == ["0", "0"], "a new run"


def test_device_is_read_once_per_line(tmp_path):
    CountingTensor.reads = 0
    with MetricLogger(tmp_path, MAIN, num_steps=12, log_every=5) as logger:
        for step in range(1, 13):
            log_step(logger, step, counting_tensor(1.0), grad_norm=counting_tensor(1.0))
    assert [line["step"] for line in read_lines(tmp_path)] == [5, 10, 12]
    assert CountingTensor.reads == 3, "loss and norm are read together"


def test_lines_contain_sums_since_the_last_line(tmp_path):
    with MetricLogger(tmp_path, MAIN, num_steps=6, log_every=4) as logger:
        for step in range(1, 7):
            time.sleep(0.01)
            log_step(logger, step, num_tokens=step, num_target_tokens=2 * step, data_time=0.25)
    first, last = read_lines(tmp_path)
    assert (first["num_tokens"], first["num_target_tokens"], first["data_time"]) == (10, 20, 0.25)
    assert (last["num_tokens"], last["num_target_tokens"], last["data_time"]) == (21, 42, 0.25)
    assert first["step_time"] > 0.01
    assert first["target_tokens_per_second"] == pytest.approx(20 / (4 * first["step_time"]))


@pytest.fixture
def clock(monkeypatch):
    """Time that metrics read; tests advance it."""
    now = [0.0]
    monkeypatch.setattr(metric_logger.time, "perf_counter", lambda: now[0])
    return now


def test_step_time_excludes_evaluation(tmp_path, clock):
    with MetricLogger(tmp_path, MAIN, num_steps=2) as logger:
        log_step(logger, 1)
        clock[0] += 0.5
        with logger.pause():
            clock[0] += 3.0
        clock[0] += 0.25
        log_step(logger, 2)
    assert read_lines(tmp_path)[1]["step_time"] == 0.75


def test_compile_time_of_evaluation_is_not_step_time(tmp_path, monkeypatch, clock):
    seconds = [0.0]
    monkeypatch.setattr(metric_logger, "compile_seconds", lambda: seconds[0])
    with MetricLogger(tmp_path, MAIN, num_steps=2) as logger:
        log_step(logger, 1)
        with logger.pause():
            clock[0] += 4.0
            seconds[0] += 3.0
        clock[0] += 0.5
        log_step(logger, 2)
    line = read_lines(tmp_path)[1]
    assert line["compile_time"] == 3.0
    assert line["step_time"] == 0.5


def test_non_finite_values_are_null(tmp_path):
    with MetricLogger(tmp_path, MAIN, num_steps=1) as logger:
        log_step(logger, 1, torch.tensor(math.nan), grad_norm=torch.tensor(math.inf))
        logger.log(1, validation_loss=-math.inf)
    first, note = read_lines(tmp_path)
    assert first["loss"] is None
    assert first["grad_norm"] is None
    assert note == {"step": 1, "validation_loss": None}


def test_log_writes_its_own_line(tmp_path, capsys):
    with MetricLogger(tmp_path, MAIN, num_steps=20, log_every=10) as logger:
        log_step(logger, 1)
        logger.log(1, validation_loss=torch.tensor(2.5), perplexity=12.18)
    assert read_lines(tmp_path) == [{"step": 1, "validation_loss": 2.5, "perplexity": 12.18}]
    assert "step 1: validation_loss 2.5, perplexity 12.18" in capsys.readouterr().err


def test_resumed_run_has_each_step_once(tmp_path):
    with MetricLogger(tmp_path, MAIN, num_steps=9) as logger:
        for step in range(1, 8):
            log_step(logger, step, float(step))
            if step % 2 == 0:
                logger.log(step, validation_loss=1.0)
    with MetricLogger(tmp_path, MAIN, num_steps=9, start=4) as logger:
        for step in range(5, 10):
            log_step(logger, step, -float(step))
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 10))
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4]
    assert [line["loss"] > 0 for line in lines if "loss" in line] == [True] * 4 + [False] * 5


def test_counters_of_an_unfinished_line_are_resumed(tmp_path, clock):
    counter = ThroughputCounter()
    with MetricLogger(tmp_path, MAIN, num_steps=8, counter=counter, log_every=4) as logger:
        for step in range(1, 7):
            clock[0] += 1.0
            log_step(logger, step)
        with logger.pause():
            clock[0] += 50.0
            state = counter.state_dict()
    clock[0], counter = 1000.0, ThroughputCounter()
    counter.load_state_dict(state)
    with MetricLogger(tmp_path, MAIN, num_steps=8, start=6, counter=counter, log_every=4) as logger:
        for step in (7, 8):
            clock[0] += 2.0
            log_step(logger, step)
    first, second = read_lines(tmp_path)
    names = "num_tokens", "num_target_tokens", "data_time", "step_time"
    assert [first[name] for name in names] == [40, 16, 0.5, 1.0]
    assert [second[name] for name in names] == [80, 32, 0.5, 1.5]


def test_rewind_removes_later_lines(tmp_path):
    counter = ThroughputCounter()
    with MetricLogger(tmp_path, MAIN, num_steps=6, counter=counter) as logger:
        logger.log(0, validation=3.0)
        for step in range(1, 5):
            log_step(logger, step, float(step))
            if step == 2:
                state = counter.state_dict()
        counter.load_state_dict(state)
        logger.rewind(2)
        for step in range(3, 7):
            log_step(logger, step, -float(step))
        assert logger.terminal.step == 6
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line.get("loss") for line in lines] == [None, 1, 2, -3, -4, -5, -6]


def test_memory_and_data_time_are_maxima_over_ranks(tmp_path):
    context = SimpleNamespace(**vars(MAIN) | {"max_over_ranks": lambda *values: [value + 1 for value in values]})
    with MetricLogger(tmp_path, context, num_steps=1) as logger:
        log_step(logger, 1)
    (line,) = read_lines(tmp_path)
    assert line["data_time"] == 1.5
    assert line["num_tokens"] == 10
    assert line["peak_memory"] % 1024 == 1


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "lo', b'{"step": 3', b"\0\0\0\0\n", b"\xff\xfe\n", b"[]\n", b'{"loss": 1}\n']
)
def test_incomplete_last_line_is_removed(tmp_path, tail):
    good = b'{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n'
    (tmp_path / FILE).write_bytes(good + tail)
    with MetricLogger(tmp_path, MAIN, num_steps=9, start=3):
        pass
    assert (tmp_path / FILE).read_bytes() == good


def test_sigkill_leaves_a_file_that_can_be_resumed(tmp_path):
    child = os.fork()
    if child == 0:
        logger = MetricLogger(tmp_path, MAIN, num_steps=10**9)
        for step in range(1, 10**9):
            log_step(logger, step)
    wait_until(lambda: (tmp_path / FILE).exists() and (tmp_path / FILE).read_bytes().count(b"\n") >= 50)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with MetricLogger(tmp_path, MAIN, num_steps=100, start=20) as logger:
        log_step(logger, 21)
    assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, 22))


def test_other_ranks_write_nothing(tmp_path, capfd):
    with MetricLogger(tmp_path / "b", OTHER, num_steps=1) as logger:
        log_step(logger, 1)
        logger.log(1, validation_loss=1.0)
    assert not (tmp_path / "b").exists()
    assert capfd.readouterr() == ("", "")


def test_few_lines_are_printed_without_a_terminal(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(metric_logger.time, "monotonic", lambda: 0.0)  # a slow machine would print more lines
    with MetricLogger(tmp_path, MAIN, num_steps=500) as logger:
        for step in range(1, 501):
            log_step(logger, step)
    out, err = capfd.readouterr()
    assert out == ""
    assert "\r" not in err
    first, last = err.splitlines()
    assert first.startswith("step 1/500: loss 1.0000")
    assert last.startswith("step 500/500: loss 1.0000")
    for text in ("target tok/s", "B", "left"):
        assert text in last


def run_in_terminal(fn, columns, rows=24):
    """Output of `fn` in a child process with a terminal."""
    child, handle = pty.fork()
    if child == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        sys.stderr = os.fdopen(os.dup(2), "w")
        fn()
        sys.stderr.flush()
        os._exit(0)
    output = b""
    try:
        while chunk := os.read(handle, 2**16):
            output += chunk
    except OSError:  # the child has closed its end
        pass
    os.waitpid(child, 0)
    return output.decode()


@pytest.mark.parametrize(("columns", "rows"), [(0, 0), (0, 24), (100, 0), (100, 24)])
def test_progress_bar_fits_the_terminal(tmp_path, columns, rows):
    def log_40_steps():
        with MetricLogger(tmp_path, MAIN, num_steps=40) as logger:
            for step in range(1, 41):
                time.sleep(0.02)
                log_step(logger, step, 1 / step)
                if step == 20:
                    logger.log(step, validation_loss=3.25)

    output = run_in_terminal(log_40_steps, columns, rows)
    printed = [line for line in output.replace("\r\n", "\n").split("\n") if line.strip()]
    assert len(printed) == 2, printed  # the logged line, and the last state of the bar
    assert "step 20: validation_loss 3.25" in printed[0]
    frames = [frame.rstrip() for frame in printed[1].split("\r")]
    assert max(map(len, frames)) <= (columns or 80)
    last = frames[-1]
    for text in ("40/40", "loss 0.0250", "target tok/s", "B,", "left"):
        assert text in last


def test_compile_time_is_separate_from_step_time(tmp_path, capsys):
    model = torch.compile(torch.nn.Linear(3, 3), backend="aot_eager")
    start = time.perf_counter()
    with MetricLogger(tmp_path, MAIN, num_steps=3) as logger:
        for step in (1, 2, 3):
            model(torch.rand(2, 3)).sum().backward()
            log_step(logger, step)
            if step == 1:
                elapsed, line = time.perf_counter() - start, read_lines(tmp_path)[0]
                assert line["compile_time"] > 0
                assert 0 < line["step_time"] <= elapsed - line["compile_time"]
    assert ["compile_time" in line for line in read_lines(tmp_path)] == [True, False, False]
    assert capsys.readouterr().err.count("compiled for") == 1


def test_allocator_stats():
    stats = {"allocated_bytes.all.current": 600, "allocated_bytes.all.peak": 900, "num_alloc_retries": 2}
    metrics = metric_logger.allocator_stats(
        stats | {"reserved_bytes.all.current": 800, "reserved_bytes.all.peak": 1000}
    )
    assert metrics == {
        "memory_allocated": 600, "peak_memory": 900, "memory_reserved": 800,
        "peak_memory_reserved": 1000, "memory_fragmentation": 0.25, "num_alloc_retries": 2,
    }  # fmt: skip
    assert set(metric_logger.allocator_stats({}).values()) == {0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_allocator_stats_on_a_gpu():
    x = torch.zeros(2**24, device="cuda")
    metrics = memory_stats(x.device)
    assert metrics["memory_allocated"] >= x.nbytes
    assert metrics["peak_memory_reserved"] >= metrics["memory_reserved"] >= metrics["memory_allocated"]


def test_allocated_memory_on_cpu_is_that_of_the_process():
    chunk, size = bytes(2**16), 2**26
    before = memory_stats(CPU)["memory_allocated"]
    with mmap.mmap(-1, size) as memory:  # not a heap allocation: those may reuse memory that other tests have freed
        for _ in range(size // len(chunk)):
            memory.write(chunk)
        growth = memory_stats(CPU)["memory_allocated"] - before
    assert 0.8 * size < growth < 1.5 * size


def test_write_error_names_the_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(UserError, match=FILE), MetricLogger(tmp_path, MAIN, num_steps=99) as logger:
            for step in range(1, 100):
                log_step(logger, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with MetricLogger(tmp_path, MAIN, num_steps=99, start=3):
        assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]


def test_file_instead_of_a_directory_is_an_error(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match=FILE):
        MetricLogger(tmp_path / "a", MAIN, num_steps=1)


def test_restarted_run_has_step_0_once(tmp_path):
    for _ in range(2):
        with MetricLogger(tmp_path, MAIN, num_steps=9) as logger:
            logger.log(0, validation=3.0)
            log_step(logger, 1)
    assert [line["step"] for line in read_lines(tmp_path)] == [0, 1]


@pytest.mark.parametrize("tail", [b"", b'{"step": 2, "verify/mean_logit_diff": 0.5}\n', b'{"step": 2, "veri'])
def test_final_metrics_are_written_once(tmp_path, tail):
    with MetricLogger(tmp_path, MAIN, num_steps=2) as logger:
        log_step(logger, 1)
        log_step(logger, 2)
    with (tmp_path / FILE).open("ab") as file:
        file.write(tail)
    write_final_metrics(tmp_path, 2, **{"verify/mean_logit_diff": 0.25, "verify/max_logit_diff": math.inf})
    *steps, last = read_lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2]
    assert last == {"step": 2, "verify/mean_logit_diff": 0.25, "verify/max_logit_diff": None}


def test_incomplete_last_line_is_not_read(tmp_path):
    assert metrics_file.read_metrics(tmp_path) == []
    (tmp_path / FILE).write_bytes(b'{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert metrics_file.read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]


META = SimpleNamespace(**vars(MAIN) | {"device": torch.device("meta")})  # the host does not wait for this device


def test_gpu_values_are_read_one_step_later(tmp_path):
    """Lines have the same values and order as on the CPU."""
    CountingTensor.reads = 0
    with MetricLogger(tmp_path / "far", META, num_steps=4) as logger:
        for step in (1, 2):
            log_step(logger, step, counting_tensor(float(step)), num_tokens=step)
            assert CountingTensor.reads == step - 1
            assert [line["step"] for line in read_lines(tmp_path / "far")] == [*range(1, step)]
        logger.log(2, validation=3.0)
        assert CountingTensor.reads == 2, "pending steps are written before other lines"
        log_step(logger, 3, counting_tensor(3.0), num_tokens=3)
        log_step(logger, 4, counting_tensor(4.0), num_tokens=4)
    with MetricLogger(tmp_path / "near", MAIN, num_steps=4) as logger:
        for step in range(1, 5):
            log_step(logger, step, float(step), num_tokens=step)
            if step == 2:
                logger.log(2, validation=3.0)
    names = "step", "loss", "grad_norm", "lr", "num_tokens", "num_target_tokens", "data_time", "validation"
    meta, cpu = (
        [[line.get(name) for name in names] for line in read_lines(tmp_path / device)] for device in ("far", "near")
    )
    assert meta == cpu
    assert [line[0] for line in meta] == [1, 2, 2, 3, 4]


def test_discarded_steps_have_no_line(tmp_path):
    with pytest.raises(UserError), MetricLogger(tmp_path, META, num_steps=9) as logger:
        for step in (1, 2):
            log_step(logger, step)
        logger.discard_after(step=1)
        raise UserError("step 2: the loss is nan")
    assert [line["step"] for line in read_lines(tmp_path)] == [1]


def test_failed_device_is_not_read(tmp_path):
    CountingTensor.reads = 0
    with pytest.raises(RuntimeError), MetricLogger(tmp_path, META, num_steps=9) as logger:
        log_step(logger, 1, counting_tensor(1.0))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert CountingTensor.reads == 0
    assert read_lines(tmp_path) == []


def test_rewind_writes_pending_lines_first(tmp_path):
    counter = ThroughputCounter()
    with MetricLogger(tmp_path, META, num_steps=4, counter=counter) as logger:
        log_step(logger, 1, 1.0)
        state = counter.state_dict()
        log_step(logger, 2, 2.0)
        counter.load_state_dict(state)
        logger.rewind(1)
        log_step(logger, 2, -2.0)
    assert [(line["step"], line["loss"]) for line in read_lines(tmp_path)] == [(1, 1.0), (2, -2.0)]
