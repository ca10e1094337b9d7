"""What must hold for every family whatever its parts are: packing, recomputation, fresh weights."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.checkpoints import SHAPES, auto, batch, error, made, ours, save, tokens
from tunekit.checkpoint.folder import Folder
from tunekit.checkpoint.write import dense
from tunekit.data.batch import IGNORE
from tunekit.losses import CrossEntropy
from tunekit.memory import Memory
from tunekit.models.decoder import Decoder
from tunekit.models.init import randomize

BOUNDS = [0, 7, 8, 29, 34, 46, 54]  # documents that end with rows of 18 tokens, and such that go over their ends


def gradients(model: Decoder, rows: torch.Tensor, *packing: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(rows, *packing).flatten(0, 1), rows.flatten().roll(-1)).backward()
    return [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]


@pytest.mark.parametrize("name", SHAPES)
def test_packed_documents_are_what_each_is_alone(name: str, tmp_path: Path) -> None:
    """And running the layers again for the gradients changes none of them."""
    folder = made(tmp_path, name)
    model = ours(folder)
    rows = tokens(3, 18)
    positions = torch.cat([torch.arange(b - a) for a, b in zip(BOUNDS, BOUNDS[1:], strict=False)]).view(3, 18)
    packing = positions, torch.tensor(BOUNDS, dtype=torch.int32)
    with torch.no_grad():
        packed = model(rows, *packing).flatten(0, 1)
        for a, b in zip(BOUNDS, BOUNDS[1:], strict=False):
            assert error(packed[a:b], model(rows.view(1, -1)[:, a:b])[0]) < 1e-5
    wanted = gradients(model, rows, *packing)
    Memory(recompute=True).apply(model)
    assert all(map(torch.equal, wanted, gradients(model, rows, *packing)))


@pytest.mark.parametrize("name", SHAPES)
def test_fresh_weights_are_those_of_transformers_in_kind(name: str, tmp_path: Path) -> None:
    """What is constant there is the same here, and what is drawn is as far spread; what ends in the residual less."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SHAPES[name])
    other = auto(SHAPES[name]).from_config(config)
    source = Folder.open(save(other, tmp_path))
    model = ours(tmp_path)
    for p in model.parameters():
        p.data.fill_(math.nan)
    randomize(model, seed=1)
    with source.reader() as wanted:
        for move in source.moves:
            parts = [dense(model, part) for part in move.ours]
            for hub, found in zip(move.hub, move.op.save(parts), strict=True):
                theirs = wanted[hub]
                if theirs.std() == 0 or theirs.numel() == 1:
                    assert torch.equal(found, theirs), hub
                elif theirs.numel() < 100:  # some draw biases and sinks too; a few numbers tell no spread
                    assert found.isfinite().all(), hub
                else:
                    assert 0.2 < found.std() / theirs.std() < 1.5, hub
                    assert abs(found.mean() - theirs.mean()) < 10 * theirs.std() / math.sqrt(theirs.numel()), hub


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_the_loss_is_that_of_the_logits(name: str, tmp_path: Path) -> None:
    """Scales and caps of the head are within the chunks of the loss, and their gradients too."""
    model, part = ours(made(tmp_path, name)), batch(tokens())
    losses = [CrossEntropy()(model, part)]
    logits = model(part.tokens).flatten(0, 1)
    losses.append(F.cross_entropy(logits, part.targets.flatten(), ignore_index=IGNORE, reduction="sum"))
    found, wanted = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert max(map(error, found, wanted)) < 1e-5
