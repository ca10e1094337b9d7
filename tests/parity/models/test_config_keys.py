"""Each key of a config.json, changed alone, in every family: the logits are those of transformers, or it is refused.

A sample by default. `TUNEKIT_ALL_KEYS=1 pytest -s tests/parity/models/test_config_keys.py` compares all values and
prints the numbers of each family and of each key.
"""

import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import product

import pytest
import torch
import transformers

from tests.helpers.config_keys import (
    Change,
    Outcome,
    compare_logits,
    key_changes,
    parse,
    read_family,
    text_section,
    to_json,
)
from tests.helpers.random_checkpoints import SHAPES, auto_class
from tunekit.models.families.config_checks import ALLOWED

ALL_KEYS = os.environ.get("TUNEKIT_ALL_KEYS") == "1"
# The shape of each family with the most keys.
RICHEST_SHAPES = {
    shape["model_type"]: name for name, shape in sorted(SHAPES.items(), key=lambda item: len(text_section(item[1])))
}
FAMILIES_PER_KEY = 2  # in the sample
# Keys in which tunekit differs on purpose, by family.
EXCEPTIONS = {
    ("nemotron_h", "time_step_min"): "docs/families.md: raises step sizes in training and prefill, but not in decoding",
    ("nemotron_h", "mamba_dt_min"): "the old name of time_step_min",
}
EXCEPTIONS |= {
    ("gemma4", f"(outer) {modality}_token_id"): "docs/families.md: placeholders of other modalities are not padding"
    for modality in ("image", "video", "audio")
}
# Keys that only matter when a model trains, and that tunekit does not apply (docs/families.md).
TRAINING_KEYS = {"attention_dropout", "dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop", "residual_dropout"}
TRAINING_KEYS |= {"router_jitter_noise", "z_loss_coefficient"}
OUTCOMES = ("equal", "refused", "exception", "invalid")
LINE = "{:24} {:>6} {:>8} {:>10} {:>8}"
counts: dict[str, Counter[str]] = defaultdict(Counter)


@pytest.fixture(scope="module", autouse=True)
def summary() -> Iterator[None]:
    """Numbers of compared values, by key and in total; `invalid` ones are refused by transformers."""
    print("\n" + LINE.format("family", *OUTCOMES))
    yield
    for key in sorted(counts):
        print(LINE.format(key, *(counts[key][kind] for kind in OUTCOMES)))
    total = sum(counts.values(), Counter[str]())
    print(LINE.format("all", *(total[kind] for kind in OUTCOMES)))


@pytest.mark.parametrize("family", RICHEST_SHAPES)
def test_keys_move_logits_as_in_transformers_or_are_refused(family: str) -> None:
    config = to_json(SHAPES[RICHEST_SHAPES[family]])
    changes = key_changes(config)
    outcomes = {}
    for change in changes if ALL_KEYS else sample(family, changes):
        outcome = compare_logits(config, change)
        if outcome.kind == "different" and (family, change.key) in EXCEPTIONS:
            outcome = Outcome("exception")
        outcomes[change.key, repr(change.value)] = outcome
        counts[change.key.split(" (")[0].split(".")[-1]][outcome.kind] += 1
    numbers = Counter(outcome.kind for outcome in outcomes.values())
    print(LINE.format(family, *(numbers[kind] for kind in OUTCOMES)))
    assert not {change: outcome.reason for change, outcome in outcomes.items() if outcome.kind == "different"}
    refusals = {change: outcome.reason for change, outcome in outcomes.items() if outcome.kind == "refused"}
    assert not {change: reason for change, reason in refusals.items() if not names_a_key(reason, change[0])}


MULTIMODAL = [family for family in RICHEST_SHAPES if "text_config" in SHAPES[RICHEST_SHAPES[family]]]


@pytest.mark.parametrize("family", sorted({*MULTIMODAL} - {"mllama"}))  # whose tied heads are refused
def test_contradicting_tie_flags_are_read_as_in_transformers(family: str) -> None:
    """`tie_word_embeddings` of a multimodal model and of its text section."""
    for outer, inner in product((False, True), repeat=2):
        config = to_json(SHAPES[RICHEST_SHAPES[family]]) | {"tie_word_embeddings": outer}
        config["text_config"]["tie_word_embeddings"] = inner
        with torch.device("meta"):
            model = auto_class(config).from_config(parse(config))
        model.tie_weights()
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert read_family(config)[1].tie_word_embeddings == is_tied, (outer, inner)


def names_a_key(message: str, changed_key: str) -> bool:
    """Whether an error names the changed key, or one that contradicts it."""
    words = {*re.findall(r"\w+", message)}
    return not words.isdisjoint({*ALLOWED, *re.findall(r"\w+", changed_key)}) or "rope type" in message


def sample(family: str, changes: list[Change]) -> list[Change]:
    """One value of each key that this family tests in the sample: two families test each key, and each family more."""
    by_key: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        by_key[change.key].append(change)
    return [
        options[zlib.crc32(f"{family} {key}".encode()) % len(options)]
        for key, options in by_key.items()
        if family in families_with_turn(key.split(" (")[0]) or zlib.crc32(f"{key} {family}".encode()) % 32 == 0
    ]


@cache
def families_with_turn(key: str) -> frozenset[str]:
    """Families that test a key in the sample: some of those that declare it, or else of all."""
    candidates = [family for family in RICHEST_SHAPES if key in declared_keys(family)] or [*RICHEST_SHAPES]
    first = zlib.crc32(key.encode())
    return frozenset(candidates[(first + 17 * i) % len(candidates)] for i in range(FAMILIES_PER_KEY))


@cache
def declared_keys(family: str) -> frozenset[str]:
    """Keys of the text model that its config class in transformers declares."""
    parsed = parse(SHAPES[RICHEST_SHAPES[family]])
    text = parsed.text_config if "text_config" in SHAPES[RICHEST_SHAPES[family]] else parsed
    inherited = {field.name for field in fields(transformers.PreTrainedConfig)}
    return frozenset({field.name for field in fields(text)} - inherited)


def test_keys_for_training_are_known() -> None:
    """A new key of any family has to be applied in training, or documented."""
    keys = frozenset[str]().union(*map(declared_keys, RICHEST_SHAPES))
    training_keys = {key for key in keys if any(word in key for word in ("drop", "jitter", "z_loss", "noise"))}
    assert training_keys == TRAINING_KEYS
