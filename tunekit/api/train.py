"""Training runs from Python: `finetune` and `run` do what `tune run` does in one process."""

import hashlib
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tunekit import devices
from tunekit.api.callbacks import Callback, open_callbacks
from tunekit.api.model import Model
from tunekit.api.model_values import model_values
from tunekit.api.notebook import has_notebook, open_display
from tunekit.api.result import Run
from tunekit.api.rows import MemoryRows, Rows, read_rows
from tunekit.api.session import api_call, free_memory, isolated_torch
from tunekit.api.values import PlainValues
from tunekit.checkpoint import run_dir
from tunekit.cli import recipe_loader, registry
from tunekit.cli.commands import run_worker
from tunekit.config import load
from tunekit.config.overrides import KeywordValues
from tunekit.config.yaml_parser import RECIPE_KEY, read_recipe
from tunekit.distributed.signals import StopFile
from tunekit.errors import RunStopped, UserError
from tunekit.loggers.observers import observe_metrics

EVAL_ONLY = ("source", "split", "max_samples", "streaming")  # keys of `data` that do not apply to `eval_data`


@dataclass
class TrainCall:
    """A call that trains: its recipe, config file and keys."""

    where: str
    recipe: str
    config: str | None
    values: dict[str, Any]
    imports: Sequence[str] = ()
    overwrite: bool = False
    notes: list[str] = field(default_factory=list)  # printed when all checks have passed

    @property
    def file_values(self) -> dict[str, Any]:
        """Values of the config file."""
        return {} if self.config is None else load.mapping(registry.find_config(self.config))

    def has_key(self, section: str, key: str) -> bool:
        """Whether the call sets a key of a section."""
        value = self.values.get(section)
        return f"{section}.{key}" in self.values or (isinstance(value, Mapping) and key in value)

    def output_dir(self, rows: Iterable[MemoryRows]) -> Path:
        """The run directory; without one, a name from the hash of all keys and rows, so that the same call resumes."""
        given = self.values.get("output_dir") or self.file_values.get("output_dir")
        if given is None:
            content = [self.recipe, self.config, list(self.imports), self.values, [item.fingerprint for item in rows]]
            digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]
            model = re.sub(r"[^\w.-]+", "-", Path(str(self.values.get("model", "model"))).name)
            given = self.values["output_dir"] = f"runs/{self.recipe}-{model}-{digest}"
            self.notes.append(f"run directory: {given}")
        return Path(str(given)).expanduser()

    def load_config(self, module: ModuleType) -> Any:
        """The config, with its keys and values checked."""
        keywords = KeywordValues(self.where, self.values)
        return recipe_loader.load_recipe_config(module, self.config, (), self.imports, keywords)


def finetune(  # noqa: PLR0913
    model: Model | Run | str | os.PathLike[str],
    rows: Rows | None = None,
    *,
    recipe: str = "sft",
    adapter: str | Mapping[str, Any] | None = "lora",
    eval_rows: Rows | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Iterable[Callback] = (),
    overwrite: bool = False,
    imports: Sequence[str] = (),
    **keys: Any,
) -> Run:
    """Fine-tune a model on rows, and return the run. The same call resumes an interrupted run.

    `rows`: dicts, a table of pandas or polars, a `datasets.Dataset`, a path, or a name on the Hub. `adapter`: "lora",
    "dora", keys of LoRA as a dict, or None to train all weights. `keys` are those of the recipe, with dicts for
    nested ones: `tunekit.finetune(model, rows, optimizer={"lr": 1e-4}, max_steps=20)`. Without `output_dir`, the run
    directory is below `runs/`. `callbacks` receive the metrics of each line as a dict. `overwrite` trains again.
    """
    where = "finetune(...)"
    with api_call(where):
        chosen = {"kind": "lora", **adapter} if isinstance(adapter, Mapping) else adapter
        values = {"adapter": "none" if chosen is None else chosen, **training_values(model, where)}
        values |= {} if output_dir is None else {"output_dir": output_dir}
        call = TrainCall(where, recipe, None, values | keys, imports, overwrite)
        return train(call, rows, eval_rows, callbacks)


def run(
    config: str | os.PathLike[str] | Mapping[str, Any],
    values: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    callbacks: Iterable[Callback] = (),
    overwrite: bool = False,
    imports: Sequence[str] = (),
    **keys: Any,
) -> Run:
    """Run a training recipe, as `tune run`, and return the run. The same call resumes an interrupted run.

    `config`: a config of `tune ls`, a YAML file, its content as a dict, or the name of a recipe, whose config are then
    `values`. `keys` override keys of the config, and `rows` its training rows; see `finetune`.
    """
    where = "run(...)"
    with api_call(where):
        recipe, file, keywords = find_recipe(where, config, values)
        call = TrainCall(where, recipe, file, keywords | keys, imports, overwrite)
        return train(call, rows, eval_rows, callbacks)


