"""Training steps of the recipes on the meta device: a model, batches, losses and optimizers that hold no numbers."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.gpu.device_rules import META
from tests.helpers.optimizer_step import step_optimizer
from tests.helpers.random_checkpoints import SHAPES
from tunekit import build
from tunekit.adapters.config import FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import CheckpointDir, HFCheckpoint
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.document import DocFlags, Document
from tunekit.distillation.teacher import OnlineTeacher
from tunekit.distributed.context import DistributedContext
from tunekit.losses.kl_divergence import KLDivergenceLoss
from tunekit.losses.preference_base import PreferenceLoss
from tunekit.losses.preference_objective import PreferenceObjective, ReferenceLogps
from tunekit.losses.reward import RewardLoss
from tunekit.losses.sequence_logps import frozen_logps
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import Attention, DecoderSpec, DenseMoE, MoE, ScoreHead
from tunekit.optim.config import SGDConfig
from tunekit.optim.train_optimizer import OptimizerInBackward, TrainOptimizer
from tunekit.quantization.config import NoQuantization
from tunekit.recipes import distill, preference, reward, sft

BF16 = PrecisionConfig("bf16", "fp32", "bf16")
# Two documents that fill a packed row, and a pair that begins with the same tokens.
LENGTHS = (20, 22, 18, 30)
SHARED_TOKENS = 9
ALIGNED = 8  # channels of bf16: 16 bytes


class Documents(list[Document]):
    """Documents as a loader has them."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(document.tokens) for document in self])


def run_on_meta() -> DistributedContext:
    dist = DistributedContext.single_process()
    dist.device = META
    return dist


def read_spec(name: str, score: ScoreHead | None = None, layers: int | None = None) -> DecoderSpec:
    """The spec of one of the SHAPES, of its first layers only where a test is not about families."""
    spec = find_family(SHAPES[name], name)[1]
    spec = replace(spec, layers=spec.layers[:layers])
    return spec if score is None else spec.with_score_head(score)


def representative_spec(name: str) -> DecoderSpec:
    """The spec of a family, with one layer of each kind, and experts of the sizes that fused products take."""
    spec = read_spec(name)
    mixers = [layer.mixer for layer in spec.layers]
    shares_kv = any(isinstance(mixer, Attention) and mixer.kv_shared_layer is not None for mixer in mixers)
    layers = spec.layers if shares_kv else tuple(dict.fromkeys(spec.layers))
    return replace(spec, layers=tuple(replace(layer, ffn=aligned(layer.ffn)) for layer in layers))


