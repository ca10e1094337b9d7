"""Losses of routers equal those of transformers, with gradients, on padded rows and on two ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.compare_layouts import PROPORTIONAL, compare, make_checkpoint_dir
from tests.helpers.random_checkpoints import SHAPES, build, load_model, load_transformers_model, rewrite_config, save
from tests.helpers.training_steps import Case
from tunekit.adapters.config import LoRAConfig
from tunekit.data.dataloader.batch import Batch, Collator, LossWeights
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import FieldError, UserError
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.families.moe_base import NUM_EXPERTS_KEYS

COEF = 0.5


def is_sparse(shape: dict[str, Any]) -> bool:
    return any(shape.get(key) for key in (*NUM_EXPERTS_KEYS, "moe_num_experts")) and "text_config" not in shape


SPARSE = {shape["model_type"]: name for name, shape in SHAPES.items() if is_sparse(shape)}.values()


def padded_batch() -> Batch:
    """Rows of three lengths; the first half of each is a prompt."""
    generator = torch.Generator().manual_seed(1)
    documents = []
    for length in (5, 11, 8):
        tokens = torch.randint(1, 60, (length,), generator=generator, dtype=torch.int32).numpy()
        documents.append(Document(tokens, (torch.arange(length) >= length // 2).numpy(), length))
    rows = [torch.tensor([i]).numpy() for i in range(3)]
    (batch,) = Collator(3, 3, 0, 1, 0, None).micro_batches(TokenizedDataset.from_documents(documents), rows)
    return batch


def train_once(model: Decoder, loss: CrossEntropy, batch: Batch) -> Tensor:
    loss.prepare(model)
    value = loss(model, batch) / batch.num_target_tokens
    value.backward()
    return value.detach()


@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_load_balancing_loss_equals_transformers(name: str, activation_checkpointing: str, tmp_path: Path) -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": COEF}
    folder = save(build(SHAPES[name] | changes), tmp_path)
    batch, model, reference = padded_batch(), load_model(folder).train(), load_transformers_model(folder).train()
    MemoryConfig(activation_checkpointing=activation_checkpointing).apply(model)
    loss = CrossEntropy()  # the coefficient is that of config.json
    value = train_once(model, loss, batch)
    labels = batch.targets.roll(1, dims=1)
    output = reference(batch.tokens, attention_mask=batch.token_mask.long(), labels=labels)
    output.loss.backward()
    assert value.item() == pytest.approx(output.loss.item(), rel=1e-5)
    with DistributedContext(0, "cpu") as dist:
        metrics = loss.pop_metrics(model, dist)
        assert metrics.keys() == {"aux_loss"}
        assert metrics["aux_loss"].item() == pytest.approx(output.aux_loss.item(), rel=1e-5)
        assert loss.pop_metrics(model, dist) == {}
    for layer, theirs in zip(model.layers, reference.model.layers, strict=True):
        torch.testing.assert_close(layer.mlp.router.weight.grad, theirs.mlp.gate.weight.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            layer.attn.q_proj.weight.grad, theirs.self_attn.q_proj.weight.grad, rtol=1e-4, atol=1e-6
        )
    plain = load_model(folder).train()
    assert value - train_once(plain, CrossEntropy(router_aux_loss_coef=0.0), batch) == pytest.approx(
        COEF * output.aux_loss.item(), rel=1e-4
    )
    with torch.no_grad():
        assert torch.equal(loss(model, batch), CrossEntropy(router_aux_loss_coef=0.0)(plain, batch)), (
            "not in evaluation"
        )


@pytest.mark.parametrize(
    "name", {shape["model_type"]: name for name, shape in SHAPES.items() if is_sparse(shape)}.values()
)
def test_coefficient_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Also if config.json has none, and 0 for models that have no such loss in transformers."""
    folder = save(build(SHAPES[name] | {"output_router_logits": True, "router_aux_loss_coef": COEF}), tmp_path)
    for changes in (lambda config: config, without_coefficient):
        rewrite_config(folder, changes)
        reference, batch = load_transformers_model(folder), padded_batch()
        labels = batch.targets.roll(1, dims=1)
        has_loss = reference(batch.tokens, labels=labels).get("aux_loss") is not None
        expected = reference.config.router_aux_loss_coef if has_loss else 0.0
        assert CrossEntropy().router_coefs(load_model(folder).spec)[0] == expected


