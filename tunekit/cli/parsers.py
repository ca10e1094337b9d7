"""Arguments of the `tune` command and its subcommands. Imports nothing slow."""

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from tunekit.errors import UserError

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