def find_recipe(where: str, config: Any, values: Any) -> tuple[str, str | None, dict[str, Any]]:
    """The recipe, the config file if there is one, and values of the call."""
    if isinstance(config, Mapping):
        keywords = {**config, **require_mapping(where, values)}
        recipe = keywords.pop(RECIPE_KEY, None)
        if not isinstance(recipe, str):
            raise UserError(f"{where}: the config has no recipe. Add 'recipe': 'sft'.")
        return recipe, None, keywords
    word = os.fspath(config)
    if registry.is_config(word):
        recipe = read_recipe(registry.find_config(word))
        if recipe is None:
            raise UserError(f"{word}: missing recipe. Add a line 'recipe: sft', or use run('sft', {word!r}).")
        return recipe, word, require_mapping(where, values)
    if isinstance(values, str | os.PathLike):
        return word, os.fspath(values), {}
    keywords = require_mapping(where, values)
    keywords.pop(RECIPE_KEY, None)
    return word, None, keywords


def require_mapping(where: str, values: Any) -> dict[str, Any]:
    """The second argument of `run` as a dict. Raises UserError for anything else."""
    if values is not None and not isinstance(values, Mapping):
        raise UserError(f"{where}: expected a dict of config keys, got {values!r:.60}. Pass the config first.")
    return dict(values or {})


def training_values(model: Model | Run | str | os.PathLike[str], where: str) -> dict[str, Any]:
    """Keys of a training config that describe a model."""
    values = model_values(model, where)
    values.pop("precision", None)  # of the result, which is not that of training
    for name in ("chat_template", "chat_template_kwargs"):
        if name in values:
            values[f"data.{name}"] = values.pop(name)
    return values | ({"adapter.adapter_path": model.adapter} if isinstance(model, Model) and model.adapter else {})


def train(call: TrainCall, rows: Rows | None, eval_rows: Rows | None, callbacks: Iterable[Callback]) -> Run:
    """Check the call, train, and return the run."""
    call.values = PlainValues(call.where)(call.values)
    module = recipe_loader.load_recipe(call.recipe)
    if "overwrite" not in inspect.signature(module.main).parameters:
        raise UserError(f"{call.where}: the recipe '{call.recipe}' does not train. Use tunekit.{call.recipe}(...).")
    memory = add_rows(call, rows, eval_rows)
    directory = call.output_dir(memory.values())
    for name in memory:
        key = "data" if name == "train" else "eval_data"
        call.values[f"{key}.source"] = str(directory / run_dir.ROWS / f"{name}.jsonl")
    cfg = call.load_config(module)
    device = torch.device(run_worker.available_devices(cfg)[0])
    observers = open_callbacks(callbacks, call.where, device)
    for name, item in memory.items():
        item.write_for_run(directory, name, call.overwrite)
    module.check(cfg)
    if call.overwrite:
        run_worker.check_overwrite(module, cfg)
    for note in call.notes:
        print(note, file=sys.stderr)
    with observe_metrics([*observers, *open_display()], hides_progress=has_notebook()):
        run_recipe(call, module, cfg, device)
    return Run(directory)


def run_recipe(call: TrainCall, module: ModuleType, cfg: Any, device: torch.device) -> None:
    """Run the recipe in this process. A stop with Ctrl-C or the stop file is printed; other signals are sent again."""
    num_devices = devices.count_devices().get(device.type, 0)
    if num_devices > 1:
        command = f"tune run {call.recipe} {cfg.output_dir}/config.yaml --nproc-per-node {num_devices}"
        print(f"1 of {num_devices} GPUs is used. To use all, run: {command}", file=sys.stderr)
    stopped = None
    stop_file = StopFile(Path(cfg.output_dir))
    with isolated_torch(device), stop_file:
        try:
            module.main(cfg, **({"overwrite": True} if call.overwrite else {}))
        except RunStopped as error:
            stopped = error.with_traceback(None)
    free_memory(device)
    if stopped is not None:
        print(stopped, file=sys.stderr)
        if stopped.code - 128 != signal.SIGINT and not stop_file.has_file:
            signal.raise_signal(stopped.code - 128)  # for the process, not only for the run


def add_rows(call: TrainCall, rows: Rows | None, eval_rows: Rows | None) -> dict[str, MemoryRows]:
    """Add the sources of rows to the keys of a call. Returns the rows in memory by the name of their file."""
    memory: dict[str, MemoryRows] = {}
    for name, section, given in (("train", "data", rows), ("eval", "eval_data", eval_rows)):
        if given is None:
            continue
        argument = "rows" if name == "train" else "eval_rows"
        if call.has_key(section, "source"):
            raise UserError(f"{call.where}: {section}.source and {argument} are set. Remove one of them.")
        if section == "eval_data" and section not in call.file_values:
            call.values |= shared_keys(call)
        source = read_rows(given, f"{call.where}: {argument}")
        if isinstance(source, MemoryRows):
            memory[name] = source
            call.values |= {f"{section}.split": "train"} if section in call.file_values else {}
        else:
            call.values[f"{section}.source"] = source
    return memory


def shared_keys(call: TrainCall) -> dict[str, Any]:
    """Keys of `data` that held-out rows share, such as max_length, below `eval_data`."""
    given = call.values.get("data", {})
    data = {**call.file_values.get("data", {}), **(given if isinstance(given, Mapping) else {})}
    dotted = {key.partition(".")[2]: value for key, value in call.values.items() if key.startswith("data.")}
    keys = {key: value for key, value in {**data, **dotted}.items() if key not in EVAL_ONLY}
    return {f"eval_data.{key}": value for key, value in keys.items() if not call.has_key("eval_data", key)}