def without_coefficient(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "router_aux_loss_coef"}


def test_z_loss_is_the_mean_square_of_the_log_normalizers(tmp_path: Path) -> None:
    folder = make_checkpoint_dir(tmp_path, "mixtral")
    batch, model, reference = padded_batch(), load_model(folder).train(), load_transformers_model(folder)
    logits = reference(batch.tokens, attention_mask=batch.token_mask.long(), output_router_logits=True).router_logits
    mask = batch.token_mask.flatten()
    expected = torch.stack([layer[mask].logsumexp(-1).square() for layer in logits]).mean()
    with_z, plain = (train_once(model, CrossEntropy(router_z_loss_coef=coef), batch) for coef in (0.1, 0.0))
    assert (with_z - plain).item() == pytest.approx(0.1 * expected.item(), rel=1e-4)


def test_metric_is_the_mean_over_the_weights_of_the_target_tokens(tmp_path: Path) -> None:
    """Micro-batches count in the metric as in the loss."""
    model, loss = load_model(make_checkpoint_dir(tmp_path, "mixtral")).train(), CrossEntropy(router_aux_loss_coef=1.0)
    padded, batches = padded_batch(), []
    for tokens, weight in ((padded.tokens, 1.0), (padded.tokens.flip(0), 0.25)):
        weights, total = torch.full(tokens.shape, weight), weight * padded.num_target_tokens
        batches.append(replace(padded, tokens=tokens, loss_weights=LossWeights(weights, total)))
    loss.prepare(model)
    means = []
    with DistributedContext(0, "cpu") as dist:
        for group in (batches[:1], batches[1:], batches):
            for batch in group:
                loss(model, batch)
            means.append(loss.pop_metrics(model, dist)["aux_loss"].item())
    first, second, both = means
    assert abs(first - second) > 1e-3
    assert both == pytest.approx(0.8 * first + 0.2 * second, rel=1e-6)


def test_coefficient_of_the_checkpoint_is_off_by_default(tmp_path: Path) -> None:
    assert CrossEntropy().router_coefs(load_model(make_checkpoint_dir(tmp_path, "mixtral")).spec) == (0.0, 0.0)


def test_router_losses_need_experts_and_valid_weights(tmp_path: Path) -> None:
    dense, sparse = (load_model(make_checkpoint_dir(tmp_path, name)) for name in ("dense", "sparse"))
    with pytest.raises(UserError, match=r"^loss\.router_aux_loss_coef: "):
        CrossEntropy(router_aux_loss_coef=0.1).prepare(dense)
    with pytest.raises(UserError, match=r"^loss\.router_z_loss_coef: "):
        CrossEntropy(router_z_loss_coef=0.1).prepare(dense)
    with pytest.raises(FieldError):
        CrossEntropy(router_aux_loss_coef=-1.0)
    sparse.flatten_rows = True  # compiled
    with pytest.raises(UserError, match=r"^compile: "):
        CrossEntropy(router_aux_loss_coef=0.1).prepare(sparse)


@pytest.mark.multi
def test_router_losses_on_two_ranks_match_one_process(tmp_path: Path) -> None:
    loss = CrossEntropy(router_aux_loss_coef=COEF, router_z_loss_coef=0.1)
    case = Case(make_checkpoint_dir(tmp_path, "sparse"), optimizer=PROPORTIONAL, steps=2, loss=loss)
    odd = replace(case, packed=True, length=23)
    compare(
        2,
        {
            "fsdp": replace(case, memory=MemoryConfig(activation_checkpointing="full")),
            "tp": replace(odd, parallel=ParallelConfig(tp=2)),
            "tp, lora": replace(case, parallel=ParallelConfig(tp=2), adapter=LoRAConfig(4)),
            "cp": replace(odd, parallel=ParallelConfig(cp=2)),
            "ep": replace(case, parallel=ParallelConfig(ep=2)),
        },
    )
