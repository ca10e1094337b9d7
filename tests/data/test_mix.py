"""A mix holds of each source what its shares say, and passes over all of a source before any of it comes again."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit.data.dataloader.batch import IGNORE
from tunekit.data.dataloader.build import DataLoader, build_dataloader
from tunekit.data.dataloader.mixture import EpochSampler, Mixture, MixtureMember
from tunekit.data.datasets import ChatDataset, TextDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError


def mix(*parts: dict, **options) -> Mixture:
    return Mixture(tuple(MixtureMember(TextDataset(f"part{i}"), **part) for i, part in enumerate(parts)), **options)


def test_without_weights_an_epoch_holds_what_its_parts_give() -> None:
    assert mix({}, {}).counts([10, 1000]) == (10, 1000)
    assert mix({"repeat": 3}, {"repeat": 0.5}).counts([10, 1000]) == (30, 500)
    assert mix({"max_samples_per_epoch": 20}, {"max_samples_per_epoch": 20, "repeat": 4}).counts([10, 1000]) == (10, 20)


def test_weights_are_shares_of_the_rows_until_one_part_has_given_all() -> None:
    assert mix({"weight": 1}, {"weight": 3}).counts([10, 1000]) == (10, 30)
    assert mix({"weight": 0.3}, {"weight": 0.1}).counts([1000, 10]) == (30, 10)
    assert mix({"weight": 1, "repeat": 5}, {"weight": 3}).counts([10, 1000]) == (50, 150)
    assert mix({"weight": 1}, {"weight": 1, "max_samples_per_epoch": 7}).counts([10, 1000]) == (7, 7)


def test_a_temperature_evens_shares_out() -> None:
    assert mix({}, {}, temperature=2).counts([100, 10_000]) == (100, 1000)  # 10 to 100
    assert mix({}, {}, temperature=1e9).counts([100, 10_000]) == (100, 100)
    assert mix({}, {"max_samples_per_epoch": 400}, temperature=2).counts([100, 10_000]) == (100, 200)


@pytest.mark.parametrize(
    ("parts", "options", "field", "message"),
    [
        ([], {}, "datasets", "name at least one"),
        ([{"weight": 1}, {}], {}, "datasets.1", "has no weight, but others have"),
        ([{"weight": 1}], {"temperature": 2.0}, "temperature", "weights say the shares already"),
        ([{}], {"temperature": 0.5}, "temperature", "must be 1"),
        ([{}], {"max_length": 1}, "max_length", "2 or more tokens"),
        ([{"weight": 0}], {}, "weight", "must be above 0, not 0: take the part out"),
        ([{"weight": float("nan")}], {}, "weight", "must be above 0, not nan"),
        ([{"repeat": 0.0}], {}, "repeat", "must be above 0"),
        ([{"max_samples_per_epoch": 0}], {}, "max_samples_per_epoch", "1 or more rows"),
    ],
)
def test_what_makes_no_sense_is_refused(parts, options, field, message) -> None:
    with pytest.raises(FieldError, match=message) as told:
        mix(*parts, **options)
    assert told.value.field == field


def test_what_is_the_same_for_all_parts_is_said_once() -> None:
    with pytest.raises(FieldError, match="Set it next to `datasets`") as told:
        Mixture((MixtureMember(TextDataset("a")), MixtureMember(ChatDataset("b", max_length=100))), max_length=50)
    assert told.value.field == "datasets.1.dataset.max_length"
    one = Mixture((MixtureMember(ChatDataset("b", max_length=100, packing=True)),), max_length=100, packing=True)
    assert one.sources == (ChatDataset("b", max_length=100, packing=True),)
    assert Mixture((MixtureMember(TextDataset("a")),), max_length=9, shuffle=False).sources == (
        TextDataset("a", max_length=9, shuffle=False),
    )


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
def test_nothing_comes_again_before_all_has_come(parts: list[tuple[int, int]], seed: int, shuffle: bool) -> None:
    """Over any number of epochs, two documents of a part differ by one in how often they came."""
    sizes, counts = zip(*parts, strict=True)
    draw, firsts = EpochSampler(sizes, counts, seed, shuffle), np.cumsum([0, *sizes])
    seen: Counter[int] = Counter()
    for epoch in range(5):
        found = draw(epoch)
        assert np.array_equal(found, draw(epoch)), "an epoch is a pure function of its number"
        seen.update(found.tolist())
        for part, count in enumerate(counts):
            times = [seen[document] for document in range(firsts[part], firsts[part + 1])]
            assert sum(times) == count * (epoch + 1)
            assert max(times) - min(times) <= 1


def test_passes_differ_where_rows_are_shuffled() -> None:
    draw = EpochSampler([50], [100], 0, True)
    first, second = np.split(draw(0), 2)
    assert sorted(first) == sorted(second) == list(range(50))
    assert not np.array_equal(first, second)
    assert EpochSampler([3, 2], [4, 2], 0, False)(0).tolist() == [0, 1, 2, 0, 3, 4]


@pytest.fixture
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["chatml"])


def texts(folder: Path, name: str, count: int) -> str:
    """Rows that say which they are."""
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{name} {number}" + " so" * (number % 7)}) + "\n" for number in range(count))
    )
    return str(path)


def opened(tokenizer, folder: Path, place, micro: int = 4, **options) -> DataLoader:
    parts = (
        MixtureMember(TextDataset(texts(folder, "a", 11)), repeat=2),
        MixtureMember(TextDataset(texts(folder, "b", 30)), max_samples_per_epoch=17),
    )
    return build_dataloader(Mixture(parts, **options), tokenizer, 4, micro, place)


def rows(loaders: list[DataLoader], tokenizer, step: int) -> Counter[str]:
    """The texts of a step that are learnt, on all ranks."""
    batches = chain.from_iterable(loader[step] for loader in loaders)
    found: Counter[str] = Counter()
    for batch in batches:
        targets = [row[row != IGNORE].tolist() for row in batch.targets]
        text = "".join(tokenizer.decode(row, special=True) for row in targets)
        found.update(text.split(tokenizer.decode([tokenizer.eos], special=True))[:-1])
    return found


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_hold_the_same_rows_on_any_layout(pack: bool, size: int, tokenizer, place, tmp_path: Path) -> None:
    want = opened(tokenizer, tmp_path, place(), packing=pack, max_length=60)
    ranks = [opened(tokenizer, tmp_path, place(rank, size), 3, packing=pack, max_length=60) for rank in range(size)]
    steps = want.steps(3)
    assert steps == sum(want.steps(1 + epoch) - want.steps(epoch) for epoch in range(3))
    for step in range(steps):
        assert rows(ranks, tokenizer, step) == rows([want], tokenizer, step)
    for epoch in range(3):
        found = sum(
            (rows(ranks, tokenizer, step) for step in range(want.steps(epoch), want.steps(epoch + 1))), Counter()
        )
        assert found.total() == 22 + 17


def test_the_report_tells_what_each_part_gives(tokenizer, place, tmp_path: Path) -> None:
    loader = opened(tokenizer, tmp_path, place(), packing=True, max_length=60)
    batches = [batch for step in range(loader.steps(1)) for batch in loader[step]]
    report = loader.report
    assert [(share.rows, share.passes) for share in report.shares] == [(22, 2), (17, 17 / 30)]
    assert report.tokens == sum(batch.real for batch in batches)
    assert report.packed == sum(len(batch.tokens) for batch in batches)
    lines = str(report).splitlines()
    assert "11 rows; an epoch takes 22 rows (56.4%), " in lines[1]
    assert lines[1].endswith("2 passes")


def test_what_is_split_is_counted_in_documents(tokenizer, place, tmp_path: Path) -> None:
    loader = opened(tokenizer, tmp_path, place(), packing=True, max_length=8)
    one, other = loader.report.shares
    assert (one.rows, other.rows) == (2 * len(loader.parts[0]), 17) and len(loader.parts[0]) > 11
    head, *lines = str(loader.report).splitlines()
    assert head.startswith(f"{one.rows + 17} documents, ")
    assert f"11 rows, {loader.parts[0].prepared.split} split into several; an epoch takes {one.rows} doc" in lines[0]


def test_a_run_goes_on_only_with_its_own_rows(tokenizer, place, tmp_path: Path) -> None:
    one, other = opened(tokenizer, tmp_path, place()), opened(tokenizer, tmp_path, place(), max_length=6)
    other.restore(opened(tokenizer, tmp_path, place(), max_length=6).state(0))
    assert one.state(0) != other.state(0)
    documents = list(one.rows)
    assert len(documents) == len(one.rows) == 41
    assert [document.tokens.tolist() for document in documents] == [one.rows[i].tokens.tolist() for i in range(41)]
    with pytest.raises(IndexError):
        one.rows[41]