def aligned(ffn: Any) -> Any:
    """Experts of other sizes are multiplied one by one, for which the host waits for the number of their rows."""
    if isinstance(ffn, DenseMoE):
        return replace(ffn, sparse=aligned(ffn.sparse))
    if not isinstance(ffn, MoE):
        return ffn
    return replace(ffn, intermediate_size=-(-ffn.intermediate_size // ALIGNED) * ALIGNED)


def build_model(
    spec: DecoderSpec,
    weights: NoQuantization | None = None,
    adapter: NoAdapter | LoRAConfig | None = None,
    memory: MemoryConfig | None = None,
    device: torch.device = META,
) -> Decoder:
    """A model whose parameters are on the device, without numbers on meta."""
    weights, adapter, memory = weights or NoQuantization(), adapter or NoAdapter(), memory or MemoryConfig()
    source = HFCheckpoint(CheckpointDir(Path("meta")), "meta", {}, find_family(SHAPES["llama3.2"], "meta")[0], spec)
    model = build.build_meta_model(source, weights, adapter)
    BF16.apply(model, {}, META)
    memory.apply(model, META)
    model.to_empty(device=device)
    model.tie()
    return model


def make_batches(packed: bool, vocab: int, sign: DocFlags | None = None, crossed: int = 0) -> list[Batch]:
    """Two micro-batches of packed rows, or four of one document each; owned and signed for losses that compare."""
    random, documents = np.random.default_rng(0), Documents()
    for i, length in enumerate(LENGTHS):
        tokens = random.integers(0, vocab, length).astype(np.int32)
        if i % 2:
            tokens[:SHARED_TOKENS] = documents[-1].tokens[:SHARED_TOKENS]
        signs = DocFlags(0) if sign is None else sign if i % 2 == 0 or sign & DocFlags.STEPWISE else DocFlags(0)
        targets = np.arange(length) >= length // 2
        values = np.ones(int(targets.sum()) if signs & DocFlags.STEPWISE else 1, np.float32)
        documents.append(Document(tokens, targets, length, signs, values))
    owned = sign is not None
    rows = [np.array([0, 1]), np.array([2, 3])]
    if not packed and not owned:
        rows = [np.array([i]) for i in range(len(LENGTHS))]
    shared = owned and packed and not (sign & DocFlags.STEPWISE)
    layout = Collator(
        2,
        1,
        0,
        1,
        0,
        128 if packed else None,
        2,
        with_document_ids=owned,
        max_mismatched_length=crossed,
        share_prefixes=shared,
    )
    return layout.micro_batches(documents, rows)


class StepResult(NamedTuple):
    """Loss, gradient norm and other metrics of one training step."""

    loss: Tensor
    grad_norm: Tensor
    metrics: Mapping[str, Tensor]


def build_optimizer(
    model: Decoder,
    adapter: NoAdapter | LoRAConfig,
    dist: DistributedContext,
    memory: MemoryConfig | None = None,
    optimizer: Any = None,
) -> TrainOptimizer:
    """With SGD by default: torch has no fused AdamW for meta."""
    layer_params = (p for layer in model.layers for p in layer.parameters())
    inner = (optimizer or SGDConfig()).build(adapter.param_groups(model), layer_params)
    return (memory or MemoryConfig()).wrap_optimizer(inner, dist)


def finish_step(optimizer: TrainOptimizer, loss: Tensor, metrics: Mapping[str, Tensor] | None = None) -> StepResult:
    max_grad_norm = 0.0 if isinstance(optimizer, OptimizerInBackward) else 1.0
    return StepResult(loss, step_optimizer(optimizer, max_grad_norm), metrics or {})


def sft_step(
    model: Decoder, loss: Any, batches: list[Batch], optimizer: TrainOptimizer, dist: DistributedContext
) -> StepResult:
    cfg: Any = SimpleNamespace(loss=loss)
    return finish_step(optimizer, sft.forward_backward(model, batches, cfg, dist))


def preference_step(
    model: Decoder,
    losses: tuple[PreferenceLoss, ...],
    batches: list[Batch],
    optimizer: TrainOptimizer,
    dist: DistributedContext,
) -> StepResult:
    paired = all(loss.docs_per_item == 2 for loss in losses)
    reference = partial(frozen_logps, model)
    objective = PreferenceObjective(losses, is_paired=paired, reference=ReferenceLogps(reference, reference))
    return finish_step(optimizer, *preference.forward_backward(model, batches, objective, dist))


def reward_step(
    model: Decoder, loss: RewardLoss, batches: list[Batch], optimizer: TrainOptimizer, dist: DistributedContext
) -> StepResult:
    cfg: Any = SimpleNamespace(loss=loss)
    return finish_step(optimizer, *reward.forward_backward(model, batches, cfg, dist))


def distill_step(
    model: Decoder,
    loss: KLDivergenceLoss,
    batches: list[Batch],
    optimizer: TrainOptimizer,
    dist: DistributedContext,
    top_k: int | None = None,
) -> StepResult:
    teacher = OnlineTeacher(build_model(model.spec, adapter=FrozenModel()), top_k, model.spec.vocab)
    cfg: Any = SimpleNamespace(loss=loss)
    return finish_step(optimizer, *distill.forward_backward(model, batches, cfg, teacher, dist))
