"""What must hold for every family whatever its parts are: packing, recomputation, fresh weights."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.checkpoints import (
    SHAPES,
    auto_class,
    build,
    load_model,
    load_transformers_model,
    make_batch,
    make_checkpoint,
    random_tokens,
    relative_error,
    save,
)
from tests.shapes_dense import DENSE
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.save_model import full_weight
from tunekit.data.dataloader.batch import IGNORE
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.norm import RMSNorm
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_init import init_weights

BOUNDS = [0, 7, 8, 29, 34, 46, 54]  # documents that end with rows of 18 tokens, and such that go over their ends


def gradients(model: Decoder, rows: torch.Tensor, *packing: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(rows, *packing).flatten(0, 1), rows.flatten().roll(-1)).backward()
    return [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]


@pytest.mark.parametrize("name", SHAPES)
def test_packed_documents_are_what_each_is_alone(name: str, tmp_path: Path) -> None:
    """And running the layers again for the gradients changes none of them."""
    folder = make_checkpoint(tmp_path, name)
    model = load_model(folder)
    rows = random_tokens(3, 18)
    positions = torch.cat([torch.arange(b - a) for a, b in zip(BOUNDS, BOUNDS[1:], strict=False)]).view(3, 18)
    packing = positions, SequenceLayout(torch.tensor(BOUNDS, dtype=torch.int32))
    with torch.no_grad():
        packed = model(rows, *packing).flatten(0, 1)
        for a, b in zip(BOUNDS, BOUNDS[1:], strict=False):
            assert relative_error(packed[a:b], model(rows.view(1, -1)[:, a:b])[0]) < 1e-5
    wanted = gradients(model, rows, *packing)
    MemoryConfig(activation_checkpointing="full").apply(model)
    assert all(map(torch.equal, wanted, gradients(model, rows, *packing)))


@pytest.mark.parametrize("name", SHAPES)
def test_fresh_weights_are_those_of_transformers_in_kind(name: str, tmp_path: Path) -> None:
    """What is constant there is the same here, and what is drawn is as far spread; what ends in the residual less."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SHAPES[name])
    other = auto_class(SHAPES[name]).from_config(config)
    source = HFCheckpoint.open(save(other, tmp_path))
    model = load_model(tmp_path)
    for p in model.parameters():
        p.data.fill_(math.nan)
    init_weights(model, seed=1)
    with source.reader() as wanted:
        for move in source.key_mappings:
            parts = [full_weight(model, part) for part in move.ours]
            for hub, found in zip(move.hub, move.op.save(parts), strict=True):
                drawn = wanted[hub]
                if drawn.std() == 0 or drawn.numel() == 1:
                    assert torch.equal(found, drawn), hub
                elif drawn.numel() < 100:  # some draw biases and sinks too; a few numbers tell no spread
                    assert found.isfinite().all(), hub
                else:
                    assert 0.2 < found.std() / drawn.std() < 1.5, hub
                    assert abs(found.mean() - drawn.mean()) < 10 * drawn.std() / math.sqrt(drawn.numel()), hub


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if "text_config" not in shape])
def test_norms_in_bf16_are_those_of_transformers_to_the_bit(name: str, tmp_path: Path) -> None:
    """Whether the weight multiplies before or behind the rounding differs from family to family."""
    folder = make_checkpoint(tmp_path, name)
    source, model, other = (
        HFCheckpoint.open(folder),
        load_model(folder).bfloat16(),
        load_transformers_model(folder).bfloat16(),
    )
    names = {move.ours[0]: move.hub[0] for move in source.key_mappings}
    for name, norm in model.named_modules():
        if not isinstance(norm, RMSNorm) or not norm.spec.weight or "linear_attn.norm" in names[f"{name}.weight"]:
            continue  # that of a delta net takes a gate
        x = torch.randn(3, 1, norm.weight.shape[0], dtype=torch.bfloat16)
        wanted = other.get_submodule(names[f"{name}.weight"].removesuffix(".weight"))(x)
        assert torch.equal(norm(x[..., None, :])[..., 0, :], wanted), name


@pytest.mark.parametrize("name", {shape["model_type"]: name for name, shape in DENSE.items()}.values())
@torch.no_grad()
def test_in_bf16_logits_are_as_near_to_those_of_fp32_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = save(build(SHAPES[name]).bfloat16(), tmp_path)
    rows, wanted = random_tokens(), load_transformers_model(folder)(random_tokens()).logits
    other = auto_class(SHAPES[name]).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    mine = load_model(folder, precision=PrecisionConfig("bf16", "bf16", "bf16")).eval()
    away = [(found.float() - wanted).square().mean().sqrt().item() for found in (mine(rows), other(rows).logits)]
    assert 0 < away[0] < 1.2 * away[1]


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_the_loss_is_that_of_the_logits(name: str, tmp_path: Path) -> None:
    """Scales and caps of the head are within the chunks of the loss, and their gradients too."""
    model, part = load_model(make_checkpoint(tmp_path, name)), make_batch(random_tokens())
    losses = [CrossEntropy()(model, part)]
    logits = model(part.tokens).flatten(0, 1)
    losses.append(F.cross_entropy(logits, part.targets.flatten(), ignore_index=IGNORE, reduction="sum"))
    found, wanted = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert max(map(relative_error, found, wanted)) < 1e-5
