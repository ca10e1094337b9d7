"""`tune chat`: chat with a model. Answers are streamed."""

import argparse
import readline
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tunekit import build
from tunekit.config.load import load_config
from tunekit.data.chat_template.chat_format import describe_unread_kwargs, with_chat_format
from tunekit.data.chat_template.named_templates import TemplateKwargs, check_template_kwargs, find_template
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.generation import generate
from tunekit.models.precision import PrecisionConfig

Message = dict[str, str]
AnswerFn = Callable[[list[Message]], Iterator[str]]  # conversation -> chunks of the answer
COMMANDS = "/reset starts a new conversation, /quit, /exit or Ctrl-D exits, Ctrl-C stops an answer, /help shows this"


@dataclass(frozen=True)
class ChatFormat:
    """Values of the flags --chat-template and --chat-template-kwargs."""

    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_template_kwargs(self.chat_template_kwargs)
        if self.chat_template is not None:
            find_template(self.chat_template)

    @staticmethod
    def from_args(args: argparse.Namespace) -> "ChatFormat":
        values = {"chat_template": args.chat_template, "chat_template_kwargs": args.chat_template_kwargs}
        return load_config(ChatFormat, None, [f"{key}={text}" for key, text in values.items() if text is not None])


def main(args: argparse.Namespace) -> None:
    """Load the model and chat until the input ends."""
    try:
        sampling = generate.SamplingConfig(
            args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens, seed=args.seed
        )
    except FieldError as error:
        raise UserError(f"--{error.field.replace('_', '-')} {error.message}") from error
    chat_format = ChatFormat.from_args(args)
    model, tokenizer = build.load_for_inference(args.model, PrecisionConfig(), DistributedContext())
    tokenizer = with_chat_format(tokenizer, chat_format.chat_template, chat_format.chat_template_kwargs)
    if warning := describe_unread_kwargs(tokenizer):
        print(f"warning: {warning}", file=sys.stderr)
    # An unusable chat template is an error now, and not only after the first question.
    tokenizer.encode_prompt([*start_messages(args.system_prompt), {"role": "user", "content": "Hello"}])
    chat_loop(lambda messages: generate.stream_text(model, tokenizer, messages, sampling), args.system_prompt)


def start_messages(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []


def chat_loop(answer: AnswerFn, system: str | None = None) -> None:
    """Read questions and print answers. An interrupted answer stays in the conversation up to the interruption.

    Raises UserError if a piped question cannot be answered. In a terminal, the conversation continues without it.
    """
    messages = start_messages(system)
    if sys.stdin.isatty():
        readline.set_auto_history(True)
        print(COMMANDS)
    while (line := read_question()) not in (None, "/quit", "/exit"):
        if line == "/reset":
            messages = start_messages(system)
        elif line == "/help":
            print(COMMANDS)
        elif line:
            messages = print_answer(answer, [*messages, {"role": "user", "content": line}])


def read_question() -> str | None:
    """Read a line; None at the end of the input. Ctrl-C clears the line."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def print_answer(answer: AnswerFn, messages: list[Message]) -> list[Message]:
    """Stream the answer. Returns the conversation including it, or without the question if there is no answer."""
    chunks: list[str] = []
    try:
        for chunk in answer(messages):
            chunks.append(chunk)
            print(chunk, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except UserError as error:
        if not sys.stdin.isatty():
            raise
        print(f"error: {error}", file=sys.stderr)
    print()
    return [*messages, {"role": "assistant", "content": "".join(chunks)}] if chunks else messages[:-1]
