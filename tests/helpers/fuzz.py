"""Mutates the files of a checkpoint, an adapter and a config, and reads the result as the commands do.

Every mutated input must be read or raise UserError, within `SECONDS`. `scripts/fuzz.py` runs many inputs, tests a few.
"""

import copy
import json
import random
import re
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.assets import BUNDLED
from tunekit.checkpoint import atomic
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.load_model import check_tensors
from tunekit.checkpoint.peft_config import PeftConfigFile
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.config.load import load_config
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.loggers.metric_logger import ThroughputCounter
from tunekit.memory.config import MemoryConfig
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization
from tunekit.recipes.sft import SFTConfig

NANO = BUNDLED / "model"
SECONDS = 20
MAX_PARAMS = 20_000_000
NUMBERS = (0, 1, -1, 7, 0.5, 2**31, 2**63, 10**12, 10**400, 1e300, float("inf"), float("nan"))
VALUES = (*NUMBERS, None, True, "", "x", "\x1b[31m", "\ud800", "a\0b", "x" * 10_000, [], [[]], [None], {}, {"a": 1})
INSERTED = (b"\0", b"\xff\xfe", b"{" * 2000, b"[" * 2000, b"- ", b": ", b"{{", b"{%", b"&a *a")
JINJA = """{{ messages }} {{ messages[-1].content * 9 }} {% for a in messages %} {% endfor %} {% if x %}
{% set x = x ~ x %} {{ x.__class__ }} {{ raise_exception(x) }} {% macro m() %}{{ m() }}{% endmacro %} {{ x | tojson }}
{% generation %} {{ range(10**9) | list }} {% include 'x' %} {{ 1 / 0 }}"""
SNIPPETS = [code.encode() for code in re.split(r"(?<=[}]) |\n", JINJA)]
TEMPLATES = sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
STATE = "state/00000002"
QUESTION = [{"role": "user", "content": "Hello!"}]
ADAPTER = {
    "peft_type": "LORA",
    "base_model_name_or_path": "tunekit/nano",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 8},
    "modules_to_save": None,
}
YAML = b"""model: tunekit/nano
data: {source: tunekit/tools, max_length: 256, packing: true}
adapter: {kind: lora, rank: 8, target_modules: [q_proj, v_proj]}
optimizer: {kind: adamw, lr: 2e-4}
max_steps: 2
output_dir: out
"""
ROWS = b"".join(
    json.dumps({"messages": [*QUESTION, {"role": "assistant", "content": "Hi."}], "id": i}).encode() + b"\n"
    for i in range(8)
)


class TooSlow(BaseException):
    """An input took longer than `SECONDS`. Not an Exception, which readers turn into UserError."""


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def read_checkpoint(folder: Path) -> None:
    """Read names, sizes, mappings and the model without its weights, as `tune run` does before it allocates."""
    checkpoint = HFCheckpoint.open(folder)
    check_tensors(checkpoint, build.build_meta_model(checkpoint, NoQuantization(), NoAdapter()).shapes)


def run_random_model(folder: Path) -> None:
    """Read a config, and run a model of this shape with random weights if it is small: kernels must accept it."""
    checkpoint = HFCheckpoint.open(folder)
    meta_model = build.build_meta_model(checkpoint, NoQuantization(), NoAdapter())
    if sum(p.numel() for p in meta_model.parameters()) < MAX_PARAMS:
        context = DistributedContext(device="cpu")
        model = build.build_model(
            checkpoint, NoQuantization(), NoAdapter(), PrecisionConfig(), MemoryConfig(), context, from_scratch=True
        )
        with torch.inference_mode():
            model(torch.arange(6)[None] % checkpoint.spec.vocab)


def read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    tokenizer.decode(tokenizer.encode_prompt(QUESTION))


def read_adapter(folder: Path) -> None:
    file = PeftConfigFile.open(folder)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.5.mlp.down_proj"):
        file.rank_and_alpha(name, file.adapter)


def read_config(folder: Path) -> None:
    load_config(SFTConfig, folder / "sft.yaml")


def read_rows(folder: Path) -> None:
    for _ in open_dataset(str(folder / "rows.jsonl"), "train").rows:
        pass


