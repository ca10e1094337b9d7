"""The `tune` command. Imports nothing slow: the module of a subcommand is imported when it is called."""

import _thread
import argparse
import keyword
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tunekit.config.process_guard import ProcessGuard
from tunekit.config.secrets import message_text
from tunekit.config.user_code import user_files
from tunekit.errors import RunStopped, UserError, did_you_mean, find_user_code, is_ctrl_c, raise_ctrl_c
from tunekit.kernels import cache_dir
from tunekit.system import imports_without_gc

OUT_OF_MEMORY = re.compile(
    "allocate memory|can't start new thread|failed to map segment|out of memory"
    "|without exception set|without setting an exception"  # SystemError
)
THREAD_SECONDS = 5.0  # to wait for threads of the user before they are named
AddArgument = Callable[..., argparse.Action]
TRAINERS = ("torchtune", "trl", "axolotl", "llama-factory", "kubeflow")  # whose configs can be imported


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UserError`, so that its errors are printed like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}{'' if message.endswith(('.', '?')) else '.'} Run `{self.prog} --help`.")


def _ls(add: AddArgument) -> None:
    add("filter", nargs="?", default="", metavar="FILTER", help="part of a name; or `presets`")
    add("--json", action="store_true", help="machine-readable JSON output")


def _cp(add: AddArgument) -> None:
    add("name", metavar="NAME", help="recipe, config, or train_loop")
    add("dest", nargs="?", default=".", metavar="FILE", help="new file or directory (default: current directory)")
    add("--force", action="store_true", help="overwrite an existing file")


def _cat(add: AddArgument) -> None:
    add("name", metavar="NAME", help="recipe, config, or train_loop")


def _new(add: AddArgument) -> None:
    add("model", metavar="MODEL", help="directory of a model or a run, or a name on the Hub")
    add("data", metavar="DATA", help="file or directory with rows, or a dataset on the Hub")
    tasks = ("sft", "preference", "dpo", "orpo", "simpo", "kto", "reward", "embed")
    add("--task", choices=tasks, help="recipe, or preference loss (default: by the columns of the rows)")
    add("--full", action="store_true", help="train all weights (default: LoRA)")
    add("--output", metavar="FILE", help="config to write (default: MODEL-DATA.yaml)")
    add("--force", action="store_true", help="overwrite an existing file")
    _gpus(add, "GPUs (default: those of this machine)")


def _import(add: AddArgument) -> None:
    add("source", nargs="?", metavar="FILE", help="config, or a directory of configs; `-- COMMAND ...` for a command")
    add("overrides", nargs="*", metavar="key=value", help="overrides, in the syntax of the other trainer")
    add("--from", dest="trainer", choices=TRAINERS, help="trainer of the config (default: by its keys)")
    add("--output", metavar="FILE", help="config to write, or directory for those of a directory (default: print it)")
    add("--force", action="store_true", help="overwrite existing files")
    devices = "devices of the original, for the batch size (default: by its command or comments, else 1)"
    add("--nproc-per-node", "--gpus", dest="gpus", type=_count, metavar="N", help=devices)


def _gpus(add: AddArgument, count: str) -> None:
    add("--nproc-per-node", "--gpus", dest="gpus", type=_count, metavar="N", help=count)
    add("--gpu-type", metavar="NAME", help="such as h100, a100, b200, l40s, t4, rtx4090, mi300x")
    add("--gpu-memory", metavar="SIZE", help="memory of a GPU, such as 80G (default: that of its type)")


def _plan(add: AddArgument) -> None:
    _gpus(add, "GPUs per node (default: none, the CPU)")
    add("--nnodes", dest="nodes", type=_count, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpu-tflops", type=_positive, metavar="N", help="bf16 peak of a GPU of unknown type")
    add("--mfu", type=_positive, default=0.45, metavar="P", help="model FLOPs utilization (default: 0.45)")
    add("--gpu-hour-price", type=_positive, metavar="N", help="price of one GPU for one hour")
    add("--auto", action="store_true", help="search for the fastest config that fits; print its overrides")
    add("--output", metavar="FILE", help="write the config found by --auto to a file")
    add(
        "--max-length",
        action="store_true",
        help="find the longest data.max_length that fits, by default on this machine",
    )
    add("--json", action="store_true", help="machine-readable JSON output")
    _config(add)


def _data(add: AddArgument) -> None:
    add("--num-rows", type=_number, metavar="N", help="number of rows to show (default: 3; in HTML 30)")
    add("--row", action="append", default=[], metavar="K", help="show this row: number or file:line")
    add("--no-color", action="store_true", help="plain text without colors")
    add("--html", nargs="?", const="data.html", metavar="FILE", help="also write an HTML report (default: data.html)")
    add("--json", action="store_true", help="machine-readable JSON output")
    _config(add)


def _run(add: AddArgument) -> None:
    add("recipe", metavar="RECIPE", help="recipe or recipe file; may be omitted if the config has a line `recipe:`")
    add("overrides", nargs="*", metavar="CONFIG key=value", help="config (name or file), then overrides")
    add("--config", metavar="CONFIG", help="config, if it is not the second argument")
    add("--overwrite", action="store_true", help="train again; deletes the results in the run directory")
    gpus = {"dest": "gpus", "type": _count, "metavar": "N", "help": "processes per node, one per GPU (default: 1)"}
    add("--nproc-per-node", "--gpus", **gpus)
    nodes = {"dest": "nodes", "type": _count, "default": 1, "metavar": "N"}
    add("--nnodes", help="number of nodes; each runs the same command (default: 1)", **nodes)
    endpoint = "host name of one of the nodes and a free port on it"
    add("--rdzv-endpoint", dest="rendezvous", metavar="HOST:PORT", help=endpoint)
    add("--rdzv-id", dest="job_id", metavar="ID", help="name of the job; nodes of another job are an error")
    add("--node-rank", type=_number, metavar="K", help="0 for the node of the endpoint (default: by host name)")
    restarts = "restarts from the last training state after a process fails (default: 0)"
    add("--max-restarts", type=_number, default=0, metavar="N", help=restarts)
    add("--slurm", metavar="KEY=VALUE,...", help="submit to Slurm: nodes=4,gpus=8,time=4:00:00,partition=x")
    add("--dry-run", action="store_true", help="with --slurm: write the script, submit nothing")
    _imports(add)


def _download(add: AddArgument) -> None:
    add("repo", metavar="REPO", help="name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@main")
    add("--revision", metavar="NAME", help="branch, tag or commit")
    add("--include", action="append", default=[], metavar="GLOB", help="download only these files; repeatable")
    add("--exclude", action="append", default=[], metavar="GLOB", help="skip these files; repeatable")
    add("--local-dir", metavar="DIR", help="target directory (default: the Hugging Face cache)")
    add("--token", metavar="TOKEN", help="access token (default: $HF_TOKEN, or that of `hf auth login`)")


def _push(add: AddArgument) -> None:
    add("folder", metavar="FOLDER", help="directory of a run, a model or an adapter")
    add("repo", metavar="REPO", help="owner/name on the Hugging Face Hub; created if it does not exist")
    add("--private", action="store_true", help="create a private repository")
    add("--revision", metavar="NAME", help="branch; created if it does not exist (default: main)")
    add("--create-pr", action="store_true", help="open a pull request instead of changing the branch")
    add("--commit-message", metavar="TEXT", help="commit message")
    add("--merge-adapter", action="store_true", help="upload the merged model instead of the adapter")
    add("--merged-dir", metavar="DIR", help="keep the merged model in DIR (default: deleted after the upload)")
    add("--force", action="store_true", help="upload unverified models too; the model card states it")
    add("--dry-run", action="store_true", help="list the files without uploading")
    add("--token", metavar="TOKEN", help="access token (default: $HF_TOKEN, or that of `hf auth login`)")


def _merge(add: AddArgument) -> None:
    add("base", metavar="BASE", help="directory of a model or a run, or a name on the Hub")
    add("adapter", metavar="ADAPTER", help="directory of an adapter or a run, or a name on the Hub")
    add("out", metavar="DIR", help="output directory")
    add("--force", action="store_true", help="do not fail if the verification fails")


def _export(add: AddArgument) -> None:
    add("model", metavar="MODEL", help="directory of a model or a run, or a name on the Hub")
    add("out", metavar="OUT", help="output file, such as model.gguf; for nf4 and fp4 a directory")
    kinds = (
        "bf16, f16, f32, q8_0, q4_0 .. (default: dtype of the model); bitsandbytes: nf4, fp4, also with -double-quant"
    )
    add("--type", metavar="TYPE", help=kinds)


def _inference(add: AddArgument) -> None:
    add("model", metavar="MODEL", help="directory of a model or a run, or a name on the Hub")
    add("--chat-template", metavar="NAME", help="Jinja file or bundled template (default: that of the model)")
    kwargs = "values of template variables: {enable_thinking: false}"
    add("--chat-template-kwargs", metavar="{NAME: VALUE}", help=kwargs)
    add("--config-overrides", metavar="{KEY: VALUE}", help="other values for keys of config.json")
    add("--quantization", metavar="KIND", help="how the weights are stored: nf4, fp4 or float8")


def _chat(add: AddArgument) -> None:
    _inference(add)
    add("--system-prompt", metavar="TEXT", help="system message")
    add("--tools", metavar="FILE", help="JSON file with a list of tools")
    add("--temperature", type=float, metavar="T", help="0: greedy decoding (default: 0.7)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (default: all)")
    add("--top-p", type=float, metavar="P", help="nucleus sampling probability (default: 0.95)")
    add("--min-p", type=float, metavar="P", help="minimum probability, relative to the highest one (default: 0)")
    add("--repetition-penalty", type=float, metavar="X", help="penalty on tokens that occur already (default: 1, none)")
    add("--stop-strings", nargs="+", metavar="TEXT", help="texts that end an answer")
    add("--max-new-tokens", type=_count, metavar="N", help="maximum answer length (default: 1024)")
    add("--seed", type=int, metavar="N", help="random seed of sampling (default: 0)")


def _serve(add: AddArgument) -> None:
    _inference(add)
    adapter = "serve a LoRA adapter of MODEL under a name of its own; repeatable"
    add("--adapter", action="append", default=[], metavar="NAME=PATH", help=adapter)
    add("--served-model-name", metavar="NAME", help="name of MODEL in requests (default: MODEL)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=_number, default=8000, metavar="N", help="port; 0: any free port (default: 8000)")
    add("--api-key", action="append", default=[], metavar="KEY", help="key of clients (default: $TUNEKIT_API_KEY)")
    add("--dtype", metavar="DTYPE", help="dtype of computation: auto, bf16, fp16 or fp32 (default: auto)")
    add("--max-num-seqs", type=_count, default=16, metavar="N", help="answers that are generated at once (default: 16)")
    length = "maximum tokens of a prompt and its answer (default: the context, at most 4096)"
    add("--max-model-len", type=_count, metavar="N", help=length)
    add("--max-tokens", type=_count, metavar="N", help="maximum length of an answer (default: the rest of the context)")
    modes = ("raw_logprobs", "processed_logprobs")
    logprobs = "log-probabilities of the model, or of its logits divided by the temperature (default: raw_logprobs)"
    add("--logprobs-mode", choices=modes, default=modes[0], help=logprobs)
    updating = "clients may load LoRA adapters from directories of this machine, as in vLLM"
    add("--allow-runtime-lora-updating", action="store_true", help=updating)
    concurrent = "answers that run or wait, `n` per prompt; more are refused (default: 256)"
    add("--max-concurrent-requests", type=_count, default=256, metavar="N", help=concurrent)
    add("--max-request-bytes", type=_count, default=2**22, metavar="N", help="size of a request (default: 4194304)")


def _selftest(add: AddArgument) -> None:
    add("--device", choices=("auto", "cpu", "cuda", "xpu", "mps"), default="auto", help="default: a GPU if available")
    output = "JSON report; Markdown next to it (default: tunekit-selftest.json)"
    add("--output", default="tunekit-selftest.json", metavar="FILE", help=output)
    add("--quick", action="store_true", help="skip training runs, multi-process checks and steps of a 1B model")
    only = "check or group: kernels, model, processes, speed; repeatable"
    add("--only", action="append", default=[], metavar="NAME", help=only)


def _options(add: AddArgument) -> None:
    add("recipe", metavar="RECIPE", help="name or file of a recipe")
    add("key", nargs="?", metavar="KEY", help="print all kinds of this key, such as loss or data.transforms")
    add("--all", action="store_true", help="print all keys of all kinds, not only of those by default")
    add("--schema", action="store_true", help="print a JSON Schema for editors instead of Markdown")


def _episodes(add: AddArgument) -> None:
    add("file", metavar="FILE", help="file of episodes (episodes_path), or a run directory with episodes.jsonl")
    add("--html", default="episodes.html", metavar="FILE", help="page to write (default: episodes.html)")
    add("--num-rows", type=_count, default=100, metavar="N", help="number of episodes, from the end (default: 100)")


def _report(add: AddArgument) -> None:
    add("runs", nargs="+", metavar="RUN", help="run directory; several are drawn in the same axes")
    add("--output", metavar="FILE", help="page to write (default: report.html in RUN; of several runs, here)")


def _watch(add: AddArgument) -> None:
    add("run", metavar="RUN", help="run directory")
    add("--port", type=_number, metavar="N", help="serve the report of the run on this port of 127.0.0.1; 0: any port")


def _cache(add: AddArgument) -> None:
    add("action", nargs="?", choices=("show", "clear"), default="show", help="default: show")
    add("keys", nargs="*", metavar="KEY", help="keys to clear, or their prefixes")
    add("--older-than", metavar="AGE", help="entries not used for AGE, such as 30d or 12h")
    add("--all", action="store_true", help="clear all entries")


def _completion(add: AddArgument) -> None:
    add("shell", choices=("bash", "zsh", "fish"), help="print a script for this shell to source")


def _config(add: AddArgument) -> None:
    add("config", metavar="CONFIG", help="name or file of a config")
    add("overrides", nargs="*", metavar="key=value", help="override values of the config")
    add("--recipe", metavar="RECIPE", help="name or file (default: the config's `recipe`)")
    _imports(add)


def _imports(add: AddArgument) -> None:
    description = "Python file that defines additional kinds"
    add("--import", dest="imports", action="append", default=[], metavar="FILE", help=description)


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


VERBS: dict[str, tuple[str, Callable[[AddArgument], None]]] = {
    "new": ("write a config for a model and a dataset that fits this machine", _new),
    "import": ("write a config from one of torchtune, TRL, axolotl, LLaMA-Factory or Kubeflow", _import),
    "ls": ("list recipes and configs", _ls),
    "cp": ("copy a recipe or config for editing", _cp),
    "cat": ("print a recipe or config", _cat),
    "validate": ("check a config without running it", _config),
    "plan": ("estimate memory, communication and time of a config", _plan),
    "data": ("inspect and check the training data of a config", _data),
    "run": ("run a recipe", _run),
    "download": ("download a model", _download),
    "push": ("upload a model to the Hub", _push),
    "merge": ("merge an adapter into its base model", _merge),
    "export": ("export a model for llama.cpp (GGUF) or bitsandbytes", _export),
    "chat": ("chat with a model", _chat),
    "serve": ("serve a model with the protocol of OpenAI", _serve),
    "selftest": ("check kernels, model and speed on this machine, and write a report", _selftest),
    "options": ("list the options of a recipe", _options),
    "episodes": ("write a web page to read sampled episodes turn by turn", _episodes),
    "report": ("write a web page with curves, facts and samples of runs", _report),
    "watch": ("follow a run on the terminal, or in a browser", _watch),
    "cache": ("show or clear the cache of tokenized rows", _cache),
    "completion": ("print a script for shell completion", _completion),
}


def make_parser(verb: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Create the parser of `tune` and the parsers of its subcommands, with the arguments of all, or only of `verb`."""
    top = Parser(prog="tune", description="Fine-tune language models.", allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print versions")
    verbs = top.add_subparsers(title="subcommands", dest="verb", metavar="SUBCOMMAND", parser_class=Parser)
    parsers = {}
    for name, (summary, add_arguments) in VERBS.items():
        parsers[name] = verbs.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
        )
        if verb in (None, name):
            add_arguments(parsers[name].add_argument)
            parsers[name].add_argument("--debug", action="store_true", help="show the traceback of an error")
    return top, parsers


def dispatch_command(words: Sequence[str]) -> None:
    """Parse the arguments and run the subcommand."""
    is_verb = bool(words) and words[0] in VERBS
    top, parsers = make_parser(words[0] if is_verb and "_ARGCOMPLETE" not in os.environ else None)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import_module("tunekit.cli.commands.completion").complete(top, parsers)
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        hint = did_you_mean(words[0], VERBS)
        raise UserError(f"unknown subcommand '{words[0]}'.{hint} Run `tune --help` for a list.")
    if is_verb:
        end = words.index("--") if "--" in words else len(words)  # after it is a command of another program
        words = [*(normalize_option(word, parsers[words[0]]) for word in words[:end]), *words[end:]]
    args, rest = top.parse_known_args(words)
    args.words = tuple(words)
    if args.version:
        metadata = import_module("importlib.metadata")  # costs 25 ms; only --version needs it
        versions = (f"{name} {metadata.version(name)}" for name in ("tunekit", "torch"))
        print(*versions, f"Python {platform.python_version()}", sep=", ")
    elif args.verb is None:
        top.print_help()
    else:
        _merge_overrides(args, rest, parsers[args.verb])
        if "model" in args and not Path(args.model).is_file():  # before torch is imported, which takes seconds
            import_module("tunekit.hub.download").find_local_dir(args.model)
        with imports_without_gc():
            command = import_module(f"tunekit.cli.commands.{args.verb}{'_' if keyword.iskeyword(args.verb) else ''}")
        command.main(args)


def normalize_option(word: str, verb: Parser) -> str:
    """Replace underscores in the name of an option, as in `--nproc_per_node=2`. Other arguments are unchanged."""
    name, equals, value = word.partition("=")
    dashed = name.replace("_", "-")
    return dashed + equals + value if name.startswith("--") and dashed in verb._option_string_actions else word


def _merge_overrides(args: argparse.Namespace, rest: list[str], verb: Parser) -> None:
    """Add the arguments that argparse did not consume: overrides after an option. Reject all others."""
    unknown = [word for word in rest if word.startswith("-") or "overrides" not in args]
    if unknown:
        options = [name for name in verb._option_string_actions if name.startswith("--")]
        key, _, value = unknown[0].lstrip("-").partition("=")
        hint = f"Keys of the config have no dashes: {key}={value or 'VALUE'}." if "overrides" in args else ""
        verb.error(f"unknown argument '{unknown[0]}'.{did_you_mean(unknown[0], options, hint)}")
    if rest:
        args.overrides += rest


def set_torch_env() -> None:
    """Set the variables that torch reads when it is imported. Variables set by the user are kept."""
    # Limit busy waiting of OpenMP threads. On two cores, training the nano reaches 3,400 to 4,000 tokens/s (default:
    # 3,900 to 4,700), but 1,900 instead of 119 if another process uses the same cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Pages of 2 MB for large tensors on the CPU; see tunekit/kernels/malloc.py for measurements.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Expandable segments on GPUs: batches of varying length do not fragment memory.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which torch reads if the newer one is not set
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Keep compiled code across reboots: the default directory of torch is in /tmp.
    inductor_dir = cache_dir.compile_cache_dir() / "inductor"
    if cache_dir.is_writable(inductor_dir):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor_dir))
    cache_dir.set_compiler_cache_directories()


def open_standard_streams() -> None:
    """Replace closed standard streams by /dev/null, or the next files that are opened take their places."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115, PTH123


def redeliver_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Interrupt again if Ctrl-C came in a callback, where Python only reports exceptions."""
    if unraisable.exc_value is not None and is_ctrl_c(unraisable.exc_value):
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(unraisable)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 2 after a UserError, 128 plus the signal number after a signal."""
    is_program, words = words is None, sys.argv[1:] if words is None else words
    open_standard_streams()
    sys.unraisablehook = redeliver_interrupt
    set_torch_env()
    with CtrlCHandler():
        code = run_command(words)
    if is_program:
        end_threads(code)
    return code


def run_command(words: Sequence[str]) -> int:
    """Run the subcommand. Returns the exit code, after the message of an error was printed."""
    try:
        with UserCodeErrors(), ProcessGuard(user_files):
            dispatch_command(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `tune ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError, MemoryError, RuntimeError, SystemError, ImportError) as error:
        if not isinstance(error, UserError | OSError) and not is_out_of_memory(error):
            raise
        if "--debug" in words:
            traceback.print_exc()
        print(f"error: {message_text(describe_error(error))}", file=sys.stderr)
        return 2
    except RunStopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        return 130
    return 0


