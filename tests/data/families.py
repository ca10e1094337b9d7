"""Families of checkpoints: chat templates (templates/*.jinja), special tokens, and what is learnt of their turns."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.data.conftest import Shape, write

FOLDER = Path(__file__).parent / "templates"
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
    """What a checkpoint folder of the family holds, and what is learnt.

    `turns`: what is written of an answer `{}` that is followed by more, and of the last one. `calls`: of a call of a
    tool and of the answer behind it. `thoughts`: of an answer with reasoning that another follows, and of the last.
    """

    special: tuple[str, ...]
    bos: str | None
    eos: str
    turns: tuple[str, str]
    calls: tuple[str, str] | None = None
    thoughts: tuple[str, str] | None = None
    plain: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    metaspace: bool = False
    system: bool = True


def even(turn: str) -> tuple[str, str]:
    return turn, turn


EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "<think>\nBy heart.\n</think>\n\n"
FAMILIES = {
    "chatml": Family(IM, None, "<|im_end|>", even("{}<|im_end|>")),
    "zephyr": Family(("<s>", "</s>"), "<s>", "</s>", even("{}</s>")),
    "llama2": Family(("<s>", "</s>"), "<s>", "</s>", even(" {} </s>"), metaspace=True),
    "llama3": Family(LLAMA3, LLAMA3[0], "<|eot_id|>", even("{}<|eot_id|>")),
    "llama3_tools": Family(LLAMA3, LLAMA3[0], "<|eot_id|>", even("{}<|eot_id|>"), (LLAMA_CALL, "{}<|eot_id|>")),
    "llama3_builtin": Family(
        LLAMA3, LLAMA3[0], "<|eot_id|>", even("{}<|eot_id|>"), (LLAMA_CALL.replace("eot", "eom"), "{}<|eot_id|>")
    ),
    "mistral": Family(
        MISTRAL, "<s>", "</s>", even("{}</s>"), (f'[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}]</s>', "{}</s>")
    ),
    "mixtral": Family(("<s>", "</s>"), "<s>", "</s>", even(" {}</s>"), metaspace=True, system=False),
    "gemma2": Family(GEMMA, "<bos>", "<eos>", even("{}<end_of_turn>"), metaspace=True, system=False),
    "gemma3": Family(GEMMA, "<bos>", "<eos>", even("{}<end_of_turn>"), metaspace=True),
    "phi3": Family(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        None,
        "<|endoftext|>",
        ("{}<|end|>", "{}<|end|><|endoftext|>"),
    ),
    "phi4": Family((*IM, "<|im_sep|>"), None, "<|im_end|>", even("{}<|im_end|>")),
    "qwen2": Family(IM, None, "<|im_end|>", even("{}<|im_end|>"), (HERMES, "{}<|im_end|>")),
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
        even("{}<｜end▁of▁sentence｜>"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            '{"city": "Oslo"}\n```<｜tool▁call▁end｜>',  # the template ends a turn of two calls only
            "{}<｜end▁of▁sentence｜>",
        ),
        plain=THINK[:2],
    ),
    "deepseek_v3": Family(DEEPSEEK, DEEPSEEK[0], DEEPSEEK[1], even("{}<｜end▁of▁sentence｜>"), plain=THINK[:2]),
    "glm4": Family(
        GLM,
        None,
        "<|endoftext|>",
        ("\n{}<|user|>", "\n{}"),  # the next turn's beginning is what stops this one
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
    "olmo2": Family(("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", even("{}<|endoftext|>")),
    "granite": Family(
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), None, "<|end_of_text|>", even("{}<|end_of_text|>")
    ),
    "smollm3": Family(IM, None, "<|im_end|>", even("<|im_start|>assistant\n{}<|im_end|>\n"), plain=THINK),
    "command_r": Family(COMMAND, COMMAND[0], "<|END_OF_TURN_TOKEN|>", even("{}<|END_OF_TURN_TOKEN|>")),
}
# A family whose template prompts for what its turns never hold: no mask is sure.
UNSURE = {"command_r7b": Family(COMMAND, COMMAND[0], "<|END_OF_TURN_TOKEN|>", even("{}"))}


def folder(place: Path, name: str) -> Path:
    """A checkpoint folder of a family, with a small tokenizer of its own."""
    family = {**FAMILIES, **UNSURE}[name]
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    shape = Shape(template, family.special, family.bos, family.eos, family.plain, family.metaspace)
    path = write(place, shape)
    ids = {item["content"]: item["id"] for item in json.loads((path / "tokenizer.json").read_text())["added_tokens"]}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[stop] for stop in family.stops]}))
    return path
