"""Stopping and going on changes no bit, whatever the optimizer, the schedule and the instant of the end."""

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
    """A frozen part, a trained part with dropout, a tied weight, a part without gradient, a buffer."""

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


def every(model):
    return [p for p in model.parameters() if p.requires_grad]


def two_groups(model):
    return [{"params": list(model.first.parameters()), "lr": 0.02}, {"params": list(model.second.parameters())}]


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(every(m), lr=0.01, weight_decay=0.1),
    "adamw_fused": lambda m: torch.optim.AdamW(every(m), lr=0.01, weight_decay=0.1, fused=True),
    "adamw_groups": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, fused=True),
    "adamw_tensor_rate": lambda m: torch.optim.AdamW(every(m), lr=torch.tensor(0.01), capturable=False, foreach=False),
    "sgd": lambda m: torch.optim.SGD(every(m), lr=0.05, weight_decay=0.1),
    "sgd_momentum": lambda m: torch.optim.SGD(every(m), lr=0.05, momentum=0.9, dampening=0.5),
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


def started(folder, optimizer="adamw", schedule="cosine", keep=2, seed=0):
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    model = Tiny()
    chosen = OPTIMIZERS[optimizer](model)
    rate = LambdaLR(chosen, SCHEDULES[schedule])
    return Checkpointer(folder, model, chosen, rate, keep, DistributedContext(device="cpu"))


def train(state, first, last, save_every=0):
    """Steps whose data come from every random number generator there is."""
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


def test_what_was_fixed_at_the_start_comes_back(tmp_path):
    state, other = started(tmp_path), started(tmp_path)
    train(state, 0, 1)
    state.save(1)
    other.model.table += 1e-6  # as if another machine had computed it
    other.restore()
    assert torch.equal(other.model.table, state.model.table)


