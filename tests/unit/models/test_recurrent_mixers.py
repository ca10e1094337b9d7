"""Models with Mamba 2 or short convolutions: packing, padding, activation checkpointing, adapters, refused configs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.helpers.random_checkpoints import SHAPES, load_model, make_checkpoint, random_tokens, relative_error
from tunekit.adapters.config import LoRAConfig
from tunekit.errors import UserError
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.mamba2 import ParallelState
from tunekit.models.recurrent import RecurrentState

NAMES = ["lfm2-biases", "bamba-biases", "falcon-h1", "nemotron-h", "granite4"]


def gradients(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_match_separate_documents(name: str, tmp_path: Path) -> None:
    """Logits and gradients of packed rows equal those of each document alone: nothing leaks across their bounds, also
    across those of rows and chunks."""
    model = load_model(make_checkpoint(tmp_path, name))
    rows, bounds = random_tokens(2, 80), [0, 1, 3, 66, 80, 99, 160]
    documents = rows.flatten().split(torch.tensor(bounds).diff().tolist())
    positions = torch.cat([torch.arange(len(document)) for document in documents]).view_as(rows)
    layout = SequenceLayout(torch.tensor(bounds, dtype=torch.int32))
    packed = model(rows, positions, layout)
    separate = torch.cat([model(document[None])[0] for document in documents]).view_as(packed)
    assert relative_error(packed, separate) < 1e-5
    weight = torch.randn_like(packed)
    actual, expected = gradients(model, (packed * weight).sum()), gradients(model, (separate * weight).sum())
    assert max(relative_error(actual[key], grad) for key, grad in expected.items()) < 1e-4
    # Other tokens in the first documents change no bit of the last one.
    changed = torch.cat([(rows.flatten()[:99] + 1) % 67, documents[-1]]).view_as(rows)
    with torch.no_grad():
        first, second = (model(r, positions, layout).flatten(0, 1)[99:] for r in (rows, changed))
    assert torch.equal(first, second)
    checkpointed = load_model(tmp_path, memory=MemoryConfig(activation_checkpointing="full"))
    recomputed = gradients(checkpointed, (checkpointed(rows, positions, layout) * weight).sum())
    assert all(torch.equal(recomputed[key], grad) for key, grad in actual.items())


@pytest.mark.parametrize("name", NAMES)
def test_padding_does_not_change_the_state(name: str, tmp_path: Path) -> None:
    """After a prefill of rows with several lengths, the state of each row equals that of the row alone."""
    model = load_model(make_checkpoint(tmp_path, name)).eval()
    lengths = [5, 1, 70, 2]
    rows = [random_tokens(1, length, seed=length)[0] for length in lengths]

    @torch.no_grad()
    def run_and_get_states(batch: Tensor, lengths: list[int]) -> list[RecurrentState]:
        cache = model.make_cache(len(batch), 80)
        model(batch, cache=cache, lengths=torch.tensor(lengths))
        caches = [layer.mamba if isinstance(layer, ParallelState) else layer for layer in cache.layers]
        return [layer for layer in caches if isinstance(layer, RecurrentState)]

    together = run_and_get_states(pad_sequence(rows, batch_first=True, padding_value=3), lengths)
    assert together
    for i, row in enumerate(rows):
        for actual, expected in zip(together, run_and_get_states(row[None], [len(row)]), strict=True):
            assert relative_error(actual.tail[i], expected.tail[0]) < 1e-5
            if expected.states.numel():
                assert relative_error(actual.states[i], expected.states[0]) < 1e-5


@pytest.mark.parametrize(("name", "is_adaptable"), [("bamba", True), ("falcon-h1", False), ("nemotron-h", False)])
def test_output_projections_that_peft_refuses_are_not_adapted(name: str, is_adaptable: bool, tmp_path: Path) -> None:
    names = LoRAConfig(4).target_layers(load_model(make_checkpoint(tmp_path, name)))
    assert any(layer.endswith(".in_proj") for layer in names)
    assert any(layer.endswith(".out_proj") for layer in names) == is_adaptable


@pytest.mark.parametrize(("name", "change", "error"), [
    ("bamba", {"time_step_limit": [0.001, 0.1]}, "time_step_limit .* is not supported"),
    ("bamba", {"mamba_d_head": 7}, "mamba_d_head 7"),
    ("bamba", {"mamba_n_groups": 3}, "mamba_n_groups 3"),
    ("falcon-h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers must have 2 values"),
    ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
    ("granite4", {"layer_types": ["mamba", "sliding_attention", "mamba"]}, "layer_types: 'sliding_attention'"),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
    ("nemotron-h", {"moe_latent_size": 16}, "moe_latent_size 16 is not supported"),
    ("nemotron-h", {"layers_block_type": ["conv"]}, "layers_block_type: 'conv'"),
    ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "hybrid_override_pattern: 'X'"),
    ("lfm2", {"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types: 'linear_attention'"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm True is not supported"),
    ("cohere2", {"sliding_window": None}, "sliding_window must be an integer"),
    ("ernie4.5-moe", {"use_bias": True}, "use_bias True is not supported"),
])  # fmt: skip
def test_unsupported_values_are_refused_with_their_key(name: str, change: dict, error: str) -> None:
    with pytest.raises(UserError, match=error):
        find_family(SHAPES[name] | change, "config.json")


def test_nemotron_layers_may_be_a_pattern() -> None:
    """In published files."""
    shape = SHAPES["nemotron-h"]
    pattern = {key: value for key, value in shape.items() if key != "layers_block_type"}
    expected = find_family(shape, "config.json")[1]
    assert find_family(pattern | {"hybrid_override_pattern": "M-*EM"}, "config.json")[1] == expected
