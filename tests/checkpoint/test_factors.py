"""Updates on both sides of a weight table: what is added to the Hub's tensors is what is added to ours."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.checkpoints import error
from tunekit.checkpoint.lora_weights import LoRADelta, LoRATarget
from tunekit.models.weight_map import Fused, Identity, Stack, Transposed

OUT = (6, 2, 4)
FLAT = {
    "one": (Identity(), ("m.weight",), OUT[:1]),
    "parts": (Fused(), ("m.weight",), OUT),
    "in turns": (Fused(interleaved=True), ("m.weight",), (5, 5)),
    "transposed": (Transposed(), ("m",), OUT[:1]),
    "parts, transposed": (Fused(transposed=True), ("m",), OUT),
}
EXPERTS = {
    "stacked": (Identity(), ("m",), OUT[:1]),
    "one for each": (Stack(), ("m.*.w",), OUT[:1]),
    "stacked parts": (Fused(dim=1), ("m",), OUT),
    "stacked in turns, transposed": (Fused(dim=1, interleaved=True, transposed=True), ("m",), (5, 5)),
    "stacked and transposed": (Transposed(), ("m",), OUT[:1]),
}
CASES = [(case, ()) for case in FLAT.values()] + [(case, (3,)) for case in EXPERTS.values()]


def updates(outs: tuple[int, ...], lead: tuple[int, ...], dora: bool = False) -> list[LoRADelta]:
    """One for each layer, of different ranks and scales, over 7 inputs."""
    made = []
    for rank, out in enumerate(outs, start=2):
        a, b = torch.randn(*lead, rank, 7), torch.randn(*lead, out, rank)
        made.append(LoRADelta(a, b, 0.5 + rank, torch.rand(*lead, out) if dora else None))
    return made


def delta(update: LoRADelta) -> Tensor:
    return update.scale * update.b @ update.a


@pytest.mark.parametrize(("case", "lead"), CASES, ids=[*FLAT, *EXPERTS])
def test_the_change_is_the_same_on_both_sides(case: tuple, lead: tuple[int, ...]) -> None:
    op, hub, outs = case
    site = LoRATarget(tuple(f"layer{i}" for i in range(len(outs))), hub, op)
    made = updates(outs, lead)
    wanted = op.save([delta(update) for update in made])
    found = site.out(made)
    assert len(found) == len(wanted) == len(site.names(3))
    for one, weight in zip(found, wanted, strict=True):
        swapped = op == Transposed() or (isinstance(op, Fused) and op.transposed)
        assert error(delta(one), weight.mT if swapped else weight) < 1e-6
    assert [tuple(delta(one).shape) for one in found] == site.shapes([(*lead, out, 7) for out in outs])
    back = site.back(found, [(*lead, out, 7) for out in outs])
    for one, mine in zip(back, made, strict=True):
        assert error(delta(one), delta(mine)) < 1e-6


@pytest.mark.parametrize("case", [FLAT["one"], FLAT["parts"], FLAT["in turns"]])
def test_magnitudes_go_with_the_outputs(case: tuple) -> None:
    """A weight whose rows are as long as they were meant to be is so on both sides."""
    op, hub, outs = case
    site = LoRATarget(tuple(f"layer{i}" for i in range(len(outs))), hub, op)
    made = updates(outs, (), dora=True)
    lengths = [update.magnitude for update in made]
    assert all(m is not None for m in lengths)
    (found,) = site.out(made)
    assert found.magnitude is not None
    assert torch.equal(found.magnitude, *op.save(lengths))
    for one, mine in zip(site.back([found], [(out, 7) for out in outs]), made, strict=True):
        assert one.magnitude is not None and torch.equal(one.magnitude, mine.magnitude)


def test_a_layer_without_an_update_has_zeros() -> None:
    made = updates((6, 2), ())
    made[0] = replace(made[0], a=made[0].a[:0], b=made[0].b[:, :0])
    (found,) = LoRATarget(("a", "b"), ("m.weight",), Fused()).out(made)
    assert found.rank == made[1].rank and found.scale == made[1].scale
    assert not delta(found)[:6].any()
    assert error(delta(found)[6:], delta(made[1])) < 1e-6
