"""Mutates the files of a checkpoint, an adapter and a config, and reads the result as the commands do.

Every mutated input must be read or raise UserError, within `SECONDS`. `scripts/fuzz.py` runs many inputs, tests a few.
"""

import json
import random
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.assets import BUNDLED
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.load_model import check_tensors
from tunekit.checkpoint.peft_reader import PeftConfigFile
from tunekit.config.load import load_config
from tunekit.data.readers.open_dataset import open_dataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
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


class TooSlow(Exception):
    """An input took longer than `SECONDS`."""


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


Reader = Callable[[Path], None]
TARGETS: dict[str, tuple[Reader, str]] = {  # what reads the file, by file
    "config.json": (run_random_model, "json"),
    "model.safetensors": (read_checkpoint, "safetensors"),
    "generation_config.json": (read_tokenizer, "json"),
    "tokenizer_config.json": (read_tokenizer, "json"),
    "tokenizer.json": (read_tokenizer, "json"),
    "chat_template.jinja": (read_tokenizer, "bytes"),
    "adapter_config.json": (read_adapter, "json"),
    "sft.yaml": (read_config, "bytes"),
    "rows.jsonl": (read_rows, "bytes"),
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


def slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers of JSON data, each with its keys."""
    for key, child in [*(value.items() if isinstance(value, dict) else enumerate(value))][:200]:
        yield value, key
        if isinstance(child, dict | list):
            yield from slots(child)


def mutate_json(data: bytes, source: random.Random) -> bytes:
    """Replace, delete or nest one to three values; sometimes also mutate the text."""
    content = json.loads(data)
    for _ in range(source.randint(1, 3)):
        container, key = source.choice([*slots(content)] or [(content, "a")])
        try:
            match source.randrange(8):
                case 0:
                    del container[key]
                case 1:
                    container[key] = [container[key]] * 3
                case _:
                    container[key] = source.choice(VALUES)
        except (IndexError, KeyError):  # changed by an earlier mutation
            continue
    text = json.dumps(content).encode()
    return mutate_bytes(text, source) if source.random() < 0.1 else text


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
                data[at:at] = source.choice(
                    (b"\0", b"\xff\xfe", b"{" * 2000, b"[" * 2000, b"- ", b": ", b"{{", b"{%", b"&a *a")
                )
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


MUTATORS = {"json": mutate_json, "bytes": mutate_bytes, "safetensors": mutate_safetensors}


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
