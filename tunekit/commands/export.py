"""`tune export`: a model as a file of llama.cpp (GGUF), read again and asked the same as the model."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType

from tunekit import assemble, verify
from tunekit.checkpoint.atomic import readable
from tunekit.errors import UserError
from tunekit.hub.trouble import tell
from tunekit.parallel import Run


def main(args: argparse.Namespace) -> None:
    """Write the file, tell what is in it and how far it is from the model, and print its path for scripts."""
    tools, out = toolbox(), Path(args.out).expanduser()
    if out.exists():
        raise UserError(f"{out} is there already: name another file")
    source, adapter, tokenizer = assemble.described(args.model)
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
    print(out)


def toolbox() -> ModuleType:
    """What writes and reads such files, which needs an extra."""
    try:
        return importlib.import_module("tunekit.export.model")
    except ImportError as error:
        missing = (error.name or "gguf").partition(".")[0]
        raise UserError(f"{missing} is not installed: pip install 'tunekit[gguf]'") from error
