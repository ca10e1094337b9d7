"""Layers, rows and experts that several ranks share, before a model holds numbers."""

from tunekit.layout import context, expert, tensor
from tunekit.models.decoder import Decoder
from tunekit.parallel.choice import Sizes
from tunekit.parallel.exchange import Imagined
from tunekit.parallel.run import Run


def split(model: Decoder, run: Run) -> None:
    """Leave of a model what is for this rank, and say so in `model.splits`; UserError where it cannot be divided."""
    tensor.split(model, run)
    context.split(model, run)
    expert.split(model, run)
    model.tie()


def imagine(model: Decoder, sizes: Sizes) -> None:
    """The same for the first of ranks that are not there: to see what it would have, or what cannot be divided."""
    if sizes.tensor > 1:
        tensor.share(model, Imagined(sizes.tensor), sizes.expert > 1)
    if sizes.context > 1:
        model.rows = context.Stretches(Imagined(sizes.context))
    if sizes.expert > 1:
        expert.share(model, Imagined(sizes.expert))
    model.tie()
