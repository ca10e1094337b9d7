"""Code snippets for model cards, which load a model with transformers and generate text or scores."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.checkpoint import peft_adapter, sentence_transformers
from tunekit.checkpoint.adapter_dir import HEAD_KEY, AdapterDir
from tunekit.checkpoint.hf_checkpoint import read_json
from tunekit.hub import redact
from tunekit.models.families import classifiers
from tunekit.models.spec import ScoreHead
from tunekit.publishing.base_model import BaseModelInfo

LOAD = """\
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{name}")
"""
LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import {auto}, AutoTokenizer

base = {auto}.from_pretrained("{base}"{head}){resize}
model = PeftModel.from_pretrained(base, "{name}")
"""
LOAD_QUANTIZED = """\
from peft import PeftModel
from transformers import {auto}, AutoTokenizer, BitsAndBytesConfig

# The adapter was trained with a 4-bit base and works best with it. Requires bitsandbytes.
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{kind}", bnb_4bit_use_double_quant={nested})
base = {auto}.from_pretrained("{base}"{head}, quantization_config=bits){resize}
model = PeftModel.from_pretrained(base, "{name}")
"""
EMBED = """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
query = model.encode_query("Where is the red hat?")
documents = model.encode_document(["The red hat is in the hall.", "The blue bag is in the attic."])
print(model.similarity(query, documents))
"""
LOAD_TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained("{name}")

"""
GENERATE = """\
{inputs}
answer = model.generate(**inputs, max_new_tokens=200)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""
CHAT_INPUTS = """\
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")\
"""
TEXT_INPUTS = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
SCORED_CHAT_INPUTS = """\
messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello to you!"}]
inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")\
"""
# Plain text of preference pairs ends with the EOS token.
REWARD_TEXT_INPUTS = 'inputs = tokenizer("Once upon a time" + tokenizer.eos_token, return_tensors="pt")'
PAIR_INPUTS = 'inputs = tokenizer("Where is the red hat?", "The red hat is in the hall.", return_tensors="pt")'
PRINT_REWARD = "print(model(**inputs).logits[0, 0].item())"
PRINT_CLASSES = """\
probabilities = model(**inputs).logits[0].softmax(-1).tolist()
print({model.config.id2label[i]: p for i, p in enumerate(probabilities)})\
"""
PRINT_STEP_SCORES = """\
prompt, steps = {prompt}, ["2 + 2 = 4.", "4 + 2 = 6."]
{text}
for step in steps:
    text += step + {separator}
    ends.append(len(text))
inputs = tokenizer(text, {special}return_offsets_mapping=True, return_tensors="pt")
last = {{end: index for index, (_, end) in enumerate(inputs.pop("offset_mapping")[0].tolist())}}
print(model(**inputs).logits[0, [last[end] for end in ends]].softmax(-1).tolist())\
"""
TEXT_STEPS = {"prompt": '"What is 2 + 2 + 2?\\n"', "text": "ends, text = [], prompt", "special": ""}
# The chat template is applied to the prompt and the start of the answer.
CHAT_STEPS = {
    "prompt": '[{"role": "user", "content": "What is 2 + 2 + 2?"}]',
    "text": """\
messages = [*prompt, {"role": "assistant", "content": steps[0]}]
text = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
ends, text = [], text.removesuffix(steps[0])\
""",
    "special": "add_special_tokens=False, ",
}
# transformers class and Hub pipeline tag of models with a score head, by PEFT task type.
SCORE_TASKS = {
    "SEQ_CLS": ("AutoModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoModelForTokenClassification", "token-classification"),
}


@dataclass(frozen=True)
class ScoreHeadInfo:
    """Score head of a model, its label names and its transformers problem_type, and whether it is a reranker."""

    score: ScoreHead
    names: Mapping[str, str]
    problem: str | None
    is_reranker: bool

    @staticmethod
    def from_dir(folder: Path) -> "ScoreHeadInfo | None":
        """Score head of a checkpoint or adapter; None for a language model."""
        if AdapterDir.is_adapter(folder):
            adapter = AdapterDir.open(folder)
            head, metadata = adapter.score_head, adapter.metadata(HEAD_KEY)
        else:
            metadata = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
            head = classifiers.score_head(metadata)
        names, problem = metadata.get("id2label") or {}, metadata.get("problem_type")
        is_reranker = sentence_transformers.is_cross_encoder(folder)
        return None if head is None else ScoreHeadInfo(head, names, problem, is_reranker)

    @property
    def task(self) -> str:
        """PEFT task type."""
        return peft_adapter.task_type(self.score)

    @property
    def description(self) -> str:
        """Sentence about the meaning of the scores."""
        if self.score.per_token:
            classes = "whether it is right (class 1)" if self.score.labels == 2 else f"its class of {self.score.labels}"
            return f"It predicts for each step of an answer {classes}, at the last token of the step."
        if self.problem == "regression":
            return "It predicts a number for a text."
        if self.problem == "multi_label_classification" and self.is_reranker:
            return "It predicts how relevant a document is to a query: the logit of a probability."
        if self.problem == "multi_label_classification":
            return "It predicts the logit of the probability that the label of a text is 1."
        if self.is_reranker:
            return "It predicts how relevant a document is to a query. The more relevant document has the higher score."
        if self.score.labels > 1:
            classes = ", ".join(f"`{name}`" for name in self.names.values()) or self.score.labels
            return f"It predicts the class of a text: {classes}."
        return (
            "It predicts the reward of an answer. Of two answers to a prompt, the one with the higher reward is better."
        )

    @property
    def load_options(self) -> str:
        """Keyword arguments of `from_pretrained` for the base of an adapter with this head."""
        classes = f"id2label=dict(enumerate({json.dumps(list(self.names.values()))}))"
        labels = classes if self.has_custom_names else f"num_labels={self.score.labels}"
        return f", {labels}, pad_token_id={self.score.pad_token_id}"

    @property
    def has_custom_names(self) -> bool:
        """Whether the label names differ from the defaults of transformers."""
        return any(name != f"LABEL_{key}" for key, name in self.names.items())

    @property
    def text_inputs(self) -> str:
        """Code that encodes plain text as in training."""
        if self.is_reranker:
            return PAIR_INPUTS
        return REWARD_TEXT_INPUTS if self.problem is None and self.score.labels == 1 else TEXT_INPUTS

    def scoring_code(self, is_chat: bool, separator: str) -> str:
        """Code that prints scores."""
        if self.score.per_token:
            return PRINT_STEP_SCORES.format(separator=json.dumps(separator), **(CHAT_STEPS if is_chat else TEXT_STEPS))
        output = PRINT_CLASSES if self.score.labels > 1 else PRINT_REWARD
        return f"{SCORED_CHAT_INPUTS if is_chat and not self.is_reranker else self.text_inputs}\n{output}"


