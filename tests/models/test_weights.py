"""Tables of names: what goes in comes out again, whatever the layout, and what does not fit is found."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tunekit.models.weight_map import (
    Fused,
    HubOnly,
    Identity,
    KeyMapping,
    KeyRule,
    Stack,
    Transposed,
    load_mappings,
    match_hub_name,
    match_name,
    save_mappings,
    to_hub_name,
    with_prefix,
)

TABLE = (
    KeyRule("layers.{}.mlp.experts.gate_proj", "model.layers.{}.mlp.experts.*.w1", Stack()),
    KeyRule(("layers.{}.mlp.experts.gate_proj.weight",), "model.layers.{}.experts.w1", Transposed()),
    KeyRule(("layers.{}.attn.q_proj", "layers.{}.attn.k_proj"), "model.layers.{}.attn.qk_proj", Fused()),
    KeyRule("layers.{}.attn", "model.layers.{}.attn"),
    KeyRule("embed", "model.embed_tokens"),
    KeyRule("head", "lm_head"),
    KeyRule((), "model.vision", HubOnly()),
)


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def shapes(tensors: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


def test_experts_are_stacked_by_their_number() -> None:
    names = [f"model.layers.3.mlp.experts.{e}.w1.weight" for e in (10, 0, 2, 1, 9, 3, 5, 4, 8, 6, 7)]
    (move,), unknown = load_mappings(names, TABLE)
    assert not unknown
    assert move.ours == ("layers.3.mlp.experts.gate_proj.weight",)
    assert move.hub == tuple(f"model.layers.3.mlp.experts.{e}.w1.weight" for e in range(11))
    parts = [numbers(2, 3) + e for e in range(11)]
    (whole,) = move.load(parts, {move.ours[0]: (11, 2, 3)})
    assert torch.equal(whole[10], parts[10])
    assert all(torch.equal(a, b) for a, b in zip(move.op.save([whole]), parts, strict=True))


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40))
def test_a_missing_expert_is_asked_for(numbers: set[int]) -> None:
    names = {f"model.layers.0.mlp.experts.{e}.w1.weight" for e in numbers}
    (move,), _ = load_mappings(sorted(names), TABLE)
    assert (set(move.hub) == names) == (numbers == set(range(len(numbers))))
    assert len(move.hub) == len(numbers)  # a large number in a name costs nothing


def test_a_missing_part_is_asked_for() -> None:
    table = (KeyRule("a", ("one", "two")),)
    for name in ("one.weight", "two.weight"):
        assert load_mappings([name], table)[0] == [KeyMapping(("a.weight",), ("one.weight", "two.weight"), Identity())]


@pytest.mark.parametrize("name", [
    "model.layers.0.mlp.experts.01.w1.weight",
    "model.layers.00.attn.v_proj.weight",
    "model.layers.x.attn.v_proj.weight",
    "model.layers.0.mlp.experts.w1.weight",
    "model.embed_tokens2.weight",
    "model_embed_tokens.weight",
    "embed_tokens.weight",
    "lm_head..weight.",
    "",
])  # fmt: skip
def test_names_without_a_row(name: str) -> None:
    known = name.startswith("lm_head")
    moves, unknown = load_mappings([name], TABLE)
    assert unknown == ([] if known else [name])
    assert [m.hub for m in moves] == ([(name,)] if known else [])


def test_the_first_row_wins_and_several_rows_lead_to_one_of_ours() -> None:
    old, _ = load_mappings(["model.layers.0.experts.w1"], TABLE)
    assert old == [KeyMapping(("layers.0.mlp.experts.gate_proj.weight",), ("model.layers.0.experts.w1",), Transposed())]
    (new,) = save_mappings({"layers.0.mlp.experts.gate_proj.weight": (2, 4, 4)}, TABLE)
    assert new.hub == ("model.layers.0.mlp.experts.0.w1.weight", "model.layers.0.mlp.experts.1.w1.weight")


def test_kept_tensors_have_no_name_here() -> None:
    moves, unknown = load_mappings(["model.vision.a.weight", "model.vision.b"], TABLE)
    assert not unknown
    assert [(m.ours, m.hub) for m in moves] == [((), ("model.vision.a.weight",)), ((), ("model.vision.b",))]
    assert all(m.load([], {}) == [] == m.hub_shapes({}) for m in moves)


def test_modules_and_adapters_follow_their_row() -> None:
    found = match_hub_name("model.layers.7.attn.qk_proj.lora_A.weight", TABLE)
    assert found is not None
    assert found.ours == ("layers.7.attn.q_proj.lora_A.weight", "layers.7.attn.k_proj.lora_A.weight")
    back = match_name("layers.7.attn.k_proj", TABLE)
    assert (back.rule, back.position, back.hub, back.tail) == (found.rule, 1, ("model.layers.7.attn.qk_proj",), "")
    assert to_hub_name("layers.2.mlp.experts.gate_proj.weight", TABLE) == "model.layers.2.mlp.experts.*.w1.weight"
    assert match_hub_name("model.layers.2.mlp.experts.5.w1.lora_B.weight", TABLE).expert == 5


def test_another_prefix() -> None:
    table = with_prefix("model.language_model.", TABLE)
    names = ["model.language_model.embed_tokens.weight", "lm_head.weight", "model.language_model.layers.1.attn.o.bias"]
    moves, unknown = load_mappings([*names, "model.embed_tokens.weight"], table)
    assert unknown == ["model.embed_tokens.weight"]
    assert [m.ours[0] for m in moves] == ["embed.weight", "head.weight", "layers.1.attn.o.bias"]
    assert [m.ours for m in moves] == [m.ours for m in load_mappings([m.hub[0] for m in moves], table)[0]]


def test_fused_layouts_by_hand() -> None:
    a, b = numbers(2, 3), numbers(2, 3) + 10
    (plain,) = Fused().save([a, b])
    assert torch.equal(plain, torch.stack([a[0], a[1], b[0], b[1]]))
    (turns,) = Fused(interleaved=True).save([a, b])
    assert torch.equal(turns, torch.stack([a[0], b[0], a[1], b[1]]))
    (swapped,) = Fused(interleaved=True, transposed=True).save([a, b])
    assert torch.equal(swapped, turns.T)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), max_size=1),
    st.booleans(),
    st.booleans(),
)
def test_fused_tensors_come_back(rows: list[int], width: int, lead: list[int], turns: bool, transposed: bool) -> None:
    rows = [rows[0]] * len(rows) if turns else rows
    op = Fused(len(lead), turns, transposed)
    parts = [numbers(*lead, n, width) + 100 * i for i, n in enumerate(rows)]
    (whole,) = op.save(parts)
    assert whole.shape[:-2] == tuple(lead)
    assert sorted(whole.shape[-2:]) == sorted((sum(rows), width))
    found = op.load([whole.contiguous()], shapes(parts))
    assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.sampled_from([Identity(), Transposed(), Stack()]))
def test_the_shapes_that_save_makes_are_those_that_load_takes(shape: list[int], op: Identity) -> None:
    ours = numbers(*shape)
    there = op.save([ours])
    move = KeyMapping(("a",), tuple(map(str, range(len(there)))), op)
    assert move.hub_shapes({"a": tuple(shape)}) == shapes(there)
    (back,) = move.load(there, {"a": tuple(shape)})
    assert torch.equal(back, ours)


def written(shapes: Mapping[str, tuple[int, ...]], table: tuple[KeyRule, ...]) -> dict[str, Tensor]:
    """A model of these shapes as its checkpoint."""
    found: dict[str, Tensor] = {}
    for move in save_mappings(shapes, table):
        made = move.op.save([numbers(*shapes[name]) + len(name) for name in move.ours])
        found |= dict(zip(move.hub, made, strict=True))
    return found


def test_a_model_goes_out_and_comes_in() -> None:
    sizes = {"layers.0.mlp.experts.gate_proj.weight": (3, 2, 4), "embed.weight": (5, 2), "head.weight": (5, 2)}
    sizes |= {"layers.0.attn.q_proj.weight": (4, 2), "layers.0.attn.k_proj.weight": (2, 2)}
    sizes |= {"layers.0.attn.q_proj.bias": (4,), "layers.0.attn.k_proj.bias": (2,), "layers.0.attn.o.weight": (2, 4)}
    there = written(sizes, TABLE)
    assert there["model.layers.0.attn.qk_proj.bias"].tolist() == [25, 26, 27, 28, 25, 26]
    assert len(there) == 3 + 2 + 2 + 1
    moves, unknown = load_mappings(there, TABLE)
    assert not unknown
    back = {n: t for m in moves for n, t in zip(m.ours, m.load([there[h] for h in m.hub], sizes), strict=True)}
    assert {name: tuple(t.shape) for name, t in back.items()} == sizes
    assert all(torch.equal(t, numbers(*sizes[name]) + len(name)) for name, t in back.items())
