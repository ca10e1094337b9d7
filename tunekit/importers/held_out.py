"""Rows that a trainer holds out of the training rows for evaluation."""

from typing import Any

from tunekit.importers.draft import Draft, Tree


def split_rows(data: Tree, size: float) -> tuple[Tree, Tree] | None:
    """Training rows, and the last rows: a fraction below 1, or a number. None if a split is a slice already."""
    if data.get("kind") == "mixture":
        parts = [split_rows(part["dataset"], size / len(data["datasets"]) if size >= 1 else size)
                 for part in data["datasets"]]  # fmt: skip
        if any(part is None for part in parts):
            return None
        train, rest = zip(*(part for part in parts if part is not None), strict=True)
        entries = [{**entry, "dataset": part} for entry, part in zip(data["datasets"], train, strict=True)]
        return {**data, "datasets": entries}, {**data, "datasets": [{"dataset": part} for part in rest]}
    split = data.get("split", "train")
    if "[" in split:
        return None
    bound = f"-{max(1, int(size))}" if size >= 1 else f"{100 - 100 * size:g}%"
    return {**data, "split": f"{split}[:{bound}]"}, {**data, "split": f"{split}[{bound}:]"}


def hold_out(draft: Draft, key: str, size: float) -> None:
    """Split `data` into training rows and `eval_data`."""
    if not size:
        return
    parts = split_rows(draft.get("data"), float(size))
    if parts is None:
        draft.drop(key, size, "set data.split and eval_data.split: they have slices already")
        return
    train, rest = parts
    draft.tree["data"], draft.tree["eval_data"] = train, rest
    draft.comments["eval_data"] = "The last rows of each dataset; the original draws them at random"


def to_fraction(per_epoch: Any, epochs: float) -> float | str:
    """Interval of a number of evaluations or states per epoch: a fraction of all steps."""
    return "epoch" if per_epoch == 1 else round(1 / (float(per_epoch) * epochs), 6)
