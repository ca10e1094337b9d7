"""Small chat templates that write tool calls as more model families do, written for these tests."""

from pathlib import Path

from tests.helpers.chat_families import IM, LLAMA3, MISTRAL
from tests.helpers.tokenizers import Shape, write_tokenizer
from tunekit.data.tokenizer import Tokenizer

TURNS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.tool_calls %}CALLS{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
PER_CALL = "{% for call in message.tool_calls %}{% set f = call.function %}BODY{% endfor %}"
PARAMETERS = "{% for k, v in f.arguments | items %}BODY{% endfor %}"


def per_call(body: str, before: str = "", after: str = "") -> str:
    return before + PER_CALL.replace("BODY", body) + after


OBJECTS = (
    "{{- '{\"name\": ' + f.name | tojson + ', \"arguments\": ' + f.arguments | tojson + '}' }}"
    "{{ ', ' if not loop.last }}"
)
CALLS = {
    "nemotron": (per_call(OBJECTS, "{{ '<TOOLCALL>[' }}", "{{ ']</TOOLCALL>' }}"), ()),
    "phi4_mini": (
        per_call(OBJECTS, "{{ '<|tool_call|>[' }}", "{{ ']<|/tool_call|>' }}"),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "granite3": (per_call(OBJECTS, "{{ '<|tool_call|>[' }}", "{{ ']' }}"), ("<|tool_call|>",)),
    "mistral_v13": (
        per_call("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"),
        (*MISTRAL[2:], "[ARGS]"),
    ),
    "mistral_v3": (per_call(OBJECTS, "{{ '[TOOL_CALLS] [' }}", "{{ ']' }}"), MISTRAL[2:]),
    "functionary": (per_call("{{ '<function=' + f.name + '>' + f.arguments | tojson + '</function>' }}"), ()),
    "llama4_python": (
        per_call(
            "{{ f.name + '(' }}"
            + PARAMETERS.replace("BODY", "{{ k + '=' + (v | tojson) + (', ' if not loop.last else '') }}")
            + "{{ ')' + (', ' if not loop.last else '') }}",
            "{{ '[' }}",
            "{{ ']' }}",
        ),
        LLAMA3,
    ),
}


def write_call_family(directory: Path, name: str) -> Path:
    """Write the tokenizer directory of a family."""
    calls, special = CALLS[name]
    template = TURNS.replace("CALLS", calls)
    return write_tokenizer(directory, Shape(template, (*IM, *special), None, "<|im_end|>"))


def open_call_family(directory: Path, name: str) -> Tokenizer:
    return Tokenizer.open(write_call_family(directory, name))
