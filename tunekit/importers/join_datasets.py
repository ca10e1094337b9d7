"""One `data` section of several datasets: a mixture, whose datasets share some keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from tunekit.importers.draft import Draft, Tree
from tunekit.importers.foreign_keys import ForeignKeys

SHARED_DEFAULTS = {"max_length": None, "packing": False, "shuffle": True}  # equal for all datasets of a mixture
WITHOUT_TEMPLATE = ("text", "completion", "segments", "stepwise")  # kinds without a chat template


def read_shared_keys(keys: ForeignKeys, max_length: int, packing: bool, streaming: bool, shuffle: bool) -> Tree:
    """Keys of all datasets: the given ones that are not defaults, variables of templates, and processes."""
    shared: Tree = {"max_length": max_length}
    shared |= {"packing": True} if packing else {}
    shared |= {"streaming": True} if streaming else {}
    shared |= {} if shuffle else {"shuffle": False}
    if (values := keys.take("chat_template_kwargs")) is not None:
        shared["chat_template_kwargs"] = values
    if (count := keys.number("dataset_num_proc", "dataset_processes", "preprocessing_num_workers")) is not None:
        shared["num_proc"] = int(count)
    return shared


def join_datasets(
    key: str, datasets: Sequence[Tree], shared: Mapping[str, Any], draft: Draft, weights: Sequence[float] = ()
) -> Tree:
    """One dataset, or a mixture. `shared` are keys of all datasets, which their own keys override.

    A mixture has one length and one chat template, those of its first dataset. Other ones are reported for `key`.
    """
    rows = [{**dataset, **shared, **dataset} for dataset in datasets]  # in the order of the dataset
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    if len(rows) == 1:
        return rows[0]
    common: Tree = {}
    for name, default in SHARED_DEFAULTS.items():
        values = [row.pop(name, default) for row in rows]
        common |= {name: values[0]} if values[0] != default else {}
        report_others(f"{key}.{name}", values, draft)
    chats = [row for row in rows if "chat_template" in row or row.get("kind") not in WITHOUT_TEMPLATE]
    templates = [row.pop("chat_template", None) for row in chats]
    if (template := next((template for template in templates if template is not None), None)) is not None:
        common["chat_template"] = template
        report_others(f"{key}.chat_template", [template, *templates], draft)
    variables = [row["chat_template_kwargs"] for row in rows if "chat_template_kwargs" in row]
    if variables and all(values == variables[0] for values in variables):
        common["chat_template_kwargs"] = variables[0]
        for row in rows:
            row.pop("chat_template_kwargs", None)
    parts: list[Tree] = [{"dataset": row} for row in rows]
    for part, weight in zip(parts, weights, strict=False):
        part["weight"] = weight
    return {"kind": "mixture", **common, "datasets": parts}


def report_others(key: str, values: Sequence[Any], draft: Draft) -> None:
    """Report values that are not the first one."""
    others = ["that of the checkpoint" if value is None else str(value) for value in values if value != values[0]]
    if others:
        text = ", ".join(dict.fromkeys(others))
        draft.differs(key, text, f"the datasets of a mixture have the same one: {values[0]}")