class CtrlCHandler:
    """Context manager in which Ctrl-C raises an exception of its own class, unless SIGINT has another handler."""

    def __enter__(self) -> None:
        is_main_thread = threading.current_thread() is threading.main_thread()
        self.is_installed = is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.is_installed:
            signal.signal(signal.SIGINT, raise_ctrl_c)

    def __exit__(self, *error: object) -> None:
        if self.is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_threads(code: int) -> None:
    """Name threads that keep the program alive, which only code of the user starts. After a failure, end with them."""
    main_thread, deadline = threading.main_thread(), time.monotonic() + THREAD_SECONDS
    threads = [thread for thread in threading.enumerate() if thread is not main_thread and not thread.daemon]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = ", ".join(thread.name for thread in threads if thread.is_alive())
    if names:
        action = "ending with" if code else "waiting for"
        print(f"warning: {action} threads that are still running: {names}", file=sys.stderr, flush=True)
        if code:
            with suppress(OSError, ValueError):  # the reader has closed the pipe, or the user the stream
                sys.stdout.flush()
            os._exit(code)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the system refused memory or a thread to this process. Libraries report it in many ways."""
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


class UserCodeErrors:
    """Context manager that ends the command with exit code 1 after an exception in a file of the user.

    File and line are printed first, then the traceback from that line on. Other exceptions are bugs of tunekit.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and (location := find_user_code(error)) is not None:
            raise RunStopped(f"error: {message_text(location.message)}\n{location.stack.rstrip()}", 1) from error


def describe_error(error: BaseException) -> str:
    """Message of an error; of the operating system with the name of the file."""
    if not isinstance(error, UserError) and is_out_of_memory(error):
        return f"out of memory: {str(error) or 'the system gives this process no more'}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
