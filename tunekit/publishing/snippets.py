"""What a model is for, and code that uses it: transformers opens it, and writes or scores with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.checkpoint import peft_adapter
from tunekit.checkpoint.hf_checkpoint import read_json
from tunekit.hub import redact
from tunekit.models.families import classifiers
from tunekit.models.spec import ScoreHead

LOAD = """\
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{name}")
"""
LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import {auto}, AutoTokenizer

model = PeftModel.from_pretrained({auto}.from_pretrained("{base}"{head}), "{name}")
"""
LOAD_PACKED = """\
from peft import PeftModel
from transformers import {auto}, AutoTokenizer, BitsAndBytesConfig

# The adapter has learnt beside a base in four bits, and fits that one best; this needs bitsandbytes.
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{kind}", bnb_4bit_use_double_quant={nested})
base = {auto}.from_pretrained("{base}"{head}, quantization_config=bits)
model = PeftModel.from_pretrained(base, "{name}")
"""
WORDS = """\
tokenizer = AutoTokenizer.from_pretrained("{name}")

"""
WRITE = """\
{inputs}
answer = model.generate(**inputs, max_new_tokens=200)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""
CHAT = """\
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")\
"""
TEXT = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
TALK = """\
messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello to you!"}]
inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")\
"""
# A text that was learnt ends with this token.
ENDED = 'inputs = tokenizer("Once upon a time" + tokenizer.eos_token, return_tensors="pt")'
REWARD = "print(model(**inputs).logits[0, 0].item())"
CLASS = """\
chances = model(**inputs).logits[0].softmax(-1).tolist()
print({model.config.id2label[i]: chance for i, chance in enumerate(chances)})\
"""
STEPS = """\
prompt, steps = {prompt}, ["2 + 2 = 4.", "4 + 2 = 6."]
{text}
for step in steps:
    text += step + {separator}
    ends.append(len(text))
inputs = tokenizer(text, {special}return_offsets_mapping=True, return_tensors="pt")
last = {{end: place for place, (_, end) in enumerate(inputs.pop("offset_mapping")[0].tolist())}}
print(model(**inputs).logits[0, [last[end] for end in ends]].softmax(-1).tolist())\
"""
ASKED = {"prompt": '"What is 2 + 2 + 2?\\n"', "text": "ends, text = [], prompt", "special": ""}
# What a template writes in front of an answer.
ASKED_CHAT = {
    "prompt": '[{"role": "user", "content": "What is 2 + 2 + 2?"}]',
    "text": """\
begun = [*prompt, {"role": "assistant", "content": steps[0]}]
text = tokenizer.apply_chat_template(begun, continue_final_message=True, tokenize=False)
ends, text = [], text.removesuffix(steps[0])\
""",
    "special": "add_special_tokens=False, ",
}
# Of a model that scores, by what PEFT calls its task: its class, and what the Hub calls what it does.
SCORING = {
    "SEQ_CLS": ("AutoModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoModelForTokenClassification", "token-classification"),
}


@dataclass(frozen=True)
class ScoreHeadInfo:
    """What scores, what its classes are called, and what transformers calls the task."""

    score: ScoreHead
    names: Mapping[str, str]
    problem: str | None

    @staticmethod
    def of(folder: Path) -> "ScoreHeadInfo | None":
        """That of a checkpoint or an adapter; None: it writes."""
        if is_adapter(folder):
            if not peft_adapter.PeftConfigFile.open(folder).scores:
                return None
            found, said = peft_adapter.read_score_head(folder), peft_adapter.read_head_metadata(folder)
        else:
            said = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
            found = classifiers.score_head(said)
        return None if found is None else ScoreHeadInfo(found, said.get("id2label") or {}, said.get("problem_type"))

    @property
    def task(self) -> str:
        """What PEFT calls it."""
        return peft_adapter.task_type(self.score)

    @property
    def says(self) -> str:
        """What the scores tell."""
        if self.score.each:
            classes = "whether it is right (class 1)" if self.score.labels == 2 else f"its class of {self.score.labels}"
            return f"It tells of each step of an answer {classes}, at the last token of the step."
        if self.problem == "regression":
            return "It gives a number to a text."
        if self.score.labels > 1:
            classes = ", ".join(f"`{name}`" for name in self.names.values()) or self.score.labels
            return f"It tells which class a text is of: {classes}."
        return "It gives a reward to an answer: of two answers to one prompt, the one with the higher reward is better."

    @property
    def told(self) -> str:
        """What transformers must be told of it before it opens the base of an adapter."""
        classes = f"id2label=dict(enumerate({json.dumps(list(self.names.values()))}))"
        return f", {classes if self.chosen else f'num_labels={self.score.labels}'}, pad_token_id={self.score.pad}"

    @property
    def chosen(self) -> bool:
        """Whether people have named the classes."""
        return any(name != f"LABEL_{key}" for key, name in self.names.items())

    def code(self, talk: bool, separator: str) -> str:
        """What prints scores."""
        if self.score.each:
            return STEPS.format(separator=json.dumps(separator), **(ASKED_CHAT if talk else ASKED))
        shown = CLASS if self.score.labels > 1 else REWARD
        return f"{TALK if talk else ENDED}\n{shown}"


@dataclass(frozen=True)
class PromptFormat:
    """How the rows were written that a model has learnt to score; None: nobody knows."""

    talk: bool | None = None
    separator: str = "\n"


def describe_scores(folder: Path) -> str:
    """What scores tell; nothing of a model that writes."""
    head = ScoreHeadInfo.of(folder)
    return "" if head is None else f" {head.says}"


def pipeline_tag(folder: Path) -> str:
    """What the Hub calls what it does."""
    head = ScoreHeadInfo.of(folder)
    return "text-generation" if head is None else SCORING[head.task][1]


def usage_snippet(
    folder: Path, name: str, base: str, public: bool, weights: Mapping[str, Any] | None, rows: PromptFormat
) -> str:
    """Code for transformers and peft, and the command to talk with it.

    `base` is its name, `public` whether the Hub knows it, `weights` how an adapter's base was kept.
    """
    where, load, head = (
        f"`{name}` stands for this model's folder, or for its name on the Hub.",
        LOAD,
        ScoreHeadInfo.of(folder),
    )
    if is_adapter(folder):
        base, load = base or redact.redact_path(peft_adapter.base_model_name(folder)), LOAD_ADAPTER
        if weights is not None and "double_quant" in weights:  # what bitsandbytes knows
            load = LOAD_PACKED.replace("{kind}", weights["kind"]).replace("{nested}", str(weights["double_quant"]))
        where += "" if public else f" `{base}` stands for the folder of the base."
    auto = "AutoModelForCausalLM" if head is None else SCORING[head.task][0]
    code = load.format(auto=auto, base=base, name=name, head="" if head is None else head.told)
    code += WORDS.format(name=name)
    template = has_template(folder)
    if head is not None:
        code += head.code(template if rows.talk is None else rows.talk, rows.separator)
        return f"{where}\n\n```python\n{code}\n```"
    code += WRITE.format(inputs=CHAT if template else TEXT)
    return f"{where}\n\n```python\n{code}```\n\n```sh\ntune chat {name}\n```"


def is_adapter(folder: Path) -> bool:
    return (folder / peft_adapter.CONFIG).is_file()


def has_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (config.is_file() and "chat_template" in read_json(config))
