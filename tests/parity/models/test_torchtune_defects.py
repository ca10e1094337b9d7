"""Known defects of torchtune. In each case the defect changes the results."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.helpers.dense_shapes import GEMMA2, LLAMA, MISTRAL, PHI, QWEN2, QWEN3, YARN
from tests.helpers.random_checkpoints import (
    FULL,
    build,
    load_model,
    load_transformers_model,
    random_tokens,
    relative_error,
    save,
    train,
)
from tunekit.checkpoint import save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.kernels.sequence_layout import SequenceLayout

Shape = dict[str, Any]
ROPE = {"rope_type": "default", "rope_theta": 250_000.0}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

# Shape of config.json, and the changes that torchtune made to it.
CONFIG_DEFECTS = {
    "Gemma 2: caps of scores and logits were swapped": (
        GEMMA2 | CAPS,
        {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 50.0},
    ),
    "Gemma 2: the cap of the logits was on hidden states": (GEMMA2 | CAPS, {"final_logit_softcapping": None}),
    "Phi-4: the base of its rotation was 10,000": (
        PHI | {"rope_parameters": ROPE},
        {"rope_parameters": ROPE | {"rope_theta": 1e4}},
    ),
    "Mistral: it had no window": (MISTRAL | {"sliding_window": 5}, {"sliding_window": None}),
    "Qwen3: it could not stretch rows": (QWEN3 | {"rope_parameters": YARN}, {"rope_parameters": None}),
}


def make_loud_checkpoint(shape: Shape, folder: Path) -> Path:
    """Checkpoint whose scores and logits exceed the softcaps."""
    model = build(shape)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "embed" in name:
                p.mul_(6)
    return save(model, folder)


@pytest.mark.parametrize("defect", CONFIG_DEFECTS)
@torch.no_grad()
def test_config_json_is_respected(defect: str, tmp_path: Path) -> None:
    shape, wrong = CONFIG_DEFECTS[defect]
    folder = make_loud_checkpoint(shape, tmp_path)
    expected = load_transformers_model(folder)(random_tokens()).logits
    config = transformers.AutoConfig.for_model(**(shape | wrong))
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager")
    assert relative_error(other(random_tokens()).logits, expected) > 1e-2, "the defect changes the logits"
    assert relative_error(load_model(folder)(random_tokens()), expected) < 1e-5


@torch.no_grad()
def test_gemma2_supports_packed_rows(tmp_path: Path) -> None:
    """torchtune refused them because softcapping and document masks excluded each other."""
    model = load_model(make_loud_checkpoint(GEMMA2 | CAPS, tmp_path))
    rows, bounds = random_tokens(1, 20), [0, 7, 20]
    positions = torch.cat([torch.arange(7), torch.arange(13)])[None]
    packed = model(rows, positions, SequenceLayout(torch.tensor(bounds, dtype=torch.int32)))[0]
    for a, b in zip(bounds, bounds[1:], strict=False):
        assert relative_error(packed[a:b], model(rows[:, a:b])[0]) < 1e-5


SHAPE_DEFECTS = {
    "Llama-Guard-3-1B: a head of its own where Llama 3.2 1B has none": LLAMA | {"tie_word_embeddings": False},
    "Mistral-Nemo: heads that do not add up to the width": MISTRAL | {"head_dim": 20, "sliding_window": None},
    "Qwen2: the tied head was lost in the conversion": QWEN2 | {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("defect", SHAPE_DEFECTS)
def test_unusual_shape_is_trained_and_saved(defect: str, tmp_path: Path) -> None:
    """The saved files have exactly the tensors of the original."""
    source = save(build(SHAPE_DEFECTS[defect]), tmp_path / "source")
    model = load_model(source)
    train(model, FULL, steps=1)
    (tmp_path / "out").mkdir()
    save_model.save_model(tmp_path / "out", model, HFCheckpoint.open(source), quiet=True)
    files = [load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out")]
    assert files[0].keys() == files[1].keys()
    with torch.no_grad():
        expected = load_transformers_model(tmp_path / "out")(random_tokens()).logits
        assert relative_error(model.eval()(random_tokens()), expected) < 1e-5
        assert relative_error(load_transformers_model(source)(random_tokens()).logits, expected) > 1e-2, (
            "training changed the logits"
        )
