"""Tool calls in answers, and the tokens that follow an answer: both as the chat template of the model writes them."""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from os.path import commonprefix
from typing import Any, NamedTuple

from tunekit.data.chat_template.call_detection import (
    ARGUMENTS,
    NAMES,
    VALUES,
    at_tag,
    find_formats,
)
from tunekit.data.chat_template.call_formats import NAME, CallError, CallFormat, NoCallError, Scanner, make_call
from tunekit.data.chat_template.messages import Message, Tools
from tunekit.data.chat_template.template_features import ANSWER, CALL_ID, QUESTION, try_render
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("<|channel>thought", "<channel|>"),
)
HARMONY_MESSAGE = re.compile(r"(?P<head>(?:[^<]|<\|(?:channel|constrain)\|>)*)<\|message\|>(?P<text>.*)", re.DOTALL)
HARMONY_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
END_OF_MESSAGE = re.escape("<|eom_id|>")  # Llama 3: ends a call, but may be missing in generation_config.json
LINE_OF_CALL = re.compile(r"^[ \t]*(?:[\[{]|\Z)", re.MULTILINE)
RESULT = "plmokn{}"  # text that no template contains
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class ParsedAnswer(NamedTuple):
    """An answer. If a call is malformed, `error` describes it, `content` is the text, and `tool_calls` is empty."""

    content: str
    reasoning_content: str | None = None
    tool_calls: Sequence[dict[str, Any]] = ()  # in OpenAI's format, with arguments as an object
    error: str | None = None

    @property
    def message(self) -> Message:
        """The answer as a message of a conversation."""
        reasoning = {} if self.reasoning_content is None else {"reasoning_content": self.reasoning_content}
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **reasoning, **calls}


