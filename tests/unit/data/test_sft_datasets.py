"""Rows of token ids and of segments: which tokens are targets, and what is rejected."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.encode_rows import encode_document, encode_row
from tunekit.data.dataloader.batch import IGNORE
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.document import Document
from tunekit.data.readers.row_reader import BadRow
from tunekit.data.sft_datasets import AutoDataset, PretokenizedDataset, SegmentsDataset
from tunekit.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["chatml"])


CONVERSATION = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]


@pytest.mark.parametrize("key", ["train", "label"])
def test_segments_equal_the_rendered_conversation(key: str, tokenizer: Tokenizer) -> None:
    """Adjacent segments with the same flag are one span: words that they split are targets."""
    prompt = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    segments = [(prompt, False), ("It i", True), ("s 4.<|im_end|>", True), ("\n", False)]
    row = {"segments": [{"text": text, key: flag} for text, flag in segments]}
    expected = encode_document(AutoDataset("x"), tokenizer, {"messages": CONVERSATION})
    for dataset in (AutoDataset("x"), SegmentsDataset("x")):
        document = encode_document(dataset, tokenizer, row)
        assert document.tokens.tolist() == expected.tokens.tolist()
        assert document.loss_mask.tolist() == expected.loss_mask.tolist()


IDS = [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("columns", "targets"),
    [
        ({}, [5, 6, 7, 8, 9]),
        ({"labels": [-100, -100, 7, 8, 9]}, [7, 8, 9]),
        ({"completion_mask": [0, 0, 1, 1, 0]}, [7, 8]),
        ({"assistant_masks": [0, 1, 0, 1, 0], "labels": None}, [6, 8]),
        ({"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1]}, [7, 9]),
        ({"attention_mask": [1, 1, 1, 1, 1], "labels": [-100, 6, 7, 8, 9]}, [6, 7, 8, 9]),
    ],
)
def test_masks_select_the_target_tokens(columns: dict, targets: list[int], tokenizer: Tokenizer) -> None:
    for dataset in (AutoDataset("x"), PretokenizedDataset("x")):
        document = encode_document(dataset, tokenizer, {"input_ids": IDS, "text": "is not used", **columns})
        assert document.tokens.tolist() == IDS
        assert document.tokens[document.loss_mask].tolist() == targets


@pytest.mark.parametrize("pad", [([0, 0], []), ([], [0, 0]), ([0], [0])])
def test_padding_is_removed(pad: tuple[list[int], list[int]], tokenizer: Tokenizer) -> None:
    left, right = pad
    row = {
        "input_ids": left + IDS + right,
        "labels": [-100] * (len(left) + 2) + IDS[2:] + [-100] * len(right),
        "attention_mask": left + [1] * 5 + right,
    }
    document = encode_document(PretokenizedDataset("x"), tokenizer, row)
    assert document.tokens.tolist() == IDS and document.full_length == 5
    assert document.tokens[document.loss_mask].tolist() == IDS[2:]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"input_ids": [5, -1]}, "input_ids"),
        ({"input_ids": [5, 2**31]}, "input_ids"),
        ({"input_ids": [[5, 6]]}, "input_ids"),
        ({"input_ids": [5.0, 6.0]}, "input_ids"),
        ({"input_ids": []}, "none of the 0 tokens"),
        ({"input_ids": IDS, "labels": [6, 7, 8, 9, -100]}, "labels[0]"),
        ({"input_ids": IDS, "labels": IDS[1:]}, "labels"),
        ({"input_ids": IDS, "labels": [-100] * 5}, "none of the 5 tokens"),
        ({"input_ids": IDS, "completion_mask": [0, 0, 1, 1]}, "completion_mask"),
        ({"input_ids": IDS, "completion_mask": [0, 0, 0.5, 1, 1]}, "completion_mask"),
        ({"input_ids": IDS, "attention_mask": [1, 0, 1, 1, 1]}, "attention_mask"),
        ({"segments": [{"text": "a", "train": True}, {"text": "b"}]}, "segments[1].train"),
        ({"segments": [{"text": "a", "train": 0.5}]}, "segments[0].train"),
        ({"segments": [{"txt": "a", "train": True}]}, "segments[0]"),
        ({"segments": ["a"]}, "segments[0]"),
        ({"segments": [{"text": "a b", "train": False}]}, "none of the "),
        ({"segments": [{"text": "a \ud800", "train": True}]}, "the text"),
    ],
)
def test_invalid_rows_are_rejected_with_their_column(fields: dict, path: str, tokenizer: Tokenizer) -> None:
    result = encode_row(AutoDataset("x"), tokenizer, fields)
    assert isinstance(result, BadRow) and result.reason.startswith(path), result


def test_missing_column_names_the_key(tokenizer: Tokenizer) -> None:
    for dataset, key in (
        (PretokenizedDataset("x"), "columns.input_ids"),
        (SegmentsDataset("x", columns={"segments": "s"}), "columns.segments"),
    ):
        result = encode_row(dataset, tokenizer, {"ids": IDS})
        assert isinstance(result, BadRow) and f"`{key}`" in result.reason


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["pretokenized", "segments"])
def test_rows_are_truncated_packed_and_cached(
    kind: str, packing: bool, tokenizer: Tokenizer, make_dist, tmp_path: Path
) -> None:
    """The batches equal those of the same conversations, which the chat template renders."""
    chats = [[CONVERSATION[0], {"role": "assistant", "content": f"It is {i}. " * i}] for i in range(1, 7)]
    rendered = [encode_document(AutoDataset("x"), tokenizer, {"messages": chat}) for chat in chats]
    rows = [to_row(kind, tokenizer, document) for document in rendered]
    loaders = []
    for name, lines in {"chats": [{"messages": chat} for chat in chats], kind: rows}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        dataset = AutoDataset(str(path), packing=packing, max_length=32)
        loaders.append(build_dataloader(dataset, tokenizer, 2, 2, make_dist()))
    for step in range(2):
        for expected, batch in zip(loaders[0][step], loaders[1][step], strict=True):
            assert torch.equal(batch.tokens, expected.tokens) and torch.equal(batch.targets, expected.targets)
            assert (batch.targets != IGNORE).any()


def to_row(kind: str, tokenizer: Tokenizer, document: Document) -> dict:
    """Row of another format with the tokens and targets of a document."""
    tokens, mask = document.tokens.tolist(), document.loss_mask.tolist()
    if kind == "pretokenized":
        return {"input_ids": tokens, "labels": [t if m else -100 for t, m in zip(tokens, mask, strict=True)]}
    texts = [tokenizer.decode([token], special=True) for token in tokens]
    return {"segments": [{"text": text, "train": flag} for text, flag in zip(texts, mask, strict=True)]}


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"instruction": "a", "output": 4}, "output"),
        ({"prompt": "a", "completion": 4}, "completion"),
        ({"text": 4}, "text"),
        ({"prompt": {"role": "user"}, "completion": "b"}, "prompt"),
    ],
)
def test_known_columns_of_another_type_are_named(row: dict, column: str, tokenizer: Tokenizer) -> None:
    result = encode_row(AutoDataset("x"), tokenizer, row)
    assert isinstance(result, BadRow) and result.reason.startswith(f"{column}: must be")
