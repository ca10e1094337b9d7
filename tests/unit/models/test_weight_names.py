"""Mapping of tensor names: all layouts round-trip, and unknown names are detected."""

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


def arange_tensor(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def shapes(tensors: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


def test_experts_are_stacked_by_index() -> None:
    names = [f"model.layers.3.mlp.experts.{e}.w1.weight" for e in (10, 0, 2, 1, 9, 3, 5, 4, 8, 6, 7)]
    (mapping,), unknown = load_mappings(names, TABLE)
    assert not unknown
    assert mapping.ours == ("layers.3.mlp.experts.gate_proj.weight",)
    assert mapping.hub == tuple(f"model.layers.3.mlp.experts.{e}.w1.weight" for e in range(11))
    experts = [arange_tensor(2, 3) + e for e in range(11)]
    (stacked,) = mapping.load(experts, {mapping.ours[0]: (11, 2, 3)})
    assert torch.equal(stacked[10], experts[10])
    assert all(torch.equal(a, b) for a, b in zip(mapping.op.save([stacked]), experts, strict=True))


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40))
def test_missing_expert_is_part_of_the_mapping(indices: set[int]) -> None:
    names = {f"model.layers.0.mlp.experts.{e}.w1.weight" for e in indices}
    (mapping,), _ = load_mappings(sorted(names), TABLE)
    assert (set(mapping.hub) == names) == (indices == set(range(len(indices))))
    assert len(mapping.hub) == len(indices)  # large indices in names cost no memory


def test_missing_tensor_is_part_of_the_mapping() -> None:
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
def test_unmapped_names_are_unknown(name: str) -> None:
    known = name.startswith("lm_head")
    moves, unknown = load_mappings([name], TABLE)
    assert unknown == ([] if known else [name])
    assert [m.hub for m in moves] == ([(name,)] if known else [])


def test_first_rule_wins_for_saving_and_all_rules_load() -> None:
    old, _ = load_mappings(["model.layers.0.experts.w1"], TABLE)
    assert old == [KeyMapping(("layers.0.mlp.experts.gate_proj.weight",), ("model.layers.0.experts.w1",), Transposed())]
    (new,) = save_mappings({"layers.0.mlp.experts.gate_proj.weight": (2, 4, 4)}, TABLE)
    assert new.hub == ("model.layers.0.mlp.experts.0.w1.weight", "model.layers.0.mlp.experts.1.w1.weight")


def test_hub_only_tensors_have_no_local_name() -> None:
    moves, unknown = load_mappings(["model.vision.a.weight", "model.vision.b"], TABLE)
    assert not unknown
    assert [(m.ours, m.hub) for m in moves] == [((), ("model.vision.a.weight",)), ((), ("model.vision.b",))]
    assert all(m.load([], {}) == [] == m.hub_shapes({}) for m in moves)


def test_modules_and_adapters_use_the_rule_of_their_weight() -> None:
    match = match_hub_name("model.layers.7.attn.qk_proj.lora_A.weight", TABLE)
    assert match is not None
    assert match.ours == ("layers.7.attn.q_proj.lora_A.weight", "layers.7.attn.k_proj.lora_A.weight")
    inverse = match_name("layers.7.attn.k_proj", TABLE)
    assert (inverse.rule, inverse.position, inverse.hub, inverse.tail) == (
        match.rule,
        1,
        ("model.layers.7.attn.qk_proj",),
        "",
    )
    assert to_hub_name("layers.2.mlp.experts.gate_proj.weight", TABLE) == "model.layers.2.mlp.experts.*.w1.weight"
    assert match_hub_name("model.layers.2.mlp.experts.5.w1.lora_B.weight", TABLE).expert == 5


