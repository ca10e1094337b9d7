"""Rows of TRL's trainers."""

from collections.abc import Mapping
from typing import Any

from tunekit.errors import UserError
from tunekit.importers.columns import set_columns
from tunekit.importers.draft import Draft, Tree
from tunekit.importers.foreign_keys import ForeignKeys
from tunekit.importers.held_out import hold_out
from tunekit.importers.join_datasets import join_datasets, read_shared_keys
from tunekit.importers.row_format import has_columns, read_first_row
from tunekit.importers.sources import join_source, local_sources

UNKNOWN_FORMAT = (
    "By the format of the rows, which is not known here: conversations and texts have all tokens as targets"
)


def read_sources(keys: ForeignKeys, draft: Draft) -> list[Tree]:
    """Source and split of each training dataset: of `dataset_name`, or of a list `datasets`."""
    datasets, name = keys.take("datasets"), keys.take("dataset_name")
    subset, split = keys.take("dataset_config"), str(keys.take("dataset_train_split", default="train"))
    if not datasets:
        if name is None:
            raise UserError("missing dataset_name. Set it to a file or a dataset name.")
        return [make_source(str(name), subset, split)]
    sources = []
    for i, item in enumerate(datasets if isinstance(datasets, list) else [datasets]):
        entry = ForeignKeys(item if isinstance(item, Mapping) else {"path": item}, f"datasets[{i}]")
        part = str(entry.take("split", default="train"))
        path, files, directory = str(entry.take("path")), entry.take("data_files"), entry.take("data_dir")
        local, part = local_sources(path, files, directory, part)
        source = make_source(local or path, entry.take("name"), part)
        if (fraction := entry.number("fraction")) is not None:
            source["weight"] = float(fraction)
        if (columns := entry.take("columns")) is not None:
            draft.report_unneeded(
                entry.dotted("columns"), columns, "not needed: only the columns of the format are read"
            )
        for dotted, value in entry.rest():
            draft.drop(dotted, value, "an argument of datasets.load_dataset, which does not read the rows here")
        sources.append(source)
    return sources


def make_source(name: str, subset: Any, split: str) -> Tree:
    return {"source": join_source(name, subset)} | ({"split": split} if split != "train" else {})


def convert_rows(keys: ForeignKeys, draft: Draft, task: str) -> None:
    """`data` and `eval_data`."""
    is_list, test_split = bool(keys.peek("datasets")), str(keys.take("dataset_test_split", default="test"))
    sources = read_sources(keys, draft)
    weights = [source.pop("weight") for source in sources if "weight" in source]
    rows = [convert_source(source, keys, draft, task) for source in sources]
    names = ("dataset_text_field", "assistant_only_loss", "completion_only_loss")
    if task == "gkd":
        draft.report_unneeded_keys(
            keys, "has no effect in GKDTrainer, which trains on the last answer of messages", *names, "packing"
        )
    for name in names:
        keys.take(name)
    shared = read_shared(keys, draft, task)
    if task == "sft" and rows[0].get("kind") == "text" and not shared.get("packing"):
        rows = [{**row, "excess_length_strategy": "truncate"} for row in rows]
    draft.set("data", join_datasets("data", rows, shared, draft, weights))
    if len(rows) == 1 and "kind" not in rows[0] and task == "sft":
        draft.comments["data.train_on"] = UNKNOWN_FORMAT
    test_size = keys.number("test_split_size")
    if test_size is not None and is_list:
        hold_out(draft, "test_split_size", test_size)
        return
    if test_size is not None:
        draft.report_unneeded(
            "test_split_size", test_size, "has no effect without datasets: dataset_test_split is used"
        )
    if str(keys.peek("eval_strategy") or keys.peek("evaluation_strategy") or "no").lower() != "no":
        tests = [{**row, "split": test_split} for row in rows]
        draft.set("eval_data", join_datasets("eval_data", tests, shared, draft))
    elif test_split != "test":
        draft.report_unneeded("dataset_test_split", test_split, "has no effect without eval_strategy")


def read_shared(keys: ForeignKeys, draft: Draft, task: str) -> Tree:
    """Length, packing and order of all datasets."""
    is_named = "max_length" in keys
    length = keys.take("max_length") if is_named else keys.take("max_seq_length", default=1024)
    if length is None and task == "gkd":
        length = 1024  # of DataCollatorForChatML
    elif length is None:
        draft.comments["data.max_length"] = "max_length is null there: rows have no limit"
    sampling = keys.take("train_sampling_strategy", default="sequential" if task == "kto" else "random")
    packing, streaming = keys.flag("packing"), keys.flag("streaming", "dataset_streaming")
    length = int(length) if length is not None else 8192
    shared = read_shared_keys(keys, length, packing, streaming, sampling != "sequential")
    if sampling != "sequential" and keys.flag("group_by_length"):
        draft.report_unneeded("group_by_length", True, "not needed: rows of a step are grouped by length")
    if (mode := keys.take("truncation_mode")) == "keep_end":
        draft.differs("truncation_mode", mode, "rows are truncated at the end")
    if (path := keys.take("chat_template_path", "chat_template")) is not None:
        shared["chat_template"] = str(path)
    return shared


def convert_source(source: Tree, keys: ForeignKeys, draft: Draft, task: str) -> Tree:
    """The format of the rows of one source."""
    row = read_first_row(source["source"], source.get("split", "train"))
    if task in ("grpo", "rloo", "distillation") and not has_columns(row, "messages"):
        return source
    if task == "kto":
        return {"kind": "unpaired_preference", **source}
    if task == "prm":
        return {"kind": "stepwise", **source}
    if task == "gkd":
        return {"kind": "chat", **source, "train_on": "last"}
    if task != "sft":
        return {"kind": "preference", **source}
    text, only_completion = str(keys.peek("dataset_text_field") or "text"), keys.peek("completion_only_loss")
    everything = not keys.peek("assistant_only_loss")
    if has_columns(row, "messages") or has_columns(row, "conversations"):
        name = "messages" if has_columns(row, "messages") else "conversations"
        data: Tree = {"kind": "chat", **source}
        set_columns(data, messages=name)
        return data | ({"train_on": "all"} if everything else {})
    if has_columns(row, "prompt", "completion"):
        return {"kind": "completion", **source} | ({"train_on": "all"} if only_completion is False else {})
    if has_columns(row, text) or text != "text":
        data = {"kind": "text", **source}
        set_columns(data, text=text)
        return data
    keeps_prompts = everything and only_completion is not True
    return {**source} | ({"train_on": "all"} if keeps_prompts and not row else {})
