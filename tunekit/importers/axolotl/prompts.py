"""Prompt formats of axolotl's dataset types that write their own texts."""

from typing import Any, NamedTuple

from tunekit.importers.columns import set_columns
from tunekit.importers.draft import Tree
from tunekit.importers.prompt_texts import alpaca_prompt, column, either, from_format

CONCISE = (
    "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that "
    "appropriately and concisely completes the request.\n\n"
)
CONTEXT = "Use the following contextual information to concisely answer the question.\n"


class PromptFormat(NamedTuple):
    """Texts around an instruction: with and without an input, and around a system message."""

    with_input: str
    without_input: str
    system: str = "{system}"


INSTRUCT = PromptFormat(
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "### Instruction:\n{instruction}\n\n### Response:\n",
    "### System:\n{system}\n\n",
)
CHAT = PromptFormat("USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:", "SYSTEM: {system}\n")
CHATML = PromptFormat(
    "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\n{system}<|im_end|>\n",
)
PHI = PromptFormat(
    "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    "<|system|>\n{system}<|end|>\n",
)
ORCA = PromptFormat("", "### Human:\n{instruction}\n### Assistant:\n", "### System:\n{system}\n")
STYLES = {"instruct": INSTRUCT, "chat": CHAT, "chatml": CHATML, "phi": PHI}


def prompted(template: str, answer: str = "output") -> Tree:
    """Rows whose prompt is a text; only the answer is trained on."""
    data: Tree = {"kind": "completion"}
    set_columns(data, completion=answer)
    return {**data, "transforms": [{"kind": "render_columns", "columns": {"prompt": template}}]}


def formatted(
    style: PromptFormat, fields: dict[str, str], answer: str, preamble: str = "", system: str | None = None
) -> Tree:
    """Rows in a format. `fields` are the columns of `instruction` and `input`; `system` is the column of a message."""
    with_input, without = (from_format(text, fields) for text in (style.with_input, style.without_input))
    text = either(fields["input"], with_input, without) if "input" in fields else without
    if system is not None:
        message = from_format(style.system, {"system": system})
        text = (
            either(system, message, from_format(style.system.replace("{system}", preamble), {}) if preamble else "")
            + text
        )
    elif preamble:
        text = preamble + text
    return prompted(text, answer)


def alpaca(style: str) -> Tree:
    """Type `alpaca`, or `alpaca:STYLE`."""
    if style == "instruct" or style not in STYLES:
        return prompted(alpaca_prompt())
    wrap, task = STYLES[style].system, "Below is an instruction that describes a task"
    request = "Write a response that appropriately completes the request."
    texts = f"{task}, paired with an input that provides further context. {request}", f"{task}. {request}"
    names = {"instruction": "instruction", "input": "input"}
    with_input = wrap.replace("{system}", texts[0]) + from_format(STYLES[style].with_input, names)
    without = wrap.replace("{system}", texts[1]) + from_format(STYLES[style].without_input, names)
    return prompted(either("input", with_input, without))


PLAIN = {"instruction": "instruction", "input": "input"}
QUESTION = {"instruction": "question"}


def context_question(question: str) -> Tree:
    template = f"{CONTEXT}USER: {column('article')}\n===\n{column(question)}\nASSISTANT:"
    return prompted(template, "answer")


TYPES: dict[str, Tree] = {
    "alpaca_chat.load_qa": formatted(CHAT, QUESTION, "answer", CONCISE),
    "alpaca_chat.load_concise": formatted(CHAT, PLAIN, "output", CONCISE),
    "alpaca_chat.load_camel_ai": formatted(CHAT, {"instruction": "message_1"}, "message_2", CONCISE),
    "alpaca_chat.load_no_prompt": formatted(CHAT, PLAIN, "output"),
    "alpaca_chat.load": alpaca("chat"),
    "alpaca_instruct.load_no_prompt": formatted(INSTRUCT, PLAIN, "output"),
    "alpaca_instruct.load": alpaca("instruct"),
    "alpaca_w_system.load": formatted(CHAT, PLAIN, "output", system="system"),
    "alpaca_w_system.load_chat": formatted(CHAT, PLAIN, "output", system="system"),
    "alpaca_w_system.load_instruct": formatted(INSTRUCT, PLAIN, "output", system="system"),
    "alpaca_w_system.load_open_orca": formatted(ORCA, QUESTION, "response", system="system_prompt"),
    "alpaca_w_system.load_open_orca_chatml": formatted(CHATML, QUESTION, "response", system="system_prompt"),
    "gpteacher": prompted(alpaca_prompt(), "response"),
    "jeopardy": formatted(INSTRUCT, {"instruction": "question", "input": "category"}, "answer"),
    "explainchoice": formatted(INSTRUCT, {"instruction": "question", "input": "choices"}, "explanation"),
    "summarizetldr": formatted(
        PromptFormat("", "USER: Summarize the following article as a TL;DR.\n{instruction}\nASSISTANT:"),
        {"instruction": "article"}, "summary",
    ),
    "oasst": prompted(alpaca_prompt("INSTRUCTION", "CONTEXT"), "RESPONSE"),
    "context_qa": context_question("question"),
    "context_qa.load": context_question("question"),
    "context_qa.load_v2": prompted(f"Context: {column('context')}\nQuestion: {column('question')}\nAnswer: ", "answer"),
}  # fmt: skip


def user_defined(options: dict[str, Any]) -> Tree:
    """A mapping as the type: formats with the fields of a row."""
    names = {
        "instruction": str(options.get("field_instruction") or "instruction"),
        "input": str(options.get("field_input") or "input"),
    }
    style = PromptFormat(
        str(options.get("format") or "{instruction} {input} "),
        str(options.get("no_input_format") or "{instruction} "),
        str(options.get("system_format") or "{system}"),
    )
    if options.get("format") and not options.get("no_input_format"):
        has_input = "{input}" in style.with_input
        style = style if has_input else style._replace(without_input=style.with_input)
    if "{input}" not in style.with_input:
        names.pop("input")
        style = style._replace(without_input=style.with_input)
    system, preamble = options.get("field_system"), str(options.get("system_prompt") or "")
    answer = str(options.get("field_output") or "output")
    if system or preamble:
        return formatted(style, names, answer, preamble, str(system or "system"))
    return formatted(style, names, answer)
