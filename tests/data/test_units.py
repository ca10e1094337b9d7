"""Answers that are compared stay together, on any layout, and a batch tells which document each token is of."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tunekit.data.dataloader import preference_data, stream_blocks
from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.map_style import MapDataLoader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.preference_data import AutoPreferenceDataset, PreferenceMixture, PreferenceMixtureMember
from tunekit.data.datasets import DatasetConfig, PreferenceDataset, UnpairedPreferenceDataset
from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

PAIRS, BATCH, PAD, LENGTH = 23, 6, 7, 30


def documents() -> TokenizedDataset:
    """Pairs that say their number in each of their first tokens: 1000, 1001, ..."""
    random, found = np.random.default_rng(0), []
    for number in range(2 * PAIRS):
        tokens = random.integers(10, 900, random.integers(4, LENGTH + 1)).astype(np.int32)
        tokens[0], learnt = 1000 + number, np.arange(len(tokens)) >= len(tokens) // 2
        found.append(Document(tokens, learnt, len(tokens), (DocFlags.GOOD, DocFlags.BAD)[number % 2]))
    return TokenizedDataset(found)


def opened(place, rows: DatasetConfig, micro: int = BATCH) -> MapDataLoader:
    mix = MixtureBase.of(rows)
    layout = Collator(BATCH, micro, place.rank, place.size, PAD, mix.capacity, mix.each, owned=True)
    return MapDataLoader(mix, (documents(),), layout, place.seed)


def pairs(place, packed: bool, micro: int = BATCH) -> MapDataLoader:
    return opened(place, PreferenceDataset("rows", max_length=LENGTH, packing=packed), micro)


def held(batch: Batch) -> list[tuple[int, list[int], list[int]]]:
    """Number, tokens and targets of each document of a batch, as its owner tells."""
    assert batch.owner is not None
    assert batch.numbers is not None
    found = []
    for index, number in enumerate(batch.numbers.tolist()):
        here = batch.owner == index
        assert here.any(1).sum() == 1, "a document is in one row"
        assert batch.positions[here].tolist() == list(range(int(here.sum())))
        found.append((number, batch.tokens[here].tolist(), batch.targets[here].tolist()))
    assert int((batch.owner >= 0).sum()) == batch.real
    return found


def told(rows: TokenizedDataset, number: int) -> tuple[int, list[int], list[int]]:
    """The same of a document, by hand."""
    document = rows[number]
    nexts = zip(document.tokens[1:].tolist(), document.learnt[1:].tolist(), strict=True)
    return number, document.tokens.tolist(), [*(token if learnt else IGNORE for token, learnt in nexts), IGNORE]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 4])
def test_pairs_are_never_torn_on_any_layout(place, packed: bool, size: int, micro: int) -> None:
    want = pairs(place(), packed)
    ranks = [pairs(place(rank, size), packed, micro) for rank in range(size)]
    assert want.steps(2) == ranks[0].steps(2)
    for step in range(want.steps(2)):
        parts = [rank[step] for rank in ranks]
        assert len({len(part) for part in parts}) == 1
        batches = [batch for part in parts for batch in part]
        for batch in batches:
            assert batch.numbers[1::2].tolist() == (batch.numbers[::2] + 1).tolist()
            assert batch.signs.tolist() == [DocFlags.GOOD, DocFlags.BAD] * (len(batch.signs) // 2)
            owned = batch.owner
            rows = [set(row.tolist()) - {-1} for row in owned]
            assert len(rows) <= (micro if packed else 2 * micro)
            if packed:
                assert all(number ^ 1 in row for row in rows for number in row), "a pair shares its row"
                assert batch.tokens.shape[1] <= 2 * LENGTH
        found = sorted(one for batch in batches for one in held(batch))
        assert found == sorted(one for batch in want[step] for one in held(batch))
        assert found == [told(want.rows, number) for number, *_ in found]
    numbers = [number for step in range(want.steps(1)) for batch in want[step] for number, *_ in held(batch)]
    assert sorted(numbers) == list(range(2 * PAIRS))


@pytest.mark.parametrize("packed", [False, True])
def test_sums_by_owner_are_those_of_each_document_alone(place, packed: bool) -> None:
    loader = pairs(place(), packed, 4)
    for step in range(loader.steps(1)):
        for batch in loader[step]:
            values = torch.sin(batch.tokens.double()) * (batch.targets != IGNORE)
            # padding owns the place before the first document here, which is left out
            sums = torch.zeros(len(batch.numbers) + 1, dtype=torch.double)
            sums.index_add_(0, batch.owner.flatten() + 1, values.flatten())
            for number, total in zip(batch.numbers.tolist(), sums[1:].tolist(), strict=True):
                document = loader.rows[number]
                alone = np.sin(document.tokens[:-1].astype(float))[document.learnt[1:]].sum()
                assert total == pytest.approx(alone)


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_without_pairs_owns_nothing(place, packed: bool) -> None:
    """A step has at most as many rows as there are ranks but one."""
    last = pairs(place(), packed).steps(1) - 1
    found = [batch for rank in range(7) for batch in pairs(place(rank, 7), packed, 1)[last]]
    batch = next(batch for batch in found if not len(batch.numbers))
    assert (batch.learnt, batch.real) == (0, 0)
    assert bool((batch.owner == -1).all())
    assert batch.signs.shape == batch.numbers.shape == (0,)
    assert batch.to("meta").owner.is_meta


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "rows", [PreferenceDataset("rows", max_length=LENGTH), UnpairedPreferenceDataset("rows", max_length=LENGTH)]
)
def test_mismatched_answers_are_those_of_the_next_row_of_the_step(place, rows: DatasetConfig, packed: bool) -> None:
    choice = type(rows)("rows", max_length=LENGTH, packing=packed)
    for size, micro in ((1, BATCH), (2, 1), (3, 4)):
        ranks = [opened(place(rank, size), choice, micro) for rank in range(size)]
        for rank in ranks:
            rank.cross()
        for step in range(ranks[0].steps(1)):
            order = np.concatenate(ranks[0].numbers(step))
            nexts = dict(zip(order.tolist(), np.roll(order, -choice.EACH).tolist(), strict=True))
            batches = [batch for rank in ranks for batch in rank[step]]
            found = [one for batch in batches for one in held(batch.others)]
            assert sorted(number for number, *_ in found) == sorted(order.tolist())
            assert [batch.others.signs.tolist() for batch in batches] == [batch.signs.tolist() for batch in batches]
            for number, tokens, targets in found:
                asked, answered = ranks[0].rows[number], ranks[0].rows[nexts[number]]
                before, behind = len(asked.tokens) // 2, len(answered.tokens) // 2
                answer = answered.tokens[behind:].tolist()
                assert tokens == [*asked.tokens[:before].tolist(), *answer][:LENGTH]
                assert targets == [*[IGNORE] * (before - 1), *answer, IGNORE][: LENGTH - 1] + [IGNORE] * (
                    before + len(answer) >= LENGTH
                )


def test_mismatched_answers_of_one_row_are_its_own(place) -> None:
    loader = opened(place(), UnpairedPreferenceDataset("rows", max_length=LENGTH))
    loader.layout = Collator(1, 1, 0, 1, PAD, None, owned=True)
    loader.cross()
    (batch,) = loader.layout.batches(loader.rows, [np.array([5])])
    assert held(batch.others) == held(batch)


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["chatml"])


def pair(number: int, name: str = "row") -> dict[str, str]:
    more = " so" * (number % 7)
    return {"prompt": f"{name} {number}{more}", "chosen": " is good" + more, "rejected": f" is bad {number}"}


def mark(number: int) -> dict[str, object]:
    return {"prompt": f"ask {number}", "completion": f" say {number}", "label": number % 3 == 0}


def file(folder: Path, name: str, rows: list[dict]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def spoken(batches: list[Batch], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The texts of each pair."""
    found = []
    for batch in batches:
        texts = [tokenizer.decode(tokens, special=True) for _, tokens, _ in held(batch)]
        found += list(zip(texts[::2], texts[1::2], strict=True))
    return sorted(found)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_of_pairs_is_never_torn(pack, size, tokenizer, place, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stream_blocks, "DOCUMENTS", 20)
    source = file(tmp_path, "rows", [pair(number) for number in range(31)])
    rows = PreferenceDataset(source, max_length=50, packing=pack, streaming=True, num_proc=0)
    want = build_dataloader(rows, tokenizer, 4, 4, place())
    ranks = [build_dataloader(rows, tokenizer, 4, 1, place(rank, size)) for rank in range(size)]
    seen, numbers, states = Counter(), [], []
    for step in range(12):
        states.append(want.state(step))
        here = want[step]
        found = spoken(here, tokenizer)
        assert found == spoken([batch for rank in ranks for batch in rank[step]], tokenizer)
        assert all(one.split(" is ")[0] == other.split(" is ")[0] for one, other in found)
        assert all(" is good" in one and " is bad" in other for one, other in found)
        seen.update(found)
        numbers += [number for batch in here for number in batch.numbers.tolist()]
    assert len(set(numbers)) == len(numbers), "no two documents of a stream are called alike"
    assert max(seen.values()) <= 1 + (seen.total() + 20) // 31
    again = build_dataloader(rows, tokenizer, 4, 4, place())
    again.restore(states[7])
    assert spoken(again[7], tokenizer) == spoken(load_to(rows, tokenizer, place(), 7), tokenizer)
    for loader in (want, again, *ranks):
        loader.close()


