"""`tune chat`: chat with a model. Answers are streamed."""

import argparse
import json
import readline
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tunekit.checkpoint.atomic import wrap_write_errors
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import Message, parse_json, parse_tools
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.evaluation.inference_config import InferenceConfig, config_from_flags
from tunekit.generation.generate import stream_text
from tunekit.generation.sampling import CHAT_SAMPLING, SamplingConfig
from tunekit.generation.token_probabilities import render_probabilities, token_probabilities
from tunekit.system import read_utf8

# Chunks of the answer to a conversation; the number selects random numbers, and token ids are appended to the list.
AnswerFn = Callable[[list[Message], int, list[int]], Iterator[str]]
ShowTokensFn = Callable[[list[Message], list[int], str], bytes]  # conversation, ids of the answer, suffix -> a file
IMAGES = (".png", ".svg", ".pdf")  # other files of /tokens are web pages
BLOCK = '"""'
COMMANDS = {
    "/help": "show this",
    "/reset": "start a new conversation",
    "/system": "TEXT: start a new conversation with this system prompt; without a text: with none",
    "/tool": "TEXT: send the result of a tool call",
    "/retry": "sample another answer to the last message",
    "/save": "FILE: append the conversation to a JSONL file, as a row of training data",
    "/tokens": "FILE: write the probability of each token of the last answer, as a .html page or a .png image",
    "/quit": "or /exit, or Ctrl-D",
}
HELP = "\n".join([
    *(f"{name:8} {text}" for name, text in COMMANDS.items()),
    f'Ctrl-C stops an answer. Several lines: end a line with \\, or write {BLOCK} before and after the text.',
])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatConfig(InferenceConfig):
    """Values of the flags. Those of `sampling` have the names of its keys."""

    sampling: SamplingConfig = CHAT_SAMPLING

    @staticmethod
    def from_args(args: argparse.Namespace) -> "ChatConfig":
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "seed")
        values = {f"sampling.{name}": getattr(args, name) for name in names}
        values |= {"sampling.stop_strings": json.dumps(args.stop_strings) if args.stop_strings else None}
        names = ("chat_template", "chat_template_kwargs", "config_overrides", "quantization")
        values |= {"model": json.dumps(args.model)} | {name: getattr(args, name) for name in names}
        return config_from_flags(ChatConfig, values)


def main(args: argparse.Namespace) -> None:
    """Load the model and chat until the input ends."""
    cfg, tools = ChatConfig.from_args(args), read_tools(args.tools)
    # An unusable chat template is an error before the weights are read, and not only after the first question.
    chat, tokenizer = Chat(args.system_prompt, tools or []), cfg.check_model(cfg.model)
    encode_conversation(tokenizer, [*chat.messages, {"role": "user", "content": "Hello"}], tools)
    if tools and "tools" not in tokenizer.template(tools).variables:
        print("warning: --tools: the chat template of this model does not read tools", file=sys.stderr)
    model, tokenizer = cfg.load_model(cfg.model, DistributedContext())

    def answer(messages: list[Message], number: int, tokens: list[int]) -> Iterator[str]:
        return stream_text(model, tokenizer, messages, cfg.sampling, tools, number, tokens)

    def show_tokens(messages: list[Message], tokens: list[int], suffix: str) -> bytes:
        prompt = encode_conversation(tokenizer, messages, tools)
        items = token_probabilities(model, prompt, tokens)
        if suffix in IMAGES:
            draw = import_module("tunekit.generation.token_image").draw_probabilities
            return draw(tokenizer, items, cfg.model, suffix[1:])
        return render_probabilities(tokenizer, prompt, items, cfg.model).encode()

    chat_loop(answer, chat, show_tokens)


def read_tools(file: str | None) -> list[dict[str, Any]] | None:
    """Tool schemas of a JSON file, which has a list of them."""
    if file is None:
        return None
    try:
        text = read_utf8(Path(file))
    except OSError as error:
        problem = f"cannot read {file}: {error.strerror}"
        raise UserError(f"--tools: {problem}. Set it to a JSON file with a list of tools.") from error
    return parse_tools(parse_json(text, file), file)


