"""Preference pairs and labels of axolotl."""

from typing import Any

from tunekit.importers.columns import set_columns
from tunekit.importers.draft import Draft, Tree
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.prompt_texts import from_format, message

PROMPTS = {  # column of the prompt by the name of a strategy
    "intel": "question", "icr": "input", "prompt_pairs": "prompt", "ultra": "prompt", "argilla": "instruction",
    "default": "prompt",
}  # fmt: skip
FORMATS = {"chatml": "chatml", "llama3": "llama3"}


def convert_pairs(kind: str, keys: ForeignKeys, rl: str, template: str | None, draft: Draft) -> Tree:
    """Rows by the name of a type, such as chatml.intel or chat_template.default."""
    if rl == "process_reward":
        data: Tree = {"kind": "stepwise"}
        if (separator := keys.take("step_separator")) is not None:
            data["step_separator"] = separator
        return data
    base, _, strategy = kind.removeprefix("bradley_terry.").partition(".")
    chosen, rejected = (
        str(keys.take("field_chosen", default="chosen")),
        str(keys.take("field_rejected", default="rejected")),
    )
    messages = keys.take("field_messages")
    data = {"kind": "unpaired_preference" if rl == "kto" else "preference"}
    if base in FORMATS:
        return convert_format(data, FORMATS[base], strategy or "default")
    if base == "chat_template" and rl == "reward":
        return render_as_messages(data, {"prompt": "input", "chosen": chosen, "rejected": rejected}, template)
    if base in ("chat_template", "", "passthrough"):
        if rl == "kto":
            set_columns(data, prompt=str(keys.take("field_prompt", default="prompt")))
        else:
            is_whole = strategy.startswith("argilla") or base == "passthrough"
            set_columns(data, prompt="prompt" if is_whole else str(messages or "messages"))
            set_columns(data, chosen=chosen, rejected=rejected)
        report_mappings(keys, draft)
        return data | ({"chat_template": template} if template else {})
    draft.drop(f"{keys.path}.type", kind, "this format is not known: prompt, chosen and rejected are read")
    return data


def report_mappings(keys: ForeignKeys, draft: Draft) -> None:
    """Names of keys and roles in messages that are not those of OpenAI."""
    mappings = keys.take("message_property_mappings") or {}
    if mappings and (mappings.get("role", "role"), mappings.get("content", "content")) != ("role", "content"):
        note = "messages have the keys role and content here: rewrite them with a custom transform"
        draft.drop(keys.dotted("message_property_mappings"), mappings, note)
    roles = keys.take("roles") or {}
    if any(source != target for target, sources in roles.items() for source in sources):
        draft.differs(keys.dotted("roles"), roles, "messages have the roles user, assistant, system and tool here")


def convert_format(data: Tree, template: str, strategy: str) -> Tree:
    """Texts in a chat format: they become messages, which a chat template renders."""
    if strategy.startswith("argilla_chat"):
        if data["kind"] == "unpaired_preference":
            set_columns(data, prompt="prompt")
        return {**data, "chat_template": template}
    column = PROMPTS.get(strategy, "prompt")
    if data["kind"] == "unpaired_preference":
        return render_as_messages(data, {"prompt": column, "completion": "completion"}, template)
    if strategy == "ultra":
        return {**data, "chat_template": template}
    return render_as_messages(data, {"prompt": column, "chosen": "chosen", "rejected": "rejected"}, template)


def render_as_messages(data: Tree, columns: dict[str, str], template: str | None) -> Tree:
    """Rows of texts as messages. Their column `system` is the system message."""
    set_columns(data, **columns)
    rendered = {name: message("user" if role == "prompt" else "assistant", name) for role, name in columns.items()}
    chat = {"chat_template": template} if template else {}
    return {**data, **chat, "transforms": [{"kind": "render_columns", "columns": rendered}]}


def convert_user_defined(options: dict[str, Any], rl: str) -> Tree:
    """A mapping as the type: formats of the prompt and of the answers, which are plain texts."""
    is_kto = rl == "kto"
    roles = ("prompt", "completion") if is_kto else ("prompt", "chosen", "rejected")
    names = {role: str(options.get(f"field_{role}") or role) for role in roles}
    system = str(options.get("field_system") or "system")
    formats = {role: str(options.get(f"{role}_format") or f"{{{role}}}") for role in roles}
    rendered = {
        role: from_format(text, {role: names[role], "system": system})
        for role, text in formats.items()
        if text != f"{{{role}}}"
    }
    data: Tree = {"kind": "unpaired_preference" if is_kto else "preference"}
    set_columns(data, **{role: role if role in rendered else name for role, name in names.items()})
    if is_kto:
        set_columns(data, label=str(options.get("field_label") or "label"))
    return data | ({"transforms": [{"kind": "render_columns", "columns": rendered}]} if rendered else {})
