"""Prompt formats of axolotl's dataset types that write their own texts."""

from typing import Any, NamedTuple

from tunekit.importers.columns import set_columns
from tunekit.importers.draft import Tree
from tunekit.importers.prompt_texts import alpaca_prompt, branch_on, column, from_format

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


def make_completion(template: str, answer: str = "output") -> Tree:
    """Rows whose prompt is a text; only the answer is trained on."""
    data: Tree = {"kind": "completion"}
    set_columns(data, completion=answer)
    return {**data, "transforms": [{"kind": "render_columns", "columns": {"prompt": template}}]}


def apply_format(
    style: PromptFormat, fields: dict[str, str], answer: str, preamble: str = "", system: str | None = None
) -> Tree:
    """Rows in a format. `fields` are the columns of `instruction` and `input`; `system` is the column of a message."""
    with_input, without = (from_format(text, fields) for text in (style.with_input, style.without_input))
    text = branch_on(fields["input"], with_input, without) if "input" in fields else without
    if system is not None:
        message = from_format(style.system, {"system": system})
        text = (
            branch_on(system, message, from_format(style.system.replace("{system}", preamble), {}) if preamble else "")
            + text
        )
    elif preamble:
        text = preamble + text
    return make_completion(text, answer)


def convert_alpaca(style: str) -> Tree:
    """Type `alpaca`, or `alpaca:STYLE`."""
    if style == "instruct" or style not in STYLES:
        return make_completion(alpaca_prompt())
    wrap, task = STYLES[style].system, "Below is an instruction that describes a task"
    request = "Write a response that appropriately completes the request."
    texts = f"{task}, paired with an input that provides further context. {request}", f"{task}. {request}"
    names = {"instruction": "instruction", "input": "input"}
    with_input = wrap.replace("{system}", texts[0]) + from_format(STYLES[style].with_input, names)
    without = wrap.replace("{system}", texts[1]) + from_format(STYLES[style].without_input, names)
    return make_completion(branch_on("input", with_input, without))


PLAIN = {"instruction": "instruction", "input": "input"}
QUESTION = {"instruction": "question"}


def convert_context_question(question: str) -> Tree:
    template = f"{CONTEXT}USER: {column('article')}\n===\n{column(question)}\nASSISTANT:"
    return make_completion(template, "answer")


TYPES: dict[str, Tree] = {
    "alpaca_chat.load_qa": apply_format(CHAT, QUESTION, "answer", CONCISE),
    "alpaca_chat.load_concise": apply_format(CHAT, PLAIN, "output", CONCISE),
    "alpaca_chat.load_camel_ai": apply_format(CHAT, {"instruction": "message_1"}, "message_2", CONCISE),
    "alpaca_chat.load_no_prompt": apply_format(CHAT, PLAIN, "output"),
    "alpaca_chat.load": convert_alpaca("chat"),
    "alpaca_instruct.load_no_prompt": apply_format(INSTRUCT, PLAIN, "output"),
    "alpaca_instruct.load": convert_alpaca("instruct"),
    "alpaca_w_system.load": apply_format(CHAT, PLAIN, "output", system="system"),
    "alpaca_w_system.load_chat": apply_format(CHAT, PLAIN, "output", system="system"),
    "alpaca_w_system.load_instruct": apply_format(INSTRUCT, PLAIN, "output", system="system"),
    "alpaca_w_system.load_open_orca": apply_format(ORCA, QUESTION, "response", system="system_prompt"),
    "alpaca_w_system.load_open_orca_chatml": apply_format(CHATML, QUESTION, "response", system="system_prompt"),
    "gpteacher": make_completion(alpaca_prompt(), "response"),
    "jeopardy": apply_format(INSTRUCT, {"instruction": "question", "input": "category"}, "answer"),
    "explainchoice": apply_format(INSTRUCT, {"instruction": "question", "input": "choices"}, "explanation"),
    "summarizetldr": apply_format(
        PromptFormat("", "USER: Summarize the following article as a TL;DR.\n{instruction}\nASSISTANT:"),
        {"instruction": "article"}, "summary",
    ),
    "oasst": make_completion(alpaca_prompt("INSTRUCTION", "CONTEXT"), "RESPONSE"),
    "context_qa": convert_context_question("question"),
    "context_qa.load": convert_context_question("question"),
    "context_qa.load_v2": make_completion(
        f"Context: {column('context')}\nQuestion: {column('question')}\nAnswer: ", "answer"
    ),
}  # fmt: skip


def convert_user_defined(options: dict[str, Any]) -> Tree:
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
        return apply_format(style, names, answer, preamble, str(system or "system"))
    return apply_format(style, names, answer)
