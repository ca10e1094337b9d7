"""`tune chat`: talk with a model; its answer appears word by word."""

import argparse
import readline
import sys
from collections.abc import Callable, Iterator

from tunekit import build
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.generation import generate
from tunekit.models.precision import PrecisionConfig

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]  # the pieces of an answer to a conversation


def main(args: argparse.Namespace) -> None:
    """Open the model and talk until the input ends."""
    try:
        sampling = generate.SamplingConfig(
            args.temperature, top_p=args.top_p, max_new_tokens=args.max_new_tokens, seed=args.seed
        )
    except FieldError as error:
        raise UserError(f"--{error.field.replace('_', '-')} {error.message}") from error
    model, tokenizer = build.load_for_inference(args.model, PrecisionConfig(), DistributedContext())
    talk(lambda messages: generate.stream_text(model, tokenizer, messages, sampling), args.system_prompt)


def talk(answer: Answer, system: str | None = None) -> None:
    """Questions and answers in turn. An answer that was stopped stays in the conversation as far as it came."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if sys.stdin.isatty():
        readline.set_auto_history(True)
        print("/reset forgets what was said, /quit or Ctrl-D leaves, Ctrl-C stops an answer")
    while (line := question()) not in (None, "/quit"):
        if line == "/reset":
            messages = list(start)
        elif line:
            messages = told(answer, [*messages, {"role": "user", "content": line}])


def question() -> str | None:
    """The next line; None at the end of the input. Ctrl-C clears the line."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def told(answer: Answer, messages: list[Message]) -> list[Message]:
    """Print the answer as it comes. Returns the conversation with it, or without the question if there is none."""
    pieces: list[str] = []
    try:
        for piece in answer(messages):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    print()
    return [*messages, {"role": "assistant", "content": "".join(pieces)}] if pieces else messages[:-1]