def assert_same(ours, theirs):
    """Equal to the last bit, types included."""
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
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_equals_unbroken(tmp_path, optimizer, schedule):
    train(unbroken := started(tmp_path / "none", optimizer, schedule), 0, 7)
    expected = snapshot(unbroken)
    train(first := started(tmp_path / "state", optimizer, schedule), 0, 4)
    first.save(4)
    second = started(tmp_path / "state", optimizer, schedule, seed=9)
    second.model.base.load_state_dict(unbroken.model.base.state_dict())  # frozen: read from the checkpoint
    assert second.restore() == 4
    train(second, 4, 7)
    assert_same(snapshot(second), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", [0, 1, 4])
def test_saving_changes_nothing(tmp_path, optimizer, step):
    train(plain := started(tmp_path / "none", optimizer), 0, step)
    now = snapshot(plain)
    train(plain := started(tmp_path / "none", optimizer), 0, 6)
    end = snapshot(plain)
    train(saving := started(tmp_path / "state", optimizer), 0, step)
    saving.save(step)
    train(saving, step, 6)
    assert_same(snapshot(saving), end)
    other = started(tmp_path / "state", optimizer)
    assert other.restore() == step
    assert_same(snapshot(other), now)


def test_nothing_saved(tmp_path):
    state = started(tmp_path / "state")
    before = snapshot(state)
    assert state.restore() == 0
    assert_same(state.model.state_dict(), type(state.model.state_dict())(before["weights"]))


def test_only_what_is_trained_is_written(tmp_path):
    model = nn.Sequential(nn.Linear(1000, 1000).requires_grad_(False), nn.Linear(1000, 2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    Checkpointer(tmp_path, model, optimizer, LambdaLR(optimizer, constant), 1, DistributedContext(device="cpu")).save(1)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 200_000


def test_compiled_and_plain_share_a_state(tmp_path):
    state = started(tmp_path, "adamw")
    train(state, 0, 2)
    state.model.second = torch.compile(state.model.second)
    state.save(2)
    other = started(tmp_path, "adamw", seed=5)
    assert other.restore() == 2
    assert torch.equal(other.model.second.weight, state.model.second.weight)


def test_keeps_the_newest(tmp_path):
    train(started(tmp_path, keep=3), 0, 7, save_every=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005", "00000006", "00000007"]


def test_old_ones_go_only_once_the_new_one_is_whole(tmp_path, monkeypatch):
    state = started(tmp_path, keep=1)
    state.save(1)
    seen = []
    remove = atomic.remove_dir

    def watched(folder):
        if folder.name == "00000001":
            seen.append(atomic.is_complete(tmp_path / "00000002"))
        remove(folder)

    monkeypatch.setattr(atomic, "remove_dir", watched)
    state.save(2)
    assert seen == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def test_saving_a_step_again(tmp_path):
    state = started(tmp_path)
    train(state, 0, 2)
    state.save(2)
    state.save(2)
    assert started(tmp_path).restore() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def test_killed_while_saving(tmp_path):
    """SIGKILL at a dozen random moments, most of them in the middle of a save; the end is that of an unbroken run."""
    train(unbroken := started(tmp_path / "none"), 0, 40)
    expected = snapshot(unbroken)
    folder, dice, steps = tmp_path / "state", random.Random(1), []
    state = started(folder)
    while len(steps) < 12 or steps[-1] <= 2:
        child = os.fork()
        if child == 0:
            done = started(folder).restore()
            train(state_of(folder), done, 39, save_every=1)
            os._exit(0)
        time.sleep(dice.uniform(0.05, 0.25) * 1.05 ** len(steps))  # a busy machine saves nothing in so short a time
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = started(folder)
        steps.append(state.restore())
        assert {path.name for path in folder.glob("*.p*")} == set()
    assert steps == sorted(steps)
    train(state, steps[-1], 40)
    assert_same(snapshot(state), expected)


def state_of(folder):
    state = started(folder)
    state.restore()
    return state


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "progress.pt", "random-0.pt", "complete"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped"])
def test_damaged_file_is_named(tmp_path, name, damage):
    train(started(tmp_path), 0, 4, save_every=2)
    file = tmp_path / "00000004" / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
        if name == atomic.MARK:
            assert started(tmp_path).restore() == 2
            return
    else:
        content[len(content) // 2] ^= 0x10
        file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "flipped": content}[damage])
    state = started(tmp_path)
    before = snapshot(state)["weights"]
    with pytest.raises(UserError) as caught:
        state.restore()
    assert str(file) in str(caught.value)
    assert f"delete the folder {tmp_path / '00000004'} to go on from step 2" in str(caught.value)
    assert_same(dict(state.model.state_dict()), dict(before))
    shutil.rmtree(tmp_path / "00000004")
    assert started(tmp_path).restore() == 2


def test_no_bit_flips_unseen(tmp_path):
    """Wherever a bit flips, the state is refused: zip checksums alone let some through."""
    train(started(tmp_path), 0, 2, save_every=2)
    dice = random.Random(3)
    for name in (".metadata", "__0_0.distcp", "progress.pt", "random-0.pt"):
        file = tmp_path / "00000002" / name
        good = file.read_bytes()
        for _ in range(40):
            bad = bytearray(good)
            bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
            file.write_bytes(bad)
            with pytest.raises(UserError, match=name):
                started(tmp_path).restore()
        file.write_bytes(good)
    assert started(tmp_path).restore() == 2


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


@pytest.mark.parametrize("name", [".metadata", "progress.pt", "random-0.pt"])
def test_a_state_runs_no_code(tmp_path, name):
    started(tmp_path / "state").save(1)
    file, hit = tmp_path / "state" / "00000001" / name, tmp_path / "hit"
    if name == ".metadata":
        file.write_bytes(pickle.dumps(Bomb(hit)))
    else:
        torch.save({"step": Bomb(hit)}, file)
    mark = file.parent / atomic.MARK
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {name: zlib.crc32(file.read_bytes())}))
    with pytest.raises(UserError, match=name):
        started(tmp_path / "state").restore()
    assert not hit.exists()


def test_state_of_another_model(tmp_path):
    started(tmp_path).save(1)
    state = started(tmp_path)
    state.model.second = nn.Linear(7, 4)
    with pytest.raises(UserError, match=r"model\.second\.bias: \(3,\) there, \(4,\) here.*--overwrite"):
        Checkpointer(tmp_path, state.model, OPTIMIZERS["adamw"](state.model), state.schedule, 1, state.run).restore()


def test_state_of_another_optimizer(tmp_path):
    train(started(tmp_path, "adamw"), 0, 1, save_every=1)
    with pytest.raises(UserError, match=r"optimizer\..*exp_avg"):
        started(tmp_path, "sgd").restore()
    with pytest.raises(UserError, match="other parameter groups|optimizer"):
        started(tmp_path, "adamw_groups").restore()


def test_state_of_another_version(tmp_path):
    """A version that keeps more or less beside the model cannot go on, and says so before it changes a number."""
    train(started(tmp_path), 0, 1, save_every=1)
    state = started(tmp_path)
    before = copy.deepcopy(state.model.state_dict())
    state.extra = (state.schedule,)
    with pytest.raises(UserError, match=r"00000001 is the state of another version of tunekit.*--overwrite"):
        state.restore()
    assert_same(dict(state.model.state_dict()), dict(before))


def test_full_disk_keeps_the_last_state(tmp_path, monkeypatch):
    state = started(tmp_path)
    state.save(1)
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=r"1 kB are free.*last complete state is .*00000001"):
        state.save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_refused_write_in_the_middle(tmp_path):
    train(state := started(tmp_path), 0, 1)
    state.save(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match=r"file too large.*last complete state is .*00000001"):
            state.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert started(tmp_path).restore() == 1