class ToolCallParser:
    """Parses the answers of a model that may call tools. `tools` are JSON schemas; they decide the types of arguments.

    Without tools, nothing is a call. Answers never raise an error.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Tools) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools or ()]
        self.schemas = {str(item.get("name")): properties_of(item) for item in functions}
        self.template_text = "\n".join(text for text, _ in tokenizer.templates.values())
        self.is_harmony = "<|channel|>" in self.template_text and "<|message|>" in self.template_text

    @cached_property
    def formats(self) -> list[CallFormat]:
        """Formats of calls, that of the chat template first; empty without tools."""
        return find_formats(self.tokenizer, self.tools) if self.tools else []

    @cached_property
    def prompt(self) -> str:
        return try_render(self.tokenizer, [{"role": "user", "content": QUESTION}], self.tools, prompt=True)

    @cached_property
    def reasoning_tags(self) -> tuple[str, str]:
        """The texts around the reasoning of an answer."""
        tokens = {token.content for token in self.tokenizer.model.get_added_tokens_decoder().values()}
        known = (tags for tags in REASONING_TAGS if tags[1] in tokens or tags[1] in self.template_text)
        return next(known, REASONING_TAGS[0])

    def parse(self, answer: str | Sequence[int]) -> ParsedAnswer:
        """Parse an answer: its token ids, or its text with special tokens. It may end with a stop token."""
        text = answer if isinstance(answer, str) else self.tokenizer.decode(answer, special=True)
        try:
            return self.parse_harmony(text) if self.is_harmony else self.parse_text(self.without_stop(text))
        except CallError as error:
            reasoning, content = self.split_reasoning(self.without_stop(text))
            return ParsedAnswer(self.visible(content), reasoning, (), f"Invalid tool call: {error}.")

    def without_stop(self, text: str) -> str:
        """The text without a stop token at its end."""
        match = re.search(f"(?:{self.tokenizer.stop_texts.pattern}|{END_OF_MESSAGE})\\s*$", text)
        return text[: match.start()] if match else text

    def visible(self, text: str) -> str:
        """The text without special tokens."""
        return self.tokenizer.special_texts.sub("", text)

    def split_reasoning(self, text: str) -> tuple[str | None, str]:
        """Reasoning and content of an answer. The generation prompt may have started the reasoning."""
        start, end = self.reasoning_tags
        is_started = self.prompt.rstrip().endswith(start)
        before, delimiter, content = text.partition(end)
        has_call = any(item.trigger and item.trigger in text for item in self.formats)
        if not delimiter and not (is_started and not has_call) and not text.lstrip().startswith(start):
            return None, text
        reasoning = self.visible(before.lstrip().removeprefix(start)).strip()
        return reasoning or None, content.lstrip("\n")

    def parse_text(self, text: str) -> ParsedAnswer:
        reasoning, content = self.split_reasoning(text)
        error: CallError | None = None
        for item in self.formats:
            start = item.find(content, self.schemas)
            if start < 0:
                continue
            try:
                calls, end = item.parse(content, start, self.schemas)
            except NoCallError:
                continue
            except CallError as problem:
                error = error or problem
                continue
            texts = (self.visible(part).strip() for part in (content[:start], content[end:]))
            return ParsedAnswer("\n".join(filter(None, texts)), reasoning, number_calls(calls))
        if error is not None:
            raise error
        content = self.visible(content)
        return ParsedAnswer(content.strip() if self.formats else content, reasoning)

    def parse_harmony(self, text: str) -> ParsedAnswer:
        """Parse the messages of an answer of gpt-oss. The generation prompt has started the first one."""
        reasoning, content, calls = [], [], []
        for part in HARMONY_ENDS.sub("", text).split("<|start|>"):
            match = HARMONY_MESSAGE.match(part)
            head, body = (match["head"], match["text"]) if match else ("", part)
            channel = head.partition("<|channel|>")[2]
            recipient = RECIPIENT.search(head)
            if recipient and self.tools:
                arguments = Scanner(body).json(f"the arguments of {recipient[1]}") if body.strip() else {}
                calls.append(make_call(recipient[1], arguments))
            elif channel.startswith("analysis"):
                reasoning.append(body)
            elif body:
                content.append(body)
        texts = [self.visible("\n".join(items)) for items in (reasoning, content)]
        return ParsedAnswer(texts[1], texts[0] or None, number_calls(calls))

    def streamable(self, text: str) -> ParsedAnswer:
        """The parts of an unfinished answer that its continuation cannot change, without calls."""
        if self.is_harmony:
            text = text if text.rpartition("<|start|>")[2].count("<|message|>") else text.rpartition("<|start|>")[0]
            return self.parse_harmony_prefix(text)
        start, end = self.reasoning_tags
        text = text[: len(text) - partial_length(text, [start, end, *(item.trigger for item in self.formats)])]
        reasoning, content = self.split_reasoning(text)
        positions = [item.find(content, self.schemas) for item in self.formats]
        if any(not item.trigger for item in self.formats) and may_start_call(content):
            positions.append(0)
        starts = [position for position in positions if position >= 0]
        content = content[: min(starts)].rstrip() if starts else content
        return ParsedAnswer(self.visible(content).strip() if self.formats else self.visible(content), reasoning)

    def parse_harmony_prefix(self, text: str) -> ParsedAnswer:
        parts = [part for part in text.split("<|start|>") if not RECIPIENT.search(part.partition("<|message|>")[0])]
        parts = [part for part in parts if "<|message|>" in part]
        return self.parse_harmony("<|start|>".join(parts))


def properties_of(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def number_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give calls without an id the next one."""
    return [{**call, "id": call["id"] or CALL_ID.format(index)} for index, call in enumerate(calls)]


def partial_length(text: str, literals: Sequence[str]) -> int:
    """Length of the end of a text that may be the start of one of some literals."""
    lengths = (size for literal in literals for size in range(1, len(literal)) if text.endswith(literal[:size]))
    return max(lengths, default=0)


def may_start_call(content: str) -> bool:
    """Whether a text may become a call that nothing introduces: JSON on a line of its own, a name, a Python call."""
    return LINE_OF_CALL.search(content) is not None or NAME.fullmatch(content.strip()) is not None


class NextTurn(NamedTuple):
    """The rendered text after an answer, split where a model stops to write."""

    prefix: str  # the dummy conversation up to the end of its answer
    stop: str  # token that ends the answer; empty if the template writes none
    stop_starts_turn: bool  # the stop token is the first one of the next turn, as in GLM
    messages: list[Message]  # the dummy conversation


