"""The `tune` command: from words to a verb. Nothing heavy is imported; the module of a verb is loaded when called."""

import argparse
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import NoReturn

from tunekit.cli import registry
from tunekit.errors import RunStopped, UserError
from tunekit.kernels import cache_dir


class Parser(argparse.ArgumentParser):
    """Argparse whose complaints are `UserError`s, printed like every other mistake."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (`{self.prog} --help` shows the words)")


def _ls(verb: Parser) -> None:
    verb.add_argument("filter", nargs="?", default="", metavar="FILTER", help="part of a name; or `presets`")
    verb.add_argument("--json", action="store_true", help="machine-readable JSON output")


def _cp(verb: Parser) -> None:
    verb.add_argument("name", metavar="NAME", help="recipe or config")
    verb.add_argument("dest", nargs="?", default=".", metavar="FILE", help="new file or folder (default: here)")
    verb.add_argument("--force", action="store_true", help="overwrite a file that is there")


def _cat(verb: Parser) -> None:
    verb.add_argument("name", metavar="NAME", help="recipe or config")


def _validate(verb: Parser) -> None:
    verb.add_argument("config", metavar="CONFIG", help="name or file of a config")
    verb.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the config")
    verb.add_argument("--recipe", metavar="RECIPE", help="name or file (default: what the config says)")
    _imports(verb)


def _plan(verb: Parser) -> None:
    verb.add_argument("config", metavar="CONFIG", help="name or file of a config")
    verb.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the config")
    gpus = {"dest": "gpus", "type": _count, "metavar": "N", "help": "GPUs per node (default: none, the CPU)"}
    verb.add_argument("--nproc-per-node", "--gpus", **gpus)
    verb.add_argument(
        "--nnodes", dest="nodes", type=_count, default=1, metavar="N", help="number of nodes (default: 1)"
    )
    verb.add_argument("--gpu-type", metavar="NAME", help="such as h100, a100, b200, l40s, t4, rtx4090, mi300x")
    verb.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU, such as 80G (default: that of its type)")
    verb.add_argument("--gpu-tflops", type=_positive, metavar="N", help="bf16 peak of a GPU of unknown type")
    verb.add_argument(
        "--mfu", type=_positive, default=0.45, metavar="P", help="model FLOPs utilization (default: 0.45)"
    )
    verb.add_argument("--gpu-hour-price", type=_positive, metavar="N", help="price of one GPU for one hour")
    verb.add_argument(
        "--auto", action="store_true", help="search for the fastest config that fits; print its overrides"
    )
    verb.add_argument("--output", metavar="FILE", help="write the config found by --auto to a file")
    verb.add_argument("--json", action="store_true", help="machine-readable JSON output")
    verb.add_argument("--recipe", metavar="RECIPE", help="name or file (default: what the config says)")
    _imports(verb)


def _data(verb: Parser) -> None:
    verb.add_argument("config", metavar="CONFIG", help="name or file of a config")
    verb.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the config")
    verb.add_argument("--num-rows", type=_number, metavar="N", help="number of rows to show (default: 3; in HTML 30)")
    verb.add_argument("--row", action="append", default=[], metavar="K", help="show this row: number or file:line")
    verb.add_argument("--no-color", action="store_true", help="plain text without colors")
    verb.add_argument("--html", nargs="?", const="data.html", metavar="FILE", help="also a page (default: data.html)")
    verb.add_argument("--json", action="store_true", help="machine-readable JSON output")
    verb.add_argument("--recipe", metavar="RECIPE", help="name or file (default: what the config says)")
    _imports(verb)


def _run(verb: Parser) -> None:
    verb.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or a file of your own")
    verb.add_argument("overrides", nargs="*", metavar="CONFIG key=value", help="config (name or file), then overrides")
    verb.add_argument("--config", metavar="CONFIG", help="the config, if it is not the second word")
    verb.add_argument("--overwrite", action="store_true", help="train again: delete the results in the run directory")
    gpus = {"dest": "gpus", "type": _count, "metavar": "N", "help": "processes per node, one per GPU (default: 1)"}
    verb.add_argument("--nproc-per-node", "--gpus", **gpus)
    nodes = {"dest": "nodes", "type": _count, "default": 1, "metavar": "N"}
    verb.add_argument("--nnodes", help="number of nodes; each runs the same command (default: 1)", **nodes)
    endpoint = "one of the nodes and a free port on it"
    verb.add_argument("--rdzv-endpoint", dest="rendezvous", metavar="HOST:PORT", help=endpoint)
    verb.add_argument("--node-rank", type=_number, metavar="K", help="0 for the first node (default: by arrival)")
    restarts = "restarts from the last training state after a process fails (default: 0)"
    verb.add_argument("--max-restarts", type=_number, default=0, metavar="N", help=restarts)
    verb.add_argument(
        "--slurm", metavar="KEY=VALUE,...", help="submit to Slurm: nodes=4,gpus=8,time=4:00:00,partition=x"
    )
    verb.add_argument("--dry-run", action="store_true", help="with --slurm: write the script, submit nothing")
    _imports(verb)


def _download(verb: Parser) -> None:
    verb.add_argument("repo", metavar="REPO", help="name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B")
    verb.add_argument("--revision", metavar="NAME", help="branch, tag or commit")
    verb.add_argument("--include", action="append", default=[], metavar="GLOB", help="only such files; repeatable")
    verb.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="not such files; repeatable")
    verb.add_argument("--local-dir", metavar="DIR", help="target directory (default: the Hugging Face cache)")
    verb.add_argument("--token", metavar="TOKEN", help="access token (default: $HF_TOKEN, or that of `hf auth login`)")


def _push(verb: Parser) -> None:
    verb.add_argument("folder", metavar="FOLDER", help="folder of a run, a model or an adapter")
    verb.add_argument("repo", metavar="REPO", help="name on the Hugging Face Hub: owner/name; made if it is not there")
    verb.add_argument("--private", action="store_true", help="only for you and your organization")
    verb.add_argument("--revision", metavar="NAME", help="branch; created if it does not exist (default: main)")
    verb.add_argument("--create-pr", action="store_true", help="open a pull request instead of changing the branch")
    verb.add_argument("--commit-message", metavar="TEXT", help="commit message")
    verb.add_argument("--merge-adapter", action="store_true", help="upload the merged model instead of the adapter")
    verb.add_argument(
        "--merged-dir", metavar="DIR", help="keep the merged model here (default: deleted after the upload)"
    )
    verb.add_argument("--force", action="store_true", help="also what was not verified; the model card says so")
    verb.add_argument("--dry-run", action="store_true", help="list the files, send nothing")
    verb.add_argument("--token", metavar="TOKEN", help="access token (default: $HF_TOKEN, or that of `hf auth login`)")


def _merge(verb: Parser) -> None:
    verb.add_argument("base", metavar="BASE", help="folder of a model or a run, or a name on the Hub")
    verb.add_argument("adapter", metavar="ADAPTER", help="folder of an adapter or a run, or a name on the Hub")
    verb.add_argument("out", metavar="DIR", help="folder to write")
    verb.add_argument("--force", action="store_true", help="no error if the result fails its verification")


def _export(verb: Parser) -> None:
    verb.add_argument("model", metavar="MODEL", help="folder of a model or a run, or a name on the Hub")
    verb.add_argument("out", metavar="OUT", help="file to write, such as model.gguf; for nf4 and fp4 a folder")
    kinds = (
        "bf16, f16, f32, q8_0, q4_0 .. (default: as the model is stored); bitsandbytes: nf4, fp4, also -double-quant"
    )
    verb.add_argument("--type", metavar="TYPE", help=kinds)


def _chat(verb: Parser) -> None:
    verb.add_argument("model", metavar="MODEL", help="folder of a model or a run, or a name on the Hub")
    verb.add_argument("--system-prompt", metavar="TEXT", help="system message")
    verb.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: greedy decoding (default: 0.7)")
    verb.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling probability (default: 0.95)"
    )
    verb.add_argument(
        "--max-new-tokens", type=_count, default=1024, metavar="N", help="maximum answer length (default: 1024)"
    )
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same answers")


def _selftest(verb: Parser) -> None:
    verb.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "xpu", "mps"), default="auto", help="default: a GPU if available"
    )
    output = "JSON report; Markdown next to it (default: tunekit-selftest.json)"
    verb.add_argument("--output", default="tunekit-selftest.json", metavar="FILE", help=output)
    verb.add_argument("--quick", action="store_true", help="without runs, processes, and steps of a 1B model")
    only = "check or group: kernels, model, processes, speed; repeatable"
    verb.add_argument("--only", action="append", default=[], metavar="NAME", help=only)


def _options(verb: Parser) -> None:
    verb.add_argument("recipe", metavar="RECIPE", help="name or file of a recipe")
    verb.add_argument("--schema", action="store_true", help="JSON Schema for editors, not Markdown")


def _cache(verb: Parser) -> None:
    verb.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="default: show")
    verb.add_argument("keys", nargs="*", metavar="KEY", help="what to clear: keys, or how they begin")
    verb.add_argument("--older-than", metavar="AGE", help="entries not used for AGE, such as 30d or 12h")
    verb.add_argument("--all", action="store_true", help="all of it")


def _completion(verb: Parser) -> None:
    verb.add_argument("shell", choices=("bash", "zsh", "fish"), help="prints a script for this shell to source")


def _imports(verb: Parser) -> None:
    own = {"action": "append", "default": [], "metavar": "FILE", "help": "Python file with choices of your own"}
    verb.add_argument("--import", dest="imports", **own)


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got '{word}'")
    return int(word)


def _positive(word: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", word) or not float(word):
        raise argparse.ArgumentTypeError(f"must be a positive number, got '{word}'")
    return float(word)


def _number(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a non-negative integer, got '{word}'")
    return int(word)


VERBS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "ls": ("list recipes and configs", _ls),
    "cp": ("copy a recipe or config, to make it your own", _cp),
    "cat": ("print a recipe or config", _cat),
    "validate": ("check a config before anything runs", _validate),
    "plan": ("tell memory, traffic and time of a config before it runs", _plan),
    "data": ("look at what a config trains on, and what is wrong with it", _data),
    "run": ("run a recipe", _run),
    "download": ("fetch a model", _download),
    "push": ("send a model to the Hub", _push),
    "merge": ("put an adapter into the weights of its base", _merge),
    "export": ("write a model for llama.cpp (GGUF) or bitsandbytes", _export),
    "chat": ("talk with a model", _chat),
    "selftest": ("check kernels, model and speed on this machine, and write a report", _selftest),
    "options": ("list every option of a recipe", _options),
    "cache": ("show or clear the prepared rows that are kept", _cache),
    "completion": ("print a script that completes words in your shell", _completion),
}


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of `tune`, and those of its verbs."""
    top = Parser(prog="tune", description="Fine-tune language models.", allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print versions")
    verbs = top.add_subparsers(title="verbs", dest="verb", metavar="VERB", parser_class=Parser)
    parsers = {}
    for name, (line, arguments) in VERBS.items():
        parsers[name] = verbs.add_parser(
            name, help=line, description=f"{line[0].upper()}{line[1:]}.", allow_abbrev=False
        )
        arguments(parsers[name])
        parsers[name].add_argument("--debug", action="store_true", help="show the traceback of an error")
    return top, parsers


def dispatch(words: Sequence[str]) -> None:
    """Parse the words and do what they say."""
    top, parsers = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import_module("tunekit.cli.commands.completion").complete(top, parsers)
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        raise UserError(f"no verb '{words[0]}'{registry.did_you_mean(words[0], VERBS) or ';'} `tune --help` lists them")
    args, rest = top.parse_known_args(words)
    if args.version:
        versions = (f"{name} {metadata.version(name)}" for name in ("tunekit", "torch"))
        print(*versions, f"Python {platform.python_version()}", sep=", ")
    elif args.verb is None:
        top.print_help()
    else:
        _take(args, rest, parsers[args.verb])
        import_module(f"tunekit.cli.commands.{args.verb}").main(args)


def _take(args: argparse.Namespace, rest: list[str], verb: Parser) -> None:
    """Overrides may stand behind an option, where argparse leaves them over. Anything else left over is a mistake."""
    wrong = [word for word in rest if word.startswith("-") or "overrides" not in args]
    if wrong:
        known = [name for name in verb._option_string_actions if name.startswith("--")]
        verb.error(f"unknown word '{wrong[0]}'{registry.did_you_mean(wrong[0], known)}")
    if rest:
        args.overrides += rest


def set_torch_env() -> None:
    """What torch reads from the environment when it is imported. What a person has set stays."""
    # Threads that wait for each other soon give up their core. Training the nano on two cores went at 3,900 to
    # 4,700 tokens/s, and at 119 beside one more busy process; with this at 3,400 to 4,000, and at 1,900 beside it.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Pages of 2 MB for large tensors on the CPU; tunekit/kernels/malloc.py tells what they bring.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Segments that grow, on a GPU: rows of another length leave no holes behind.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which is read where the newer one is not set
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # What was compiled outlives a restart of the machine, which empties the folder that torch would take.
    kept = cache_dir.compile_cache_dir() / "inductor"
    if cache_dir.is_writable(kept):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
    cache_dir.set_compiler_cache_directories()


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 2 for a mistake, 128 and the signal's number for what a signal ended."""
    words = sys.argv[1:] if words is None else words
    set_torch_env()
    try:
        dispatch(words)
        sys.stdout.flush()
    except UserError as error:
        if "--debug" in words:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunStopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone, as in `tune ls | head`; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(main())
