"""Properties of all families: packing, activation checkpointing, initial weights, bf16 and the loss."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.helpers.dense_shapes import DENSE
from tests.helpers.random_checkpoints import (
    SHAPES,
    WEIGHTLESS_OPTIONS,
    auto_class,
    build,
    load_model,
    load_transformers_model,
    make_batch,
    make_checkpoint,
    random_tokens,
    relative_error,
    save,
    shallow_shape,
)
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

BOUNDS = [0, 7, 8, 36, 54]  # document boundaries: some coincide with rows of 18 tokens, some do not


def logits_and_gradients(
    model: Decoder, rows: torch.Tensor, *packing: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits (tokens, vocab) and all gradients."""
    model.zero_grad()
    logits = model(rows, *packing).flatten(0, 1)
    F.cross_entropy(logits, rows.flatten().roll(-1)).backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]


@pytest.mark.parametrize("name", SHAPES)
def test_packed_documents_match_separate_documents(name: str, tmp_path: Path) -> None:
    """Activation checkpointing does not change the gradients."""
    folder = make_checkpoint(tmp_path, name)
    model = load_model(folder)
    rows = random_tokens(3, 18)
    positions = torch.cat([torch.arange(b - a) for a, b in zip(BOUNDS, BOUNDS[1:], strict=False)]).view(3, 18)
    packing = positions, SequenceLayout(torch.tensor(BOUNDS, dtype=torch.int32))
    packed, expected = logits_and_gradients(model, rows, *packing)
    with torch.no_grad():
        for a, b in zip(BOUNDS, BOUNDS[1:], strict=False):
            assert relative_error(packed[a:b], model(rows.view(1, -1)[:, a:b])[0]) < 1e-5
    MemoryConfig(activation_checkpointing="full").apply(model)
    assert all(map(torch.equal, expected, logits_and_gradients(model, rows, *packing)[1]))


# Shapes that differ only in options without weights have the same initial weights.
WEIGHT_SHAPES = {repr({k: v for k, v in SHAPES[name].items() if k not in WEIGHTLESS_OPTIONS}): name for name in SHAPES}


@pytest.mark.parametrize("name", WEIGHT_SHAPES.values())
def test_initial_weights_are_distributed_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Constants are equal, and random values have a similar standard deviation; residual projections are smaller."""
    torch.manual_seed(0)
    shape = shallow_shape(name)
    transformers_model = auto_class(shape).from_config(transformers.AutoConfig.for_model(**shape))
    source = HFCheckpoint.open(save(transformers_model, tmp_path))
    model = load_model(tmp_path)
    for p in model.parameters():
        p.data.fill_(math.nan)
    init_weights(model, seed=1)
    with source.reader() as expected:
        for mapping in source.key_mappings:
            tensors = [full_weight(model, tensor_name) for tensor_name in mapping.ours]
            for hub, actual in zip(mapping.hub, mapping.op.save(tensors), strict=True):
                reference = expected[hub]
                if reference.std() == 0 or reference.numel() == 1:
                    assert torch.equal(actual, reference), hub
                elif reference.numel() < 100:  # the standard deviation of few values is not significant
                    assert actual.isfinite().all(), hub
                else:
                    assert 0.2 < actual.std() / reference.std() < 1.5, hub
                    assert abs(actual.mean() - reference.mean()) < 10 * reference.std() / math.sqrt(
                        reference.numel()
                    ), hub


# One shape of each family, with and without experts, and those that are about norms.
TEXT_SHAPES = {name: shape["model_type"] for name, shape in SHAPES.items() if "text_config" not in shape}
NORM_SHAPES = [*{(kind, "moe" in name): name for name, kind in TEXT_SHAPES.items()}.values()]
NORM_SHAPES += [name for name in TEXT_SHAPES if "norm" in name and name not in NORM_SHAPES]


@pytest.mark.parametrize("name", NORM_SHAPES)
def test_bf16_norms_match_transformers_bit_by_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families differ in whether the weight is applied before or after rounding to bf16."""
    monkeypatch.setitem(SHAPES, name, shallow_shape(name))
    folder = make_checkpoint(tmp_path, name)
    source, model, transformers_model = (
        HFCheckpoint.open(folder),
        load_model(folder).bfloat16(),
        load_transformers_model(folder).bfloat16(),
    )
    names = {move.ours[0]: move.hub[0] for move in source.key_mappings}
    for name, norm in model.named_modules():
        if not isinstance(norm, RMSNorm) or not norm.spec.weight or "linear_attn.norm" in names[f"{name}.weight"]:
            continue  # the norm of a delta net has a gate
        x = torch.randn(3, 1, norm.weight.shape[0], dtype=torch.bfloat16)
        hub_name = names[f"{name}.weight"].removesuffix(".weight").replace("backbone.", "model.")  # of Nemotron-H
        expected = transformers_model.get_submodule(hub_name)(x)
        assert torch.equal(norm(x[..., None, :])[..., 0, :], expected), name


@pytest.mark.parametrize("name", {shape["model_type"]: name for name, shape in DENSE.items()}.values())
@torch.no_grad()
def test_bf16_error_is_at_most_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = save(build(SHAPES[name]).bfloat16(), tmp_path)
    rows, expected = random_tokens(), load_transformers_model(folder)(random_tokens()).logits
    transformers_model = (
        auto_class(SHAPES[name]).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    )
    model = load_model(folder, precision=PrecisionConfig("bf16", "bf16", "bf16")).eval()
    errors = [
        (actual.float() - expected).square().mean().sqrt().item()
        for actual in (model(rows), transformers_model(rows).logits)
    ]
    assert 0 < errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_chunked_loss_matches_the_loss_of_logits(name: str, tmp_path: Path) -> None:
    """Logit scale and softcap are part of the chunked loss and its gradients."""
    model, batch = load_model(make_checkpoint(tmp_path, name)), make_batch(random_tokens())
    losses = [CrossEntropy()(model, batch)]
    logits = model(batch.tokens).flatten(0, 1)
    losses.append(F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"))
    actual, expected = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert max(map(relative_error, actual, expected)) < 1e-5
