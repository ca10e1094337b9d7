"""Small chat templates that write tool calls as more model families do, written for these tests."""

from pathlib import Path

from tests.helpers.chat_families import DEEPSEEK, IM, LLAMA3, MISTRAL
from tests.helpers.tokenizers import Shape, write_tokenizer
from tunekit.data.tokenizer import Tokenizer

KIMI = tuple(f"<|tool_call{part}|>" for part in
             ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end"))  # fmt: skip
COHERE = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>",
          "<|END_RESPONSE|>")  # fmt: skip
TURNS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.tool_calls %}CALLS{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
PER_CALL = "{% for call in message.tool_calls %}{% set f = call.function %}BODY{% endfor %}"
PARAMETERS = "{% for k, v in f.arguments | items %}BODY{% endfor %}"
TEXT = "(v if v is string else v | tojson)"


def per_call(body: str, before: str = "", after: str = "") -> str:
    return before + PER_CALL.replace("BODY", body) + after


def parameters(body: str) -> str:
    return PARAMETERS.replace("BODY", body)


QWEN3_CODER = per_call(
    "{{- '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
    + parameters("{{- '<parameter=' + k + '>\\n' + " + TEXT + " + '\\n</parameter>\\n' }}")
    + "{{- '</function>\\n</tool_call>' }}"
)
GLM45 = per_call(
    "{{- '\\n<tool_call>' + f.name + '\\n' }}"
    + parameters("{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + " + TEXT + " + '</arg_value>\\n' }}")
    + "{{- '</tool_call>' }}"
)
OBJECTS = (
    "{{- '{\"name\": ' + f.name | tojson + ', \"arguments\": ' + f.arguments | tojson + '}' }}"
    "{{ ', ' if not loop.last }}"
)
CALLS = {
    "qwen3_coder": (QWEN3_CODER, ("<tool_call>", "</tool_call>")),
    "glm45": (GLM45, ("<tool_call>", "</tool_call>")),
    "nemotron": (per_call(OBJECTS, "{{ '<TOOLCALL>[' }}", "{{ ']</TOOLCALL>' }}"), ()),
    "phi4_mini": (
        per_call(OBJECTS, "{{ '<|tool_call|>[' }}", "{{ ']<|/tool_call|>' }}"),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "granite3": (per_call(OBJECTS, "{{ '<|tool_call|>[' }}", "{{ ']' }}"), ("<|tool_call|>",)),
    "mistral_v11": (
        per_call("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"),
        (*MISTRAL[2:], "[ARGS]"),
    ),
    "mistral_v3": (per_call(OBJECTS, "{{ '[TOOL_CALLS] [' }}", "{{ ']' }}"), MISTRAL[2:]),
    "deepseek_v31": (
        per_call(
            "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments | tojson + '<｜tool▁call▁end｜>' }}",
            "{{ '<｜tool▁calls▁begin｜>' }}",
            "{{ '<｜tool▁calls▁end｜>' }}",
        ),
        DEEPSEEK,
    ),
    "kimi_k2": (
        per_call(
            "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + f.arguments | tojson + "
            "'<|tool_call_end|>' }}",
            "{{ '<|tool_calls_section_begin|>' }}",
            "{{ '<|tool_calls_section_end|>' }}",
        ),
        KIMI,
    ),
    "command_a": (
        per_call(
            '{{ \'{"tool_call_id": "\' + loop.index0 | string + \'", "tool_name": \' + f.name | tojson + '
            "', \"parameters\": ' + f.arguments | tojson + '}' }}{{ ',\\n    ' if not loop.last }}",
            "{{ '<|START_ACTION|>[\\n    ' }}",
            "{{ '\\n]<|END_ACTION|>' }}",
        ),
        COHERE,
    ),
    "functionary": (per_call("{{ '<function=' + f.name + '>' + f.arguments | tojson + '</function>' }}"), ()),
    "llama4": (
        per_call(
            "{{ f.name + '(' }}"
            + parameters("{{ k + '=' + (v | tojson) + (', ' if not loop.last else '') }}")
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
