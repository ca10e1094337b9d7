"""Formats of tool calls in answers: a format finds the calls in a text and parses their names and arguments.

Literals are compared without the whitespace in and around them, because models vary it.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tunekit.data.chat_template.messages import MAX_DEPTH, reject_constant

NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
NAME = re.compile(r"\w[\w.:\-/]{0,255}")
JSON_CALL = re.compile(
    r'^[ \t]*\[?\s{0,32}\{\s{0,32}"(?:name|tool_name|type|function|arguments|parameters)"\s{0,32}:', re.MULTILINE
)
PYTHON_CALL = re.compile(r"\[\s*[\w.]+\(")
WRAPPED_NAME = re.compile(r"^functions\.(.+?)(?::\d+)?$")  # Kimi K2 and gpt-oss: a namespace and a number
SEPARATORS = " \t\r\n,;]"
CALL_ERRORS = (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError)
STRING_DELIMITERS = ('<|"|>', "<escape>")  # Gemma 4, FunctionGemma: tokens around strings, in which nothing is escaped
UNQUOTED_VALUE = re.compile(r"[^,{}\[\]]*")  # a number, true, false or null
CALL_ID_PLACE = "\0"  # in a literal: any call id
Schemas = Mapping[str, Mapping[str, Any]]  # properties of the parameters of each tool by its name


class CallError(Exception):
    """A malformed tool call. The text describes the error to the model."""


class NoCallError(CallError):
    """A text that looks like a call, but is an answer."""


@dataclass
class Scanner:
    """A position in a text."""

    text: str
    pos: int = 0
    call_id: str | None = None  # in the last literal

    def skip(self, chars: str = " \t\r\n") -> None:
        while self.pos < len(self.text) and self.text[self.pos] in chars:
            self.pos += 1

    def accept(self, literal: str) -> bool:
        """Move after a literal that follows, after whitespace. An empty literal always follows."""
        self.skip()
        match = literal_pattern(literal).match(self.text, self.pos)
        self.pos = match.end() if match else self.pos
        return match is not None

    def until(self, literal: str, label: str) -> str:
        """Return the text up to a literal, and move after it."""
        match = literal_pattern(literal).search(self.text, self.pos)
        if match is None:
            raise CallError(f"{label} is incomplete: {literal.strip()!r} is missing")
        start, self.pos = self.pos, match.end()
        self.call_id = match.groupdict().get("id")
        return self.text[start : match.start()]

    def json(self, label: str) -> Any:
        """Return the JSON value that follows, and move after it."""
        self.skip()
        try:
            value, self.pos = json.JSONDecoder(parse_constant=reject_constant).raw_decode(self.text, self.pos)
        except ValueError as error:
            raise CallError(f"{label} is not valid JSON: {error}") from None
        except RecursionError:
            raise CallError(f"{label} is not valid JSON: it is nested too deeply") from None
        return value

    def unquoted(self, label: str, depth: int = 0) -> Any:
        """Return the JSON value with unquoted keys and delimited strings that follows, and move after it."""
        self.skip()
        if depth > MAX_DEPTH:
            raise CallError(f"{label} is nested too deeply")
        for delimiter in STRING_DELIMITERS:
            if self.accept(delimiter):
                return self.until(delimiter, label)
        if self.text.startswith('"', self.pos):
            return self.json(label)
        if self.accept("["):
            return [value for _, value in self.unquoted_items("]", label, depth)]
        if self.accept("{"):
            return dict(self.unquoted_items("}", label, depth))
        match = UNQUOTED_VALUE.match(self.text, self.pos)
        assert match is not None
        self.pos = match.end()
        return typed_value(match[0].strip(), {})

    def unquoted_items(self, end: str, label: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield the items of an object or a list up to its end. Those of a list have an empty key."""
        while not self.accept(end):
            key = ""
            if end == "}":
                is_delimited = self.text.startswith((*STRING_DELIMITERS, '"'), self.pos)
                key = self.unquoted(label, depth) if is_delimited else ""
                key += self.until(":", f"a key of {label}").strip()
            yield key, self.unquoted(label, depth + 1)
            if not self.accept(",") and not self.text.startswith(end, self.pos):
                raise CallError(f"{label} is incomplete: {end!r} is missing")


