"""A step that would spoil the weights: told with its rows, passed over, or left behind by a way back."""

from dataclasses import replace

import pytest
import torch

from tests.recipes.test_resume import stop_after
from tunekit.checkpoint import atomic
from tunekit.data.dataloader.map_style import MapDataLoader
from tunekit.losses import cross_entropy
from tunekit.recipes import sft
from tunekit.training.step_guard import StepGuard

RUN = ("run", "sft", "sft.yaml", "eval_data=null", "max_steps=14", "save_every=3", "step_guard.spike_window=8")
MARK = 0  # a token with which no row begins
BACK = ("step_guard.spike_factor=20", "step_guard.on_spike=rollback")


def plant(monkeypatch, factor, *steps):
    """The loss of what these steps read is so many times what it was."""
    get, loss = MapDataLoader.__getitem__, cross_entropy.CrossEntropy.__call__

    def marked(data, step):
        batches = get(data, step)
        if step not in steps:
            return batches
        first = batches[0].tokens.clone()
        first[0, 0] = MARK
        return [replace(batches[0], tokens=first), *batches[1:]]

    def made(choice, model, batch):
        found = loss(choice, model, batch)
        return found * factor if batch.tokens[0, 0] == MARK else found

    monkeypatch.setattr(MapDataLoader, "__getitem__", marked)
    monkeypatch.setattr(cross_entropy.CrossEntropy, "__call__", made)


def without(monkeypatch, start, behind):
    """Steps from `start` on read what comes `behind` steps later."""
    numbers = MapDataLoader.numbers
    monkeypatch.setattr(MapDataLoader, "numbers", lambda data, step: numbers(data, step + behind * (step >= start)))


def states(work, out):
    return sorted(int(mark.parent.name) for mark in (work.folder / out).glob("state/*/complete"))


