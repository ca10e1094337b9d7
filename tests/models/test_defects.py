"""What torchtune did wrong, by name. Each case is one in which the wrong way gives other numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.checkpoints import (
    FULL,
    build,
    load_model,
    load_transformers_model,
    random_tokens,
    relative_error,
    save,
    train,
)
from tests.shapes_dense import GEMMA2, LLAMA, MISTRAL, PHI, QWEN2, QWEN3, YARN
from tunekit.checkpoint import save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.kernels.sequence_layout import SequenceLayout

Shape = dict[str, Any]
ROPE = {"rope_type": "default", "rope_theta": 250_000.0}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

# The shape as its config.json says it, and as torchtune built it whatever config.json said.
BUILT = {
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


def loud(shape: Shape, folder: Path) -> Path:
    """A checkpoint whose scores and logits go beyond any cap."""
    model = build(shape)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "embed" in name:
                p.mul_(6)
    return save(model, folder)


@pytest.mark.parametrize("defect", BUILT)
@torch.no_grad()
def test_config_json_decides(defect: str, tmp_path: Path) -> None:
    shape, wrong = BUILT[defect]
    folder = loud(shape, tmp_path)
    wanted = load_transformers_model(folder)(random_tokens()).logits
    config = transformers.AutoConfig.for_model(**(shape | wrong))
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager")
    assert relative_error(other(random_tokens()).logits, wanted) > 1e-2, "the defect shows here"
    assert relative_error(load_model(folder)(random_tokens()), wanted) < 1e-5


@torch.no_grad()
def test_gemma_2_in_packed_rows(tmp_path: Path) -> None:
    """They were refused: documents need a mask, and so did the cap."""
    model = load_model(loud(GEMMA2 | CAPS, tmp_path))
    rows, bounds = random_tokens(1, 20), [0, 7, 20]
    positions = torch.cat([torch.arange(7), torch.arange(13)])[None]
    packed = model(rows, positions, SequenceLayout(torch.tensor(bounds, dtype=torch.int32)))[0]
    for a, b in zip(bounds, bounds[1:], strict=False):
        assert relative_error(packed[a:b], model(rows[:, a:b])[0]) < 1e-5


SIZES = {
    "Llama-Guard-3-1B: a head of its own where Llama 3.2 1B has none": LLAMA | {"tie_word_embeddings": False},
    "Mistral-Nemo: heads that do not add up to the width": MISTRAL | {"head_dim": 20, "sliding_window": None},
    "Qwen2: the tied head got lost on the way back": QWEN2 | {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("defect", SIZES)
def test_a_size_that_no_builder_knew_is_trained_and_written(defect: str, tmp_path: Path) -> None:
    """And its files have the tensors that they had, no more and no fewer."""
    source = save(build(SIZES[defect]), tmp_path / "source")
    model = load_model(source)
    train(model, FULL, steps=1)
    (tmp_path / "out").mkdir()
    save_model.save_model(tmp_path / "out", model, HFCheckpoint.open(source), quiet=True)
    files = [load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out")]
    assert files[0].keys() == files[1].keys()
    with torch.no_grad():
        wanted = load_transformers_model(tmp_path / "out")(random_tokens()).logits
        assert relative_error(model.eval()(random_tokens()), wanted) < 1e-5
        assert relative_error(load_transformers_model(source)(random_tokens()).logits, wanted) > 1e-2, (
            "it learnt something"
        )