@dataclass
class Chat:
    """A conversation. A command or a message that fails leaves it as it was."""

    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[Message] = field(init=False)
    tokens: list[int] = field(default_factory=list)  # of the last answer
    num_answers: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    @property
    def last_answer(self) -> list[Message]:
        """The last answer, if it is the last message."""
        return [message for message in self.messages[-1:] if message["role"] == "assistant"]

    def require_answer(self, name: str) -> None:
        """Raise UserError if the last message is not an answer, which command `name` needs."""
        if not self.last_answer:
            raise UserError(f"{name}: there is no answer yet. Write a message first.")

    def send(self, answer: AnswerFn, *new: Message) -> None:
        """Stream the answer to new messages. An interrupted answer stays in the conversation up to the interruption."""
        chunks, tokens = [], []
        try:
            for chunk in answer([*self.messages, *new], self.num_answers, tokens):
                chunks.append(chunk)
                print(chunk, end="", flush=True)
        except KeyboardInterrupt:
            pass
        finally:
            print()
        if chunks:
            self.messages += [*new, {"role": "assistant", "content": "".join(chunks)}]
            self.num_answers, self.tokens = self.num_answers + 1, tokens

    def retry(self, answer: AnswerFn) -> None:
        self.require_answer("/retry")
        messages = self.messages
        self.messages = messages[:-1]
        try:
            self.send(answer)
        finally:
            if not self.last_answer:
                self.messages = messages

    def run_command(self, name: str, text: str, answer: AnswerFn, show_tokens: ShowTokensFn) -> None:
        """Run a command other than /quit. Raises UserError if that is not possible."""
        if name == "/help":
            print(HELP)
        elif name == "/reset":
            self.reset()
        elif name == "/system":
            self.system = text or None
            self.reset()
        elif name == "/retry":
            self.retry(answer)
        elif name not in COMMANDS:
            raise UserError(f"{name}: unknown command. /help lists all commands.")
        elif not text:
            raise UserError(f"{name}: an argument is missing. /help describes it.")
        elif name == "/tool":
            self.require_answer(name)
            self.send(answer, {"role": "tool", "content": text})
        else:
            self.write(name, Path(text), show_tokens)

    def write(self, name: str, file: Path, show_tokens: ShowTokensFn) -> None:
        """Write the file of /save or /tokens."""
        self.require_answer(name)
        with wrap_write_errors(file):
            if name == "/save":
                with file.open("a", encoding="utf-8") as lines:
                    row = {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})
                    lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            else:
                file.write_bytes(show_tokens(self.messages[:-1], self.tokens, file.suffix.lower()))
        print(f"written to {file}")


def chat_loop(answer: AnswerFn, chat: Chat, show_tokens: ShowTokensFn) -> None:
    """Read messages and commands until the input ends.

    Raises UserError if a piped line fails. In a terminal, the conversation continues without it.
    """
    if sys.stdin.isatty():
        readline.set_auto_history(True)
        print("/help lists all commands. Ctrl-C stops an answer, Ctrl-D ends.")
    while (text := read_message()) is not None:
        name, _, rest = text.partition(" ")
        if name in ("/quit", "/exit"):
            return
        try:
            if name.startswith("/") and name[1:].isalpha():
                chat.run_command(name, rest.strip(), answer, show_tokens)
            elif text:
                chat.send(answer, {"role": "user", "content": text})
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            print(f"error: {error}", file=sys.stderr)


def read_message() -> str | None:
    """Read a line, or several that a backslash or quotes join; None at the end of the input. Ctrl-C discards them."""
    is_open = False
    try:
        text = read_line("> ").strip()
        if is_open := text.startswith(BLOCK):
            text = text.removeprefix(BLOCK)
            while not text.endswith(BLOCK):
                text += "\n" + read_line(". ")
            return text.removesuffix(BLOCK).strip("\n")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + read_line(". ")
        return text
    except EOFError:
        if is_open:
            raise UserError(f"the text after {BLOCK} has no end. Write {BLOCK} after it.") from None
        return None
    except KeyboardInterrupt:
        print()
        return ""


def read_line(prompt: str) -> str:
    """A line of standard input. Raise UserError if it is not UTF-8."""
    try:
        line = input(prompt if sys.stdin.isatty() else "")
        line.encode()  # some locales decode invalid bytes to lone surrogates
    except UnicodeError:
        raise UserError("standard input: not UTF-8 text. Convert it, for example with: iconv -t UTF-8") from None
    return line
