"""Answers to prompts, many at once: from the command line or from a file.

tune run generate nano/generate 'prompts=["What is 3 plus 4?"]'
tune run generate nano/generate source=questions.jsonl output_path=answers.jsonl sampling.temperature=0.7
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tunekit import build
from tunekit.checkpoint.atomic import write_text_atomic
from tunekit.data.chat_template.messages import parse_messages
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.readers.open_dataset import find_data_files, open_dataset
from tunekit.data.readers.row_reader import require_row
from tunekit.data.row_errors import with_row_location
from tunekit.data.tokenizer import Tokenizer
from tunekit.devices import DeviceChoice
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import COPIES, ParallelConfig
from tunekit.errors import FieldError, UserError
from tunekit.generation.generate import SamplingConfig, generate_all
from tunekit.hub import download
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import Float8Config, FP4Config, NF4Config, NoQuantization


@dataclass(frozen=True)
class GenerateConfig:
    """Which model is asked what, and how it chooses its words."""

    model: str  # folder of a checkpoint, an adapter or a run; a Hub name; tunekit/nano
    prompts: tuple[str, ...] = ()  # what a user says
    source: str | None = None  # rows with `messages` (up to what is to be answered) or `prompt`
    split: str = "train"  # of the source
    system_prompt: str | None = None  # what the system message says
    apply_chat_template: bool = True  # Format harness questions with the chat template
    sampling: SamplingConfig = SamplingConfig()
    quantization: NoQuantization | NF4Config | FP4Config | Float8Config = NoQuantization()  # how its weights are stored
    precision: PrecisionConfig = PrecisionConfig()
    batch_size: int = 16  # prompts that are answered at once
    output_path: str | None = None  # JSON file (evaluate), JSONL file (generate)
    parallel: ParallelConfig = COPIES  # how several devices share the prompts, or the weights
    device: DeviceChoice = "auto"  # auto: the first of cuda, xpu, mps that torch finds, else cpu

    def __post_init__(self) -> None:
        if not self.prompts and self.source is None:
            raise FieldError("prompts", "nothing to answer: give prompts, or a source with rows of them")
        if self.batch_size < 1:
            raise FieldError("batch_size", f"must be 1 or more, not {self.batch_size}")


CONFIG = GenerateConfig


def check(cfg: GenerateConfig) -> None:
    """Whether the model and the rows are there."""
    source, adapter, _ = build.resolve_model(cfg.model, download.SMALL)
    build.check_parallelizable(source, cfg.quantization, adapter, cfg.parallel)
    if cfg.source is not None:
        find_data_files(cfg.source, cfg.split)


def main(cfg: GenerateConfig) -> None:
    """Answer all prompts, in their order."""
    with DistributedContext(cfg.sampling.seed, cfg.device, cfg.parallel) as run:
        cfg.parallel.check_inference(run.size)
        model, tokenizer = build.load_for_inference(cfg.model, cfg.precision, run, cfg.quantization)
        texts = list(read_prompts(cfg))
        prompts = [encode_prompt(text, tokenizer, cfg) for text in texts]
        found = generate_all(model, prompts, cfg.sampling, tokenizer.stops, cfg.batch_size, run)
        pairs = zip(texts, found, strict=True)
        lines = [{"prompt": text, "answer": tokenizer.decode(answer)} for text, answer in pairs]
        run.shared(partial(write_answers, cfg, lines))


def read_prompts(cfg: GenerateConfig) -> Iterator[str | list]:
    """Prompts as text, or as conversations."""
    yield from cfg.prompts
    for row in map(require_row, open_dataset(cfg.source, cfg.split, None).rows) if cfg.source is not None else ():
        found = row.fields.get("messages", row.fields.get("prompt"))
        if not isinstance(found, str | list) or not found:
            raise UserError(f"{row.where}: neither 'messages' nor 'prompt' to answer")
        yield found if isinstance(found, str) else with_row_location(row, parse_messages, found, "messages")


def encode_prompt(prompt: str | list, tokenizer: Tokenizer, cfg: GenerateConfig) -> list[int]:
    """The tokens to go on from."""
    if isinstance(prompt, str) and not cfg.apply_chat_template:
        return tokenizer.encode(prompt, special=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    system = [{"role": "system", "content": cfg.system_prompt}] if cfg.system_prompt else []
    messages = [*system, *messages]
    return tokenizer.prompt(detect_features(tokenizer.template(), tokenizer).fit(messages))


def write_answers(cfg: GenerateConfig, lines: list[dict]) -> None:
    if cfg.output_path is not None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_text_atomic(Path(cfg.output_path), text)
        print(f"{len(lines)} answers in {cfg.output_path}")
        return
    for line in lines:
        prompt = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
        print(f"> {prompt}\n{line['answer']}\n")
