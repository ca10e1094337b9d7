"""Datasets of axolotl."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.axolotl import pairs, prompts
from tunekit.importers.columns import set_columns
from tunekit.importers.draft import Draft, Tree
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.prompt_texts import render_messages
from tunekit.importers.sources import join_source, local_sources

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
TEMPLATES = {  # names of axolotl whose format is that of a bundled template
    "chatml": "chatml", "llama3": "llama3", "alpaca": "alpaca", "gemma": "gemma", "phi_3": "phi3", "inst": "inst",
    "mistral_v1": "inst", "mistral_v2v3": "mistral", "zephyr": "zephyr",
}  # fmt: skip
SHARE = {"role": "from", "content": "value"}


@dataclass
class AxolotlContext:
    """Options that all datasets share."""

    draft: Draft
    rl: str | None  # preference method, or reward
    chat_template: str | None
    train_on_inputs: bool


def read_template(keys: ForeignKeys, draft: Draft) -> str | None:
    """Bundled template or file of `chat_template` and `chat_template_jinja`; None for that of the checkpoint."""
    name, text = keys.take("chat_template"), keys.take("chat_template_jinja")
    if text is not None and name in (None, "jinja"):
        if Path(str(text)).is_file() or str(text).endswith((".jinja", ".j2", ".jinja2")):
            return str(text)
        draft.drop(
            keys.dotted("chat_template_jinja"), text, "write it to a file, and set data.chat_template to the file"
        )
        return None
    name = str(name).removeprefix("tokenizer_default_fallback_") if name is not None else None
    if name is None or name == "tokenizer_default":
        return None
    if name not in TEMPLATES:
        note = "not bundled: the template of the checkpoint is used, which is this one for most models"
        draft.differs(keys.dotted("chat_template"), name, note)
    return TEMPLATES.get(name)


def convert_dataset(value: Any, path: str, context: AxolotlContext) -> Tree:
    """One dataset."""
    keys = ForeignKeys(value if isinstance(value, Mapping) else {"path": value}, path)
    kind = keys.take("type")
    template = read_template(keys, context.draft) or context.chat_template
    if isinstance(kind, Mapping):
        is_pair = context.rl is not None
        data = (
            pairs.convert_user_defined(dict(kind), context.rl or "")
            if is_pair
            else prompts.convert_user_defined(dict(kind))
        )
        if context.train_on_inputs and not is_pair:
            data["train_on"] = "all"
    elif context.rl is not None:
        data = pairs.convert_pairs(str(kind or ""), keys, context.rl, template, context.draft)
    else:
        data = convert_type(str(kind or "chat_template"), keys, template, context)
    data.update(read_source(keys, context.draft))
    for dotted, rest in keys.rest():
        if rest is not None and rest is not False:
            context.draft.drop(dotted, rest, "no option of this format here")
    return data


def convert_type(kind: str, keys: ForeignKeys, template: str | None, context: AxolotlContext) -> Tree:
    """Rows of supervised fine-tuning, by the name of a type."""
    base, _, style = kind.partition(":")
    if base.startswith(("chat_template", "sharegpt", "messages.chat", "llama2_chat", "pygmalion")):
        return convert_chat(base, keys, template, context)
    data: Tree | None = None
    if base in ("completion", "pretrain", "pretraining"):
        data = {"kind": "text"}
        set_columns(data, text=str(keys.take("field", "text_column", default="text")))
        return data
    if base == "input_output":
        return {"kind": "segments"}
    if base == "alpaca":
        data = prompts.convert_alpaca(style or "instruct")
    elif base in prompts.TYPES:
        data = {**prompts.TYPES[base]}
    if data is None:
        context.draft.drop(f"{keys.path}.type", kind, "this format is not known: the columns decide; set data.kind")
        return {}
    return data | ({"train_on": "all"} if context.train_on_inputs else {})


def convert_chat(kind: str, keys: ForeignKeys, template: str | None, context: AxolotlContext) -> Tree:
    """Conversations."""
    draft = context.draft
    is_sharegpt = kind.startswith(("sharegpt", "llama2_chat", "pygmalion"))
    name = str(keys.take("field_messages", default="conversations" if is_sharegpt else "messages"))
    fields = keys.take("message_property_mappings") or {}
    fields = {"role": keys.take("message_field_role") or fields.get("role") or ("from" if is_sharegpt else "role"),
              "content": keys.take("message_field_content") or fields.get("content")
              or ("value" if is_sharegpt else "content")}  # fmt: skip
    roles = {source: target for target, sources in (keys.take("roles") or {}).items() for source in sources}
    own_roles = {source: target for source, target in roles.items() if ROLES.get(source) != target}
    if fields == SHARE and not own_roles:
        data: Tree = {"kind": "sharegpt"}
        set_columns(data, conversations=name)
    else:
        data = {"kind": "chat"}
        set_columns(data, messages=name)
        if own_roles or fields != {"role": "role", "content": "content"}:
            template_text = render_messages(name, fields["role"], fields["content"], {**ROLES, **roles})
            data["transforms"] = [{"kind": "render_columns", "columns": {name: template_text}}]
    if template is not None:
        data["chat_template"] = template
    trained = convert_targets(keys, context)
    if (tools := keys.take("field_tools")) not in (None, "tools"):
        data.setdefault("transforms", []).append({"kind": "rename_columns", "column_mapping": {str(tools): "tools"}})
    if (conversation := keys.take("conversation")) is not None:
        known = TEMPLATES.get(str(conversation))
        data.update({"chat_template": known} if known and template is None else {})
        if known is None:
            draft.differs(keys.dotted("conversation"), conversation, "the template of the checkpoint is used")
    return {**data, **trained}


def convert_targets(keys: ForeignKeys, context: AxolotlContext) -> Tree:
    """`train_on` of conversations."""
    draft, roles = context.draft, keys.texts("roles_to_train")
    for name in ("train_on_eos", "train_on_eot"):
        if (choice := keys.take(name)) not in (None, "turn"):
            draft.differs(keys.dotted(name), choice, "the end of each trained turn is a target")
    flag = keys.take("message_field_training")
    if flag in ("train", "training", "weight"):
        if flag == "training":
            draft.differs(
                keys.dotted("message_field_training"), flag, "the flag of a message is `train` here: rename it"
            )
        return {"train_on": "per_message"}
    if flag is not None:
        draft.drop(keys.dotted("message_field_training"), flag, "the flag of a message is `train` here: rename it")
    if context.train_on_inputs or "all" in roles:
        return {"train_on": "all"}
    named = list(dict.fromkeys(ROLES.get(role, role) for role in roles))
    return {} if named in ([], ["assistant"]) else {"train_on": named}


def read_source(keys: ForeignKeys, draft: Draft) -> Tree:
    """`source` and `split` of a dataset."""
    path, files, subset = keys.take("path"), keys.take("data_files"), keys.take("name")
    split, revision, kind = str(keys.take("split", default="train")), keys.take("revision"), keys.take("ds_type")
    if path is None:
        raise UserError(f"{keys.path}: missing path. Set it to a file or a dataset name.")
    if isinstance(files, list) and len(files) > 1:
        draft.differs(keys.dotted("data_files"), files, "source is a pattern, which may match other files too")
    name, split = local_sources(str(path), files, None, split)
    source = name or join_source(str(path), subset, revision)
    if kind is not None:
        draft.report_unneeded(keys.dotted("ds_type"), kind, "not needed: the suffix of a file says its type")
    is_split = split not in ("train", "")
    return {"source": source} | ({"split": split} if is_split else {})
