"""From a checkpoint and choices to a model ready to train or to answer. The one place that fixes the order."""

from dataclasses import replace
from pathlib import Path

import torch

from tunekit.adapters import Frozen, Full, LoRA
from tunekit.checkpoint import atomic, peft
from tunekit.checkpoint.folder import Folder
from tunekit.checkpoint.read import read
from tunekit.checkpoint.score import insist_on_text
from tunekit.checkpoint.workspace import CONFIG, FINAL, METRICS, STATE
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.formats import Plain
from tunekit.hub import fetch
from tunekit.layout.shard import allocate, shard
from tunekit.layout.split import imagine, split
from tunekit.memory import Memory
from tunekit.models.decoder import Decoder
from tunekit.models.init import randomize
from tunekit.parallel.choice import Parallel, Sizes
from tunekit.parallel.run import Run
from tunekit.parallel.tensors import register
from tunekit.precision import Precision

PLAIN = Plain()


def model(
    source: Folder,
    weights: Plain,
    adapter: Full | LoRA,
    precision: Precision,
    memory: Memory,
    run: Run,
    fresh: bool = False,
) -> Decoder:
    """Build on no device, then fill in place. With `fresh`, weights are drawn and not read."""
    net = outline(source, weights, adapter)
    for line in weights.remarks(net):
        run.tell(line)
    split(net, run)  # layers, rows and experts that ranks share
    precision.set_matmul_precision(run.device)
    precision.apply(net, {} if fresh else source.dtypes, run.device)  # how exact it is
    memory.apply(net, run.device, run.tell)  # what is kept
    shard(net, run)  # where it is
    allocate(net, run)
    net.tie()
    register((*net.named_parameters(), *net.named_buffers()), net.splits)
    if fresh:
        randomize(net, run.seed)
    else:
        read(replace(source, exact=True) if weights.exact else source, net, run=run)
    adapter.initialize(net, run.seed)
    if adapter.start is not None:
        peft.read(Path(adapter.start), net, adapter, source)
    return net


def outline(source: Folder, weights: Plain, adapter: Full | LoRA) -> Decoder:
    """The model before it holds a number. An adapter to start from must fit it."""
    with torch.device("meta"):
        net = Decoder(source.spec)
    weights.apply(net)  # what a weight is
    adapter.apply(net)  # what is trained
    if adapter.start is not None:
        peft.fitting(Path(adapter.start), net, adapter, source)
    return net


def divisible(source: Folder, weights: Plain, adapter: Full | LoRA, parallel: Parallel) -> None:
    """UserError where devices cannot share the model so, however many there are."""
    if parallel.least != Sizes():
        imagine(outline(source, weights, adapter), parallel.least)


def opened(
    name: str, precision: Precision, run: Run, weights: Plain = PLAIN, scores: bool = False
) -> tuple[Decoder, Tokenizer]:
    """A model to ask, and its tokenizer: one that writes, or with `scores` any."""
    source, adapter, tokenizer = described(name)
    if not scores:
        insist_on_text(source, name)
    return model(source, weights, adapter, precision, Memory(), run), tokenizer


def described(name: str, files: fetch.Files = fetch.READ) -> tuple[Folder, Full | LoRA, Tokenizer]:
    """What a name stands for: a checkpoint, an adapter on its base, or what a finished run has left."""
    path = finished(fetch.resolve(name, files=files))
    if not (path / peft.CONFIG).is_file():
        source = Folder.open(path, name)
        return source, Frozen(), Tokenizer.open(path).fitted(source.spec.vocab, path)
    base = peft.base(path)
    source = peft.headed(path, Folder.open(fetch.resolve(base, files=files), base))
    adapter = replace(peft.described(path, source), start=str(path))
    own = path if (path / "tokenizer.json").is_file() else source.path
    return source, adapter, Tokenizer.open(own).fitted(source.spec.vocab, own)


def finished(path: Path) -> Path:
    """The checkpoint of a run's folder; any other folder is one itself."""
    if not (path / STATE).is_dir() and not (path / FINAL).is_dir() and not unsaved(path):
        return path
    final = atomic.locate(path / FINAL)
    if final is None:
        raise UserError(f"{path}: this run has not ended, so there is no result yet: start it again to go on")
    return final


def unsaved(path: Path) -> bool:
    """Whether this is the folder of a run that has saved nothing yet."""
    return all((path / name).is_file() for name in (CONFIG, METRICS)) and not (path / "config.json").is_file()
