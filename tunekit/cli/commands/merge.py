"""`tune merge`: a model and an adapter become one checkpoint."""

import argparse
from dataclasses import replace
from pathlib import Path

from tunekit import build
from tunekit.checkpoint import atomic, merge, peft_adapter, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.hub.errors import print_line
from tunekit.publishing import model_card


def main(args: argparse.Namespace) -> None:
    """Write the folder, verify it, and print its path alone on standard output, so that scripts can use it."""
    out = Path(args.out).expanduser()
    if out.exists():
        raise UserError(f"{out} is there already: name another folder")
    adapter, base = (build.final_dir_of(download.resolve_model_dir(name)) for name in (args.adapter, args.base))
    if not (adapter / peft_adapter.CONFIG).is_file():
        raise UserError(
            f"{args.adapter}: no {peft_adapter.CONFIG}, so this is no adapter; the base comes first, then the adapter"
        )
    if (base / peft_adapter.CONFIG).is_file():
        raise UserError(
            f"{args.base} is an adapter itself: name the model that it is for, {peft_adapter.base_model_name(base)}"
        )
    source = peft_adapter.with_adapter_score_head(adapter, HFCheckpoint.open(base, args.base))
    choice = replace(peft_adapter.read_adapter_config(adapter, source), adapter_path=str(adapter))
    if peft_adapter.read_base_name(adapter) not in (None, args.base, peft_adapter.base_model_ref(source)[0]):
        print_line(
            f"{args.adapter} was trained for {peft_adapter.read_base_name(adapter)}; its updates fit {args.base} too"
        )
    with atomic.AtomicDir(out) as folder:
        if merge.merge_adapter(source, adapter, folder):
            print_line("the head was the embedding and now differs from it: it is a tensor of its own")
        found = verify.verify_merge(folder, source, choice, DistributedContext().device)
        model_card.write_merged_card(folder, adapter, source)
    print_line(str(found))
    if not args.force:
        verify.raise_if_failed(out)
    print(out)