@lru_cache(maxsize=256)
def literal_pattern(literal: str) -> re.Pattern[str]:
    """Pattern of a literal with any whitespace, or none, between its parts."""
    pattern = r"\s*".join(map(re.escape, literal.split()))
    return re.compile(pattern.replace(re.escape(CALL_ID_PLACE), rf"(?P<id>{NAME.pattern}?)"))


@dataclass(frozen=True)
class CallFormat:
    """The text that a template writes around the parts of calls.

    Kinds: `json`, objects with a name and arguments, or a list of them; `named`, a name and a JSON object;
    `unquoted`, the same with unquoted keys and tokens around strings; `parameters`, a name and a text for each
    argument; `python`, a list of Python calls.
    """

    kind: Literal["json", "named", "unquoted", "parameters", "python"]
    start: str = ""  # before each call
    end: str = ""  # after each call
    section: str = ""  # before the first call
    section_end: str = ""  # after the last call
    middle: str = ""  # between the name and the arguments
    key_start: str = ""  # kind `parameters`: around the name and the text of each argument
    key_end: str = ""
    value_end: str = ""

    @property
    def trigger(self) -> str:
        """The text that starts the calls; empty if an answer is a call because of its form."""
        return next(iter([*self.section.split(), *self.start.split()]), "")

    def find(self, text: str, schemas: Schemas) -> int:
        """Position where calls start; -1 if there are none."""
        if self.trigger:
            return text.find(self.trigger)
        if self.kind == "json":
            match = JSON_CALL.search(text)
        elif self.kind == "named":
            match = re.match(rf"\s*({NAME.pattern}){re.escape(self.middle.rstrip())}\s*\{{", text)
            match = match if match and (not schemas or match[1] in schemas) else None
        else:
            match = PYTHON_CALL.match(text.lstrip())
            return len(text) - len(text.lstrip()) if match else -1
        return match.start() if match else -1

    def parse(self, text: str, start: int, schemas: Schemas) -> tuple[list[dict[str, Any]], int]:
        """Parse the calls at a position. Return them and the position after them. Raise CallError."""
        scanner, calls = Scanner(text, start), []
        if self.section.strip():
            scanner.accept(self.section)
        while scanner.accept(self.start) and self.has_call(scanner):
            calls += self.parse_call(scanner, schemas)
            self.accept_end(scanner)
            scanner.skip(SEPARATORS)
        if not calls:
            raise CallError(f"there is no tool call after {self.trigger!r}")
        if self.section_end.strip():
            scanner.accept(self.section_end)
        return calls, scanner.pos

    def accept_end(self, scanner: Scanner) -> None:
        """Move after the end literal, or after as much of it as follows."""
        position = scanner.pos
        scanner.skip(SEPARATORS)
        if not [part for part in self.end.split() if scanner.accept(part)]:
            scanner.pos = position

    def has_call(self, scanner: Scanner) -> bool:
        """Whether text follows that can be a call. After a start that identifies calls, it must be one."""
        rest = scanner.text[scanner.pos :].lstrip()
        if self.start.strip() and not (self.kind == "json" and self.section.strip()):
            return True
        named = rf"{NAME.pattern}\s*\S"
        patterns = {"json": r"[\[{]", "parameters": NAME.pattern, "python": r"\[?\w"}
        return re.match(patterns.get(self.kind, named), rest) is not None

    def parse_call(self, scanner: Scanner, schemas: Schemas) -> list[dict[str, Any]]:
        match self.kind:
            case "json":
                return self.parse_json(scanner)
            case "named":
                name, call_id = self.parse_name(scanner), scanner.call_id
                return [make_call(name, scanner.json(f"the arguments of {name}"), call_id)]
            case "unquoted":
                name = self.parse_name(scanner)
                return [make_call(name, scanner.unquoted(f"the arguments of {name}"))]
            case "parameters":
                name = self.parse_name(scanner)
                return [make_call(name, self.parse_parameters(scanner, name, schemas.get(name, {})))]
            case "python":
                return self.parse_python(scanner)

    def parse_json(self, scanner: Scanner) -> list[dict[str, Any]]:
        value = scanner.json("the tool call")
        items = value if isinstance(value, list) else [value]
        if not self.trigger and not all(isinstance(item, dict) and is_json_call(item) for item in items):
            raise NoCallError("the answer is no tool call")
        return [json_call(item) for item in items]

    def parse_name(self, scanner: Scanner) -> str:
        scanner.skip()
        if self.middle.strip():
            name = scanner.until(self.middle.strip(), "the name of the tool call").strip()
        else:
            match = NAME.match(scanner.text, scanner.pos)
            name = match[0] if match else ""
            scanner.pos += len(name)
        if not NAME.fullmatch(name):
            raise CallError(f"the tool call has no valid name, got {name[:40]!r}")
        return name

    def parse_parameters(self, scanner: Scanner, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        while scanner.accept(self.key_start):
            label = f"a parameter of {name}"
            key = scanner.until(self.key_end.strip(), label).strip()
            value = scanner.until(self.value_end.strip(), f"parameter {key!r} of {name}")
            lead, trail = padding_after(self.key_end), padding_before(self.value_end)
            arguments[key] = typed_value(value.removeprefix(lead).removesuffix(trail), schema.get(key))
        end = next(iter(self.end.split()), "")
        if not scanner.text.startswith(end, scanner.pos):  # cut off, or with text between the parameters
            raise CallError(f"the call of {name} is incomplete: {end!r} is missing after its parameters")
        return arguments

    def parse_python(self, scanner: Scanner) -> list[dict[str, Any]]:
        """Parse Python calls up to the end literal, or to the end of the text."""
        scanner.skip()
        stop = scanner.text.find(self.end.strip(), scanner.pos) if self.end.strip() else -1
        source = scanner.text[scanner.pos : len(scanner.text) if stop < 0 else stop].strip()
        scanner.pos = len(scanner.text) if stop < 0 else stop
        try:
            with warnings.catch_warnings(action="ignore"):  # invalid escapes in strings
                tree = ast.parse(source, mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
            return [python_call(node) for node in nodes]
        except CALL_ERRORS as error:
            raise CallError(f"the tool call is not a valid Python call: {error}") from None


def padding_after(literal: str) -> str:
    """Whitespace at the end of a literal."""
    return literal[len(literal.rstrip()) :]


def padding_before(literal: str) -> str:
    """Whitespace at the start of a literal."""
    return literal[: len(literal) - len(literal.lstrip())]


def is_json_call(item: Mapping[str, Any]) -> bool:
    function = item.get("function")
    fields = function if isinstance(function, dict) else item
    return any(key in fields for key in NAME_KEYS) and any(key in fields for key in ARGUMENT_KEYS)


def json_call(item: Any) -> dict[str, Any]:
    """Convert a JSON object to a call. Names of its keys vary between families."""
    if not isinstance(item, dict):
        raise CallError(f"the tool call must be a JSON object with `name` and `arguments`, got {json.dumps(item)[:40]}")
    function = item.get("function")
    fields = function if isinstance(function, dict) else item
    name = next((fields[key] for key in NAME_KEYS if key in fields), None)
    if not isinstance(name, str) or not name:
        raise CallError("the tool call has no `name`")
    call_id = item.get("id", item.get("tool_call_id"))
    arguments = next((fields[key] for key in ARGUMENT_KEYS if key in fields), None)
    return make_call(name, arguments, call_id if isinstance(call_id, str) else None)


def make_call(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    """A call in OpenAI's format, with the arguments as an object. Arguments may be an object in a JSON string."""
    if match := WRAPPED_NAME.match(name):
        name, call_id = match[1], name if name.startswith("functions.") and ":" in name else call_id
    if isinstance(arguments, str):
        arguments = Scanner(arguments).json(f"the arguments of {name}") if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise CallError(f"the arguments of {name} must be a JSON object, got {json.dumps(arguments)[:40]}")
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def typed_value(text: str, schema: Any) -> Any:
    """Value of an argument that is written as text: a string if its schema says so, else JSON or a Python literal."""
    kinds = allowed_types(schema)
    if "string" in kinds:
        return None if "null" in kinds and text.strip() == "null" else text
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except CALL_ERRORS:
            continue
        return value if is_json(value) else text
    return text


def allowed_types(schema: Any) -> set[str]:
    """Types that a JSON Schema allows, also with a list of types or `anyOf`; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    types = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    options = [item for key in ("anyOf", "oneOf") if isinstance(items := schema.get(key), list) for item in items]
    return types.union(*map(allowed_types, options))


def is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except CALL_ERRORS:
        return False
    return not isinstance(value, tuple | bytes | set)


class JSONConstants(ast.NodeTransformer):
    """Replaces the names `true`, `false` and `null` by constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def python_call(node: ast.AST) -> dict[str, Any]:
    """Convert a Python call with keyword arguments, such as `weather(city="Oslo")` or `weather.call(city="Oslo")`."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("expected name(key=value, ...)")
    name = ast.unparse(node.func).removesuffix(".call")
    if not NAME.fullmatch(name):
        raise ValueError(f"invalid name {name[:40]!r}")
    arguments = {str(keyword.arg): ast.literal_eval(JSONConstants().visit(keyword.value)) for keyword in node.keywords}
    if not is_json(arguments):
        raise ValueError(f"the arguments of {name} are not JSON values")
    return make_call(name, arguments)


DEEPSEEK = {"section": "<｜tool▁calls▁begin｜>", "section_end": "<｜tool▁calls▁end｜>", "end": "<｜tool▁call▁end｜>"}
# Formats of models whose template does not write calls, or writes only some of the forms that the model uses.
KNOWN_FORMATS = (
    CallFormat("json", "<tool_call>", "</tool_call>"),  # Hermes, Qwen, SmolLM3, Granite 4
    CallFormat("parameters", "<tool_call>\n<function=", "</function>\n</tool_call>", middle=">",
               key_start="<parameter=", key_end=">\n", value_end="\n</parameter>"),  # Qwen3-Coder, Nemotron 3
    CallFormat("parameters", "<tool_call>", "</tool_call>", key_start="<arg_key>",
               key_end="</arg_key>\n<arg_value>", value_end="</arg_value>"),  # GLM 4.5
    CallFormat("json", "<|tool_call|>", "<|/tool_call|>"),  # Phi-4-mini, Granite 3
    CallFormat("json", section="[TOOL_CALLS]"),  # Mistral
    CallFormat("named", "[TOOL_CALLS]", middle="[ARGS]"),  # Mistral since tokenizer version 11
    CallFormat("json", section="<TOOLCALL>", section_end="</TOOLCALL>"),  # Nemotron
    CallFormat("json", section="<|START_ACTION|>", section_end="<|END_ACTION|>"),  # Cohere
    CallFormat("named", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", middle="\n```json\n",
               **{**DEEPSEEK, "end": "```<｜tool▁call▁end｜>"}),  # DeepSeek R1 and V3
    CallFormat("named", "<｜tool▁call▁begin｜>", middle="<｜tool▁sep｜>", **DEEPSEEK),  # DeepSeek V3.1
    CallFormat("named", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>",
               "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),  # Kimi K2
    CallFormat("json", "<|python_tag|>"),  # Llama 3
    CallFormat("python", "<|python_tag|>"),  # Llama 3 with built-in tools
    CallFormat("python", "<|python_start|>", "<|python_end|>"),  # Llama 4
    CallFormat("json", section="<|python_end|>"),  # Llama 4, after a text
    CallFormat("unquoted", "<|tool_call> call:", "<tool_call|>"),  # Gemma 4
    CallFormat("unquoted", "<start_function_call> call:", "<end_function_call>"),  # FunctionGemma
    CallFormat("python", "```tool_code", "```"),  # Gemma 3
    CallFormat("named", "<function=", "</function>", middle=">"),  # Functionary
)  # fmt: skip
