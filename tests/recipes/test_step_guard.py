"""Steps with NaN or a spike: reported with their rows, skipped, or rolled back."""

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
MARK = 0  # a token that starts no row
ROLLBACK = ("step_guard.spike_factor=20", "step_guard.on_spike=rollback")


def scale_loss(monkeypatch, factor, *steps):
    """Multiply the loss of these steps by `factor`."""
    get, loss = MapDataLoader.__getitem__, cross_entropy.CrossEntropy.__call__

    def mark_batch(data, step):
        batches = get(data, step)
        if step not in steps:
            return batches
        tokens = batches[0].tokens.clone()
        tokens[0, 0] = MARK
        return [replace(batches[0], tokens=tokens), *batches[1:]]

    def scaled(choice, model, batch):
        value = loss(choice, model, batch)
        return value * factor if batch.tokens[0, 0] == MARK else value

    monkeypatch.setattr(MapDataLoader, "__getitem__", mark_batch)
    monkeypatch.setattr(cross_entropy.CrossEntropy, "__call__", scaled)


def skip_rows(monkeypatch, start, offset):
    """From step `start` on, read the rows of `offset` steps later."""
    numbers = MapDataLoader.document_indices
    monkeypatch.setattr(
        MapDataLoader, "document_indices", lambda data, step: numbers(data, step + offset * (step >= start))
    )


def saved_steps(workspace, out):
    return sorted(int(mark.parent.name) for mark in (workspace.folder / out).glob("state/*/complete"))


