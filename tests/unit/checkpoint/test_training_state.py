"""Stopping and resuming changes no bit, with any optimizer, schedule and time of the stop."""

import copy
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import time
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tunekit.checkpoint import atomic
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError


class Tiny(nn.Module):
    """A model with frozen, trained and unused layers, dropout, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7).requires_grad_(False)
        self.first, self.second, self.unused = nn.Linear(7, 7, bias=False), nn.Linear(7, 3), nn.Linear(2, 2)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x):
        x = nn.functional.dropout(self.first(torch.tanh(self.base(x))), 0.3)
        return self.second(self.tied(x)) + self.table


def trained_parameters(model):
    return [p for p in model.parameters() if p.requires_grad]


def two_groups(model):
    return [{"params": list(model.first.parameters()), "lr": 0.02}, {"params": list(model.second.parameters())}]


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(trained_parameters(m), lr=0.01, weight_decay=0.1),
    "adamw_fused": lambda m: torch.optim.AdamW(trained_parameters(m), lr=0.01, weight_decay=0.1, fused=True),
    "adamw_groups": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, fused=True),
    "adamw_tensor_rate": lambda m: torch.optim.AdamW(
        trained_parameters(m), lr=torch.tensor(0.01), capturable=False, foreach=False
    ),
    "sgd": lambda m: torch.optim.SGD(trained_parameters(m), lr=0.05, weight_decay=0.1),
    "sgd_momentum": lambda m: torch.optim.SGD(trained_parameters(m), lr=0.05, momentum=0.9, dampening=0.5),
    "sgd_groups": lambda m: torch.optim.SGD(two_groups(m), lr=0.05, momentum=0.9, nesterov=True),
}


def constant(step):
    return 1.0


def cosine(step):
    return min(1.0, (step + 1) / 3) * (0.5 + 0.5 * math.cos(step / 5))


class Warmup:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, step):
        return min(1.0, (step + 1) / self.steps)


SCHEDULES = {"constant": constant, "cosine": cosine, "object": Warmup(4)}


def make_state(directory, optimizer="adamw", schedule="cosine", keep=2, seed=0):
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    model = Tiny()
    optim = OPTIMIZERS[optimizer](model)
    lr_scheduler = LambdaLR(optim, SCHEDULES[schedule])
    return Checkpointer(directory, model, optim, lr_scheduler, keep, DistributedContext(device="cpu"))


def train(state, first, last, save_every=0):
    """Run steps with data from all random number generators."""
    for step in range(first + 1, last + 1):
        x = torch.randn(4, 5) + random.random() + float(numpy.random.rand())
        state.model(x).square().mean().backward()
        state.optimizer.step()
        state.schedule.step()
        state.optimizer.zero_grad()
        if save_every and step % save_every == 0:
            state.save(step)


def snapshot(state):
    return {
        "weights": {name: value.clone() for name, value in state.model.state_dict().items()},
        "optimizer": copy.deepcopy(state.optimizer.state_dict()),
        "schedule": copy.deepcopy(state.schedule.state_dict()),
        "random": (random.random(), torch.rand(3), torch.tensor(numpy.random.rand(3))),
    }


def test_buffers_are_restored(tmp_path):
    state, other = make_state(tmp_path), make_state(tmp_path)
    train(state, 0, 1)
    state.save(1)
    other.model.table += 1e-6  # as if computed on another machine
    other.restore()
    assert torch.equal(other.model.table, state.model.table)


def assert_same(ours, theirs):
    """Assert equal types and bits."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.contiguous().numpy().tobytes() == theirs.contiguous().numpy().tobytes()
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for actual, expected in zip(ours, theirs, strict=True):
            assert_same(actual, expected)
    else:
        assert ours == theirs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_run_equals_uninterrupted_run(tmp_path, optimizer, schedule):
    train(unbroken := make_state(tmp_path / "none", optimizer, schedule), 0, 7)
    expected = snapshot(unbroken)
    train(before_stop := make_state(tmp_path / "state", optimizer, schedule), 0, 4)
    before_stop.save(4)
    resumed = make_state(tmp_path / "state", optimizer, schedule, seed=9)
    resumed.model.base.load_state_dict(unbroken.model.base.state_dict())  # frozen: read from the checkpoint
    assert resumed.restore() == 4
    train(resumed, 4, 7)
    assert_same(snapshot(resumed), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", [0, 1, 4])
def test_saving_does_not_change_training(tmp_path, optimizer, step):
    train(unsaved := make_state(tmp_path / "none", optimizer), 0, step)
    at_save = snapshot(unsaved)
    train(unsaved := make_state(tmp_path / "none", optimizer), 0, 6)
    at_end = snapshot(unsaved)
    train(saving := make_state(tmp_path / "state", optimizer), 0, step)
    saving.save(step)
    train(saving, step, 6)
    assert_same(snapshot(saving), at_end)
    other = make_state(tmp_path / "state", optimizer)
    assert other.restore() == step
    assert_same(snapshot(other), at_save)


def test_restore_without_states_returns_zero(tmp_path):
    state = make_state(tmp_path / "state")
    before = snapshot(state)
    assert state.restore() == 0
    assert_same(state.model.state_dict(), type(state.model.state_dict())(before["weights"]))


def test_only_trained_parameters_are_saved(tmp_path):
    model = nn.Sequential(nn.Linear(1000, 1000).requires_grad_(False), nn.Linear(1000, 2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    Checkpointer(tmp_path, model, optimizer, LambdaLR(optimizer, constant), 1, DistributedContext(device="cpu")).save(1)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 200_000


def test_compiled_and_eager_models_share_a_state(tmp_path):
    state = make_state(tmp_path, "adamw")
    train(state, 0, 2)
    state.model.second = torch.compile(state.model.second)
    state.save(2)
    other = make_state(tmp_path, "adamw", seed=5)
    assert other.restore() == 2
    assert torch.equal(other.model.second.weight, state.model.second.weight)


def test_newest_states_are_kept(tmp_path):
    train(make_state(tmp_path, keep=3), 0, 7, save_every=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005", "00000006", "00000007"]


def test_old_states_are_removed_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    state = make_state(tmp_path, keep=1)
    state.save(1)
    is_new_complete = []
    remove = atomic.remove_dir

    def checking_remove(folder):
        if folder.name == "00000001":
            is_new_complete.append(atomic.is_complete(tmp_path / "00000002"))
        remove(folder)

    monkeypatch.setattr(atomic, "remove_dir", checking_remove)
    state.save(2)
    assert is_new_complete == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def test_saving_a_step_twice(tmp_path):
    state = make_state(tmp_path)
    train(state, 0, 2)
    state.save(2)
    state.save(2)
    assert make_state(tmp_path).restore() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def test_sigkill_while_saving_does_not_change_training(tmp_path):
    """SIGKILL at a dozen random times, mostly during a save, ends with the result of an uninterrupted run."""
    train(unbroken := make_state(tmp_path / "none"), 0, 40)
    expected = snapshot(unbroken)
    directory, rng, steps = tmp_path / "state", random.Random(1), []
    state = make_state(directory)
    while len(steps) < 12 or steps[-1] <= 2:
        child = os.fork()
        if child == 0:
            start = make_state(directory).restore()
            train(restored_state(directory), start, 39, save_every=1)
            os._exit(0)
        time.sleep(rng.uniform(0.05, 0.25) * 1.05 ** len(steps))  # a busy machine saves nothing in a short time
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = make_state(directory)
        steps.append(state.restore())
        assert {path.name for path in directory.glob("*.p*")} == set()
    assert steps == sorted(steps)
    train(state, steps[-1], 40)
    assert_same(snapshot(state), expected)


def restored_state(folder):
    state = make_state(folder)
    state.restore()
    return state


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "progress.pt", "random-0.pt", "complete"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped"])
def test_damaged_file_is_named(tmp_path, name, damage):
    train(make_state(tmp_path), 0, 4, save_every=2)
    path = tmp_path / "00000004" / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
        if name == atomic.MARK:
            assert make_state(tmp_path).restore() == 2
            return
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "flipped": content}[damage])
    state = make_state(tmp_path)
    before = snapshot(state)["weights"]
    with pytest.raises(UserError) as caught:
        state.restore()
    assert str(path) in str(caught.value)
    assert str(tmp_path / "00000004") in str(caught.value) and "step 2" in str(caught.value)
    assert_same(dict(state.model.state_dict()), dict(before))
    shutil.rmtree(tmp_path / "00000004")
    assert make_state(tmp_path).restore() == 2


def test_every_flipped_bit_is_detected(tmp_path):
    """Any flipped bit is detected. Zip checksums alone miss some."""
    train(make_state(tmp_path), 0, 2, save_every=2)
    rng = random.Random(3)
    for name in (".metadata", "__0_0.distcp", "progress.pt", "random-0.pt"):
        path = tmp_path / "00000002" / name
        contents = path.read_bytes()
        for _ in range(40):
            damaged = bytearray(contents)
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=name):
                make_state(tmp_path).restore()
        path.write_bytes(contents)
    assert make_state(tmp_path).restore() == 2


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


@pytest.mark.parametrize("name", [".metadata", "progress.pt", "random-0.pt"])
def test_state_runs_no_code(tmp_path, name):
    make_state(tmp_path / "state").save(1)
    file, trace = tmp_path / "state" / "00000001" / name, tmp_path / "hit"
    if name == ".metadata":
        file.write_bytes(pickle.dumps(Bomb(trace)))
    else:
        torch.save({"step": Bomb(trace)}, file)
    mark = file.parent / atomic.MARK
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {name: zlib.crc32(file.read_bytes())}))
    with pytest.raises(UserError, match=name):
        make_state(tmp_path / "state").restore()
    assert not trace.exists()


