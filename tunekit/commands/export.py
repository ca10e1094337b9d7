"""`tune export`: a model as a file of llama.cpp (GGUF), or in four bits as bitsandbytes has them.

What was written is read again, and asked the same as the model.
"""

import argparse
import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from tunekit import assemble, card, verify
from tunekit.adapters import Frozen
from tunekit.checkpoint import stream
from tunekit.checkpoint.atomic import readable, whole
from tunekit.checkpoint.folder import Folder
from tunekit.checkpoint.score import insist_on_text
from tunekit.errors import UserError
from tunekit.export import packed
from tunekit.formats import NF4
from tunekit.hub.trouble import tell
from tunekit.parallel.run import Run

# What layers that are one tensor in files may change: there their scales are packed together. 0.006 was measured.
NESTED = 0.05, 1.0
PACKED = "Its linear layers are in four bits; transformers opens it with `pip install bitsandbytes accelerate`."


def main(args: argparse.Namespace) -> None:
    """Write, tell what was found, and print the path for scripts."""
    out = Path(args.out).expanduser()
    if out.exists():
        raise UserError(f"{out} is there already: give another name")
    if args.type in packed.TYPES:
        folder(args.model, out, packed.TYPES[args.type])
    else:
        file(args, out)
    print(out)


def folder(model: str, out: Path, weights: NF4) -> None:
    """A checkpoint in four bits, for transformers and for us: the same logits as of the model that is packed here."""
    source, adapter, _ = assemble.described(model)
    with whole(out) as made:
        read = packed.export(source, adapter, weights, made)
        # Scales that are packed too come out as other ones when they are packed again: here they stay what they became.
        kinds = (read, weights), (Folder.open(made), replace(weights, nested=False))
        rows, device = verify.probes(made, source.spec), Run().device
        wanted, found = (stream.logits(one, Frozen(), rows, verify.EXACT, device, kind) for one, kind in kinds)
        tolerance, peak = NESTED if weights.nested else (verify.FINEST, verify.PEAK * verify.FINEST)
        what = "model in four bits and files"
        result = verify.compare(what, wanted, found, tolerance=tolerance, peak=peak)
        verify.kept(made, result)
        card.minimal(made, source, "quantized", PACKED)
    tell(str(result))
    verify.insist(out)


def file(args: argparse.Namespace, out: Path) -> None:
    """A file of llama.cpp, what is in it and how far it is from the model."""
    tools = toolbox()
    source, adapter, tokenizer = assemble.described(args.model)
    insist_on_text(source, args.model)
    name = Path(args.model.partition("@")[0]).name or out.stem
    result = tools.export(source, adapter, tokenizer, out, args.type, name)
    tell(f"{result.word}, {readable(out.stat().st_size)}")
    for kind, stray in result.strays.items():
        exact = "exact" if stray.worst == 0 else f"the largest error is {stray.worst:.0%} of what the type allows"
        tell(f"{stray.count} tensors in {kind}: {exact}")
    for note in result.notes:
        tell(f"note: {note}")
    found = verify.exported(source, adapter, result.file, result.drift, Run().device)
    if not found.passed:
        raise UserError(f"{out}: {found}; the file stays there, to be looked at")
    tell(str(found))


def toolbox() -> ModuleType:
    """What writes and reads such files, which needs an extra."""
    try:
        return importlib.import_module("tunekit.export.model")
    except ImportError as error:
        missing = (error.name or "gguf").partition(".")[0]
        others = ", ".join(packed.TYPES)
        raise UserError(
            f"{missing} is not installed, which every --type but {others} needs: pip install 'tunekit[gguf]'"
        ) from error
