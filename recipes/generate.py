"""Batched generation for prompts from the command line or from a file.

tune run generate nano/generate 'prompts=["What is 3 plus 4?"]'
tune run generate nano/generate source=questions.jsonl output_path=answers.jsonl sampling.temperature=0.7
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tunekit.checkpoint.atomic import write_text_atomic
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import parse_messages, parse_tools
from tunekit.data.readers.open_dataset import find_data_files, open_dataset
from tunekit.data.readers.row_reader import require_row
from tunekit.data.row_errors import with_row_location
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.evaluation.inference_config import InferenceConfig
from tunekit.generation.generate import generate_texts


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """The keys of this recipe."""

    prompts: tuple[str, ...] = ()  # User messages
    source: str | None = None  # Dataset with `messages` (up to the answer) or `prompt` columns
    split: str = "train"  # Split of `source`
    system_prompt: str | None = None  # System message
    apply_chat_template: bool = True  # Format prompts with the chat template; false: continue the text
    num_return_sequences: int = 1  # Answers to each prompt; several need sampling.temperature > 0
    batch_size: int = 16  # Answers per forward pass
    output_path: str | None = None  # JSONL file with one line per answer; null: print them

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts and self.source is None:
            raise FieldError("prompts", "no prompts. Set prompts or source.")
        for key in ("batch_size", "num_return_sequences"):
            if getattr(self, key) < 1:
                raise FieldError(key, f"must be >= 1, got {getattr(self, key)}")
        if self.num_return_sequences > 1 and self.sampling.temperature == 0:
            raise FieldError("num_return_sequences", "greedy answers are equal. Set sampling.temperature.")


CONFIG = GenerateConfig


def check(cfg: GenerateConfig) -> None:
    """Raise UserError if the model or the rows do not exist, or the prompts need a chat template and have none."""
    tokenizer = cfg.check_model(cfg.model)
    if cfg.apply_chat_template:
        tokenizer.template()  # raises UserError if there is none
    if cfg.source is not None:
        find_data_files(cfg.source, cfg.split)


def main(cfg: GenerateConfig) -> None:
    """Generate the answers to all prompts, in their order."""
    with DistributedContext(cfg.sampling.seed, cfg.device, cfg.parallel) as dist:
        cfg.parallel.check_inference(dist.world_size)
        model, tokenizer = cfg.load_model(cfg.model, dist)
        encoded = [(prompt, encode_prompt(prompt, tools, tokenizer, cfg)) for prompt, tools in read_prompts(cfg)]
        rows = [row for row in encoded for _ in range(cfg.num_return_sequences)]
        answers = generate_texts(model, tokenizer, [ids for _, ids in rows], cfg.sampling, cfg.batch_size, dist)
        lines = [{"prompt": prompt, "answer": answer} for (prompt, _), answer in zip(rows, answers, strict=True)]
        dist.run_on_main(partial(write_answers, cfg, lines))


def read_prompts(cfg: GenerateConfig) -> Iterator[tuple[str | list, list | None]]:
    """Prompts as text, or as lists of messages, each with its tools."""
    yield from ((prompt, None) for prompt in cfg.prompts)
    for row in map(require_row, open_dataset(cfg.source, cfg.split, None).rows) if cfg.source is not None else ():
        prompt = row.fields.get("messages", row.fields.get("prompt"))
        if not isinstance(prompt, str | list) or not prompt:
            raise UserError(f"{row.where}: has no 'messages' or 'prompt'")
        tools = with_row_location(row, parse_tools, row.fields.get("tools"), "tools")
        yield prompt if isinstance(prompt, str) else with_row_location(row, parse_messages, prompt, "messages"), tools


def encode_prompt(prompt: str | list, tools: list | None, tokenizer: Tokenizer, cfg: GenerateConfig) -> list[int]:
    """Token ids of a prompt, up to the start of the answer."""
    if isinstance(prompt, str) and not cfg.apply_chat_template:
        return tokenizer.encode(prompt, special=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    system = [{"role": "system", "content": cfg.system_prompt}] if cfg.system_prompt else []
    return encode_conversation(tokenizer, [*system, *messages], tools)


def write_answers(cfg: GenerateConfig, lines: list[dict]) -> None:
    if cfg.output_path is not None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_text_atomic(Path(cfg.output_path), text)
        print(f"{len(lines)} answers in {cfg.output_path}")
        return
    for line in lines:
        prompt = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
        print(f"> {prompt}\n{line['answer']}\n")
