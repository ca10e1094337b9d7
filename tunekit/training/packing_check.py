"""Whether packed documents see each other: asked of the model and the rows at hand, before the first step.

A few documents of the first step are read twice, together as training packs them and each alone. Whatever of
positions, masks, states or kernels takes one for part of another shows in the logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.preprocess.tokenized_dataset import Document
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder, Head

ROWS, EACH, TOKENS = 2, 3, 96  # two packed rows of three documents or pairs, none longer than this
FIRST = 8  # tokens of a document that know least of their own, and show most what they see of others
# Root of the mean squared difference of a token's logits, in their standard deviations. Rounding makes 1e-6 in fp32
# and 0.01 to 0.04 in bf16, where products of other sizes add up in another order; a leak makes 0.1 to 1.
LIMITS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class PackingProbe(NamedTuple):
    """A batch of rows, the documents in them, and where what is written of each is in the flattened rows."""

    batch: Batch
    documents: list[Document]
    spans: list[slice]


@torch.no_grad()
def check_packing(model: Decoder, data: DataLoader, run: DistributedContext) -> None:
    """UserError if documents are not the same together and alone; a line for the log if they are."""
    each = EACH * data.mix.each
    sample = data.sample(ROWS * each)
    if data.layout.capacity is None or len(sample) < 2:
        return
    cut = [
        truncate_document(document, TOKENS - 7 * i) for i, (_, document) in enumerate(sample)
    ]  # bounds where no block ends
    batch, written = data.layout.written([cut[first : first + each] for first in range(0, len(cut), each)])
    trial = PackingProbe(batch.to(run.device), cut, spans(batch, written))
    dtype = model.compute or model.embed.weight.dtype
    with evaluating(model):
        found = logit_differences(model, trial, run)
        worst = int(np.argmax(found))  # of what is no number, the first
        if not found[worst] <= LIMITS[dtype]:  # what is no number is no agreement
            layer = first_leaking_layer(model, trial, worst, LIMITS[dtype] / 4, run)
            raise UserError(
                f"packing: {sample[worst][0]} is not the same beside other documents as alone: its logits differ by "
                f"{found[worst]:.2g} of their spread, and rounding by less than {LIMITS[dtype]:g}{layer}; "
                "set `data.packing: false` and report it"
            )
    kind = str(dtype).removeprefix("torch.")
    run.tell(
        f"packing: {len(cut)} documents together are what each is alone, to {found[worst]:.1g} of the spread of their "
        f"logits ({LIMITS[dtype]:g} is the limit in {kind})"
    )


def truncate_document(document: Document, most: int) -> Document:
    """The beginning of a document, which does not depend on what follows."""
    return document.begun(most)


@contextmanager
def evaluating(model: Decoder) -> Iterator[None]:
    """Without dropout."""
    training = model.training
    model.eval()
    yield
    model.train(training)


def spans(batch: Batch, rows: Sequence[Sequence[Document]]) -> list[slice]:
    """Where what is written of each document is in the flattened rows."""
    width, found = batch.tokens.shape[1], []
    for number, row in enumerate(rows):
        start = number * width
        for document in row:
            found.append(slice(start, start := start + len(document.tokens)))
    return found


def logit_differences(model: Decoder, trial: PackingProbe, run: DistributedContext) -> list[float]:
    """How far each document's logits are from those alone. Scores are too few to have a spread: there it is what they
    are made of."""
    alone = [model(to_batch(document, run), read=hidden_states).flatten(0, 1) for document in trial.documents]
    found: list[float] = []

    def read(hidden: Tensor, head: Head) -> Tensor:  # in here the head is whole where weights are sharded
        for span, other in zip(trial.spans, alone, strict=True):
            made = hidden.flatten(0, 1)[span], own_tokens(other, span)
            together, apart = (x.float() if model.spec.score is not None else head(x).float() for x in made)
            each = (together - apart).square().mean(-1).sqrt() / apart.std(-1)
            found.append(float(torch.stack([each.mean(), each[:FIRST].mean()]).max()))
        return hidden

    forward_packed(model, trial.batch, read)
    return found


def forward_packed(model: Decoder, batch: Batch, read: Callable[[Tensor, Head], Tensor]) -> None:
    model(batch.tokens, batch.positions, batch.layout, read=read)


def to_batch(document: Document, run: DistributedContext) -> Tensor:
    """The tokens (1, S) of a document."""
    return torch.tensor(document.tokens, dtype=torch.long, device=run.device)[None]  # a copy: rows are mapped


def own_tokens(whole: Tensor, span: slice) -> Tensor:
    """Of the tokens (S, ...) of a document those that are written: the last ones."""
    return whole[len(whole) - (span.stop - span.start) :]


def hidden_states(hidden: Tensor, head: Head) -> Tensor:
    return hidden


def first_leaking_layer(model: Decoder, trial: PackingProbe, number: int, limit: float, run: DistributedContext) -> str:
    """The first layer behind which a document is another one, in words; nothing if that is none."""
    with record_layer_outputs(model) as outputs:
        model(to_batch(trial.documents[number], run), read=hidden_states)
        forward_packed(model, trial.batch, hidden_states)
    half, span = len(outputs) // 2, trial.spans[number]
    for layer, (alone, together) in enumerate(zip(outputs[:half], outputs[half:], strict=True)):
        right = own_tokens(alone.flatten(0, 1), span).float()
        apart = together.flatten(0, 1)[span].float() - right
        if not apart.norm() <= limit * right.norm():
            return f" (from layer {layer} on, {type(model.spec.layers[layer].mixer).__name__})"
    return ""


@contextmanager
def record_layer_outputs(model: Decoder) -> Iterator[list[Tensor]]:
    """What the layers give, in the order in which they run."""
    outputs: list[Tensor] = []

    def keep(layer: nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(output)

    hooks = [layer.register_forward_hook(keep) for layer in model.layers]
    yield outputs
    for hook in hooks:
        hook.remove()