def test_state_of_another_model_is_rejected(tmp_path):
    make_state(tmp_path).save(1)
    state = make_state(tmp_path)
    state.model.second = nn.Linear(7, 4)
    with pytest.raises(UserError, match=r"model\.second\.bias: .*\(3,\).*\(4,\).*--overwrite"):
        Checkpointer(tmp_path, state.model, OPTIMIZERS["adamw"](state.model), state.schedule, 1, state.dist).restore()


def test_state_of_another_optimizer_is_rejected(tmp_path):
    train(make_state(tmp_path, "adamw"), 0, 1, save_every=1)
    with pytest.raises(UserError, match=r"optimizer\..*exp_avg"):
        make_state(tmp_path, "sgd").restore()
    with pytest.raises(UserError, match="parameter groups|optimizer"):
        make_state(tmp_path, "adamw_groups").restore()


def test_state_of_another_version_is_rejected(tmp_path):
    """A version with other parts of the state is rejected before a parameter changes."""
    train(make_state(tmp_path), 0, 1, save_every=1)
    state = make_state(tmp_path)
    before = copy.deepcopy(state.model.state_dict())
    state.stateful = {"extra": state.schedule}
    with pytest.raises(UserError, match=r"00000001.*--overwrite"):
        state.restore()
    assert_same(dict(state.model.state_dict()), dict(before))


def test_full_disk_keeps_the_last_state(tmp_path, monkeypatch):
    state = make_state(tmp_path)
    state.save(1)
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=r"1000 bytes free.*00000001"):
        state.save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_failed_write_keeps_the_last_state(tmp_path):
    train(state := make_state(tmp_path), 0, 1)
    state.save(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match=r"file too large.*00000001"):
            state.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert make_state(tmp_path).restore() == 1
