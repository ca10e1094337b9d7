"""Batched generation for prompts from the command line or from a file.

tune run generate nano/generate 'prompts=["What is 3 plus 4?"]'
tune run generate nano/generate source=questions.jsonl output_path=answers.jsonl sampling.temperature=0.7
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tunekit import build
from tunekit.checkpoint.atomic import write_text_atomic
from tunekit.data.chat_template.chat_format import describe_unread_kwargs, with_chat_format
from tunekit.data.chat_template.messages import parse_messages
from tunekit.data.chat_template.named_templates import TemplateKwargs, check_template_kwargs
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.readers.open_dataset import find_data_files, open_dataset
from tunekit.data.readers.row_reader import require_row
from tunekit.data.row_errors import with_row_location
from tunekit.data.tokenizer import Tokenizer
from tunekit.devices import DeviceChoice
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import REPLICATED, ParallelConfig
from tunekit.errors import FieldError, UserError
from tunekit.generation.generate import SamplingConfig, generate_all
from tunekit.hub import download
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import Float8Config, FP4Config, NF4Config, NoQuantization


@dataclass(frozen=True)
class GenerateConfig:
    """The keys of this recipe."""

    model: str  # Directory of a checkpoint, adapter or run; a Hub name; tunekit/nano
    prompts: tuple[str, ...] = ()  # User messages
    source: str | None = None  # Dataset with `messages` (up to the answer) or `prompt` columns
    split: str = "train"  # Split of `source`
    system_prompt: str | None = None  # System message
    apply_chat_template: bool = True  # Format prompts with the chat template; false: continue the text
    chat_template: str | None = None  # Jinja file, or the name of a bundled template, that replaces the model's
    # Values of template variables, such as {enable_thinking: false}
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)
    sampling: SamplingConfig = SamplingConfig()  # How completions are generated
    quantization: NoQuantization | NF4Config | FP4Config | Float8Config = NoQuantization()  # How the weights are stored
    precision: PrecisionConfig = PrecisionConfig()  # dtypes of weights and computation
    batch_size: int = 16  # Prompts per forward pass
    output_path: str | None = None  # JSONL file for prompts and answers; null: print them
    parallel: ParallelConfig = REPLICATED  # How several devices share the prompts or the weights
    device: DeviceChoice = "auto"  # `auto`: the first of cuda, xpu and mps that torch finds, else cpu

    def __post_init__(self) -> None:
        if not self.prompts and self.source is None:
            raise FieldError("prompts", "no prompts. Set prompts or source.")
        if self.batch_size < 1:
            raise FieldError("batch_size", f"must be >= 1, got {self.batch_size}")
        check_template_kwargs(self.chat_template_kwargs)


CONFIG = GenerateConfig


def check(cfg: GenerateConfig) -> None:
    """Raise UserError if the model or the rows do not exist, or the prompts need a chat template and have none."""
    source, adapter, tokenizer = build.resolve_model(cfg.model, download.SMALL)
    tokenizer = with_chat_format(tokenizer, cfg.chat_template, cfg.chat_template_kwargs)
    if cfg.apply_chat_template:
        tokenizer.template()  # raises UserError if there is none
    build.check_parallelizable(source, cfg.quantization, adapter, cfg.parallel)
    if cfg.source is not None:
        find_data_files(cfg.source, cfg.split)


def main(cfg: GenerateConfig) -> None:
    """Generate the answers to all prompts, in their order."""
    with DistributedContext(cfg.sampling.seed, cfg.device, cfg.parallel) as dist:
        cfg.parallel.check_inference(dist.world_size)
        model, tokenizer = build.load_for_inference(cfg.model, cfg.precision, dist, cfg.quantization)
        tokenizer = with_chat_format(tokenizer, cfg.chat_template, cfg.chat_template_kwargs)
        if warning := describe_unread_kwargs(tokenizer):
            dist.log(f"warning: {warning}")
        texts = list(read_prompts(cfg))
        prompts = [encode_prompt(text, tokenizer, cfg) for text in texts]
        outputs = generate_all(model, prompts, cfg.sampling, tokenizer.stops, cfg.batch_size, dist)
        pairs = zip(texts, outputs, strict=True)
        lines = [{"prompt": text, "answer": tokenizer.decode(answer)} for text, answer in pairs]
        dist.run_on_main(partial(write_answers, cfg, lines))


def read_prompts(cfg: GenerateConfig) -> Iterator[str | list]:
    """Prompts as text, or as lists of messages."""
    yield from cfg.prompts
    for row in map(require_row, open_dataset(cfg.source, cfg.split, None).rows) if cfg.source is not None else ():
        prompt = row.fields.get("messages", row.fields.get("prompt"))
        if not isinstance(prompt, str | list) or not prompt:
            raise UserError(f"{row.where}: has no 'messages' or 'prompt'")
        yield prompt if isinstance(prompt, str) else with_row_location(row, parse_messages, prompt, "messages")


def encode_prompt(prompt: str | list, tokenizer: Tokenizer, cfg: GenerateConfig) -> list[int]:
    """Token ids of a prompt, up to the start of the answer."""
    if isinstance(prompt, str) and not cfg.apply_chat_template:
        return tokenizer.encode(prompt, special=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    system = [{"role": "system", "content": cfg.system_prompt}] if cfg.system_prompt else []
    messages = [*system, *messages]
    return tokenizer.encode_prompt(detect_features(tokenizer.template(), tokenizer).adapt_messages(messages))


def write_answers(cfg: GenerateConfig, lines: list[dict]) -> None:
    if cfg.output_path is not None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_text_atomic(Path(cfg.output_path), text)
        print(f"{len(lines)} answers in {cfg.output_path}")
        return
    for line in lines:
        prompt = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
        print(f"> {prompt}\n{line['answer']}\n")