def open_state(folder: Path) -> tuple[nn.Module, Checkpointer]:
    """A small model and the training states in a directory."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    context = DistributedContext(device="cpu")
    return model, Checkpointer(folder, model, optimizer, scheduler, 1, context, throughput=ThroughputCounter())


def read_state(folder: Path) -> None:
    """Restore a training state, whose marker has the checksums of the mutated files."""
    checksums = atomic.checksums(folder / STATE)
    del checksums[atomic.MARK]
    (folder / STATE / atomic.MARK).write_text(json.dumps(checksums))
    read_marked_state(folder)


def read_marked_state(folder: Path) -> None:
    """Restore a training state, and take a step."""
    model, checkpointer = open_state(folder / "state")
    if checkpointer.restore():
        model(torch.ones(4)).sum().backward()
        checkpointer.optimizer.step()


def read_sharded(folder: Path) -> None:
    read_checkpoint(folder / "sharded")


Reader = Callable[[Path], None]
TARGETS: dict[str, tuple[Reader, str]] = {  # what reads the file, by file
    "config.json": (run_random_model, "json"),
    "model.safetensors": (read_checkpoint, "safetensors"),
    "generation_config.json": (read_tokenizer, "json"),
    "tokenizer_config.json": (read_tokenizer, "json"),
    "tokenizer.json": (read_tokenizer, "json"),
    "chat_template.jinja": (read_tokenizer, "template"),
    "adapter_config.json": (read_adapter, "json"),
    "sft.yaml": (read_config, "bytes"),
    "rows.jsonl": (read_rows, "bytes"),
    "sharded/model.safetensors.index.json": (read_sharded, "json"),
    f"{STATE}/complete": (read_marked_state, "json"),
    f"{STATE}/progress.pt": (read_state, "torch"),
    f"{STATE}/random-0.pt": (read_state, "torch"),
    f"{STATE}/.metadata": (read_state, "bytes"),
    f"{STATE}/__0_0.distcp": (read_state, "bytes"),
}


def write_corpus(folder: Path) -> None:
    """Write valid files. Weights are linked."""
    for file in NANO.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
        else:
            (folder / file.name).symlink_to(file)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (folder / "sft.yaml").write_bytes(YAML)
    (folder / "rows.jsonl").write_bytes(ROWS)
    write_sharded_checkpoint(folder / "sharded")
    model, checkpointer = open_state(folder / "state")
    model(torch.ones(4)).sum().backward()
    checkpointer.optimizer.step()
    checkpointer.save(2)


def write_sharded_checkpoint(folder: Path) -> None:
    """Write the bundled model as two files and an index."""
    folder.mkdir()
    tensors = load_file(NANO / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_bytes((NANO / "config.json").read_bytes())


def slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers of JSON data, each with its keys."""
    for key, child in [*(value.items() if isinstance(value, dict) else enumerate(value))][:200]:
        yield value, key
        if isinstance(child, dict | list):
            yield from slots(child)


def mutate_json(data: bytes, source: random.Random) -> bytes:
    """Replace, delete or nest one to three values; sometimes also mutate the text."""
    content = json.loads(data)
    mutate_values(content, source)
    text = json.dumps(content).encode()
    return mutate_bytes(text, source) if source.random() < 0.1 else text


def mutate_values(content: Any, source: random.Random) -> None:
    """Replace, delete or nest one to three values in place."""
    for _ in range(source.randint(1, 3)):
        container, key = source.choice([*slots(content)] or [(content, "a")])
        try:
            match source.randrange(8):
                case 0:
                    del container[key]
                case 1:
                    container[key] = [container[key]] * 3
                case _:
                    container[key] = copy.deepcopy(source.choice(VALUES))
        except (IndexError, KeyError):  # changed by an earlier mutation
            continue


def mutate_torch(data: bytes, source: random.Random) -> bytes:
    """Mutate the values of a torch.save file, or its bytes."""
    if source.random() < 0.2:
        return mutate_bytes(data, source)
    content = torch.load(BytesIO(data), weights_only=True)
    mutate_values(content, source)
    stream = BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def mutate_template(data: bytes, source: random.Random) -> bytes:
    """Mutate the bytes of any known chat template, or insert Jinja code."""
    template = source.choice(TEMPLATES).read_bytes() if source.random() < 0.7 else data
    if source.random() < 0.5:
        return mutate_bytes(template, source)
    at = source.randrange(len(template) + 1)
    return template[:at] + b"".join(source.choices(SNIPPETS, k=source.randint(1, 3))) + template[at:]


def mutate_bytes(data: bytes, source: random.Random) -> bytes:
    """Flip, cut, repeat or insert bytes."""
    data = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(data) + 1)
        match source.randrange(6):
            case 0:
                data[at : at + 1] = bytes([source.randrange(256)])
            case 1:
                del data[at : at + source.randint(1, 20)]
            case 2:
                data[at:at] = data[at : at + 40] * source.randint(1, 5)
            case 3:
                data[at:at] = source.choice(INSERTED)
            case 4:
                data = data[:at]
            case 5:
                data[at:at] = str(source.choice(NUMBERS)).encode()
    return bytes(data)


def mutate_safetensors(data: bytes, source: random.Random) -> bytes:
    """Mutate the header, and sometimes its length."""
    (size,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + size]
    header = mutate_json(header, source) if source.random() < 0.6 else mutate_bytes(header, source)
    length = len(header) if source.random() < 0.8 else source.choice((0, 1, 2**32, 2**63, 2**64 - 1))
    return struct.pack("<Q", length) + header + data[8 + size :]


MUTATORS = {
    "json": mutate_json,
    "bytes": mutate_bytes,
    "safetensors": mutate_safetensors,
    "torch": mutate_torch,
    "template": mutate_template,
}


def fuzz_file(name: str, count: int, folder: Path, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Read `count` mutations of a file: number of outcomes, and a description of each that is no UserError."""
    reader, kind = TARGETS[name]
    file = folder / name
    original, source = file.read_bytes(), random.Random(f"{name} {seed}")
    outcomes, findings = Counter[str](), []
    for i in range(count):
        mutated = MUTATORS[kind](original, source)
        file.unlink()
        file.write_bytes(mutated)
        try:
            with time_limit():
                reader(folder)
            outcomes["read"] += 1
        except UserError:
            outcomes["refused"] += 1
        except BaseException as error:  # also PanicException of Rust libraries
            if isinstance(error, KeyboardInterrupt):
                raise
            outcomes[type(error).__name__] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            findings.append(
                f"{name} #{i}: {type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
            )
    file.unlink()
    file.write_bytes(original)
    return outcomes, findings
