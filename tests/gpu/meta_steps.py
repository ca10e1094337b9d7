"""Training steps of the recipes on the meta device: a model, batches, losses and optimizers that hold no numbers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.checkpoints import SHAPES
from tests.gpu.device_rules import META
from tunekit import assemble
from tunekit.adapters import Frozen, Full, LoRA
from tunekit.checkpoint.folder import Folder
from tunekit.data.prepared.documents import Document
from tunekit.data.signs import Sign
from tunekit.data.steps.batch import Batch, Layout
from tunekit.formats import Plain
from tunekit.losses.answers import logps
from tunekit.losses.comparison import Loss
from tunekit.losses.divergence import Divergence
from tunekit.losses.objective import Judges, Objective
from tunekit.losses.reward import Scoring
from tunekit.memory import Memory, Update
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import family
from tunekit.models.spec import Attention, DecoderSpec, MoE, Score, Twin
from tunekit.on_policy import OnPolicy, Writer
from tunekit.optim import SGD
from tunekit.parallel.run import Run
from tunekit.precision import Precision
from tunekit.recipes import distill, preference, reward, sft
from tunekit.reference import Shift
from tunekit.teacher import Asked
from tunekit.training import Taken

BF16 = Precision("bf16", "fp32", "bf16")
# Two documents that fill a packed row, and a pair that begins with the same tokens.
LENGTHS = (20, 22, 18, 30)
SHARED_TOKENS = 9
ALIGNED = 8  # channels of bf16: 16 bytes


class Documents(list[Document]):
    """Documents as a loader has them."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(document.tokens) for document in self])


def run_on_meta() -> Run:
    run = Run.alone()
    run.device = META
    return run


def read_spec(name: str, score: Score | None = None, layers: int | None = None) -> DecoderSpec:
    """The spec of one of the SHAPES, of its first layers only where a test is not about families."""
    spec = family(SHAPES[name], name)[1]
    spec = replace(spec, layers=spec.layers[:layers])
    return spec if score is None else spec.scoring(score)


def representative_spec(name: str) -> DecoderSpec:
    """The spec of a family, with one layer of each kind, and experts of the sizes that fused products take."""
    spec = read_spec(name)
    shares_kv = any(isinstance(layer.mixer, Attention) and layer.mixer.kv_from is not None for layer in spec.layers)
    layers = spec.layers if shares_kv else tuple(dict.fromkeys(spec.layers))
    return replace(spec, layers=tuple(replace(layer, ffn=aligned(layer.ffn)) for layer in layers))


def aligned(ffn: Any) -> Any:
    """Experts of other sizes are multiplied one by one, for which the host waits for the number of their rows."""
    if isinstance(ffn, Twin):
        return replace(ffn, sparse=aligned(ffn.sparse))
    return replace(ffn, hidden=-(-ffn.hidden // ALIGNED) * ALIGNED) if isinstance(ffn, MoE) else ffn


def build_model(
    spec: DecoderSpec,
    weights: Plain | None = None,
    adapter: Full | LoRA | None = None,
    memory: Memory | None = None,
    device: torch.device = META,
) -> Decoder:
    """A model whose parameters are on the device, without numbers on meta."""
    weights, adapter, memory = weights or Plain(), adapter or Full(), memory or Memory()
    source = Folder(Path("meta"), "meta", {}, family(SHAPES["llama3.2"], "meta")[0], spec)
    model = assemble.outline(source, weights, adapter)
    BF16.apply(model, {}, META)
    memory.apply(model, META, lambda _: None)
    model.to_empty(device=device)
    model.tie()
    return model


def make_batches(packed: bool, vocab: int, sign: Sign | None = None, crossed: int = 0) -> list[Batch]:
    """Two micro-batches of packed rows, or four of one document each; owned and signed for losses that compare."""
    random, documents = np.random.default_rng(0), Documents()
    for i, length in enumerate(LENGTHS):
        tokens = random.integers(0, vocab, length).astype(np.int32)
        if i % 2:
            tokens[:SHARED_TOKENS] = documents[-1].tokens[:SHARED_TOKENS]
        signs = Sign(0) if sign is None else sign if i % 2 == 0 or sign & Sign.STEPS else Sign(0)
        targets = np.arange(length) >= length // 2
        values = np.ones(int(targets.sum()) if signs & Sign.STEPS else 1, np.float32)
        documents.append(Document(tokens, targets, length, signs, values))
    owned = sign is not None
    rows = [np.array([0, 1]), np.array([2, 3])]
    if not packed and not owned:
        rows = [np.array([i]) for i in range(len(LENGTHS))]
    shared = owned and packed and not (sign & Sign.STEPS)
    layout = Layout(2, 1, 0, 1, 0, 128 if packed else None, 2, owned=owned, crossed=crossed, shared=shared)
    return layout.batches(documents, rows)


def build_update(
    model: Decoder, adapter: Full | LoRA, run: Run, memory: Memory | None = None, optimizer: Any = None
) -> Update:
    """With SGD: torch has no fused AdamW for meta."""
    blocks = (p for layer in model.layers for p in layer.parameters())
    built = (optimizer or SGD()).build(adapter.trained(model), blocks)
    return (memory or Memory()).update(built, 0.0 if memory and memory.step_in_backward else 1.0, run)


def sft_step(model: Decoder, loss: Any, batches: list[Batch], update: Any, run: Run) -> Taken:
    return sft.train_step(model, batches, SimpleNamespace(loss=loss), update, run)


def preference_step(model: Decoder, terms: tuple[Loss, ...], batches: list[Batch], update: Any, run: Run) -> Taken:
    paired = all(term.each == 2 for term in terms)
    judge = partial(logps, model)
    goal = Objective(terms, paired=paired, judges=Judges(judge, judge))
    return preference.train_step(model, batches, SimpleNamespace(), update, run, goal, Shift())


def reward_step(model: Decoder, loss: Scoring, batches: list[Batch], update: Any, run: Run) -> Taken:
    return reward.train_step(model, batches, SimpleNamespace(loss=loss), update, run)


def distill_step(
    model: Decoder, loss: Divergence, batches: list[Batch], update: Any, run: Run, top: int | None = None
) -> Taken:
    teacher = Asked(build_model(model.spec, adapter=Frozen()), top, model.spec.vocab)
    layout = Layout(2, 1, 0, 1, 0, 128)
    writer = Writer(OnPolicy(), layout, 128, frozenset())
    return distill.train_step(model, batches, SimpleNamespace(loss=loss), update, run, teacher, writer)
