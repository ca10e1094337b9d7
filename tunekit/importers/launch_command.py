"""Command lines of other trainers: the launcher, its number of devices, the program, and its arguments."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.foreign_keys import parse_argument, read_mapping

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S)
DEVICE_COUNTS = ("--num_processes", "--num_gpus", "--nproc_per_node", "--nproc")
NODE_COUNTS = ("--nnodes", "--num_nodes", "--num_machines")
LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
PREFIXES = (("uv", "run"), ("poetry", "run"), ("nohup",), ("env",), ("srun",), ("sudo",))
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass
class LaunchCommand:
    """A command: `program` and its arguments. `num_devices` is None if neither an option nor a variable says it."""

    program: str
    arguments: list[str]
    num_devices: int | None = None
    launcher_options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def parse_command(words: Sequence[str]) -> LaunchCommand:
    """Parse a command, which may also be one quoted word."""
    words = shlex.split(words[0]) if len(words) == 1 else [*words]
    words = [word for word in words if word not in ("\\", "\\\n", "")]
    environment: dict[str, str] = {}
    while words and (ASSIGNMENT.fullmatch(words[0]) or find_prefix(words)):
        if ASSIGNMENT.fullmatch(words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        words = words[len(find_prefix(words)) :]
    if not words:
        raise UserError("missing command after --. Usage: tune import -- trl sft --model_name_or_path ...")
    command = split_launcher(words)
    command.environment = environment
    visible = next((environment[name] for name in VISIBLE if name in environment), None)
    if visible is not None and command.num_devices is None and command.program.startswith("llamafactory"):
        command.num_devices = len([part for part in visible.split(",") if part.strip()])
    return command


def find_prefix(words: Sequence[str]) -> tuple[str, ...]:
    """Words in front of a command that do not change it, such as `uv run`; empty if there are none."""
    return next((prefix for prefix in PREFIXES if tuple(words[: len(prefix)]) == prefix), ())


def split_launcher(words: list[str]) -> LaunchCommand:
    """Program of a command, without python, torchrun, accelerate or deepspeed in front of it."""
    first = Path(words[0]).name
    is_python = re.fullmatch(r"python[\d.]*", first) is not None
    if is_python and words[1:2] == ["-m"] and words[2:3] != ["torch.distributed.run"] and len(words) > 2:
        return LaunchCommand(words[2], words[3:])
    if is_python and words[1:2] != ["-m"] and len(words) > 1:
        script = next((i for i, word in enumerate(words) if word.endswith(".py")), 1)
        return LaunchCommand(words[script], words[script + 1 :])
    rest = words[3:] if is_python else words[2:] if words[:2] == [words[0], "launch"] else words[1:]
    if first not in LAUNCHERS and not is_python:
        return LaunchCommand(first, words[1:])
    return split_options(rest)


def split_options(words: list[str]) -> LaunchCommand:
    """Options of a launcher, and the program after them: a Python file, or a module after -m."""
    for i, word in enumerate(words):
        is_module = word in ("-m", "--module") and i + 1 < len(words)
        if is_module or word.endswith(".py") or Path(word).name in ("trl", "axolotl", "llamafactory-cli"):
            options = parse_options(words[:i])
            start = i + 1 if is_module else i
            return LaunchCommand(words[start], words[start + 1 :], count_devices(options), options)
    raise UserError("no program after the launcher. Pass the command with its script, such as accelerate launch sft.py")


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Options as `--name value`, `--name=value`, or flags. Names get underscores; several values are a list."""
    options: dict[str, Any] = {}
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("-") or re.fullmatch(r"-\.?\d.*", word):
            raise UserError(f"'{word}': expected an option, such as --learning_rate 1e-4. Remove it.")
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        while not equals and i < len(words) and (not words[i].startswith("-") or re.match(r"-\.?\d", words[i])):
            values.append(words[i])
            i += 1
        key = "--" + name.lstrip("-").replace("-", "_")
        parsed = [parse_argument(value) for value in values]
        options[key] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return options


def count_devices(options: dict[str, Any]) -> int | None:
    """Processes over all nodes; None if no option says it. A config file of accelerate is read if it exists."""
    count = next((options[name] for name in DEVICE_COUNTS if isinstance(options.get(name), int)), None)
    file = options.get("--config_file")
    if count is None and isinstance(file, str) and Path(file).is_file():
        value = read_mapping(Path(file)).get("num_processes")
        count = value if isinstance(value, int) else None
    nodes = next((options[name] for name in NODE_COUNTS if isinstance(options.get(name), int)), 1)
    is_total = "--num_processes" in options or file is not None
    return None if count is None else count * (1 if is_total else nodes)
