"""`tune export`: export a model to a GGUF file (llama.cpp) or a 4-bit bitsandbytes checkpoint.

The result is loaded again, and its logits are compared with those of the model.
"""

import argparse
import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import verify
from tunekit.checkpoint.atomic import AtomicDir
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import ModelSource, checkpoint_logits
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.export import bitsandbytes_export
from tunekit.hub.errors import print_line
from tunekit.publishing import model_card
from tunekit.quantization.config import NF4Config
from tunekit.system import format_bytes

# Of logits. Layers that are fused in files share double-quantized scales. 0.006 was measured.
DOUBLE_QUANT_TOLERANCE = 0.025
CARD_TEXT = (
    "Its linear layers are quantized to 4 bits; transformers loads it after `pip install bitsandbytes accelerate`."
)


def main(args: argparse.Namespace) -> None:
    """Export and verify the model. Standard output is only the path, for use in scripts."""
    print(write_exported(args))


def write_exported(args: argparse.Namespace) -> Path:
    """Export and verify the model, and return its file or directory."""
    out = Path(args.out).expanduser()
    if out.exists():
        raise UserError(f"{out}: already exists. Choose another name")
    if args.type in bitsandbytes_export.TYPES:
        export_bitsandbytes(args.model, out, bitsandbytes_export.TYPES[args.type])
    else:
        export_gguf(args, out)
    return out


def export_bitsandbytes(model: str, out: Path, weights: NF4Config) -> None:
    """Write a 4-bit checkpoint and compare its logits with those of the model quantized in memory."""
    source, adapter, _ = resolve_unchanged(model)
    with AtomicDir(out) as directory:
        read = bitsandbytes_export.export_bitsandbytes(source, adapter, weights, directory)
        # Quantizing scales again would change them, so the loaded checkpoint uses the dequantized scales.
        exported = ModelSource(HFCheckpoint.open(directory), replace(weights, double_quant=False))
        rows, device = verify.probe_prompts(directory, source.spec), DistributedContext().device
        expected = checkpoint_logits(ModelSource(read, weights), rows, device)
        actual = checkpoint_logits(exported, rows, device, like=expected)
        tolerance = DOUBLE_QUANT_TOLERANCE if weights.double_quant else verify.TOLERANCE
        title = "4-bit model and exported files"
        result = verify.compare_logits(title, expected, actual, tolerance=tolerance)
        result.write(directory)
        model_card.write_minimal_card(directory, source, "quantized", CARD_TEXT)
    print_line(str(result))
    verify.raise_if_failed(out)


def export_gguf(args: argparse.Namespace, out: Path) -> None:
    """Write a GGUF file, and report its rounding errors and the difference of its logits."""
    tools = import_gguf_export()
    source, adapter, tokenizer = resolve_unchanged(args.model)
    require_language_model(source, args.model)
    name = Path(args.model.partition("@")[0]).name or out.stem
    result = tools.export_gguf(source, adapter, tokenizer, out, args.type, name)
    print_line(f"{result.quant_type}, {format_bytes(out.stat().st_size)}")
    for kind, error in result.rounding_errors.items():
        exact = "exact" if error.worst == 0 else f"largest error {error.worst:.0%} of the limit of the type"
        print_line(f"{error.count} tensors in {kind}: {exact}")
    for note in result.notes:
        print_line(f"note: {note}")
    verification = verify.verify_export(source, adapter, result.file, result.drift, DistributedContext().device)
    if not verification.passed:
        raise UserError(f"{out}: {verification}. The file was not deleted")
    print_line(str(verification))


def resolve_unchanged(name: str) -> tuple[HFCheckpoint, NoAdapter | LoRAConfig, Tokenizer]:
    """Checkpoint, adapter and tokenizer of a model. Raises UserError if weights have changed since a run saved them."""
    source, adapter, tokenizer = build.resolve_model(name)
    for path in filter(None, (source.path, adapter.adapter_path)):
        verify.check_unchanged(Path(path))
    return source, adapter, tokenizer


def import_gguf_export() -> ModuleType:
    """Import the GGUF modules, which require the extra `gguf`."""
    try:
        return importlib.import_module("tunekit.export.gguf_export")
    except ImportError as error:
        missing = (error.name or "gguf").partition(".")[0]
        others = ", ".join(bitsandbytes_export.TYPES)
        raise UserError(
            f"{missing} is not installed. All types except {others} require it: pip install 'tunekit[gguf]'"
        ) from error
