"""LoRA deltas are the same for the tensors of a checkpoint and for the layers that they map to."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.random_checkpoints import relative_error
from tunekit.checkpoint.lora_delta import LoRADelta, LoRATarget
from tunekit.models.weight_map import Fused, Identity, Stack, Transposed

OUT = (6, 2, 4)
FLAT = {
    "one": (Identity(), ("m.weight",), OUT[:1]),
    "fused": (Fused(), ("m.weight",), OUT),
    "interleaved": (Fused(interleaved=True), ("m.weight",), (5, 5)),
    "transposed": (Transposed(), ("m",), OUT[:1]),
    "fused, transposed": (Fused(transposed=True), ("m",), OUT),
}
EXPERTS = {
    "stacked": (Identity(), ("m",), OUT[:1]),
    "one tensor per expert": (Stack(), ("m.*.w",), OUT[:1]),
    "stacked, fused": (Fused(dim=1), ("m",), OUT),
    "stacked, interleaved, transposed": (Fused(dim=1, interleaved=True, transposed=True), ("m",), (5, 5)),
    "stacked and transposed": (Transposed(), ("m",), OUT[:1]),
}
CASES = [(case, ()) for case in FLAT.values()] + [(case, (3,)) for case in EXPERTS.values()]


def make_deltas(outs: tuple[int, ...], lead: tuple[int, ...], dora: bool = False) -> list[LoRADelta]:
    """One delta per layer, of different ranks and scales, with 7 inputs."""
    deltas = []
    for rank, out in enumerate(outs, start=2):
        a, b = torch.randn(*lead, rank, 7), torch.randn(*lead, out, rank)
        deltas.append(LoRADelta(a, b, 0.5 + rank, torch.rand(*lead, out) if dora else None))
    return deltas


def full_delta(update: LoRADelta) -> Tensor:
    return update.scale * update.b @ update.a


@pytest.mark.parametrize(("case", "lead"), CASES, ids=[*FLAT, *EXPERTS])
def test_delta_is_the_same_in_checkpoint_and_layers(case: tuple, lead: tuple[int, ...]) -> None:
    op, hub, outs = case
    target = LoRATarget(tuple(f"layer{i}" for i in range(len(outs))), hub, op)
    deltas = make_deltas(outs, lead)
    expected = op.save([full_delta(update) for update in deltas])
    checkpoint_deltas = target.to_checkpoint(deltas)
    assert len(checkpoint_deltas) == len(expected) == len(target.tensor_names(3))
    for actual, weight in zip(checkpoint_deltas, expected, strict=True):
        swapped = op == Transposed() or (isinstance(op, Fused) and op.transposed)
        assert relative_error(full_delta(actual), weight.mT if swapped else weight) < 1e-6
    assert [tuple(full_delta(actual).shape) for actual in checkpoint_deltas] == target.shapes(
        [(*lead, out, 7) for out in outs]
    )
    layer_deltas = target.from_checkpoint(checkpoint_deltas, [(*lead, out, 7) for out in outs])
    for actual, expected_delta in zip(layer_deltas, deltas, strict=True):
        assert relative_error(full_delta(actual), full_delta(expected_delta)) < 1e-6


@pytest.mark.parametrize("case", [FLAT["one"], FLAT["fused"], FLAT["interleaved"]])
def test_magnitudes_follow_the_outputs(case: tuple) -> None:
    """Row norms are mapped like the output rows of their weights."""
    op, hub, outs = case
    target = LoRATarget(tuple(f"layer{i}" for i in range(len(outs))), hub, op)
    deltas = make_deltas(outs, (), dora=True)
    magnitudes = [update.magnitude for update in deltas]
    assert all(m is not None for m in magnitudes)
    (checkpoint_delta,) = target.to_checkpoint(deltas)
    assert checkpoint_delta.magnitude is not None
    assert torch.equal(checkpoint_delta.magnitude, *op.save(magnitudes))
    for actual, expected in zip(
        target.from_checkpoint([checkpoint_delta], [(out, 7) for out in outs]), deltas, strict=True
    ):
        assert actual.magnitude is not None and torch.equal(actual.magnitude, expected.magnitude)


def test_layer_without_adapter_has_zero_delta() -> None:
    deltas = make_deltas((6, 2), ())
    deltas[0] = replace(deltas[0], a=deltas[0].a[:0], b=deltas[0].b[:, :0])
    (checkpoint_delta,) = LoRATarget(("a", "b"), ("m.weight",), Fused()).to_checkpoint(deltas)
    assert checkpoint_delta.rank == deltas[1].rank and checkpoint_delta.scale == deltas[1].scale
    assert not full_delta(checkpoint_delta)[:6].any()
    assert relative_error(full_delta(checkpoint_delta)[6:], full_delta(deltas[1])) < 1e-6
