"""Labels reach the batch: of texts, of steps at their last token, and the margins of pairs; what is wrong is told."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.reward_data import AutoRewardDataset
from tunekit.data.datasets import DatasetConfig, PreferenceDataset, UnpairedPreferenceDataset
from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.readers.row_reader import BadRow, Row
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["headers"])


def encoded(rows: DatasetConfig, tokenizer: Tokenizer, fields: dict) -> list[Document] | BadRow | None:
    (found,) = rows.encode(rows.prepare(tokenizer), [Row("rows.jsonl:1", fields)])
    return found


def document(rows: DatasetConfig, tokenizer: Tokenizer, fields: dict) -> Document:
    found = encoded(rows, tokenizer, fields)
    assert isinstance(found, list), found
    (one,) = found
    return one


def opened(
    rows: type[DatasetConfig], tokenizer: Tokenizer, place, path: Path, lines: list[dict], **options
) -> DataLoader:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return build_dataloader(rows(str(file), **options), tokenizer, len(lines), 2, place)


def by_number(batches: list[Batch]) -> dict[int, float]:
    """What is said of each document."""
    pairs = (zip(batch.numbers.tolist(), batch.values.tolist(), strict=True) for batch in batches)
    return {number: value for each in pairs for number, value in each}


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
STEPS = {"prompt": "What is 2 + 2?", "completions": ["It is so: 2 + 2", "Hello there", "It is 4."]}


@pytest.mark.parametrize("pack", [False, True])
def test_labels_of_texts(pack: bool, tokenizer, place, tmp_path) -> None:
    lines = [{"text": "The fox " * (1 + number % 5), "label": number / 4} for number in range(7)]
    loader = opened(LabeledDataset, tokenizer, place(), tmp_path, lines, packing=pack, max_length=64)
    assert by_number(loader[0]) == {number: number / 4 for number in range(7)}
    for batch in loader[0]:
        for index in range(len(batch.numbers)):
            tokens = batch.tokens[batch.owner == index].tolist()
            assert (tokens[0], tokens[-1]) == (tokenizer.bos, tokenizer.eos)


def test_labels_are_names_numbers_or_truths(tokenizer) -> None:
    named = LabeledDataset("x", class_names=("bad", "good"))
    for label, want in (("good", 1.0), (0, 0.0), (True, 1.0)):
        assert document(named, tokenizer, {"text": "fox", "label": label}).value == want
    assert document(LabeledDataset("x"), tokenizer, {"text": "fox", "label": -0.5}).value == -0.5
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is so"}]
    talk = document(LabeledDataset("x"), tokenizer, {"messages": messages, "label": 2})
    assert tokenizer.decode(talk.tokens.tolist(), special=True) == tokenizer.render(messages, None)
    assert talk.value == 2


def test_what_is_cut_keeps_its_label(tokenizer) -> None:
    fields = {"text": "The fox jumps over lazy dogs", "label": 3}
    assert document(LabeledDataset("x", max_length=3), tokenizer, fields).value == 3
    whole, cut = (
        document(StepwiseDataset("x", max_length=n), tokenizer, STEPS | {"labels": [1, 0, 1]}) for n in (99, 20)
    )
    assert len(cut.tokens) == 20
    assert 0 < cut.learnt.sum() == len(cut.values) < 3
    assert cut.values.tolist() == whole.values[: len(cut.values)].tolist()


@pytest.mark.parametrize("pack", [False, True])
def test_steps_have_their_label_at_their_last_token(pack: bool, tokenizer, place, tmp_path) -> None:
    """As if the prompt and each step were encoded alone."""
    labels = [[True, False, True], [False, False, True], [True, True, True]]
    lines = [STEPS | {"labels": each} for each in labels]
    loader = opened(StepwiseDataset, tokenizer, place(), tmp_path, lines, packing=pack, max_length=128)
    tokens, ends = [tokenizer.bos, *tokenizer.encode_texts([STEPS["prompt"]], False)[0]], []
    for step in STEPS["completions"]:
        tokens += tokenizer.encode_texts([step + "\n"], False)[0]
        ends.append(len(tokens) - 1)
    seen = 0
    for batch in loader[0]:
        assert batch.learnt == 3 * len(batch.numbers)
        assert bool(batch.values.isnan().all())
        for index, number in enumerate(batch.numbers.tolist()):
            here = batch.owner == index
            assert batch.tokens[here].tolist() == tokens
            targets = batch.targets[here]
            assert {place: int(targets[place]) for place in ends} == dict(
                zip(ends, map(int, labels[number]), strict=True)
            )
            assert int((targets != IGNORE).sum()) == 3
            seen += 1
    assert seen == 3


def test_steps_are_what_the_assistant_says_to_messages(tokenizer) -> None:
    """As if what the template writes before the answer were the prompt, behind its own beginning."""
    labels = {"labels": [True, False, True]}
    rows = StepwiseDataset("x", step_separator=" ;")
    found = document(rows, tokenizer, STEPS | {"prompt": ASKED} | labels)
    text = tokenizer.render(ASKED, None, prompt=True)
    bare = document(rows, tokenizer, STEPS | {"prompt": text.removeprefix("<|begin|>")} | labels)
    assert found.tokens.tolist() == bare.tokens.tolist() and found.tokens[0] == tokenizer.bos != found.tokens[1]
    assert found.learnt.tolist() == bare.learnt.tolist() and found.values.tolist() == [1, 0, 1]
    written = document(rows, tokenizer, STEPS | {"prompt": json.dumps(ASKED)} | labels)
    assert written.tokens.tolist() == found.tokens.tolist()
    spoken = document(rows, tokenizer, STEPS | {"prompt": [{"role": "user", "content": "<|eot_id|>"}]} | labels)
    assert found.signs == DocFlags.STEPS and spoken.signs == DocFlags.STEPS | DocFlags.SPECIAL_IN_TEXT


def test_steps_that_a_template_rewrites_are_refused(folders: dict[str, Path]) -> None:
    """They would not stand where a model of transformers finds them."""
    fields = {"prompt": ASKED[1:], "completions": ["<think>It is", "so.</think>It is 4."], "labels": [1, 0]}
    found = encoded(StepwiseDataset("x"), Tokenizer.open(folders["thinking"]), fields)
    assert isinstance(found, BadRow) and "the chat template does not write the answer as it is" in found.reason


def test_margins_of_pairs(tokenizer, place, tmp_path) -> None:
    lines = [{"prompt": "a", "chosen": " fox", "rejected": f" dog {number}"} for number in range(4)]
    lines[1]["margin"], lines[3]["margin"] = 0.5, 2
    loader = opened(PreferenceDataset, tokenizer, place(), tmp_path, lines)
    margins = {}
    for batch in loader[0]:
        assert batch.margins.shape == (len(batch.numbers) // 2,)
        margins |= dict(zip((batch.numbers[::2] // 2).tolist(), batch.margins.tolist(), strict=True))
    assert margins == {0: 0.0, 1: 0.5, 2: 0.0, 3: 2.0}


def test_a_run_does_not_go_on_with_other_labels() -> None:
    tokens, learnt = np.arange(4, dtype=np.int32), np.ones(4, bool)
    digests = {
        TokenizedDataset([Document(tokens, learnt, 4, values=np.array([value], np.float32))]).digest
        for value in (0.0, 1.0)
    }
    assert len(digests) == 2
    bare = TokenizedDataset([Document(tokens, learnt, 4)])
    assert bare.digest not in digests
    assert math.isnan(bare[0].value)


BAD = {
    "no label": (LabeledDataset("x"), {"text": "fox"}, "label"),
    "a null": (
        LabeledDataset("x"),
        {"text": "fox", "label": None},
        "label: is null, and a row needs its label: write it, or pass over such rows by `on_bad_row: skip` beside the",
    ),
    "a name without classes": (
        LabeledDataset("x"),
        {"text": "fox", "label": "good"},
        "label: 'good' needs `class_names`",
    ),
    "a long one": (
        LabeledDataset("x"),
        {"text": "fox", "label": "a" * 99},
        f"label: '{'a' * 40}..' needs `class_names`",
    ),
    "no class": (
        LabeledDataset("x", class_names=("a", "b")),
        {"text": "fox", "label": "c"},
        "'c' is none of the `class_names`: a, b",
    ),
    "too high": (
        LabeledDataset("x", class_names=("a", "b")),
        {"text": "fox", "label": 2},
        "2 counts none of the 2 `class_names`",
    ),
    "not finite": (LabeledDataset("x"), {"text": "fox", "label": math.inf}, "label: want a number"),
    "a list": (LabeledDataset("x"), {"text": "fox", "label": [1]}, "label: want a number"),
    "few labels": (
        StepwiseDataset("x"),
        STEPS | {"labels": [1]},
        "labels: want a list of 3, one for each step, this is 1",
    ),
    "an empty step": (StepwiseDataset("x"), STEPS | {"completions": ["a", ""], "labels": [1, 1]}, "none of them empty"),
    "no prompt": (
        StepwiseDataset("x"),
        STEPS | {"prompt": None, "labels": [1, 1, 1]},
        "prompt: want a string or a list",
    ),
    "an answered prompt": (
        StepwiseDataset("x"),
        STEPS | {"prompt": [*ASKED, {"role": "assistant", "content": "It"}], "labels": [1, 1, 1]},
        "prompt: ends with an assistant message: what it says is the first of the steps",
    ),
    "an unknown role": (
        StepwiseDataset("x"),
        STEPS | {"prompt": [{"role": "man", "content": "Hello"}], "labels": [1, 1, 1]},
        "prompt + completions[0]: unknown role 'man'",
    ),
    "half a class": (
        StepwiseDataset("x"),
        STEPS | {"labels": [1, 0.5, 1]},
        "true or false, or classes from 0 on, not 0.5",
    ),
    "a margin": (
        PreferenceDataset("x"),
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "d"},
        "margin: want a num",
    ),
    "a mark": (
        UnpairedPreferenceDataset("x"),
        {"prompt": "a", "completion": "b", "label": "yes"},
        "label: want true or false",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told(name: str, tokenizer) -> None:
    rows, fields, message = BAD[name]
    found = encoded(rows, tokenizer, fields)
    assert isinstance(found, BadRow)
    assert message in found.reason


def test_rows_are_what_the_first_says(tokenizer, place, tmp_path) -> None:
    """Though others would read a text or a conversation without its label."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is so"}]
    for fields, says in (
        ({"text": "fox", "label": 1}, "texts with labels"),
        ({"messages": messages, "label": 0.5}, "texts with labels"),
        (STEPS | {"labels": [1, 1, 1]}, "steps with labels"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference pairs"),
    ):
        assert says in str(opened(AutoRewardDataset, tokenizer, place(), tmp_path, [fields]).report)
    with pytest.raises(UserError, match="it wants chosen and rejected; text or messages, and label"):
        opened(AutoRewardDataset, tokenizer, place(), tmp_path, [{"instruction": "a", "output": "b"}])


def test_choices_that_make_no_sense() -> None:
    with pytest.raises(FieldError, match="not said of its parts"):
        StepwiseDataset("x", excess_length_strategy="split")
    with pytest.raises(FieldError, match="name each once"):
        LabeledDataset("x", class_names=("a", "a"))