def test_rules_with_another_prefix() -> None:
    table = with_prefix("model.language_model.", TABLE)
    names = ["model.language_model.embed_tokens.weight", "lm_head.weight", "model.language_model.layers.1.attn.o.bias"]
    moves, unknown = load_mappings([*names, "model.embed_tokens.weight"], table)
    assert unknown == ["model.embed_tokens.weight"]
    assert [m.ours[0] for m in moves] == ["embed.weight", "head.weight", "layers.1.attn.o.bias"]
    assert [m.ours for m in moves] == [m.ours for m in load_mappings([m.hub[0] for m in moves], table)[0]]


def test_fused_layouts() -> None:
    a, b = arange_tensor(2, 3), arange_tensor(2, 3) + 10
    (plain,) = Fused().save([a, b])
    assert torch.equal(plain, torch.stack([a[0], a[1], b[0], b[1]]))
    (interleaved,) = Fused(interleaved=True).save([a, b])
    assert torch.equal(interleaved, torch.stack([a[0], b[0], a[1], b[1]]))
    (swapped,) = Fused(interleaved=True, transposed=True).save([a, b])
    assert torch.equal(swapped, interleaved.T)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), max_size=1),
    st.booleans(),
    st.booleans(),
)
def test_fused_tensors_round_trip(
    rows: list[int], width: int, lead: list[int], interleaved: bool, transposed: bool
) -> None:
    rows = [rows[0]] * len(rows) if interleaved else rows
    op = Fused(len(lead), interleaved, transposed)
    tensors = [arange_tensor(*lead, n, width) + 100 * i for i, n in enumerate(rows)]
    (fused,) = op.save(tensors)
    assert fused.shape[:-2] == tuple(lead)
    assert sorted(fused.shape[-2:]) == sorted((sum(rows), width))
    loaded = op.load([fused.contiguous()], shapes(tensors))
    assert all(torch.equal(a, b) for a, b in zip(loaded, tensors, strict=True))


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.sampled_from([Identity(), Transposed(), Stack()]))
def test_saved_shapes_are_loadable(shape: list[int], op: Identity) -> None:
    original = arange_tensor(*shape)
    saved = op.save([original])
    mapping = KeyMapping(("a",), tuple(map(str, range(len(saved)))), op)
    assert mapping.hub_shapes({"a": tuple(shape)}) == shapes(saved)
    (loaded,) = mapping.load(saved, {"a": tuple(shape)})
    assert torch.equal(loaded, original)


def to_checkpoint(shapes: Mapping[str, tuple[int, ...]], table: tuple[KeyRule, ...]) -> dict[str, Tensor]:
    """Checkpoint tensors of a model with these shapes."""
    tensors: dict[str, Tensor] = {}
    for mapping in save_mappings(shapes, table):
        saved = mapping.op.save([arange_tensor(*shapes[name]) + len(name) for name in mapping.ours])
        tensors |= dict(zip(mapping.hub, saved, strict=True))
    return tensors


def test_model_round_trip() -> None:
    sizes = {"layers.0.mlp.experts.gate_proj.weight": (3, 2, 4), "embed.weight": (5, 2), "head.weight": (5, 2)}
    sizes |= {"layers.0.attn.q_proj.weight": (4, 2), "layers.0.attn.k_proj.weight": (2, 2)}
    sizes |= {"layers.0.attn.q_proj.bias": (4,), "layers.0.attn.k_proj.bias": (2,), "layers.0.attn.o.weight": (2, 4)}
    saved = to_checkpoint(sizes, TABLE)
    assert saved["model.layers.0.attn.qk_proj.bias"].tolist() == [25, 26, 27, 28, 25, 26]
    assert len(saved) == 3 + 2 + 2 + 1
    moves, unknown = load_mappings(saved, TABLE)
    assert not unknown
    loaded = {n: t for m in moves for n, t in zip(m.ours, m.load([saved[h] for h in m.hub], sizes), strict=True)}
    assert {name: tuple(t.shape) for name, t in loaded.items()} == sizes
    assert all(torch.equal(t, arange_tensor(*sizes[name]) + len(name)) for name, t in loaded.items())
