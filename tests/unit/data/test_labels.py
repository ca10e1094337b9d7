"""Labels of texts and steps and margins of pairs reach the batch. Invalid labels are rejected."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.encode_rows import encode_document, encode_row
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import IGNORE, Batch
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.reward_data import AutoRewardDataset
from tunekit.data.datasets import DatasetConfig, PreferenceDataset, UnpairedPreferenceDataset
from tunekit.data.document import DocFlags, Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
from tunekit.data.readers.row_reader import BadRow
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["headers"])


def build_loader(
    dataset_class: type[DatasetConfig], tokenizer: Tokenizer, dist, directory: Path, lines: list[dict], **options
) -> DataLoader:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return build_dataloader(dataset_class(str(path), **options), tokenizer, len(lines), 2, dist)


def values_by_number(batches: list[Batch]) -> dict[int, float]:
    """Map document numbers to their values."""
    pairs = (zip(batch.documents.indices.tolist(), batch.documents.labels.tolist(), strict=True) for batch in batches)
    return {number: value for items in pairs for number, value in items}


PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
STEPS = {"prompt": "What is 2 + 2?", "completions": ["It is so: 2 + 2", "Hello there", "It is 4."]}


@pytest.mark.parametrize("pack", [False, True])
def test_text_labels_reach_the_batch(pack: bool, tokenizer, make_dist, tmp_path) -> None:
    lines = [{"text": "The fox " * (1 + number % 5), "label": number / 4} for number in range(7)]
    loader = build_loader(LabeledDataset, tokenizer, make_dist(), tmp_path, lines, packing=pack, max_length=64)
    assert values_by_number(loader[0]) == {number: number / 4 for number in range(7)}
    for batch in loader[0]:
        for index in range(len(batch.documents.indices)):
            tokens = batch.tokens[batch.documents.ids == index].tolist()
            assert tokens == tokenizer.encode_texts([tokenizer.decode(tokens)], True)[0]
            assert tokens[0] == tokenizer.bos and tokenizer.eos not in tokens


def test_label_is_class_name_number_or_boolean(tokenizer) -> None:
    with_class_names = LabeledDataset("x", class_names=("bad", "good"))
    for label, expected in (("good", 1.0), (0, 0.0), (True, 1.0)):
        assert encode_document(with_class_names, tokenizer, {"text": "fox", "label": label}).value == expected
    assert encode_document(LabeledDataset("x"), tokenizer, {"text": "fox", "label": -0.5}).value == -0.5
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is so"}]
    conversation = encode_document(LabeledDataset("x"), tokenizer, {"messages": messages, "label": 2})
    assert tokenizer.decode(conversation.tokens.tolist(), special=True) == tokenizer.render(messages, None)
    assert conversation.value == 2


def test_truncated_document_keeps_its_labels(tokenizer) -> None:
    fields = {"text": "The fox jumps over lazy dogs", "label": 3}
    assert encode_document(LabeledDataset("x", max_length=3), tokenizer, fields).value == 3
    full, truncated = (
        encode_document(StepwiseDataset("x", max_length=n), tokenizer, STEPS | {"labels": [1, 0, 1]}) for n in (99, 20)
    )
    assert len(truncated.tokens) == 20
    assert 0 < truncated.loss_mask.sum() == len(truncated.values) < 3
    assert truncated.values.tolist() == full.values[: len(truncated.values)].tolist()


@pytest.mark.parametrize("pack", [False, True])
def test_step_labels_are_targets_of_last_tokens(pack: bool, tokenizer, make_dist, tmp_path) -> None:
    """Tokens equal those of the prompt and each step encoded separately."""
    labels = [[True, False, True], [False, False, True], [True, True, True]]
    lines = [STEPS | {"labels": step_labels} for step_labels in labels]
    loader = build_loader(StepwiseDataset, tokenizer, make_dist(), tmp_path, lines, packing=pack, max_length=128)
    tokens, ends = [tokenizer.bos, *tokenizer.encode_texts([STEPS["prompt"]], False)[0]], []
    for step in STEPS["completions"]:
        tokens += tokenizer.encode_texts([step + "\n"], False)[0]
        ends.append(len(tokens) - 1)
    num_documents = 0
    for batch in loader[0]:
        assert batch.num_target_tokens == 3 * len(batch.documents.indices)
        assert bool(batch.documents.labels.isnan().all())
        for index, number in enumerate(batch.documents.indices.tolist()):
            is_document = batch.documents.ids == index
            assert batch.tokens[is_document].tolist() == tokens
            targets = batch.targets[is_document]
            assert {end: int(targets[end]) for end in ends} == dict(zip(ends, map(int, labels[number]), strict=True))
            assert int((targets != IGNORE).sum()) == 3
            num_documents += 1
    assert num_documents == 3


def test_steps_continue_the_rendered_prompt(tokenizer) -> None:
    """The prompt is the rendered template up to the answer, with one bos."""
    labels = {"labels": [True, False, True]}
    dataset = StepwiseDataset("x", step_separator=" ;")
    steps = encode_document(dataset, tokenizer, STEPS | {"prompt": PROMPT} | labels)
    text = tokenizer.render(PROMPT, None, prompt=True)
    expected = encode_document(dataset, tokenizer, STEPS | {"prompt": text.removeprefix("<|begin|>")} | labels)
    assert steps.tokens.tolist() == expected.tokens.tolist() and steps.tokens[0] == tokenizer.bos != steps.tokens[1]
    assert steps.loss_mask.tolist() == expected.loss_mask.tolist() and steps.values.tolist() == [1, 0, 1]
    from_json = encode_document(dataset, tokenizer, STEPS | {"prompt": json.dumps(PROMPT)} | labels)
    assert from_json.tokens.tolist() == steps.tokens.tolist()
    with_special_text = encode_document(
        dataset, tokenizer, STEPS | {"prompt": [{"role": "user", "content": "<|eot_id|>"}]} | labels
    )
    assert (
        steps.doc_flags == DocFlags.STEPWISE
        and with_special_text.doc_flags == DocFlags.STEPWISE | DocFlags.SPECIAL_IN_TEXT
    )


def test_template_that_rewrites_steps_is_an_error(tokenizer_dirs: dict[str, Path]) -> None:
    """Otherwise the targets would be at other tokens than in transformers."""
    fields = {"prompt": PROMPT[1:], "completions": ["<think>It is", "so.</think>It is 4."], "labels": [1, 0]}
    result = encode_row(StepwiseDataset("x"), Tokenizer.open(tokenizer_dirs["thinking"]), fields)
    assert isinstance(result, BadRow) and "chat template" in result.reason


def test_margins_of_pairs_reach_the_batch(tokenizer, make_dist, tmp_path) -> None:
    lines = [{"prompt": "a", "chosen": " fox", "rejected": f" dog {number}"} for number in range(4)]
    lines[1]["margin"], lines[3]["margin"] = 0.5, 2
    loader = build_loader(PreferenceDataset, tokenizer, make_dist(), tmp_path, lines)
    margins = {}
    for batch in loader[0]:
        assert batch.documents.margins.shape == (len(batch.documents.indices) // 2,)
        margins |= dict(
            zip((batch.documents.indices[::2] // 2).tolist(), batch.documents.margins.tolist(), strict=True)
        )
    assert margins == {0: 0.0, 1: 0.5, 2: 0.0, 3: 2.0}


def test_labels_change_the_digest() -> None:
    tokens, mask = np.arange(4, dtype=np.int32), np.ones(4, bool)
    digests = {
        TokenizedDataset.from_documents([Document(tokens, mask, 4, values=np.array([value], np.float32))]).fingerprint
        for value in (0.0, 1.0)
    }
    assert len(digests) == 2
    without_values = TokenizedDataset.from_documents([Document(tokens, mask, 4)])
    assert without_values.fingerprint not in digests
    assert math.isnan(without_values[0].value)


BAD_ROWS = {
    "no label": (LabeledDataset("x"), {"text": "fox"}, "label"),
    "null label": (LabeledDataset("x"), {"text": "fox", "label": None}, "label: "),
    "class name without class_names": (LabeledDataset("x"), {"text": "fox", "label": "good"}, "'good'"),
    "long class name": (LabeledDataset("x"), {"text": "fox", "label": "a" * 99}, f"label: '{'a' * 39}..."),
    "unknown class": (LabeledDataset("x", class_names=("a", "b")), {"text": "fox", "label": "c"}, "a, b"),
    "class index too high": (LabeledDataset("x", class_names=("a", "b")), {"text": "fox", "label": 2}, "class_names"),
    "label beyond fp32": (LabeledDataset("x"), {"text": "fox", "label": 1e39}, "label: "),
    "huge integer label": (LabeledDataset("x"), {"text": "fox", "label": -(10**400)}, "label: "),
    "infinite label": (LabeledDataset("x"), {"text": "fox", "label": math.inf}, "label: "),
    "list as label": (LabeledDataset("x"), {"text": "fox", "label": [1]}, "label: "),
    "missing labels": (StepwiseDataset("x"), STEPS | {"labels": [1]}, "labels: "),
    "empty step": (StepwiseDataset("x"), STEPS | {"completions": ["a", ""], "labels": [1, 1]}, "empty"),
    "null prompt": (StepwiseDataset("x"), STEPS | {"prompt": None, "labels": [1, 1, 1]}, "prompt: "),
    "answered prompt": (
        StepwiseDataset("x"),
        STEPS | {"prompt": [*PROMPT, {"role": "assistant", "content": "It"}], "labels": [1, 1, 1]},
        "prompt: ",
    ),
    "unknown role": (
        StepwiseDataset("x"),
        STEPS | {"prompt": [{"role": "man", "content": "Hello"}], "labels": [1, 1, 1]},
        "prompt + completions[0].role: unknown role 'man'",
    ),
    "fractional class": (StepwiseDataset("x"), STEPS | {"labels": [1, 0.5, 1]}, "0.5"),
    "text as margin": (
        PreferenceDataset("x"),
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "d"},
        "margin: ",
    ),
    "text as flag": (UnpairedPreferenceDataset("x"), {"prompt": "a", "completion": "b", "label": "yes"}, "label: "),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_invalid_label_is_rejected(name: str, tokenizer) -> None:
    dataset, fields, message = BAD_ROWS[name]
    result = encode_row(dataset, tokenizer, fields)
    assert isinstance(result, BadRow)
    assert message in result.reason


def test_format_is_detected_from_first_row(tokenizer, make_dist, tmp_path) -> None:
    """Other formats could read a text or a conversation without its label."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is so"}]
    for fields, description in (
        ({"text": "fox", "label": 1}, "texts with labels"),
        ({"messages": messages, "label": 0.5}, "texts with labels"),
        (STEPS | {"labels": [1, 1, 1]}, "steps with labels"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference pairs"),
    ):
        assert description in str(build_loader(AutoRewardDataset, tokenizer, make_dist(), tmp_path, [fields]).summary)
    with pytest.raises(UserError, match="chosen .*rejected.*text .*messages.*label"):
        build_loader(AutoRewardDataset, tokenizer, make_dist(), tmp_path, [{"instruction": "a", "output": "b"}])


def test_invalid_options_are_rejected_by_name() -> None:
    with pytest.raises(FieldError, match="excess_length_strategy"):
        StepwiseDataset("x", excess_length_strategy="split")
    with pytest.raises(FieldError, match="class_names"):
        LabeledDataset("x", class_names=("a", "a"))
