"""`tune merge`: merge an adapter into its base model."""

import argparse
from pathlib import Path

from tunekit import build
from tunekit.checkpoint import atomic, merge, peft_adapter, verify
from tunekit.checkpoint.adapter_dir import AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.peft_config import CONFIG
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.hub.errors import print_line
from tunekit.publishing import model_card


def main(args: argparse.Namespace) -> None:
    """Write and verify the merged checkpoint. Standard output is only its path, for use in scripts."""
    print(write_merged(args))


def write_merged(args: argparse.Namespace) -> Path:
    """Write and verify the merged checkpoint, and return its directory."""
    out = Path(args.out).expanduser()
    if out.exists():
        raise UserError(f"{out}: already exists. Choose another directory")
    directory, base = (build.final_dir_of(download.resolve_model_dir(name)) for name in (args.adapter, args.base))
    if not AdapterDir.is_adapter(directory):
        raise UserError(f"{args.adapter}: not an adapter (no {CONFIG}). Usage: tune merge BASE ADAPTER DIR")
    if AdapterDir.is_adapter(base):
        problem = f"BASE is an adapter. Use its base model, {AdapterDir.open(base).peft.base_name}"
        raise UserError(f"{args.base}: {problem}")
    adapter = AdapterDir.open(directory)
    source = peft_adapter.with_adapter_config(adapter, HFCheckpoint.open(base, args.base))
    adapter_config = peft_adapter.read_adapter_config(adapter, source)
    trained_on = adapter.peft.values.get("base_model_name_or_path")
    if trained_on not in (None, args.base, peft_adapter.base_model_ref(source)[0]):
        print_line(f"note: {args.adapter} was trained on {trained_on}; its shapes match {args.base}")
    with atomic.AtomicDir(out) as folder:
        if merge.merge_adapter(source, adapter, folder):
            print_line("note: the adapter changes the output head, which is no longer tied to the embedding")
        if source.has_untrained_mtp:
            print_line(f"note: {model_card.UNTRAINED_MTP}")
        verification = verify.verify_merge(folder, source, adapter_config, DistributedContext().device)
        model_card.write_merged_card(folder, directory, source)
    print_line(str(verification))
    if not args.force:
        verify.raise_if_failed(out)
    return out