def load_to(rows: DatasetConfig, tokenizer: Tokenizer, place, step: int) -> list[Batch]:
    loader = build_dataloader(rows, tokenizer, 4, 4, place)
    found = [loader[at] for at in range(step + 1)][-1]
    loader.close()
    return found


@pytest.mark.parametrize("pack", [False, True])
def test_a_mix_of_pairs_counts_pairs(pack: bool, tokenizer, place, tmp_path) -> None:
    one = file(tmp_path, "one", [pair(number, "one") for number in range(9)])
    other = file(tmp_path, "other", [pair(number, "other") for number in range(20)])
    mix = PreferenceMixture(
        (
            PreferenceMixtureMember(AutoPreferenceDataset(one), repeat=2),
            PreferenceMixtureMember(PreferenceDataset(other), max_samples_per_epoch=7),
        ),
        max_length=50,
        packing=pack,
    )
    loader = build_dataloader(mix, tokenizer, 4, 2, place())
    assert [(share.rows, share.passes) for share in loader.report.shares] == [(18, 2), (7, 7 / 20)]
    batches = [batch for step in range(loader.steps(1)) for batch in loader[step]]
    found = spoken(batches, tokenizer)
    assert Counter(text.split()[0] for text, _ in found) == {"one": 18, "other": 7}
    assert all(one.split(" is ")[0] == other.split(" is ")[0] for one, other in found)
    assert loader.report.tokens == sum(batch.real for batch in batches)
    if pack:
        assert loader.report.packed == sum(len(batch.tokens) for batch in batches)
        assert loader.report.filled == pytest.approx(loader.report.tokens / (loader.report.packed * 100))


