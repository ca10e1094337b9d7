"""Replacements for keys, kinds and recipes of other trainers and of tunekit 0.1. Those of keys are in text files."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

Key = str  # a dotted key, as in an override


class KeyHint(NamedTuple):
    """A row of the tables, which describe their format. A row with an empty `key` applies to every recipe."""

    names: str
    key: Key
    note: str
    where: Key | None  # other key that the recipe must have


def read_hints(file: Path) -> tuple[KeyHint, ...]:
    """Read a table of replacements."""
    rows, where = [], None
    for line in file.read_text("utf-8").splitlines():
        if line.startswith("["):
            where = line.strip("[]") or None
        elif line and not line.startswith("#"):
            names, _, replacement = line.partition(" -> ")
            key, _, note = replacement.partition("| ")
            rows.append(KeyHint(names, key.strip(), note, where))
    return tuple(rows)


POLICY_KEYS = read_hints(Path(__file__).with_name("policy_hints.txt"))
TABLE = (
    *POLICY_KEYS,
    *read_hints(Path(__file__).with_name("migration_hints.txt")),
    *read_hints(Path(__file__).with_name("renamed_keys.txt")),  # of tunekit 0.1
)

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
}
KIND_NOTES = {  # kinds of other trainers that are several keys here
    "qlora": "QLoRA is adapter=lora quantization=nf4",
    "qdora": "QDoRA is adapter=dora quantization=nf4",
}

PREFERENCE = "it is a loss of recipe preference: tune run preference CONFIG loss={name}"
REWARD = "it is a loss of recipe reward: tune run reward CONFIG loss={name}"
ONLINE = (
    "it is not supported; recipes grpo and ppo train on rewards of sampled answers (grpo, dapo, rloo, ppo and others), "
    "recipe preference on pairs and labels (dpo, kto, orpo and others)"
)
POLICY = "it is a loss of recipe grpo: tune run grpo CONFIG loss={name}"
RECIPES = (
    ("dpo ipo kto orpo simpo cpo bco alphapo discopop robust hinge exo_pair sppo_hard apo_zero apo_down", PREFERENCE),
    ("rpo mpo", "it is a sum of losses of recipe preference, such as tune run preference CONFIG loss=[dpo,sft]"),
    ("lora_dpo_single_device lora_dpo_distributed",
     "it is recipe preference: tune run preference llama3_2/1b_dpo_lora"),
    ("full_dpo_distributed",
     "it is recipe preference with adapter=none, which needs a lower optimizer.lr than an adapter: "
     "tune run preference llama3_2/1b_dpo_lora adapter=none optimizer.lr=1e-6"),
    ("dapo gspo bnpo dr_grpo cispo sapo rloo reinforce_pp", POLICY),
    ("reinforce rlvr", "it is recipe grpo: tune run grpo CONFIG"),
    ("grpo_full_finetune_distributed async_grpo_full_finetune_distributed",
     "it is recipe grpo: tune run grpo llama3_2/3b_grpo_gsm8k"),
    ("ppo_full_finetune_single_device", "it is recipe ppo: tune run ppo mistral/7b_ppo_full"),
    ("gmpo online_dpo nash_md xpo rlhf", ONLINE),
    ("rm reward_model reward_modeling", REWARD.format(name="bradley_terry")),
    ("bradley_terry classification regression binary_cross_entropy process_reward", REWARD),
    ("reranker rerank cross_encoder", REWARD.format(name="binary_cross_entropy")),
    ("multiple_negatives_ranking cosent cosine_similarity", "it is a loss of recipe embed: tune run embed nano/embed"),
    ("embedding embeddings sentence_transformer retriever", "it is recipe embed: tune run embed nano/embed"),
    ("prm", REWARD.format(name="process_reward")),
    ("gkd kd distillation minillm knowledge_distillation_single_device knowledge_distillation_distributed",
     "it is recipe distill: tune run distill CONFIG"),
    ("finetune train full full_finetune_single_device full_finetune_distributed",
     "it is recipe sft with adapter=none, as in tune run sft llama3_2/1b_full"),
    ("lora dora lora_finetune_single_device lora_finetune_distributed",
     "it is recipe sft with adapter=lora or dora, as in tune run sft llama3_2/1b_lora"),
    ("qlora qdora", "it is recipe sft with adapter=lora quantization=nf4, as in tune run sft llama3_2/1b_qlora"),
    ("eval eleuther_eval", "it is recipe evaluate: tune run evaluate CONFIG"),
)  # fmt: skip
DATA_SECTIONS = frozenset({"eval_data", "dataset"})


def find_hint(path: Sequence[str], keys: Collection[Key]) -> KeyHint | None:
    """Row for the unknown key at `path` in a recipe with these keys; None if no row applies.

    Rows of policy trainers are about top-level keys: inside a section of the recipe, they apply if they replace a key
    by one of this section.
    """
    names = [*(name for name in path[:-1] if not name.isdecimal()), path[-1]]
    section = "data" if names[:-1] and names[-2] in DATA_SECTIONS else ".".join(names[-2:-1])
    qualified = f"{section}.{names[-1]}" if section else names[-1]
    rows = [row for row in TABLE if row.key in ("", *keys) and row.where in (None, *keys)]
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