def tool_result_tokens(
    tokenizer: Tokenizer,
    tools: Tools,
    messages: Sequence[Message],
    calls: Sequence[dict[str, Any]] = (),
    last_token: int | None = None,
) -> list[int]:
    """Token ids that the template appends after an answer: `messages`, and the start of the next answer.

    `messages` are the results of `calls`, or a user message. `last_token` is the last token of the answer: if it is no
    stop token, the end of the turn is added. Only a dummy conversation is rendered, so the tokens of the answer stay as
    they were sampled. Tool results become a user message if the template does not write them.
    Raise UserError if the template cannot render a second turn.
    """
    for answer, following in dummy_turns(messages, calls):
        turn = find_next_turn(tokenizer, tools, answer, following)
        if turn is None:
            continue
        text = try_render(tokenizer, [*turn.messages, *following], tools, prompt=True)
        if text.startswith(turn.prefix):
            return encode_turn(tokenizer, turn, text[len(turn.prefix) :], last_token)
    roles = " and ".join(dict.fromkeys(message["role"] for message in messages))
    raise UserError(f"{tokenizer.template(tools).name}: the chat template cannot render {roles} after an answer")


def dummy_turns(
    messages: Sequence[Message], calls: Sequence[dict[str, Any]]
) -> Iterator[tuple[Message, Sequence[Message]]]:
    """Yield answers, and messages that follow them: first as they are, then in forms that more templates support."""
    if messages[0]["role"] == "tool":
        names = [message.get("name") or NAMES[0] for message in messages]
        ids = [message.get("tool_call_id") or CALL_ID.format(index) for index, message in enumerate(messages)]
        functions = [call["function"]["name"] for call in calls] or names
        ids = [call["id"] for call in calls] or ids
        dummies = [dummy_call(name, call_id) for name, call_id in zip(functions, ids, strict=False)]
        results = [
            {"tool_call_id": call_id, "name": name, **message}
            for call_id, name, message in zip(ids, functions, messages, strict=False)
        ]
        yield {"role": "assistant", "content": "", "tool_calls": dummies}, results
        yield {"role": "assistant", "content": ANSWER}, results
    yield {"role": "assistant", "content": ANSWER}, messages
    text = "\n".join(str(message["content"]) for message in messages)
    yield {"role": "assistant", "content": ANSWER}, [{"role": "user", "content": text}]


def dummy_call(name: str, call_id: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": ARGUMENTS}}


def find_next_turn(
    tokenizer: Tokenizer, tools: Tools, answer: Message, following: Sequence[Message]
) -> NextTurn | None:
    """Find where an answer ends when messages follow it; None if the template does not write all of them."""
    conversation: list[Message] = [{"role": "user", "content": QUESTION}, answer]
    results = [RESULT.format(index) for index in range(len(following))]
    hidden = [{**message, "content": result} for message, result in zip(following, results, strict=True)]
    alone = try_render(tokenizer, conversation, tools)
    text = try_render(tokenizer, [*conversation, *hidden], tools, prompt=True)
    marker = VALUES[-1] if "tool_calls" in answer else ANSWER
    as_answers = [{**message, "role": "assistant"} for message in hidden]
    if not all(result in text for result in results) or marker not in alone.rpartition(QUESTION)[2]:
        return None
    if text == try_render(tokenizer, [*conversation, *as_answers], tools, prompt=True):  # an unknown role
        return None
    start = text.rfind(marker, 0, text.index(results[0])) + len(marker)
    if start < len(marker):
        return None
    tail, tail_alone = text[start : text.index(results[0])], alone.rpartition(marker)[2]
    match = tokenizer.stop_texts.search(tail)
    common = at_tag(commonprefix([tail, tail_alone]), tail)
    if match is None and tokenizer.stop_texts.match(tail_alone.lstrip()):  # the last turn has an end of its own
        match = tokenizer.special_texts.match(tail)
    elif match is None and "tool_calls" not in answer:  # the end of a turn is not among the stop tokens
        match = tokenizer.special_texts.search(common)
    if match is None:
        return NextTurn(text[: start + len(common)], "", False, conversation)
    starts_turn = match.end() > len(common) and not tokenizer.stop_texts.match(tail_alone.lstrip())
    return NextTurn(text[: start + match.start()], match[0], starts_turn, conversation)


def encode_turn(tokenizer: Tokenizer, turn: NextTurn, text: str, last_token: int | None) -> list[int]:
    """Token ids of the text after an answer. The stop token is left out if it was sampled."""
    ids = tokenizer.encode(text)
    last_text = "" if last_token is None else tokenizer.special_ids.get(last_token)
    is_other = last_text != turn.stop
    if not turn.stop or (is_other and last_token not in tokenizer.stops):
        return ids
    return ids if is_other and turn.stop_starts_turn else ids[1:]
