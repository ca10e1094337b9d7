"""`tune` commands in processes that are forked from this one, which has imported everything: run with `python -m`.

A line of the input is a JSON object with the words of a command, its environment, directory, and files for its
standard streams; or with the code and arguments of a Python program. The output is its process id, and its exit code
when it has ended.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

import huggingface_hub.hf_api
import torch._dynamo  # noqa: F401  # torch imports this with the first optimizer
from huggingface_hub import constants
from huggingface_hub.utils import logging

from tunekit.cli import main as cli
from tunekit.cli.commands import chat, download, push, run, run_worker  # noqa: F401
from tunekit.publishing import plots  # noqa: F401
from tunekit.recipes import distill, sft  # noqa: F401

MAX_SLEEP = 0.05  # seconds; retries of tunekit and of the client wait longer, which no test needs


def read_hub_environment() -> None:
    """Let the Hub client read its environment again, which it does when it is imported."""
    old = dict(vars(constants))
    importlib.reload(constants)
    importlib.reload(logging)
    changed = {name for name in old if name.isupper() and old[name] != vars(constants)[name]}
    for module in [module for name, module in sys.modules.items() if name.startswith("huggingface_hub.")]:
        vars(module).update({name: vars(constants)[name] for name in changed & vars(module).keys()})
    huggingface_hub.hf_api.api.endpoint = constants.ENDPOINT


def run_command(request: dict[str, Any]) -> int:
    """Run a command or a program in this process. Return its exit code."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(request[name], os.O_RDWR | os.O_CREAT), number)
    sys.stdin = open(0)  # noqa: SIM115, PTH123
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, MAX_SLEEP))
    read_hub_environment()
    return run_program(request["code"], request["words"]) if request["code"] else cli.main(request["words"])


def run_program(code: str, words: list[str]) -> int:
    """Run a Python program in this process. Return its exit code."""
    sys.argv = ["-c", *words]
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    gc.freeze()
    for line in sys.stdin:
        if child := os.fork():
            print(child, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        code = run_command(json.loads(line))
        sys.stdout.flush()
        os._exit(code)  # normal interpreter shutdown takes longer than most commands


if __name__ == "__main__":
    main()