def test_rows_are_what_the_first_says(tokenizer, place, tmp_path) -> None:
    marks = build_dataloader(
        AutoPreferenceDataset(file(tmp_path, "marks", [mark(number) for number in range(6)])), tokenizer, 6, 6, place()
    )
    (batch,) = marks[0]
    good = {number: mark(number)["label"] for number in range(6)}
    assert [sign == DocFlags.GOOD for sign in batch.signs.tolist()] == [
        good[number] for number in batch.numbers.tolist()
    ]
    assert "completions with marks" in str(marks.report)
    assert "preference pairs" in str(
        build_dataloader(AutoPreferenceDataset(file(tmp_path, "a", [pair(1)])), tokenizer, 1, 1, place()).report
    )
    chats = file(tmp_path, "chats", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(UserError, match="from which this recipe does not learn: it wants columns chosen and rejected"):
        build_dataloader(AutoPreferenceDataset(chats), tokenizer, 1, 1, place())


def test_pairs_and_marks_do_not_mix(tokenizer, place, tmp_path) -> None:
    one, other = file(tmp_path, "one", [pair(1)]), file(tmp_path, "other", [mark(1)])
    with pytest.raises(
        UserError, match="all give pairs, or all give single answers; here .* gives unpaired_preference rows"
    ):
        build_dataloader(
            PreferenceMixture(
                (
                    PreferenceMixtureMember(AutoPreferenceDataset(one)),
                    PreferenceMixtureMember(AutoPreferenceDataset(other)),
                )
            ),
            tokenizer,
            1,
            1,
            place(),
        )
    with pytest.raises(FieldError, match="cannot go on in further rows"):
        preference_data.AutoPreferenceDataset(one, excess_length_strategy="split")
