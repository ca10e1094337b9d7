"""The result of a training run: its directory, metrics and model."""

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import yaml

from tunekit.api.model import Conversation, Model, SamplingOptions, load
from tunekit.api.session import api_call
from tunekit.api.tables import make_table
from tunekit.checkpoint import atomic, run_dir
from tunekit.cli.commands import export, merge, push, report
from tunekit.cli.main import make_parser
from tunekit.errors import UserError
from tunekit.system import read_utf8

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

PathLike = str | os.PathLike[str]


class Run:
    """A run directory, of `finetune`, `run` or `tune run`."""

    def __init__(self, directory: PathLike) -> None:
        self.directory = Path(directory).expanduser()
        if not (self.directory / run_dir.CONFIG).is_file():
            raise UserError(f"{self.directory}: no run directory (no {run_dir.CONFIG}). Pass the output_dir of a run.")

    def __repr__(self) -> str:
        state = "finished" if self.finished else "not finished; the same call resumes it"
        lines = read_metric_lines(self.directory)
        return f"Run({str(self.directory)!r}: {state}, step {lines[-1]['step'] if lines else 0})"

    @property
    def finished(self) -> bool:
        """Whether the result is written. Otherwise the same call resumes the run."""
        return atomic.is_complete(self.directory / run_dir.FINAL)

    @property
    def config(self) -> dict[str, Any]:
        """The complete config, of config.yaml, which repeats the run with `tune run`."""
        return yaml.safe_load(read_utf8(self.directory / run_dir.CONFIG))

    @property
    def metrics(self) -> "DataFrame":
        """Metrics by step, one column for each name. Step 0 is the model before training."""
        steps: dict[int, dict[str, Any]] = {}
        for line in read_metric_lines(self.directory):
            steps.setdefault(line["step"], {}).update(line)
        return make_table(list(steps.values()), ["step"])

    def plot(self) -> "Figure":
        """Loss, learning rate and gradient norm over the steps."""
        with api_call("run.plot()"):
            return import_module("tunekit.publishing.plots").make_figure(read_metric_lines(self.directory))

    def report(self, file: PathLike | None = None) -> Path:
        """Write the web page of the run, as `tune report`, by default into its directory, and return the file."""
        with api_call("run.report(...)"):
            output = {} if file is None else {"output": os.fspath(file)}
            return report.write_page(parse("report", [self.directory], **output))

    @cached_property
    def model(self) -> Model:
        """The result, which is loaded on first use and kept. `load(run.directory, ...)` takes options."""
        return load(self.directory)

    def chat(
        self,
        messages: str | Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> str:
        """The answer of the result to a question or a conversation; see `Model.chat`."""
        return self.model.chat(messages, tools=tools, **sampling)

    def merge(self, directory: PathLike, *, force: bool = False) -> Path:
        """Merge the adapter into its base model, as `tune merge`, and return the directory of the merged model."""
        with api_call("run.merge(...)"):
            base = self.config["model"]
            return merge.write_merged(parse("merge", [base, self.directory, directory], force=force))

    def push(
        self,
        repo: str,
        *,
        private: bool = False,
        merge_adapter: bool = False,
        revision: str | None = None,
        commit_message: str | None = None,
        token: str | None = None,
    ) -> str:
        """Upload the result to the Hub, as `tune push`, and return its URL."""
        with api_call("run.push(...)"):
            options = {"private": private, "merge_adapter": merge_adapter, "revision": revision, "token": token}
            args = parse("push", [self.directory, repo], **options, commit_message=commit_message)
            return str(push.upload_result(args))

    def export(self, file: PathLike, *, type: str | None = None) -> Path:
        """Export the result for llama.cpp or bitsandbytes, as `tune export`, and return the file or directory."""
        with api_call("run.export(...)"):
            return export.write_exported(parse("export", [self.directory, file], type=type))


def read_metric_lines(directory: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without one that is being written."""
    file = directory / run_dir.METRICS
    text = file.read_bytes().rpartition(b"\n")[0] if file.is_file() else b""
    return [json.loads(line) for line in text.splitlines()]


def parse(verb: str, positional: Sequence[PathLike], **options: str | bool | None) -> Namespace:
    """Arguments of a command. Options that are None or False are left out."""
    words = [verb]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [f"{flag}={value}"] if isinstance(value, str) else []
    return make_parser(verb)[0].parse_args([*words, "--", *(os.fspath(path) for path in positional)])
