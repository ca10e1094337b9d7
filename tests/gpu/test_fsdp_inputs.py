"""Inputs of a model as FSDP moves them to a GPU: bounds of documents stay on the host.

On gloo and a CPU FSDP moves nothing, so runs of several processes do not show it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors, _to_kwargs

from tests.gpu.device_rules import META
from tests.gpu.meta_steps import (
    build_model,
    build_optimizer,
    distill_step,
    make_batches,
    preference_step,
    read_spec,
    representative_spec,
    reward_step,
    run_on_meta,
    sft_step,
)
from tunekit.adapters.config import NoAdapter
from tunekit.data.document import DocFlags
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.losses.dpo import DPO
from tunekit.losses.kl_divergence import ForwardKL
from tunekit.losses.reward import BradleyTerry
from tunekit.losses.unpaired import KTO
from tunekit.models.spec import ScoreHead

STEPS: dict[str, tuple[Callable[..., Any], Any, DocFlags | None, int]] = {
    "sft": (sft_step, CrossEntropy(), None, 0),
    "distill": (distill_step, ForwardKL(), None, 0),
    "dpo": (preference_step, (DPO(),), DocFlags.DESIRABLE, 0),
    "kto": (preference_step, (KTO(),), DocFlags.DESIRABLE, 40),
    "reward": (reward_step, BradleyTerry(), DocFlags.DESIRABLE, 0),
}
FAMILIES = ("llama3.2", "llama4", "gemma2", "phi3-long", "qwen3.5")


def as_fsdp_moves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The inputs of a root module as FSDP2 hands them on, with what mixed precision casts looked through too."""
    (args,), (kwargs,) = _to_kwargs(args, kwargs, META, False)
    return _apply_to_tensors(lambda x: x, args), _apply_to_tensors(lambda x: x, kwargs)


@pytest.mark.parametrize("method", STEPS)
def test_bounds_stay_on_the_host(method: str) -> None:
    step, loss, sign, crossed = STEPS[method]
    layouts: list[SequenceLayout] = []
    run, score = run_on_meta(), ScoreHead(1) if method == "reward" else None
    model = build_model(read_spec("llama3.2", score, layers=1))
    batches = make_batches(True, model.spec.vocab, sign, crossed)

    def move(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        args, kwargs = as_fsdp_moves(module, args, kwargs)
        layouts.extend(x for x in (*args, *kwargs.values()) if isinstance(x, SequenceLayout))
        assert not [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and not x.is_meta]
        return args, kwargs

    model.register_forward_pre_hook(move, with_kwargs=True)
    step(model, loss, batches, build_optimizer(model, NoAdapter(), run), run)
    assert layouts and all(x.cu_seqlens.device.type == "cpu" for x in layouts)
    assert method not in ("dpo", "reward") or all(x.prefixes is not None for x in layouts)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_of_families_that_read_bounds(name: str) -> None:
    """Chunks, windows, caps, stretched rotations and states: each reads bounds in a way of its own."""
    run, model = run_on_meta(), build_model(representative_spec(name))
    model.register_forward_pre_hook(as_fsdp_moves, with_kwargs=True)
    batches = make_batches(True, model.spec.vocab)[:1]
    result = sft_step(model, CrossEntropy(), batches, build_optimizer(model, NoAdapter(), run), run)
    assert result.loss.is_meta