@pytest.mark.parametrize("early", [True, False])
def test_what_is_no_number_ends_the_run(work, monkeypatch, early):
    """Read late, as on a GPU, nothing of it is kept either."""
    found = {}
    numbers = MapDataLoader.numbers

    def kept(data, step):
        rows = numbers(data, step)
        found[step] = [data.rows.where(int(n)) for row in rows for n in row]
        return rows

    monkeypatch.setattr(MapDataLoader, "numbers", kept)
    assert work.tune(*RUN, "max_steps=6", "output_dir=good").code == 0
    plant(monkeypatch, float("nan"), 6)
    if not early:
        create = StepGuard.__init__

        def create_late(guard, config, dist, prefetcher):
            create(guard, config, dist, prefetcher)
            guard.reads_now = False

        monkeypatch.setattr(StepGuard, "__init__", create_late)
    done = work.tune(*RUN, "log_every=4")
    assert done.code == 2
    (told,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "step 7: the loss is nan" in told
    assert "step_guard.on_nan=skip" in told
    assert [f"rows.jsonl:{row.rpartition(':')[2]}" for row in found[6]][0] in told
    assert all(row.rpartition(":")[2] in told for row in found[6])
    assert states(work, "out") == [6]
    assert not (work.folder / "out/final").exists()
    good, stayed = (work.folder / out / "state/00000006" for out in ("good", "out"))
    assert {f.name: f.read_bytes() for f in good.glob("*.safetensors")} == {
        f.name: f.read_bytes() for f in stayed.glob("*.safetensors")
    }
    assert atomic.find_corrupt_file(stayed) is None
    # A person decides to go on.
    done = work.tune(*RUN, "log_every=4", "step_guard.on_nan=skip")
    assert done.code == 0, done.err
    assert "step 7: the loss is nan" in done.err
    assert "it moves no weight" in done.err


def test_a_step_is_passed_over(work, monkeypatch):
    """Not a bit of what is trained moves for it."""
    plant(monkeypatch, float("inf"), 5)
    done = work.tune(*RUN, "max_steps=6", "step_guard.on_nan=skip", "lr_scheduler=constant")
    assert done.code == 0, done.err
    line = next(line for line in work.numbers("out") if line["step"] == 6)
    assert (line["loss"], line["grad_norm"]) == (None, None)
    assert work.tune(*RUN, "max_steps=5", "lr_scheduler=constant", "output_dir=five").code == 0
    a, b = work.tensors("out"), work.tensors("five")
    assert a
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("answer", [(), ("step_guard.on_nan=skip",)], ids=["good", "passed over"])
def test_a_run_ends_with_the_rows_of_its_last_epoch(work, monkeypatch, answer):
    """Of a mix whose epochs have some rows each: rows of a step that is passed over do not come again, nor do others
    come in their place; stopped and started again too."""
    seen, take = [], sft.forward_backward

    def noted(model, batches, *how):
        seen.append([row.tolist() for batch in batches for row in batch.tokens])
        return take(model, batches, *how)

    mix = (
        "data={kind: mixture, max_length: 64, datasets: [{dataset: {kind: chat, source: rows.jsonl}, "
        "max_samples_per_epoch: 4}]}"
    )
    words = (*RUN, mix, "max_steps=null", "epochs=7", "global_batch_size=3", "save_every=1", *answer)
    monkeypatch.setattr(sft, "forward_backward", noted)
    assert work.tune(*words, "output_dir=good").code == 0
    wanted, seen[:] = [*seen], []
    assert len(wanted) == 14 and [len(rows) for rows in wanted] == [3, 1] * 7
    if answer:
        plant(monkeypatch, float("inf"), 5, 6)
    done = work.tune(*words)
    assert done.code == 0 and done.err.count("it moves no weight") == 2 * len(answer), done.err
    whole, seen[:] = [*seen], []
    for step in (6, 7):
        with monkeypatch.context() as stops:
            stop_after(stops, step)
            assert work.tune(*words, f"output_dir=broken{step}").code == 143
        assert work.tune(*words, f"output_dir=broken{step}").code == 0
        assert work.same(f"broken{step}", "out")
    assert seen == [*whole, *whole]
    marked = [number for number, (a, b) in enumerate(zip(whole, wanted, strict=True)) if a != b]
    assert marked == [5, 6] * len(answer)  # whose first token is a mark
    assert [[row[1:] for row in rows] for rows in whole] == [[row[1:] for row in rows] for rows in wanted]


def test_a_run_goes_back_past_the_rows_of_a_spike(work, monkeypatch):
    """As if the rows since the last state were not there; stopped and started again on the way too."""
    with pytest.MonkeyPatch.context() as other:
        without(other, 9, 2)
        assert work.tune(*RUN, "output_dir=without").code == 0
    plant(monkeypatch, 1000.0, 10)
    done = work.tune(*RUN, *BACK)
    assert done.code == 0, done.err
    assert "times the median of the last 8 steps" in done.err
    assert "back to step 9" in done.err
    assert work.same("out", "without")
    stop_after(monkeypatch, 12)
    assert work.tune(*RUN, *BACK, "output_dir=broken").code == 143
    assert work.tune(*RUN, *BACK, "output_dir=broken").code == 0
    assert work.same("broken", "without")


def test_ways_back_come_to_an_end(work, monkeypatch):
    """Before the first state a run goes back to its beginning; at last it ends."""
    plant(monkeypatch, 1000.0, 8, 17, 26)
    done = work.tune(*RUN, *BACK, "save_every=20", "step_guard.max_interventions=2")
    assert done.code == 2
    assert done.err.count("back to step 0") == 2
    assert "behind 2 rollbacks" in done.err


def test_what_cannot_be_held_is_refused(work):
    early = ("memory.optimizer_in_bwd=true", "max_grad_norm=0", "micro_batch_size=4")
    done = work.tune(*RUN, *early, "step_guard.on_nan=skip")
    assert done.code == 2
    assert "memory.optimizer_in_bwd" in done.err
    assert work.tune(*RUN, *early, "max_steps=2").code == 0
    assert work.tune(*RUN, "step_guard.on_nan=ignore", "max_steps=1", "output_dir=off").code == 0
    for word in ("step_guard.spike_factor=1", "step_guard.spike_window=2", "step_guard.max_interventions=0"):
        assert work.tune(*RUN, word).code == 2
