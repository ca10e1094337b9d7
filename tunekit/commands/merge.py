"""`tune merge`: a model and an adapter become one checkpoint."""

import argparse
from dataclasses import replace
from pathlib import Path

from tunekit import assemble, card, verify
from tunekit.checkpoint import atomic, merge, peft
from tunekit.checkpoint.folder import Folder
from tunekit.errors import UserError
from tunekit.hub import fetch
from tunekit.hub.trouble import tell
from tunekit.parallel.run import Run


def main(args: argparse.Namespace) -> None:
    """Write the folder, verify it, and print its path alone on standard output, so that scripts can use it."""
    out = Path(args.out).expanduser()
    if out.exists():
        raise UserError(f"{out} is there already: name another folder")
    adapter, base = (assemble.finished(fetch.resolve(name)) for name in (args.adapter, args.base))
    if not (adapter / peft.CONFIG).is_file():
        raise UserError(
            f"{args.adapter}: no {peft.CONFIG}, so this is no adapter; the base comes first, then the adapter"
        )
    if (base / peft.CONFIG).is_file():
        raise UserError(f"{args.base} is an adapter itself: name the model that it is for, {peft.base(base)}")
    source = peft.headed(adapter, Folder.open(base, args.base))
    choice = replace(peft.described(adapter, source), start=str(adapter))
    if peft.names(adapter) not in (None, args.base, peft.base_name(source)[0]):
        tell(f"{args.adapter} was trained for {peft.names(adapter)}; its updates fit {args.base} too")
    with atomic.whole(out) as folder:
        if merge.merge(source, adapter, folder):
            tell("the head was the embedding and now differs from it: it is a tensor of its own")
        found = verify.merged(folder, source, choice, Run().device)
        card.merged(folder, adapter, source)
    tell(str(found))
    if not args.force:
        verify.insist(out)
    print(out)
