"""Replacements for keys, kinds and recipes of other trainers and of tunekit 0.1. Keys and recipes are in text files."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

Key = str  # a dotted key, as in an override
UNNEEDED = "-"  # key of a row whose names are not needed


class KeyHint(NamedTuple):
    """A row of the tables, which describe their format. A row with an empty `key` applies to every recipe."""

    names: str
    key: Key
    note: str
    where: Key | None  # other key that the recipe must have
    is_needed: bool = True  # false: the names select what is always so


def read_rows(name: str) -> Iterator[tuple[str | None, str, str]]:
    """Heading, left and right side of each row of a table."""
    heading = None
    for line in Path(__file__).with_name(name).read_text("utf-8").splitlines():
        if line.startswith("["):
            heading = line.strip("[]") or None
        elif line and not line.startswith("#"):
            left, _, right = line.partition(" -> ")
            yield heading, left, right


def read_hints(name: str) -> Iterator[KeyHint]:
    """Replacements for keys."""
    for where, names, replacement in read_rows(name):
        key, _, note = replacement.partition("| ")
        key, is_needed = key.strip().removeprefix(UNNEEDED), key.strip() != UNNEEDED
        yield KeyHint(names, key, note, where, is_needed)


POLICY_KEYS = tuple(read_hints("policy_hints.txt"))
TRAINERS = ("migration_hints.txt", "trainer_hints.txt")  # keys of other trainers, and those that few configs have
TABLE = (*POLICY_KEYS, *(row for name in (*TRAINERS, "renamed_keys.txt") for row in read_hints(name)))
RECIPES = tuple((names, answer) for _, names, answer in read_rows("recipe_hints.txt"))

RENAMED_KINDS = {
    "full": "none",
    "plain": "none",
    "marked": "unpaired_preference",
    "labelled": "labeled",  # vocabulary: ignore
    "stepped": "stepwise",
    "mix": "mixture",
    "rename": "rename_columns",
    "where": "filter",
    "initial": "auto",
    "off": "disable_adapter",
    "cached": "precomputed",
    "bradleyterry": "bradley_terry",
    "process": "process_reward",
    "live": "online",
    "stored": "offline",
    "forwardkl": "forward_kl",
    "reversekl": "reverse_kl",
    "symmetrickl": "symmetric_kl",
    "skewedkl": "skewed_kl",
    "skewedreversekl": "skewed_reverse_kl",
    "jensenshannon": "jensen_shannon",
    "MultipleNegativesRankingLoss": "multiple_negatives_ranking",
    "CachedMultipleNegativesRankingLoss": "multiple_negatives_ranking",
    "infonce": "multiple_negatives_ranking",
    "CoSENTLoss": "cosent",
    "CosineSimilarityLoss": "cosine_similarity",
    "BinaryCrossEntropyLoss": "binary_cross_entropy",
    "4bit": "nf4",
    "int4": "nf4",
    "mnrl": "multiple_negatives_ranking",
    "fp8": "float8",
    "int8": "float8",
    "8bit": "float8",
    "adamw_torch_fused": "adamw",
    "paged_adamw_32bit": "adamw",
    "torch.optim.AdamW": "adamw",
    "bitsandbytes.optim.PagedAdamW": "adamw",
    "bitsandbytes.optim.AdamW8bit": "adamw8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw8bit",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
KIND_NOTES = {  # kinds of other trainers that are several keys here
    "qlora": "QLoRA is adapter=lora quantization=nf4",
    "qdora": "QDoRA is adapter=dora quantization=nf4",
}
VALUE_NOTES = {  # for values of the wrong type, by the last part of the key
    "epochs": "max_steps=N trains a part of an epoch",
    "eval_every": "eval_data=null turns evaluation off",
    "save_every": "a number greater than the number of steps saves only the last training state",
    "max_length": "the longest context of a model is max_position_embeddings of its config.json",
    "max_grad_norm": "0 disables clipping",
    "push_to_hub": "set push_to_hub.repo_id=OWNER/NAME",
    "loss": "for another loss, write a class and pass --import FILE.py",
}

DATA_SECTIONS = frozenset({"eval_data", "dataset"})


def find_hint(path: Sequence[str], keys: Collection[Key]) -> KeyHint | None:
    """Row for the unknown key at `path` in a recipe with these keys; None if no row applies.

    Rows of policy trainers are about top-level keys: inside a section of the recipe, they apply if they replace a key
    by one of this section.
    """
    names = [*(name for name in path[:-1] if not name.isdecimal()), path[-1]]
    section = "data" if names[:-1] and names[-2] in DATA_SECTIONS else ".".join(names[-2:-1])
    qualified = f"{section}.{names[-1]}" if section else names[-1]
    rows = [row for row in TABLE if (not row.key or row.key in keys) and (row.where is None or row.where in keys)]
    if row := next((row for row in rows if qualified in row.names.split()), None):
        return row
    head = "data" if names[0] in DATA_SECTIONS else names[0]
    is_known = len(names) > 1 and any(key.startswith(f"{head}.") for key in keys)
    rows = [row for row in rows if not is_known or row not in POLICY_KEYS or row.key.partition(".")[0] == head]
    return next((row for row in rows if names[-1] in row.names.split()), None)


def suggest_recipe(name: str) -> str | None:
    """Replacement for a recipe of another trainer; None if it is unknown."""
    hints = (hint for names, hint in RECIPES if name.lower() in names.split())
    return next((hint.format(name=name.lower()) for hint in hints), None)
