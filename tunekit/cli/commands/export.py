"""`tune export`: a model as a file of llama.cpp (GGUF), or in four bits as bitsandbytes has them.

What was written is read again, and asked the same as the model.
"""

import argparse
import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from tunekit import build
from tunekit.adapters.config import FrozenModel
from tunekit.checkpoint import layerwise_forward, verify
from tunekit.checkpoint.atomic import AtomicDir
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.export import bitsandbytes_export
from tunekit.hub.errors import print_line
from tunekit.publishing import model_card
from tunekit.quantization.config import NF4Config
from tunekit.system import format_bytes

# What layers that are one tensor in files may change: there their scales are packed together. 0.006 was measured.
NESTED = 0.05, 1.0
PACKED = "Its linear layers are in four bits; transformers opens it with `pip install bitsandbytes accelerate`."


def main(args: argparse.Namespace) -> None:
    """Write, tell what was found, and print the path for scripts."""
    out = Path(args.out).expanduser()
    if out.exists():
        raise UserError(f"{out} is there already: give another name")
    if args.type in bitsandbytes_export.TYPES:
        folder(args.model, out, bitsandbytes_export.TYPES[args.type])
    else:
        file(args, out)
    print(out)


def folder(model: str, out: Path, weights: NF4Config) -> None:
    """A checkpoint in four bits, for transformers and for us: the same logits as of the model that is packed here."""
    source, adapter, _ = build.resolve_model(model)
    with AtomicDir(out) as made:
        read = bitsandbytes_export.export_bitsandbytes(source, adapter, weights, made)
        # Scales that are packed too come out as other ones when they are packed again: here they stay what they became.
        kinds = (read, weights), (HFCheckpoint.open(made), replace(weights, double_quant=False))
        rows, device = verify.probe_prompts(made, source.spec), DistributedContext().device
        wanted, found = (
            layerwise_forward.checkpoint_logits(one, FrozenModel(), rows, verify.FP32, device, kind)
            for one, kind in kinds
        )
        tolerance, peak = NESTED if weights.double_quant else (verify.TOLERANCE, verify.PEAK_FACTOR * verify.TOLERANCE)
        what = "model in four bits and files"
        result = verify.compare_logits(what, wanted, found, tolerance=tolerance, peak=peak)
        verify.save_result(made, result)
        model_card.write_minimal_card(made, source, "quantized", PACKED)
    print_line(str(result))
    verify.raise_if_failed(out)


def file(args: argparse.Namespace, out: Path) -> None:
    """A file of llama.cpp, what is in it and how far it is from the model."""
    tools = toolbox()
    source, adapter, tokenizer = build.resolve_model(args.model)
    require_language_model(source, args.model)
    name = Path(args.model.partition("@")[0]).name or out.stem
    result = tools.export(source, adapter, tokenizer, out, args.type, name)
    print_line(f"{result.quant_type}, {format_bytes(out.stat().st_size)}")
    for kind, error in result.rounding_errors.items():
        exact = "exact" if error.worst == 0 else f"largest error {error.worst:.0%} of the limit of the type"
        print_line(f"{error.count} tensors in {kind}: {exact}")
    for note in result.notes:
        print_line(f"note: {note}")
    found = verify.verify_export(source, adapter, result.file, result.drift, DistributedContext().device)
    if not found.passed:
        raise UserError(f"{out}: {found}; the file stays there, to be looked at")
    print_line(str(found))


def toolbox() -> ModuleType:
    """What writes and reads such files, which needs an extra."""
    try:
        return importlib.import_module("tunekit.export.gguf_export")
    except ImportError as error:
        missing = (error.name or "gguf").partition(".")[0]
        others = ", ".join(bitsandbytes_export.TYPES)
        raise UserError(
            f"{missing} is not installed, which every --type but {others} needs: pip install 'tunekit[gguf]'"
        ) from error
