"""Datasets of torchtune."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.columns import set_columns
from tunekit.importers.draft import Draft, Tree
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.join_datasets import join_datasets
from tunekit.importers.prompt_texts import alpaca_prompt, column, escape, message
from tunekit.importers.sources import join_source, local_sources
from tunekit.importers.torchtune.model import PLAIN, TextFormat
from tunekit.importers.torchtune.source import COMPONENT

IMAGES = "trains on images, and models read text only here"
# Templates of torchtune that write texts around a question, by their last name.
QUESTION_TEXTS = {
    "GrammarErrorCorrectionTemplate": ("Correct this to standard English: ", "\n---\nCorrected: "),
    "SummarizeTemplate": ("Summarize this dialogue:\n", "\n---\nSummary:\n"),
    "QuestionAnswerTemplate": ("Question: ", "\n\nAnswer: "),
}


@dataclass
class DataContext:
    """Options besides the dataset that determine the format of rows."""

    draft: Draft
    text_format: TextFormat
    max_length: int
    tokenizer: ForeignKeys
    source_column: str = ""
    question_texts: tuple[str, str] = ("", "")


def read_question_texts(context: DataContext) -> None:
    """Read the texts around a question that `tokenizer.prompt_template` sets: a known name, or a mapping."""
    template = context.tokenizer.peek("prompt_template")
    if isinstance(template, str):
        texts = QUESTION_TEXTS.get(template.rpartition(".")[2])
    else:
        pair = template.get("user") if isinstance(template, Mapping) else None
        others = {name for name in template or {} if name != "user" and any(template[name] or ())}
        texts = (str(pair[0]), str(pair[1])) if isinstance(pair, list) and len(pair) == 2 and not others else None
    if texts is not None:
        context.tokenizer.take("prompt_template")
        context.question_texts = texts


def convert_dataset(value: Any, path: str, context: DataContext) -> Tree:
    """The `data` section of a dataset, or of a list of datasets."""
    if isinstance(value, list):
        datasets = [convert_dataset(item, f"{path}[{i}]", context) for i, item in enumerate(value)]
        return join_datasets("data" if path == "dataset" else "eval_data", datasets, {}, context.draft)
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: must be a mapping with _component_. Set a dataset builder.")
    keys = ForeignKeys(value, path)
    builder = str(keys.take(COMPONENT, default="")).rpartition(".")[2]
    if (
        "multimodal" in str(value.get(COMPONENT, ""))
        or "vision" in builder
        or builder in ("llava_instruct_dataset", "vqa_dataset")
    ):
        raise UserError(f"{path}: {builder} {IMAGES}. Set a dataset of texts, such as chat_dataset.")
    if builder not in BUILDERS:
        hint = "Rewrite it as a dataset kind in a Python file, and pass --import FILE.py to tune run (docs/data.md)"
        raise UserError(f"{path}: unknown dataset builder {builder!r}. {hint}.")
    data = BUILDERS[builder](keys, context)
    data["max_length"] = int(keys.number("max_seq_len", default=context.max_length))
    if keys.flag("packed"):
        data["packing"] = True
    finish_dataset(keys, data, context)
    return data


def finish_dataset(keys: ForeignKeys, data: Tree, context: DataContext) -> None:
    """Keys of all builders: the source, and what has no counterpart."""
    data.update(read_source(keys, data.pop("default_source", None), context.draft))
    if (transform := keys.take("filter_fn")) is not None:
        context.draft.drop(
            keys.dotted("filter_fn"), transform, "filter rows with data.transforms, or a custom transform"
        )
    if (separate := keys.take("split_across_pack")) is not None:
        context.draft.report_unneeded(
            keys.dotted("split_across_pack"), separate, "not needed: texts are packed as a whole"
        )
    for dotted, value in keys.rest():
        context.draft.drop(dotted, value, "an argument of datasets.load_dataset, which does not read the rows here")


def read_source(keys: ForeignKeys, default: str | None, draft: Draft) -> Tree:
    """`source` and `split` from the arguments of datasets.load_dataset. `default` may name a subset: NAME:SUBSET."""
    default_source, _, default_subset = (default or "").partition(":")
    source, files = keys.take("source", default=default_source), keys.take("data_files")
    subset, directory = keys.take("name", "subset"), keys.take("data_dir")
    split = str(keys.take("split", default="train"))
    keys.take("trust_remote_code", "streaming")
    if not source:
        raise UserError(f"{keys.path}: missing source. Set it to a file or a dataset name.")
    if isinstance(files, list) and len(files) > 1:
        draft.differs(keys.dotted("data_files"), files, "source is a pattern, which may match other files too")
    name, split = local_sources(str(source), files, directory, split)
    if name is None:
        is_local = Path(str(source)).exists()
        name = join_source(str(source), subset or (default_subset if not is_local else None))
        if directory is not None:
            draft.drop(
                keys.dotted("data_dir"), directory, "a directory of a Hub dataset: use hf://datasets/NAME/DIRECTORY"
            )
    return {"source": name} | ({"split": split} if split != "train" else {})


def set_format(data: Tree, context: DataContext) -> Tree:
    """Chat template of conversations."""
    if context.text_format.chat_template is not None:
        data["chat_template"] = context.text_format.chat_template
        if not context.text_format.final_newline:
            data["chat_template_kwargs"] = {"final_newline": False}
    elif context.text_format is PLAIN or not context.text_format.has_markers:
        note = "torchtune writes no markers around messages; here, the chat template of the checkpoint does"
        context.draft.differs("tokenizer", "", note)
    return data


def read_targets(keys: ForeignKeys, default: bool) -> Tree:
    """`train_on` from the flag train_on_input, or from masking_strategy of later versions."""
    strategy = keys.take("masking_strategy")
    by_strategy = {"train_on_all": "all", "train_on_assistant": "assistant", "train_on_last": "last"}
    inputs = keys.flag("train_on_input", default=default)
    choice = by_strategy.get(str(strategy), "all" if inputs else "assistant")
    return {} if choice == "assistant" else {"train_on": choice}


def convert_question(context: DataContext, question: str, prompt: str, answer: str, system: str | None = None) -> Tree:
    """Rows of a question and an answer, as a conversation or as plain text.

    `question` is a template, or `prompt` the column if it is empty.
    """
    before, after = context.question_texts
    if before or after:
        question = f"{escape(before)}{question or column(prompt)}{escape(after)}"
    if context.text_format.has_markers:
        data: Tree = {"kind": "instruct"}
        set_columns(data, prompt=prompt, input=None, completion=answer)
        if system:
            data["system_prompt"] = system
        if question:
            data["transforms"] = [{"kind": "render_columns", "columns": {prompt: question}}]
        return set_format(data, context)
    data = {"kind": "completion"}
    if system or question:
        set_columns(data, completion=answer)
        text = escape(system or "") + (question or column(prompt))
        data["transforms"] = [{"kind": "render_columns", "columns": {"prompt": text}}]
    else:
        set_columns(data, prompt=prompt, completion=answer)
    return data


def make_alpaca_converter(source: str) -> Callable[[ForeignKeys, DataContext], Tree]:
    def convert(keys: ForeignKeys, context: DataContext) -> Tree:
        names = {"instruction": "instruction", "input": "input", "output": "output"} | (keys.take("column_map") or {})
        prompt = alpaca_prompt(names["instruction"], names["input"])
        data = convert_question(context, prompt, names["instruction"], names["output"])
        return {**data, **read_targets(keys, True), "default_source": source}

    return convert


def make_instruct_converter(source: str | None, prompt: str = "input", answer: str = "output") -> Callable[..., Tree]:
    def convert(keys: ForeignKeys, context: DataContext) -> Tree:
        names = {"input": prompt, "output": answer} | (keys.take("column_map") or {})
        data = convert_question(context, "", names["input"], names["output"], keys.take("new_system_prompt"))
        return {**data, **read_targets(keys, False), "default_source": source}

    return convert


def convert_chat(keys: ForeignKeys, context: DataContext) -> Tree:
    style = str(keys.take("conversation_style", default="openai"))
    return convert_conversation(keys, context, style, keys.take("conversation_column"))


def convert_conversation(keys: ForeignKeys, context: DataContext, style: str, name: str | None) -> Tree:
    data: Tree = {"kind": "sharegpt" if style == "sharegpt" else "chat"}
    if style == "sharegpt":
        set_columns(data, conversations=name or "conversations")
    else:
        set_columns(data, messages=name or "messages")
    if (system := keys.take("new_system_prompt")) is not None:
        note = "replaces the system message of each row: use a custom transform, or render_columns with a column system"
        context.draft.drop(keys.dotted("new_system_prompt"), system, note)
    return {**set_format(data, context), **read_targets(keys, False)}


def convert_slimorca(keys: ForeignKeys, context: DataContext) -> Tree:
    names = keys.take("column_map") or {}
    data = convert_conversation(keys, context, "sharegpt", names.get("conversations"))
    return {**data, "default_source": "Open-Orca/SlimOrca-Dedup"}


def make_text_converter(source: str | None, name: str = "text") -> Callable[[ForeignKeys, DataContext], Tree]:
    def convert(keys: ForeignKeys, context: DataContext) -> Tree:
        data: Tree = {"kind": "text"}
        set_columns(data, text=keys.take("column", default=name))
        if not keys.flag("add_eos", default=True):
            context.draft.differs(keys.dotted("add_eos"), False, "each text ends with the EOS token here")
        return {**data, "default_source": source}

    return convert


def make_preference_converter(source: str | None, **names: str) -> Callable[[ForeignKeys, DataContext], Tree]:
    def convert(keys: ForeignKeys, context: DataContext) -> Tree:
        columns = names | (keys.take("column_map") or {})
        data: Tree = {"kind": "preference"}
        set_columns(data, chosen=columns["chosen"], rejected=columns["rejected"])
        if "prompt" in columns:
            data["transforms"] = [make_messages(columns, context.question_texts)]
            set_columns(data, prompt=columns["prompt"])
        if keys.flag("train_on_input"):
            context.draft.drop(keys.dotted("train_on_input"), True, "prompts are never trained on in preference pairs")
        if (system := keys.take("new_system_prompt")) is not None:
            context.draft.drop(keys.dotted("new_system_prompt"), system, "add a column system to the rows")
        return {**set_format(data, context), "default_source": source}

    return convert


def make_messages(columns: Mapping[str, str], texts: tuple[str, str]) -> Tree:
    """Transform that makes one message of each text, so that the chat template is used."""
    rendered = {columns["prompt"]: message("user", columns["prompt"], *texts)}
    rendered |= {columns[role]: message("assistant", columns[role]) for role in ("chosen", "rejected")}
    return {"kind": "render_columns", "columns": rendered}


def convert_gsm8k_sft(keys: ForeignKeys, context: DataContext) -> Tree:
    if (part := keys.take("partition")) is not None:
        context.draft.drop(keys.dotted("partition"), part, "all rows of the split are used; set data.split to a slice")
    data = convert_question(context, "", "question", "answer")
    context.draft.differs(keys.path, "gsm8k_sft", "torchtune writes a prompt with tags around the question")
    return {**data, "default_source": "openai/gsm8k:main"}


BUILDERS: dict[str, Callable[[ForeignKeys, DataContext], Tree]] = {
    "alpaca_dataset": make_alpaca_converter("tatsu-lab/alpaca"),
    "alpaca_cleaned_dataset": make_alpaca_converter("yahma/alpaca-cleaned"),
    "instruct_dataset": make_instruct_converter(None),
    "grammar_dataset": make_instruct_converter("liweili/c4_200m"),
    "samsum_dataset": make_instruct_converter("Samsung/samsum", "dialogue", "summary"),
    "chat_dataset": convert_chat,
    "slimorca_dataset": convert_slimorca,
    "text_completion_dataset": make_text_converter(None),
    "cnn_dailymail_articles_dataset": make_text_converter("ccdv/cnn_dailymail:3.0.0", "article"),
    "wikitext_dataset": make_text_converter("EleutherAI/wikitext_document_level:wikitext-103-v1", "page"),
    "preference_dataset": make_preference_converter(None, chosen="chosen", rejected="rejected"),
    "hh_rlhf_helpful_dataset": make_preference_converter(
        "RLHFlow/HH-RLHF-Helpful-standard", chosen="chosen", rejected="rejected"
    ),
    "stack_exchange_paired_dataset": make_preference_converter(
        "lvwerra/stack-exchange-paired", prompt="question", chosen="response_j", rejected="response_k"
    ),
    "gsm8k_sft": convert_gsm8k_sft,
}
