"""Requests of the protocol: JSON to validated options, with OpenAI's names of fields and those of vLLM for others."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, NamedTuple

from tunekit.data.chat_template.messages import Conversation, make_conversation, parse_tools
from tunekit.data.chat_template.template import check_template_kwargs
from tunekit.data.readers.row_reader import json_type
from tunekit.errors import FieldError, UserError
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.stop_strings import StopStrings
from tunekit.serving.errors import APIError, bad_request

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MIN_TEMPERATURE, MAX_SCALE = 0.01, 100.0  # logits are divided by temperatures and penalties
SHARED = {"model", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop",
          "stream", "stream_options", "response_format", "logprobs", "stop_token_ids", "ignore_eos", "return_token_ids",
          "return_tokens_as_token_ids", "structured_outputs", "guided_json", "guided_regex",
          "guided_choice"}  # fmt: skip
CHAT = {"messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs",
        "chat_template_kwargs", "reasoning_effort"}  # fmt: skip
# Fields without an effect on the answer
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
           "prompt_cache_retention", "request_id", "cache_salt", "priority", "cache_prompt"}  # fmt: skip
# Fields of OpenAI, vLLM and SGLang with the values that are supported: those that change nothing.
FIXED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "length_penalty": (1,), "typical_p": (1,), "min_tokens": (0,),
    "logit_bias": ({},), "bad_words": ([],), "best_of": (1,), "use_beam_search": (False,), "early_stopping": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "detokenize": (True,),
    "include_stop_str_in_output": (False,), "no_stop_trim": (False,), "return_hidden_states": (False,),
    "prompt_logprobs": (0, False), "return_token_offsets": (False,), "load_inplace": (False,)}  # fmt: skip
FIXED_CHAT: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],), "functions": ([],), "function_call": ("none", "auto"), "verbosity": ("medium",),
    "include_reasoning": (True,), "separate_reasoning": (True,),
    "stream_reasoning": (True,), "documents": ([],), "echo": (False,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "add_special_tokens": (False,), "chat_template_content_format": ("auto",),
    "mm_processor_kwargs": ({},)}  # fmt: skip
FIXED_COMPLETION: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "add_special_tokens": (True,)}
EFFORT, DEFAULT_EFFORT = "reasoning_effort", "medium"  # a variable of the chat template
Tools = list[dict[str, Any]] | None


class Structure(NamedTuple):
    """The form of an answer: a JSON Schema, a regular expression, or a list of texts. `param` is the field."""

    kind: Literal["json", "regex", "choice"]
    value: Any
    param: str


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How prompts are answered. `max_tokens` is None if the request has no limit, which is in `max_tokens_field`."""

    model: str
    sampling: SamplingConfig
    max_tokens: int | None
    max_tokens_field: str
    num_choices: int
    is_stream: bool
    includes_usage: bool  # whether a stream ends with the numbers of tokens
    num_logprobs: int | None  # most likely tokens to report with each token; None: no log-probabilities
    structure: Structure | None  # that the answer must have
    stop_token_ids: frozenset[int]  # end the answer, besides the stop tokens of the model
    ignores_eos: bool  # whether the stop tokens of the model do not end the answer
    returns_token_ids: bool  # whether choices have the ids of their tokens
    allows_parallel_calls: bool  # whether an answer may have several tool calls
    names_tokens_by_id: bool  # whether log-probabilities name tokens as `token_id:7` instead of by their text

    @property
    def includes_stop_token(self) -> bool:
        """Whether stop tokens are reported, as in vLLM. Clients of OpenAI expect the tokens of the text only."""
        return self.returns_token_ids or self.names_tokens_by_id

    def stop_tokens(self, stop: StopStrings) -> frozenset[int]:
        """Ids that end the answer."""
        eos = stop.tokenizer.stops if self.ignores_eos else frozenset()
        return stop.token_ids - eos | self.stop_token_ids


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to answer. `is_forced`: the answer must be a call of one of the tools."""

    conversation: Conversation
    options: AnswerOptions
    is_forced: bool
    template_kwargs: dict[str, Any]  # values of variables of the chat template

    @property
    def tools(self) -> Tools:
        return self.conversation.tools


@dataclass(frozen=True)
class CompletionRequest:
    """Texts or token ids to continue."""

    prompts: list[str | list[int]]
    options: AnswerOptions


class Fields:
    """Fields of a JSON object. Null is the same as no field."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}

    def check_names(self, known: set[str], fixed: Mapping[str, tuple[Any, ...]] = FIXED) -> None:
        """Raise APIError for fields that are neither known nor have one of the `fixed` values."""
        for name, value in self.values.items():
            if name in known | IGNORED or value in fixed.get(name, ()):
                continue
            values = " or ".join(json.dumps(item) for item in fixed.get(name, ()))
            problem = f"must be {values}" if values else "not supported by this server"
            raise APIError(400, f"{name}: {problem}", name, "unsupported_parameter")

    def typed(self, name: str, kinds: type | UnionType, noun: str, default: Any = None) -> Any:
        """Value of a field. Raises APIError for other types than `kinds`; booleans are not numbers."""
        value = self.values.get(name, default)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise bad_request(name, f"must be {noun}, got {json_type(value)}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.typed(name, int | float, "a number", default)
        if not low <= value <= high:
            raise bad_request(name, f"must be >= {low:g} and <= {high:g}, got {value}")
        return float(value)

    def temperature(self) -> float:
        """Smaller temperatures than MIN_TEMPERATURE, other than 0, overflow."""
        value = self.number("temperature", 1.0, 0, MAX_SCALE)
        return max(value, MIN_TEMPERATURE) if value else 0.0

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        if name not in self.values:
            return None
        value = self.typed(name, int, "an integer")
        if value < low or (high is not None and value > high):
            raise bad_request(name, f"must be >= {low}{'' if high is None else f' and <= {high}'}, got {value}")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        return self.typed(name, bool, "a boolean", default)

    def object(self, name: str) -> dict[str, Any]:
        return self.typed(name, dict, "an object", {})

    def string(self, name: str) -> str:
        return self.typed(name, str, "a string")

    def name(self, name: str) -> str:
        """A string that is not blank."""
        if not (value := self.string(name)).strip():
            raise bad_request(name, "must not be empty")
        return value

    def stop_strings(self) -> tuple[str, ...]:
        value = self.values.get("stop", [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise bad_request("stop", "must be a text or a list of texts that are not empty")
        if len(texts) > MAX_STOP_STRINGS:
            raise bad_request("stop", f"must have at most {MAX_STOP_STRINGS} texts, got {len(texts)}")
        return tuple(texts)

    def stop_token_ids(self) -> frozenset[int]:
        value = self.values.get("stop_token_ids", [])
        if value != [] and not is_tokens(value):
            raise bad_request("stop_token_ids", "must be a list of token ids")
        return frozenset(value)

    def sampling(self) -> SamplingConfig:
        """Sampling options. Without a seed, answers differ from request to request."""
        seed, top_k = self.integer("seed", -(2**63), 2**64 - 1), self.integer("top_k", -1)
        try:
            return SamplingConfig(
                temperature=self.temperature(),
                top_k=None if top_k in (None, 0, -1) else top_k,  # vLLM: 0 and -1 are all tokens
                top_p=self.number("top_p", 1.0, 0, 1),
                min_p=self.number("min_p", 0.0, 0, 1),
                repetition_penalty=self.number("repetition_penalty", 1.0, 1 / MAX_SCALE, MAX_SCALE),
                stop_strings=self.stop_strings(),
                seed=secrets.randbits(62) if seed is None else abs(seed),
            )
        except FieldError as error:
            raise bad_request(error.field, error.message) from None

    def structure(self) -> Structure | None:
        """Form of the answer, by OpenAI's `response_format` or fields of vLLM. Raises APIError if there are several."""
        results = [*self.response_format(), *self.structured_outputs()]
        for kind in ("json", "regex", "choice"):
            if (value := self.values.get(f"guided_{kind}")) is not None:
                results.append(self.check_structure(kind, value, f"guided_{kind}"))
        if len(results) > 1:
            raise bad_request(results[1].param, f"cannot be combined with {results[0].param}")
        return results[0] if results else None

    def response_format(self) -> list[Structure]:
        value = self.object("response_format")
        kind = value.get("type", "text")
        if kind == "text":
            return []
        if kind == "json_object":
            return [Structure("json", {"type": "object"}, "response_format")]
        inner = value.get("json_schema")
        if kind != "json_schema" or not isinstance(inner, dict):
            raise bad_request("response_format", "must have type text, json_object, or json_schema with `json_schema`")
        return [self.check_structure("json", inner.get("schema", {}), "response_format")]

    def structured_outputs(self) -> list[Structure]:
        """vLLM's field: an object with `json`, `json_object`, `regex` or `choice`."""
        param = "structured_outputs"
        values = {key: value for key, value in self.object(param).items() if value is not None and value is not False}
        if len(values) > 1:
            raise bad_request(param, f"must have one of json, json_object, regex and choice, got {', '.join(values)}")
        if values.pop("json_object", False):
            values = {"json": {"type": "object"}}
        if unknown := values.keys() - {"json", "regex", "choice"}:
            raise bad_request(param, f"{min(unknown)} is not supported. Use json, json_object, regex or choice.")
        return [self.check_structure(kind, value, param) for kind, value in values.items()]

    def check_structure(self, kind: Any, value: Any, param: str) -> Structure:
        """The structure. Schemas may be JSON text."""
        if kind == "json" and isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise bad_request(param, f"must be a JSON Schema: {error}") from None
        if kind == "json" and not isinstance(value, dict):
            raise bad_request(param, f"must be a JSON Schema (an object), got {json_type(value)}")
        if kind == "regex" and not isinstance(value, str):
            raise bad_request(param, f"must be a regular expression (a string), got {json_type(value)}")
        is_list = isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
        if kind == "choice" and not is_list:
            raise bad_request(param, "must be a list of texts that are not empty")
        return Structure(kind, value, param)


def parse_options(
    fields: Fields, num_logprobs: int | None, max_tokens: int | None, max_tokens_field: str = "max_tokens"
) -> AnswerOptions:
    stream_options = fields.object("stream_options")
    return AnswerOptions(
        model=fields.string("model"),
        sampling=fields.sampling(),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        num_choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        is_stream=fields.boolean("stream"),
        includes_usage=stream_options.get("include_usage") is True,
        num_logprobs=num_logprobs,
        structure=fields.structure(),
        stop_token_ids=fields.stop_token_ids(),
        ignores_eos=fields.boolean("ignore_eos"),
        returns_token_ids=fields.boolean("return_token_ids"),
        allows_parallel_calls=fields.boolean("parallel_tool_calls", True),
        names_tokens_by_id=fields.boolean("return_tokens_as_token_ids"),
    )


def parse_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Parse the body of /v1/chat/completions. Raises APIError."""
    fields = Fields(body)
    fields.check_names(SHARED | CHAT, FIXED | FIXED_CHAT)
    wants_logprobs, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wants_logprobs:
        raise bad_request("top_logprobs", "needs logprobs: true")
    limits = {name: fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")}
    key = next((name for name, limit in limits.items() if limit is not None), "max_tokens")
    options = parse_options(fields, (top or 0) if wants_logprobs else None, limits[key], key)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise bad_request("messages", f"must be a list of messages, got {json_type(messages)}")
    try:
        tools = parse_tools(body.get("tools"), "tools")
        tools, is_forced = choose_tools(tools, fields.values.get("tool_choice", "auto"))
        conversation = make_conversation(messages, "messages", tools)
    except UserError as error:
        raise APIError(400, str(error), str(error).partition("[")[0].partition(":")[0], "invalid_value") from None
    if is_forced and options.structure is not None:
        raise bad_request(options.structure.param, "cannot be combined with a tool_choice that requires a call")
    return ChatRequest(conversation, options, is_forced, template_kwargs(fields))


def template_kwargs(fields: Fields) -> dict[str, Any]:
    """Values of variables of the chat template."""
    values = fields.object("chat_template_kwargs")
    if EFFORT in fields.values:
        values = {EFFORT: fields.string(EFFORT), **values}
    try:
        check_template_kwargs(values)
    except FieldError as error:
        raise bad_request("chat_template_kwargs", error.message) from None
    return values


def choose_tools(tools: Tools, choice: Any) -> tuple[Tools, bool]:
    """The tools that an answer may call, and whether it must call one. `choice` is `tool_choice`."""
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise bad_request("tools", f"tools[{index}].function must be an object with a name")
    if choice == "none" or (choice == "auto" and not tools):
        return None, False
    if choice in ("auto", "required"):
        if not tools:
            raise bad_request("tool_choice", "needs tools")
        return tools, choice == "required"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    selected = [tool for tool in tools or () if tool["function"]["name"] == name]
    if not selected:
        raise bad_request("tool_choice", "must be none, auto, required, or the name of a function in tools")
    return selected, True


def parse_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse the body of /v1/completions. Raises APIError."""
    fields = Fields(body)
    fields.check_names(SHARED | {"prompt"}, FIXED | FIXED_COMPLETION)
    value = fields.values.get("prompt")
    prompts: list[Any] = value if isinstance(value, list) and not is_tokens(value) else [value]
    if not prompts or not all(isinstance(prompt, str) or is_tokens(prompt) for prompt in prompts):
        raise bad_request("prompt", "must be a text, a list of texts, token ids, or a list of lists of token ids")
    max_tokens = fields.integer("max_tokens", 1)
    options = parse_options(fields, fields.integer("logprobs", 0, MAX_TOP_LOGPROBS), max_tokens or 16)
    if len(prompts) * options.num_choices > MAX_CHOICES:
        raise bad_request(
            "prompt", f"must have at most {MAX_CHOICES} answers, got {len(prompts) * options.num_choices}"
        )
    return CompletionRequest(prompts, options)


def is_tokens(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


Endpoint = Literal["chat", "completion"]