@pytest.mark.parametrize("immediate", [True, False])
def test_nan_stops_the_run_with_its_rows(workspace, monkeypatch, immediate):
    """With late reads, as on a GPU, later states are not saved either."""
    rows_by_step = {}
    numbers = MapDataLoader.document_indices

    def record_rows(data, step):
        rows = numbers(data, step)
        rows_by_step[step] = [data.documents.row_location(int(n)) for row in rows for n in row]
        return rows

    monkeypatch.setattr(MapDataLoader, "document_indices", record_rows)
    assert workspace.run_tune(*RUN, "max_steps=6", "output_dir=good").code == 0
    scale_loss(monkeypatch, float("nan"), 6)
    if not immediate:
        create = StepGuard.__init__

        def create_with_late_reads(guard, config, dist, prefetcher):
            create(guard, config, dist, prefetcher)
            guard.reads_now = config.can_drop_steps

        monkeypatch.setattr(StepGuard, "__init__", create_with_late_reads)
    result = workspace.run_tune(*RUN, "log_every=4")
    assert result.code == 2
    (error,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "step 7: loss is nan" in error
    assert "step_guard.on_nan=skip" in error
    assert [f"rows.jsonl:{row.rpartition(':')[2]}" for row in rows_by_step[6]][0] in error
    assert all(row.rpartition(":")[2] in error for row in rows_by_step[6])
    assert saved_steps(workspace, "out") == [6]
    assert not (workspace.folder / "out/final").exists()
    good, state = (workspace.folder / out / "state/00000006" for out in ("good", "out"))
    assert {f.name: f.read_bytes() for f in good.glob("*.safetensors")} == {
        f.name: f.read_bytes() for f in state.glob("*.safetensors")
    }
    assert atomic.find_corrupt_file(state) is None
    # The user resumes with another setting.
    result = workspace.run_tune(*RUN, "log_every=4", "step_guard.on_nan=skip")
    assert result.code == 0, result.err
    assert "step 7: loss is nan" in result.err
    assert "step is skipped" in result.err


def test_skipped_step_does_not_change_weights(workspace, monkeypatch):
    scale_loss(monkeypatch, float("inf"), 5)
    result = workspace.run_tune(*RUN, "max_steps=6", "step_guard.on_nan=skip", "lr_scheduler=constant")
    assert result.code == 0, result.err
    line = next(line for line in workspace.deterministic_metrics("out") if line["step"] == 6)
    assert (line["loss"], line["grad_norm"]) == (None, None)
    assert workspace.run_tune(*RUN, "max_steps=5", "lr_scheduler=constant", "output_dir=five").code == 0
    a, b = workspace.tensors("out"), workspace.tensors("five")
    assert a
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("options", [(), ("step_guard.on_nan=skip",)], ids=["good", "skipped"])
def test_skipped_rows_are_not_repeated_or_replaced(workspace, monkeypatch, options):
    """A mixture with some rows per epoch, run at once or stopped and resumed: rows of skipped steps are not
    repeated, and no other rows replace them.
    """
    steps, original = [], sft.forward_backward

    def record(model, batches, *rest):
        steps.append([row.tolist() for batch in batches for row in batch.tokens])
        return original(model, batches, *rest)

    data = (
        "data={kind: mixture, max_length: 64, datasets: [{dataset: {kind: chat, source: rows.jsonl}, "
        "max_samples_per_epoch: 4}]}"
    )
    args = (*RUN, data, "max_steps=null", "epochs=7", "global_batch_size=3", *options)
    monkeypatch.setattr(sft, "forward_backward", record)
    assert workspace.run_tune(*args, "output_dir=good").code == 0
    expected, steps[:] = [*steps], []
    assert len(expected) == 14 and [len(rows) for rows in expected] == [3, 1] * 7
    if options:
        scale_loss(monkeypatch, float("inf"), 5, 6)
    result = workspace.run_tune(*args)
    assert result.code == 0 and result.err.count("step is skipped") == 2 * len(options), result.err
    unbroken, steps[:] = [*steps], []
    for step in (6, 7):
        with monkeypatch.context() as stops:
            stop_after(stops, step)
            assert workspace.run_tune(*args, f"output_dir=broken{step}").code == 143
        assert workspace.run_tune(*args, f"output_dir=broken{step}").code == 0
        assert workspace.is_same_run(f"broken{step}", "out")
    assert steps == [*unbroken, *unbroken]
    marked = [number for number, (a, b) in enumerate(zip(unbroken, expected, strict=True)) if a != b]
    assert marked == [5, 6] * len(options)  # whose first token is a mark
    assert [[row[1:] for row in rows] for rows in unbroken] == [[row[1:] for row in rows] for rows in expected]


def test_rollback_skips_the_rows_of_a_spike(workspace, monkeypatch):
    """The result is that of a run without these rows, also if it is stopped and resumed."""
    with pytest.MonkeyPatch.context() as patch:
        skip_rows(patch, 9, 2)
        assert workspace.run_tune(*RUN, "output_dir=without").code == 0
    scale_loss(monkeypatch, 1000.0, 10)
    result = workspace.run_tune(*RUN, *ROLLBACK)
    assert result.code == 0, result.err
    assert "times the median of the last 8 steps" in result.err
    assert "Rolled back to step 9" in result.err
    assert workspace.is_same_run("out", "without")
    stop_after(monkeypatch, 12)
    assert workspace.run_tune(*RUN, *ROLLBACK, "output_dir=broken").code == 143
    assert workspace.run_tune(*RUN, *ROLLBACK, "output_dir=broken").code == 0
    assert workspace.is_same_run("broken", "without")


def test_rollbacks_are_limited(workspace, monkeypatch):
    """Without a saved state the run rolls back to step 0. It stops after max_interventions."""
    scale_loss(monkeypatch, 1000.0, 8, 17, 26)
    result = workspace.run_tune(*RUN, *ROLLBACK, "save_every=20", "step_guard.max_interventions=2")
    assert result.code == 2
    assert result.err.count("Rolled back to step 0") == 2
    assert "2 rollbacks" in result.err


def test_incompatible_options_are_refused(workspace):
    in_bwd = ("memory.optimizer_in_bwd=true", "max_grad_norm=0", "micro_batch_size=4")
    result = workspace.run_tune(*RUN, *in_bwd, "step_guard.on_nan=skip")
    assert result.code == 2
    assert "memory.optimizer_in_bwd" in result.err
    assert workspace.run_tune(*RUN, *in_bwd, "max_steps=2").code == 0
    assert workspace.run_tune(*RUN, "step_guard.on_nan=ignore", "max_steps=1", "output_dir=off").code == 0
    for override in ("step_guard.spike_factor=1", "step_guard.spike_window=2", "step_guard.max_interventions=0"):
        assert workspace.run_tune(*RUN, override).code == 2
