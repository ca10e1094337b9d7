"""Datasets of LLaMA-Factory: names, which dataset_info.json describes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.columns import set_columns
from tunekit.importers.draft import Draft, Tree
from tunekit.importers.prompt_texts import branch_on, column, message, render_messages
from tunekit.importers.sources import join_source

INFO = "dataset_info.json"
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
        "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"}  # fmt: skip
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
               "system_tag": "system"}  # fmt: skip
MEDIA = ("images", "videos", "audios")
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
# Descriptions of the demonstration data in LLaMA-Factory's repository, which its examples use.
PAIRS = {
    "formatting": "sharegpt",
    "ranking": True,
    "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
}
LABELS = {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": OPENAI_TAGS}
TEXT = {"columns": {"prompt": "text"}}
TOOLS = {"formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}}
KNOWN: dict[str, Tree] = {
    **{name: {} for name in ("identity", "alpaca_en_demo", "alpaca_zh_demo")},
    **dict.fromkeys(("dpo_en_demo", "dpo_zh_demo"), PAIRS),
    "kto_en_demo": LABELS,
    **dict.fromkeys(("glaive_toolcall_en_demo", "glaive_toolcall_zh_demo"), TOOLS),
    **dict.fromkeys(("c4_demo", "wiki_demo"), TEXT),
    "alpaca_en": {"hf_hub_url": "llamafactory/alpaca_en"},
    "alpaca_gpt4_en": {"hf_hub_url": "llamafactory/alpaca_gpt4_en"},
}


@dataclass
class LlamaFactoryContext:
    """Options that all datasets share."""

    draft: Draft
    stage: str
    directory: str
    base: Path | None  # directory of the config
    template: Tree  # chat_template and its variables
    targets: Tree  # train_on


def convert_datasets(names: list[Any], context: LlamaFactoryContext) -> list[Tree]:
    """Datasets by their names, or by their descriptions."""
    info, directory = read_info(context)
    return [convert_named(name, info, directory, context) for name in names]


def read_info(context: LlamaFactoryContext) -> tuple[dict[str, Any], Path]:
    """Contents and directory of dataset_info.json; empty if it is not on this machine."""
    bases = [Path(), *([context.base, *context.base.parents[:2]] if context.base is not None else [])]
    for base in bases:
        path = base / context.directory / INFO
        if path.is_file():
            try:
                return json.loads(path.read_text("utf-8")), base / context.directory
            except ValueError as error:
                raise UserError(f"{path}: invalid JSON: {error}. Correct it.") from None
    return {}, Path(context.directory)


def convert_named(name: Any, info: Mapping[str, Any], directory: Path, context: LlamaFactoryContext) -> Tree:
    """One dataset."""
    draft = context.draft
    if isinstance(name, Mapping):
        entry, name = dict(name), str(name.get("file_name", "dataset"))
    elif name in info:
        entry = dict(info[name])
    elif context.directory == "ONLINE" or ("/" in str(name) and not Path(str(name)).suffix):
        entry = {"hf_hub_url": name}
    else:
        if "mllm" in str(name):
            raise UserError(f"dataset {name}: trains on images, and models read text only here.")
        entry = {"file_name": f"{name}.json", **KNOWN.get(str(name), {})}
        note = f"not in {directory / INFO}: the file {entry.get('file_name')} in {directory} is assumed"
        (draft.differs if str(name) in KNOWN else draft.drop)("dataset", name, note)
    columns = entry.get("columns") or {}
    if media := [kind for kind in MEDIA if columns.get(kind)]:
        raise UserError(f"dataset {name}: has {media[0]}, and models read text only here. Remove it from the datasets.")
    data = convert_rows(entry, columns, context)
    source = read_source(str(name), entry, directory, draft)
    transforms = data.pop("transforms", [])
    data = {**data, **source, **({"transforms": transforms} if transforms else {})}
    if (count := entry.get("num_samples")) is not None:
        data["max_samples"] = int(count)
    return data


def read_source(name: str, entry: Mapping[str, Any], directory: Path, draft: Draft) -> Tree:
    """Source and split of a dataset."""
    hub, file = entry.get("hf_hub_url"), entry.get("file_name") or entry.get("cloud_file_name")
    if hub is not None:
        source = join_source(str(hub), entry.get("subset"))
    elif file is not None:
        is_remote = "://" in str(file) or Path(str(file)).is_absolute()
        source = str(file) if is_remote else str(directory / str(file))
    else:
        other = entry.get("ms_hub_url") or entry.get("om_hub_url") or entry.get("script_url")
        draft.drop("dataset", name, f"rows of {other}: only files and datasets of the Hugging Face Hub are read")
        source = str(other)
    if (folder := entry.get("folder")) is not None and hub is not None:
        source = f"hf://datasets/{hub}/{folder}"
    split = str(entry.get("split", "train"))
    return {"source": source} | ({"split": split} if split != "train" else {})


def convert_rows(entry: Mapping[str, Any], columns: Mapping[str, str], context: LlamaFactoryContext) -> Tree:
    """The format of the rows."""
    formatting = entry.get("formatting", "alpaca")
    if formatting == "alpaca":
        data = convert_alpaca({**(columns or ALPACA)}, bool(entry.get("ranking")), context)
    else:
        tags = {
            **(OPENAI_TAGS if formatting == "openai" and not entry.get("tags") else TAGS),
            **(entry.get("tags") or {}),
        }
        data = convert_sharegpt(columns, tags, bool(entry.get("ranking")), context)
    renamed = {columns[role]: role for role in ("system", "tools") if columns.get(role) not in (None, role)}
    if renamed:
        data["transforms"] = [{"kind": "rename_columns", "column_mapping": renamed}, *data.get("transforms", [])]
    return data


def convert_alpaca(names: dict[str, str], ranking: bool, context: LlamaFactoryContext) -> Tree:
    """Rows of an instruction, an input that follows it in the next line, and a response."""
    prompt, query = names.get("prompt") or names.get("query") or "instruction", names.get("query")
    if context.stage == "pt":
        data: Tree = {"kind": "text"}
        set_columns(data, text=prompt)
        return data
    question = (
        branch_on(query, f"{column(prompt)}\n{column(query)}", column(prompt)) if query and query != prompt else None
    )
    if ranking or context.stage in ("dpo", "rm"):
        roles = {
            "prompt": prompt,
            "chosen": names.get("chosen", "chosen"),
            "rejected": names.get("rejected", "rejected"),
        }
        return convert_answers("preference", roles, question, context)
    if names.get("kto_tag") or context.stage == "kto":
        roles = {"prompt": prompt, "completion": names.get("response", "output")}
        return convert_answers("unpaired_preference", roles, question, context) | make_labeled(names)
    if context.stage == "ppo":
        data = {**context.template}
        set_columns(data, prompt=prompt)
        return data | ({"transforms": [{"kind": "render_columns", "columns": {prompt: question}}]} if question else {})
    data = {"kind": "instruct", **context.template, **context.targets}
    set_columns(data, prompt=prompt, input=None, completion=names.get("response", "output"))
    if question:
        data["transforms"] = [{"kind": "render_columns", "columns": {prompt: question}}]
    if (history := names.get("history")) not in (None, "history"):
        mapping = {"kind": "rename_columns", "column_mapping": {str(history): "history"}}
        data["transforms"] = [*data.get("transforms", []), mapping]
    return data


def make_labeled(names: Mapping[str, str]) -> Tree:
    data: Tree = {"kind": "unpaired_preference"}
    set_columns(data, label=names.get("kto_tag") or "kto_tag")
    return data


def convert_answers(kind: str, roles: dict[str, str], question: str | None, context: LlamaFactoryContext) -> Tree:
    """Pairs or labeled answers of texts, as messages."""
    data: Tree = {"kind": kind}
    set_columns(data, **roles)
    rendered = {name: message("user" if role == "prompt" else "assistant", name) for role, name in roles.items()}
    transforms = [{"kind": "render_columns", "columns": rendered}]
    if question:
        transforms.insert(0, {"kind": "render_columns", "columns": {roles["prompt"]: question}})
    return {**data, **context.template, "transforms": transforms}


def convert_sharegpt(
    columns: Mapping[str, str], tags: Mapping[str, str], ranking: bool, context: LlamaFactoryContext
) -> Tree:
    """Conversations with tags for the keys and roles of messages."""
    name = str(columns.get("messages") or "conversations")
    if ranking or context.stage in ("dpo", "rm"):
        roles = {
            "prompt": name,
            "chosen": columns.get("chosen", "chosen"),
            "rejected": columns.get("rejected", "rejected"),
        }
        data: Tree = {"kind": "preference"}
        set_columns(data, **roles)
        answer = f'[{{"role": "assistant", "content": {{{{ NAME["{tags["content_tag"]}"] | tojson }}}}}}]'
        rendered = {name: render_tagged(name, tags)} | {
            roles[role]: answer.replace("NAME", roles[role]) for role in ("chosen", "rejected")
        }
        return {**data, **context.template, "transforms": [{"kind": "render_columns", "columns": rendered}]}
    if columns.get("kto_tag") or context.stage == "kto":
        rendered = {"prompt": render_tagged(f"{name}[:-1]", tags), "completion": render_tagged(f"{name}[-1:]", tags)}
        transforms = [{"kind": "render_columns", "columns": rendered}]
        return {**make_labeled(columns), **context.template, "transforms": transforms}
    if context.stage == "ppo":
        data = {**context.template}
        set_columns(data, prompt=name)
        return data | {"transforms": [{"kind": "render_columns", "columns": {name: render_tagged(name, tags)}}]}
    data = {**context.template, **context.targets}
    if all(tags.get(tag) == value for tag, value in TAGS.items()):
        data = {"kind": "sharegpt", **data}
        set_columns(data, conversations=name)
        return data
    data = {"kind": "chat", **data}
    set_columns(data, messages=name)
    if any(tags.get(tag) != value for tag, value in OPENAI_TAGS.items()):
        data["transforms"] = [{"kind": "render_columns", "columns": {name: render_tagged(name, tags)}}]
    return data


def render_tagged(expression: str, tags: Mapping[str, str]) -> str:
    """Template of messages with tags for their keys and roles, in JSON."""
    roles = {tags.get("user_tag", "human"): "user", tags.get("assistant_tag", "gpt"): "assistant",
             tags.get("system_tag", "system"): "system", tags.get("observation_tag", "observation"): "tool",
             tags.get("function_tag", "function_call"): "assistant"}  # fmt: skip
    return render_messages(expression, tags["role_tag"], tags["content_tag"], roles)