@dataclass(frozen=True)
class PromptFormat:
    """Format of the training rows of a scoring model. `is_chat` is None if it is unknown."""

    is_chat: bool | None = None
    separator: str = "\n"


UNKNOWN_FORMAT = PromptFormat()


def describe_scores(folder: Path) -> str:
    """Sentence about the outputs of a model; empty for a language model."""
    if sentence_transformers.is_embedding_model(folder):
        return " It embeds texts for search: those with a similar meaning have similar vectors."
    head = ScoreHeadInfo.from_dir(folder)
    return "" if head is None else f" {head.description}"


def library_name(folder: Path) -> str:
    """Library that opens the model."""
    if sentence_transformers.is_embedding_model(folder):
        return "sentence-transformers"
    return "peft" if AdapterDir.is_adapter(folder) else "transformers"


def pipeline_tag(folder: Path) -> str:
    """Pipeline tag of the Hub."""
    if sentence_transformers.is_embedding_model(folder):
        return "sentence-similarity"
    head = ScoreHeadInfo.from_dir(folder)
    return "text-generation" if head is None else SCORE_TASKS[head.task][1]


def usage_snippet(
    folder: Path,
    name: str,
    base: BaseModelInfo | None,
    quantization: Mapping[str, Any] | None = None,
    prompt_format: PromptFormat = UNKNOWN_FORMAT,
) -> str:
    """Code for transformers and peft, and the command to chat with the model.

    `quantization` is that of the base of an adapter.
    """
    note = f"`{name}` is the directory of this model, or its name on the Hub."
    base_name = "" if base is None else base.repo or base.name
    adapter = AdapterDir.open(folder) if AdapterDir.is_adapter(folder) else None
    if adapter is not None and base is not None and base.repo is None:
        note += f" `{base_name}` is the directory of the base."
    if sentence_transformers.is_embedding_model(folder):
        return f"{note}\n\n```python\n{EMBED.format(name=name)}```"
    load, head = LOAD, ScoreHeadInfo.from_dir(folder)
    if adapter is not None:
        base_name = base_name or redact.redact_path(adapter.peft.base_name)
        load = LOAD_ADAPTER
        if quantization is not None and "double_quant" in quantization:  # a format of bitsandbytes
            kind, nested = quantization["kind"], str(quantization["double_quant"])
            load = LOAD_QUANTIZED.replace("{kind}", kind).replace("{nested}", nested)
    auto = "AutoModelForCausalLM" if head is None else SCORE_TASKS[head.task][0]
    options = "" if head is None else head.load_options
    changes = {} if adapter is None else dict(adapter.config_changes)
    rows = changes.pop(peft_adapter.VOCAB_SIZE, None)
    options += config_options(changes)
    resize = "" if rows is None else f"\nbase.resize_token_embeddings({rows})  # with rows for new tokens"
    code = load.format(auto=auto, base=base_name, name=name, head=options, resize=resize)
    code += LOAD_TOKENIZER.format(name=name)
    template = has_template(folder)
    if head is not None:
        is_chat = template if prompt_format.is_chat is None else prompt_format.is_chat
        code += head.scoring_code(is_chat, prompt_format.separator)
        return f"{note}\n\n```python\n{code}\n```"
    code += GENERATE.format(inputs=CHAT_INPUTS if template else TEXT_INPUTS)
    return f"{note}\n\n```python\n{code}```\n\n```sh\ntune chat {name}\n```"


def config_options(changes: dict[str, Any]) -> str:
    """Arguments with which transformers loads the base of an adapter that was trained with other config values."""
    theta, scaling = changes.pop("rope_theta", None), changes.pop("rope_scaling", None)
    if theta is not None:
        changes["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"} | (scaling or {})
    return "".join(f", {key}={value!r}" for key, value in changes.items())


def has_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (config.is_file() and "chat_template" in read_json(config))
