"""Model families: chat templates, special tokens, and the target text of each kind of turn.

Templates are those of the package, and others in chat_templates/.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.tokenizers import Shape, write_tokenizer
from tunekit.data.chat_template.template import TEMPLATES

TEMPLATE_DIR = Path(__file__).parent / "chat_templates"
BUNDLED = {"gemma3": "gemma"}  # names of families whose template ships with the package under another name
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁sep｜>",
) + tuple(f"<｜tool▁{part}▁{side}｜>" for part in ("calls", "call", "outputs", "output") for side in ("begin", "end"))
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]")  # fmt: skip
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
COMMAND = ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
           "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>",
           "<|END_THINKING|>")  # fmt: skip

CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call><|im_end|>"
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>'


@dataclass(frozen=True)
class Family:
    """Contents of a tokenizer directory and the target text that its template gives for an answer `{}`.

    `turns`: an answer that is followed by another turn, and the last answer. `calls`: a tool call, and the answer after
    its result. `thoughts`: an answer with reasoning that is followed by another turn, and the last one.
    """

    special: tuple[str, ...]
    bos: str | None
    eos: str
    turns: tuple[str, str] = ("", "")
    calls: tuple[str, str] | None = None
    thoughts: tuple[str, str] | None = None
    plain: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    metaspace: bool = False
    system: bool = True


def same_twice(turn: str) -> tuple[str, str]:
    return turn, turn


EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "<think>\nBy heart.\n</think>\n\n"
FAMILIES = {
    "alpaca": Family(("<s>", "</s>"), "<s>", "</s>", same_twice("{}</s>")),
    "chatml": Family(IM, None, "<|im_end|>", same_twice("{}<|im_end|>")),
    "zephyr": Family(("<s>", "</s>"), "<s>", "</s>", same_twice("{}</s>")),
    "inst": Family(("<s>", "</s>"), "<s>", "</s>", same_twice(" {}</s>"), metaspace=True),
    "llama2": Family(("<s>", "</s>"), "<s>", "</s>", same_twice(" {} </s>"), metaspace=True),
    "llama3": Family(LLAMA3, LLAMA3[0], "<|eot_id|>", same_twice("{}<|eot_id|>")),
    "llama3_tools": Family(LLAMA3, LLAMA3[0], "<|eot_id|>", same_twice("{}<|eot_id|>"), (LLAMA_CALL, "{}<|eot_id|>")),
    "llama3_builtin": Family(
        LLAMA3, LLAMA3[0], "<|eot_id|>", same_twice("{}<|eot_id|>"), (LLAMA_CALL.replace("eot", "eom"), "{}<|eot_id|>")
    ),
    "mistral": Family(
        MISTRAL, "<s>", "</s>", same_twice("{}</s>"), (f'[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}]</s>', "{}</s>")
    ),
    "mixtral": Family(("<s>", "</s>"), "<s>", "</s>", same_twice(" {}</s>"), metaspace=True, system=False),
    "gemma2": Family(GEMMA, "<bos>", "<eos>", same_twice("{}<end_of_turn>"), metaspace=True, system=False),
    "gemma3": Family(GEMMA, "<bos>", "<eos>", same_twice("{}<end_of_turn>"), metaspace=True),
    "phi3": Family(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        None,
        "<|endoftext|>",
        ("{}<|end|>", "{}<|end|><|endoftext|>"),
    ),
    "phi4": Family((*IM, "<|im_sep|>"), None, "<|im_end|>", same_twice("{}<|im_end|>")),
    "qwen2": Family(IM, None, "<|im_end|>", same_twice("{}<|im_end|>"), (HERMES, "{}<|im_end|>")),
    "qwen3": Family(
        IM,
        None,
        "<|im_end|>",
        ("{}<|im_end|>", EMPTY + "{}<|im_end|>"),
        (HERMES, EMPTY + "{}<|im_end|>"),
        ("{}<|im_end|>", THOUGHT + "{}<|im_end|>"),
        plain=THINK,
    ),
    "deepseek_r1": Family(
        DEEPSEEK,
        DEEPSEEK[0],
        DEEPSEEK[1],
        same_twice("{}<｜end▁of▁sentence｜>"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            '{"city": "Oslo"}\n```<｜tool▁call▁end｜>',  # the template ends a turn of two calls only
            "{}<｜end▁of▁sentence｜>",
        ),
        plain=THINK[:2],
    ),
    "deepseek_v3": Family(DEEPSEEK, DEEPSEEK[0], DEEPSEEK[1], same_twice("{}<｜end▁of▁sentence｜>"), plain=THINK[:2]),
    "glm4": Family(
        GLM,
        None,
        "<|endoftext|>",
        ("\n{}<|user|>", "\n{}"),  # the first token of the next turn ends this one
        ('weather\n{"city": "Oslo"}<|observation|>', "\n{}"),
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "gpt_oss": Family(
        HARMONY,
        None,
        "<|return|>",
        ("<|channel|>final<|message|>{}<|end|>", "<|channel|>final<|message|>{}<|return|>"),
        (
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
            "<|channel|>final<|message|>{}<|return|>",
        ),
        (
            "<|channel|>final<|message|>{}<|end|>",
            "<|channel|>analysis<|message|>By heart.<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>",
        ),
        stops=("<|return|>", "<|call|>"),
    ),
    "olmo2": Family(("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", same_twice("{}<|endoftext|>")),
    "granite": Family(
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        None,
        "<|end_of_text|>",
        same_twice("{}<|end_of_text|>"),
    ),
    "smollm3": Family(IM, None, "<|im_end|>", same_twice("<|im_start|>assistant\n{}<|im_end|>\n"), plain=THINK),
    "command_r": Family(COMMAND, COMMAND[0], "<|END_OF_TURN_TOKEN|>", same_twice("{}<|END_OF_TURN_TOKEN|>")),
}
# The generation prompt of this template contains text that its turns do not: the loss mask is ambiguous.
AMBIGUOUS = {"command_r7b": Family(COMMAND, COMMAND[0], "<|END_OF_TURN_TOKEN|>", same_twice("{}"))}


def read_family_template(name: str) -> str:
    """Text of the chat template of a family: one of the package, or of the tests."""
    path = TEMPLATES.get(BUNDLED.get(name, name), TEMPLATE_DIR / f"{name}.jinja")
    return path.read_text(encoding="utf-8")


def write_family(directory: Path, name: str) -> Path:
    """Write the tokenizer directory of a family."""
    return write_template_family(directory, {**FAMILIES, **AMBIGUOUS}[name], read_family_template(name))


def write_template_family(directory: Path, family: Family, template: str) -> Path:
    """Write a tokenizer directory with the special tokens of a family."""
    shape = Shape(template, family.special, family.bos, family.eos, family.plain, family.metaspace)
    path = write_tokenizer(directory, shape)
    token_ids = {
        token["content"]: token["id"] for token in json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    }
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [token_ids[stop] for stop in family.stops]})
    )
    return path
