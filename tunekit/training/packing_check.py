"""A check that packed documents do not attend to each other, with the run's own model and rows, before the first step.

A few documents of the first step are run twice: packed as in training, and each alone. Any leak through positions,
masks, states or kernels changes the logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.document import Document
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder, Head

NUM_ROWS, DOCS_PER_ROW, MAX_TOKENS = 2, 3, 96  # of the probe; a unit of a preference pair counts as one document
NUM_LENGTHS = 12  # different lengths of documents
NUM_FIRST = 8  # first tokens of a document: they have the least context of their own, so a leak shows most there
# Limits of the RMS difference of a token's logits, in their standard deviations. Rounding causes 1e-6 in fp32 and 0.01
# to 0.04 in bf16, where matmuls of other shapes sum in another order; a leak causes 0.1 to 1.
LIMITS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class PackingProbe(NamedTuple):
    """A batch of packed rows, the documents in it, and the span of each in the flattened rows."""

    batch: Batch
    documents: list[Document]
    spans: list[slice]


@torch.no_grad()
def check_packing(model: Decoder, data: DataLoader, dist: DistributedContext) -> None:
    """Raise UserError if the logits of a document change when it is packed; log the largest difference if not."""
    if data.collator.capacity is None:  # rows are not packed
        return
    docs_per_row = DOCS_PER_ROW * data.mixture.docs_per_row
    sample = data.sample_documents(NUM_ROWS * docs_per_row)
    if len(sample) < 2:
        return
    # Different lengths, so that document boundaries are not at multiples of a kernel's block size.
    documents = [document.prefix(MAX_TOKENS - 7 * (i % NUM_LENGTHS)) for i, (_, document) in enumerate(sample)]
    rows = [documents[first : first + docs_per_row] for first in range(0, len(documents), docs_per_row)]
    batch, packed_rows = data.collator.collate_rows(rows)
    probe = PackingProbe(batch.to(dist.device), documents, document_spans(batch, packed_rows))
    dtype = model.compute_dtype or model.embed.weight.dtype
    limit, dtype_name = LIMITS[dtype], str(dtype).removeprefix("torch.")
    with evaluating(model):
        differences = logit_differences(model, probe, dist)
        worst = int(np.argmax(differences))  # the first NaN, if there is one
        if not differences[worst] <= limit:
            layer = first_leaking_layer(model, probe, worst, limit / 4, dist)
            raise UserError(
                f"packing: logits of {sample[worst][0]} change by {differences[worst]:.2g} standard deviations when it "
                f"is packed (limit {limit:g}): cross-document attention leak{layer}. Set data.packing=false and report "
                "a bug."
            )
    dist.log(
        f"packing: logits of {len(documents)} packed documents differ by {differences[worst]:.1g} standard deviations "
        f"from those of each alone (limit {limit:g} in {dtype_name})"
    )


@contextmanager
def evaluating(model: Decoder) -> Iterator[None]:
    """Evaluation mode, without dropout."""
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)


def document_spans(batch: Batch, rows: Sequence[Sequence[Document]]) -> list[slice]:
    """The span of each document in the flattened rows."""
    row_length, spans = batch.tokens.shape[1], []
    for number, row in enumerate(rows):
        start = number * row_length
        for document in row:
            spans.append(slice(start, start := start + len(document.tokens)))
    return spans


def logit_differences(model: Decoder, probe: PackingProbe, dist: DistributedContext) -> list[float]:
    """For each document, the RMS difference between packed and single logits, in their standard deviations.

    Of models with a score head, the hidden states are compared: a few scores have no meaningful deviation.
    """
    single = [model(to_batch(document, dist), head_fn=hidden_states).flatten(0, 1) for document in probe.documents]
    differences: list[float] = []

    def compare(hidden: Tensor, head: Head) -> Tensor:  # called inside the model, where a sharded head is gathered
        for span, single_hidden in zip(probe.spans, single, strict=True):
            pair = hidden.flatten(0, 1)[span], own_tokens(single_hidden, span)
            packed, alone = (x.float() if model.spec.score is not None else head(x).float() for x in pair)
            per_token = (packed - alone).square().mean(-1).sqrt() / alone.std(-1)
            differences.append(float(torch.stack([per_token.mean(), per_token[:NUM_FIRST].mean()]).max()))
        return hidden

    model(probe.batch.tokens, probe.batch.positions, probe.batch.layout, head_fn=compare)
    return differences


def to_batch(document: Document, dist: DistributedContext) -> Tensor:
    """The tokens of a document, (1, S) int64."""
    return torch.tensor(document.tokens, dtype=torch.long, device=dist.device)[None]  # a copy: documents are mapped


def own_tokens(values: Tensor, span: slice) -> Tensor:
    """The last values of a document (S, ...): those after the prefix that it shares with the document before."""
    return values[len(values) - (span.stop - span.start) :]


def hidden_states(hidden: Tensor, head: Head) -> Tensor:
    return hidden


def first_leaking_layer(model: Decoder, probe: PackingProbe, index: int, limit: float, dist: DistributedContext) -> str:
    """` in layer N (class)` of the first layer whose output changes for a document; empty if there is none."""
    with record_layer_outputs(model) as outputs:
        model(to_batch(probe.documents[index], dist), head_fn=hidden_states)
        model(probe.batch.tokens, probe.batch.positions, probe.batch.layout, head_fn=hidden_states)
    num_layers, span = len(outputs) // 2, probe.spans[index]
    for layer, (alone, packed) in enumerate(zip(outputs[:num_layers], outputs[num_layers:], strict=True)):
        expected = own_tokens(alone.flatten(0, 1), span).float()
        difference = packed.flatten(0, 1)[span].float() - expected
        if not difference.norm() <= limit * expected.norm():
            return f" in layer {layer} ({type(model.spec.layers[layer].mixer).__name__})"
    return ""


@contextmanager
def record_layer_outputs(model: Decoder) -> Iterator[list[Tensor]]:
    """The outputs of all layers, in the order of execution."""
    outputs: list[Tensor] = []

    def record(layer: nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(output)

    hooks = [layer.register_forward_hook(record) for layer in model.layers]
    yield outputs
    for hook in hooks:
        hook.remove()
