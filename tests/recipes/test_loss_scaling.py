"""Training in fp16: overflows of scaled gradients are skipped and counted, and the course is that of fp32."""

import itertools

import pytest
import torch

from tests.helpers.recipe_runs import stop_after
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.distributed import loss_scaler
from tunekit.distributed.loss_scaler import DynamicLossScaler

RUN = ("run", "sft", "sft.yaml", "save_every=1", "log_every=1")
FP16 = ("precision.compute_dtype=fp16", "max_steps=8")
HUGE = 2.0**40  # overflows in the first steps


def step_lines(workspace, out):
    lines = workspace.deterministic_metrics(out)
    return [line for line in lines if "loss" in line]


def test_course_is_that_of_fp32(workspace):
    assert workspace.run_tune(*RUN, *FP16).code == 0
    assert workspace.run_tune(*RUN, "max_steps=8", "output_dir=fp32").code == 0
    half, full = step_lines(workspace, "out"), step_lines(workspace, "fp32")
    assert [line["loss"] for line in half] == pytest.approx([line["loss"] for line in full], rel=2e-3)
    assert [line["grad_norm"] for line in half] == pytest.approx([line["grad_norm"] for line in full], rel=1e-2)
    assert {line["loss_scale"] for line in half} == {2.0**16} and "loss_scale" not in full[0]


@pytest.mark.parametrize("micro_batch_size", [4, 1])
def test_steps_that_overflow_change_no_weight(workspace, monkeypatch, micro_batch_size):
    monkeypatch.setattr(loss_scaler, "INIT_SCALE", HUGE)
    weights, save = [], Checkpointer.save

    def recording(checkpointer, step):
        weights.append(next(checkpointer.model.parameters()).clone())
        save(checkpointer, step)

    monkeypatch.setattr(Checkpointer, "save", recording)
    args = (*RUN, *FP16, "max_steps=30", f"micro_batch_size={micro_batch_size}", "max_grad_norm=1")
    assert workspace.run_tune(*args).code == 0
    lines = step_lines(workspace, "out")
    skipped = [line["grad_norm"] == 0 for line in lines]
    counts = list(itertools.accumulate(skipped))
    assert skipped[0] and not all(skipped)
    assert [line["num_overflows"] for line in lines] == counts
    assert [line["loss_scale"] for line in lines] == [HUGE / 2**count for count in counts]
    assert [torch.equal(a, b) for a, b in itertools.pairwise(weights)] == skipped[1:]


def test_stopped_run_resumes_bit_exactly(workspace, monkeypatch):
    """The state has the scale and the number of good steps, which decides when it grows."""
    monkeypatch.setattr(loss_scaler, "INIT_SCALE", 2.0**30)
    monkeypatch.setattr(loss_scaler, "GROWTH_INTERVAL", 5)
    args = (*RUN, *FP16, "max_steps=24")
    assert workspace.run_tune(*args).code == 0
    scales = [line["loss_scale"] for line in step_lines(workspace, "out")]
    assert any(after > before for before, after in zip(scales, scales[1:], strict=False)), "the scale has grown"
    for step in (4, 15):
        with monkeypatch.context() as patch:
            stop_after(patch, step)
            assert workspace.run_tune(*args, "output_dir=stopped").code == 143
    assert workspace.run_tune(*args, "output_dir=stopped").code == 0
    assert workspace.is_same_run("out", "stopped")
    assert step_lines(workspace, "out") == step_lines(workspace, "stopped")


def test_loss_scaling_needs_gradients_after_the_backward_pass(workspace):
    refused = workspace.run_tune(*RUN, *FP16, "memory.optimizer_in_bwd=true", "max_grad_norm=0", "micro_batch_size=4")
    assert refused.code == 2 and "memory.optimizer_in_bwd: not compatible with the loss scaling of fp16" in refused.err


def test_infinite_gradients_at_scale_1_are_left_to_the_step_guard():
    scaler = DynamicLossScaler()
    norms = [torch.tensor(torch.inf)] * 16
    assert [scaler.update(norm) for norm in norms] == [True] * 16
    assert scaler.scale == 1 and not scaler.update(torch.tensor(torch.nan))
