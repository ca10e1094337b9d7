"""A checkpoint of some thousand weights, rows to learn, and `tune`: in this process, or in one of its own to kill."""

import json
import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.outcome import CommandResult
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

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "torch_dtype": "float32"}
# What the configs of all recipes say here.
SHORT = """\
precision: {{compute_dtype: fp32}}
device: cpu
output_dir: out
global_batch_size: 4
micro_batch_size: 2
save_every: 1
eval_every: 3
"""
CONFIG = """\
recipe: sft
model: {model}
data: {{kind: chat, source: rows.jsonl, max_length: 64}}
eval_data: {{kind: chat, source: held.jsonl, max_length: 64}}
max_steps: 6
"""
# What runs in a process of its own. Its exit code is that of the command.
# A shell starts what it puts into the background with Ctrl-C ignored, and so all that is started from there.
PROGRAM = """
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


@dataclass(frozen=True)
class Work:
    """A folder with `sft.yaml`, rows to learn and held-out rows; `tune` runs there."""

    folder: Path
    model: Path
    context: ForkServerContext
    capture: pytest.CaptureFixture[str]

    def tune(self, *words: str) -> CommandResult:
        """`tune`, in this process."""
        self.capture.readouterr()
        code, told = cli.main(words), self.capture.readouterr()
        return CommandResult(code, told.out, told.err)

    def start(self, *words: str, first: str = "") -> ForkServerProcess:
        """`tune`, in a process forked from one that has imported everything: it is at work at once.

        `first`: what else that process does, before.
        """
        program = PROGRAM.format(folder=str(self.folder), words=words, first=first)
        process = self.context.Process(target=exec, args=(program, {}), daemon=True)
        process.start()
        return process

    @property
    def log(self) -> str:
        """What the process that was started last has printed."""
        return (self.folder / "log").read_text()

    def tensors(self, out: str, part: str = "final") -> dict[str, torch.Tensor]:
        """All that the safetensors files of a run hold."""
        files = sorted((self.folder / out / part).glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def same(self, one: str, other: str) -> bool:
        """Whether two runs ended with the same weights, to the last bit, and the same numbers on the way."""
        a, b = self.tensors(one), self.tensors(other)
        equal = bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        return equal and self.numbers(one) == self.numbers(other)

    def numbers(self, out: str) -> list[dict]:
        """The lines of a run's metrics, without what depends on the clock."""
        timeless = {
            "step",
            "loss",
            "grad_norm",
            "lr",
            "eval/loss",
            "verify/max_logit_diff",
            "verify/mean_logit_diff",
            "verify/top1_agreement",
        }
        rows = map(json.loads, (self.folder / out / "metrics.jsonl").read_text().splitlines())
        return [{name: value for name, value in row.items() if name in timeless} for row in rows]


def sums(first: int, count: int) -> str:
    """Rows of chat, in JSON lines, about numbers from `first` on."""
    rows = [(f"What is {n} plus {n * n}?", f"It is {n + n * n}" + "!" * (n % 3)) for n in range(first, first + count)]
    turns = ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in rows)
    return "".join(json.dumps({"messages": turn}) + "\n" for turn in turns)


@pytest.fixture(scope="session")
def make() -> Callable[..., Path]:
    """A random checkpoint under the nano's tokenizer, with some keys of its config changed."""

    def model(folder: Path, **changes: object) -> Path:
        nano = assets.MODELS["tunekit/nano"]
        described = folder / "described"
        described.mkdir(parents=True)
        for file in [*nano.glob("*.json"), *nano.glob("*.jinja")]:
            shutil.copy(file, described)
        config = json.loads((nano / "config.json").read_text()) | SMALL | changes
        (described / "config.json").write_text(json.dumps(config))
        source = HFCheckpoint.open(described)
        net = Decoder(source.spec)
        net.tie()
        init_weights(net, 3)
        with atomic.AtomicDir(folder / "model") as out:
            save_model(out, net, source, quiet=True)
        return folder / "model"

    return model


@pytest.fixture(scope="session")
def tiny(make: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def learnt(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a model that knows four rows by heart."""
    folder = tmp_path_factory.mktemp("learnt")
    (folder / "rows.jsonl").write_text(sums(1, 4))
    data = ChatDataset(str(folder / "rows.jsonl"), max_length=64)
    sft.main(
        sft.SFTConfig(
            model=str(tiny),
            data=data,
            output_dir=str(folder / "out"),
            optimizer=AdamWConfig(lr=1e-2),
            precision=PrecisionConfig("fp32"),
            device="cpu",
            global_batch_size=4,
            micro_batch_size=4,
            max_steps=80,
        )
    )
    return folder / "out"


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    # torch imports this when it makes the first optimizer.
    found.set_forkserver_preload(["pytest", "torch._dynamo", "tunekit.recipes.sft", "tunekit.cli.commands.run_worker"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    first = found.Process(target=int)  # it returns when everything is imported
    first.start()
    first.join()
    return found


@pytest.fixture
def work(
    tmp_path: Path,
    tiny: Path,
    context: ForkServerContext,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Work:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(sums(1, 10))
    Path("held.jsonl").write_text(sums(100, 3))
    Path("sft.yaml").write_text((CONFIG + SHORT).format(model=tiny))
    return Work(tmp_path, tiny, context, capsys)
