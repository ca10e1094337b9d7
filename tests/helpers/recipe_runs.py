"""A tiny checkpoint, training rows, and `tune` in this process or in a child process."""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.command_result import CommandResult
from tests.helpers.forkserver import start_forkserver
from tunekit import assets
from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.save_model import save_model
from tunekit.cli import main as cli
from tunekit.data.datasets import ChatDataset
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_init import init_weights
from tunekit.optim.config import AdamWConfig
from tunekit.recipes import sft
from tunekit.training.run_context import Due, RunContext

TINY_SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_SHAPE |= {"num_key_value_heads": 2, "head_dim": 8, "torch_dtype": "float32"}
# Part of the configs of all recipes.
SHARED_CONFIG = """\
precision: {{compute_dtype: fp32}}
device: cpu
output_dir: out
global_batch_size: 4
micro_batch_size: 2
save_every: 100
eval_every: 3
"""
CONFIG = """\
recipe: sft
model: {model}
data: {{kind: chat, source: rows.jsonl, max_length: 64}}
eval_data: {{kind: chat, source: held.jsonl, max_length: 64}}
max_steps: 6
"""
# Program of the child process. Its exit code is that of the command. Background jobs of a shell ignore SIGINT, and
# children inherit that.
CHILD_PROGRAM = """
import os, signal, sys
from tunekit.cli import main as cli
signal.signal(signal.SIGINT, signal.default_int_handler)
os.chdir({folder!r})
log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(log, 1)
os.dup2(log, 2)
{first}
sys.exit(cli.main({words!r}))
"""
# Code that ends a run with SIGKILL after the state of a step is saved.
KILL_AFTER_STEP = """
from tunekit.checkpoint.training_state import Checkpointer
save = Checkpointer.save
def save_and_end(state, step):
    save(state, step)
    state.wait()
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
Checkpointer.save = save_and_end
"""


@dataclass(frozen=True)
class Workspace:
    """Directory with `sft.yaml`, training rows and held-out rows, in which `tune` runs."""

    folder: Path
    model: Path
    context: ForkServerContext
    capture: pytest.CaptureFixture[str]

    def run_tune(self, *args: str) -> CommandResult:
        """Run `tune` in this process."""
        self.capture.readouterr()
        code, output = cli.main(args), self.capture.readouterr()
        return CommandResult(code, output.out, output.err)

    def kill_after(self, step: int, *args: str) -> None:
        """Run `tune` in a child process that is killed after the state of a step is saved."""
        process = self.start(*args, setup=KILL_AFTER_STEP.format(step=step))
        process.join()
        assert process.exitcode == -signal.SIGKILL, self.log

    def start(self, *args: str, setup: str = "") -> ForkServerProcess:
        """Run `tune` in a process that is forked from one with all imports done.

        `setup`: code that the process runs first.
        """
        code = CHILD_PROGRAM.format(folder=str(self.folder), words=args, first=setup)
        process = self.context.Process(target=exec, args=(code, {}), daemon=True)
        process.start()
        return process

    @property
    def log(self) -> str:
        """Output of the most recently started process."""
        return (self.folder / "log").read_text()

    def tensors(self, out: str, subdirectory: str = "final") -> dict[str, torch.Tensor]:
        """Tensors of all safetensors files in a subdirectory of a run."""
        files = sorted((self.folder / out / subdirectory).glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def is_same_run(self, first: str, other: str) -> bool:
        """Whether two runs have bit-identical weights and the same metrics."""
        a, b = self.tensors(first), self.tensors(other)
        equal = bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        return equal and self.deterministic_metrics(first) == self.deterministic_metrics(other)

    def deterministic_metrics(self, out: str) -> list[dict]:
        """Metric lines without values that depend on time."""
        timeless = {
            "step",
            "loss",
            "grad_norm",
            "lr",
            "eval/loss",
            "loss_scale",
            "num_overflows",
            "verify/max_logit_diff",
            "verify/mean_logit_diff",
            "verify/top1_agreement",
        }
        rows = map(json.loads, (self.folder / out / "metrics.jsonl").read_text().splitlines())
        return [{name: value for name, value in row.items() if name in timeless} for row in rows]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM in this step of a run, which saves it and stops."""
    due_after = RunContext.due_after

    def stopping(run: RunContext, current: int, num_steps: int) -> Due:
        if current == step:
            signal.raise_signal(signal.SIGTERM)
        return due_after(run, current, num_steps)

    monkeypatch.setattr(RunContext, "due_after", stopping)


def addition_rows(start: int, count: int) -> str:
    """Chat rows about `count` additions, as JSON lines."""
    rows = [(f"What is {n} plus {n * n}?", f"It is {n + n * n}" + "!" * (n % 3)) for n in range(start, start + count)]
    conversations = ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows)
    return "".join(json.dumps({"messages": turn}) + "\n" for turn in conversations)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    """Function that makes a random checkpoint with the tokenizer of tunekit/nano and changes to its config."""

    def model(folder: Path, **changes: object) -> Path:
        nano = assets.MODELS["tunekit/nano"]
        source_dir = folder / "described"
        source_dir.mkdir(parents=True)
        for file in [*nano.glob("*.json"), *nano.glob("*.jinja")]:
            shutil.copy(file, source_dir)
        config = json.loads((nano / "config.json").read_text()) | TINY_SHAPE | changes
        (source_dir / "config.json").write_text(json.dumps(config))
        source = HFCheckpoint.open(source_dir)
        decoder = Decoder(source.spec)
        decoder.tie()
        init_weights(decoder, 3)
        with atomic.AtomicDir(folder / "model") as out:
            save_model(out, decoder, source, quiet=True)
        return folder / "model"

    return model


@pytest.fixture(scope="session")
def tiny_model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def memorized_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a model that has memorized four rows."""
    directory = tmp_path_factory.mktemp("memorized")
    (directory / "rows.jsonl").write_text(addition_rows(1, 4))
    data = ChatDataset(str(directory / "rows.jsonl"), max_length=64)
    sft.main(
        sft.SFTConfig(
            model=str(tiny_model),
            data=data,
            output_dir=str(directory / "out"),
            optimizer=AdamWConfig(lr=1e-2),
            precision=PrecisionConfig("fp32"),
            device="cpu",
            global_batch_size=4,
            micro_batch_size=4,
            max_steps=80,
        )
    )
    return directory / "out"


@pytest.fixture(scope="session")
def forkserver_context() -> ForkServerContext:
    return start_forkserver()


@pytest.fixture
def workspace(
    tmp_path: Path,
    tiny_model: Path,
    forkserver_context: ForkServerContext,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Workspace:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(addition_rows(1, 10))
    Path("held.jsonl").write_text(addition_rows(100, 3))
    Path("sft.yaml").write_text((CONFIG + SHARED_CONFIG).format(model=tiny_model))
    return Workspace(tmp_path, tiny_model, forkserver_context, capsys)
