"""A mixture has the configured fraction of each dataset, and uses all rows of a dataset before repeating any."""

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


def make_mixture(*members: dict, **options) -> Mixture:
    return Mixture(
        tuple(MixtureMember(TextDataset(f"part{i}"), **member) for i, member in enumerate(members)), **options
    )


def test_without_weights_an_epoch_has_all_rows() -> None:
    assert make_mixture({}, {}).rows_per_epoch([10, 1000]) == (10, 1000)
    assert make_mixture({"repeat": 3}, {"repeat": 0.5}).rows_per_epoch([10, 1000]) == (30, 500)
    assert make_mixture({"max_samples_per_epoch": 20}, {"max_samples_per_epoch": 20, "repeat": 4}).rows_per_epoch(
        [10, 1000]
    ) == (10, 20)


def test_weights_are_fractions_of_the_rows() -> None:
    assert make_mixture({"weight": 1}, {"weight": 3}).rows_per_epoch([10, 1000]) == (10, 30)
    assert make_mixture({"weight": 0.3}, {"weight": 0.1}).rows_per_epoch([1000, 10]) == (30, 10)
    assert make_mixture({"weight": 1, "repeat": 5}, {"weight": 3}).rows_per_epoch([10, 1000]) == (50, 150)
    assert make_mixture({"weight": 1}, {"weight": 1, "max_samples_per_epoch": 7}).rows_per_epoch([10, 1000]) == (7, 7)


def test_temperature_flattens_fractions() -> None:
    assert make_mixture({}, {}, temperature=2).rows_per_epoch([100, 10_000]) == (100, 1000)  # ratio 10 instead of 100
    assert make_mixture({}, {}, temperature=1e9).rows_per_epoch([100, 10_000]) == (100, 100)
    assert make_mixture({}, {"max_samples_per_epoch": 400}, temperature=2).rows_per_epoch([100, 10_000]) == (100, 200)


@pytest.mark.parametrize(
    ("members", "options", "field"),
    [
        ([], {}, "datasets"),
        ([{"weight": 1}, {}], {}, "datasets.1"),
        ([{"weight": 1}], {"temperature": 2.0}, "temperature"),
        ([{}], {"temperature": 0.5}, "temperature"),
        ([{}], {"max_length": 1}, "max_length"),
        ([{"weight": 0}], {}, "weight"),
        ([{"weight": float("nan")}], {}, "weight"),
        ([{"repeat": 0.0}], {}, "repeat"),
        ([{"max_samples_per_epoch": 0}], {}, "max_samples_per_epoch"),
    ],
)
def test_invalid_option_is_rejected_by_name(members, options, field) -> None:
    with pytest.raises(FieldError) as error:
        make_mixture(*members, **options)
    assert error.value.field == field


def test_option_of_the_mixture_is_an_error_in_a_member() -> None:
    with pytest.raises(FieldError) as error:
        Mixture((MixtureMember(TextDataset("a")), MixtureMember(ChatDataset("b", max_length=100))), max_length=50)
    assert error.value.field == "datasets.1.dataset.max_length"
    single = Mixture((MixtureMember(ChatDataset("b", max_length=100, packing=True)),), max_length=100, packing=True)
    assert single.dataset_configs == (ChatDataset("b", max_length=100, packing=True),)
    assert Mixture((MixtureMember(TextDataset("a")),), max_length=9, shuffle=False).dataset_configs == (
        TextDataset("a", max_length=9, shuffle=False),
    )


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
def test_all_rows_come_before_any_repeats(members: list[tuple[int, int]], seed: int, shuffle: bool) -> None:
    """After any number of epochs, the counts of two documents of a dataset differ by at most one."""
    sizes, counts = zip(*members, strict=True)
    sampler, starts = EpochSampler(sizes, counts, seed, shuffle), np.cumsum([0, *sizes])
    seen: Counter[int] = Counter()
    for epoch in range(5):
        epoch_documents = sampler(epoch)
        assert np.array_equal(epoch_documents, sampler(epoch)), "an epoch is a pure function of its number"
        seen.update(epoch_documents.tolist())
        for member, count in enumerate(counts):
            times = [seen[document] for document in range(starts[member], starts[member + 1])]
            assert sum(times) == count * (epoch + 1)
            assert max(times) - min(times) <= 1


def test_order_differs_between_passes_if_shuffled() -> None:
    sampler = EpochSampler([50], [100], 0, True)
    first, second = np.split(sampler(0), 2)
    assert sorted(first) == sorted(second) == list(range(50))
    assert not np.array_equal(first, second)
    assert EpochSampler([3, 2], [4, 2], 0, False)(0).tolist() == [0, 1, 2, 0, 3, 4]


@pytest.fixture
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["chatml"])


def write_texts(directory: Path, name: str, count: int) -> str:
    """Write rows with unique texts."""
    path = directory / f"{name}.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{name} {number}" + " so" * (number % 7)}) + "\n" for number in range(count))
    )
    return str(path)


def build_loader(tokenizer, directory: Path, dist, micro: int = 4, **options) -> DataLoader:
    members = (
        MixtureMember(TextDataset(write_texts(directory, "a", 11)), repeat=2),
        MixtureMember(TextDataset(write_texts(directory, "b", 30)), max_samples_per_epoch=17),
    )
    return build_dataloader(Mixture(members, **options), tokenizer, 4, micro, dist)


def count_texts(loaders: list[DataLoader], tokenizer, step: int) -> Counter[str]:
    """Texts of all targets of a step, on all ranks."""
    batches = chain.from_iterable(loader[step] for loader in loaders)
    counts: Counter[str] = Counter()
    for batch in batches:
        targets = [row[row != IGNORE].tolist() for row in batch.targets]
        text = "".join(tokenizer.decode(row, special=True) for row in targets)
        counts.update(text.split(tokenizer.decode([tokenizer.eos], special=True))[:-1])
    return counts


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_have_the_same_rows_on_any_layout(pack: bool, size: int, tokenizer, make_dist, tmp_path: Path) -> None:
    single = build_loader(tokenizer, tmp_path, make_dist(), packing=pack, max_length=60)
    ranks = [
        build_loader(tokenizer, tmp_path, make_dist(rank, size), 3, packing=pack, max_length=60) for rank in range(size)
    ]
    steps = single.num_steps(3)
    assert steps == sum(single.num_steps(1 + epoch) - single.num_steps(epoch) for epoch in range(3))
    for step in range(steps):
        assert count_texts(ranks, tokenizer, step) == count_texts([single], tokenizer, step)
    for epoch in range(3):
        counts = sum(
            (
                count_texts(ranks, tokenizer, step)
                for step in range(single.num_steps(epoch), single.num_steps(epoch + 1))
            ),
            Counter(),
        )
        assert counts.total() == 22 + 17


def test_report_lists_each_dataset(tokenizer, make_dist, tmp_path: Path) -> None:
    loader = build_loader(tokenizer, tmp_path, make_dist(), packing=True, max_length=60)
    batches = [batch for step in range(loader.num_steps(1)) for batch in loader[step]]
    report = loader.summary
    assert [(share.rows, share.passes) for share in report.datasets] == [(22, 2), (17, 17 / 30)]
    assert report.tokens == sum(batch.num_tokens for batch in batches)
    assert report.num_packed_rows == sum(len(batch.tokens) for batch in batches)
    line = str(report).splitlines()[1]
    assert all(text in line for text in ("11 rows", "22 rows", "56.4%")) and line.endswith("2 passes")


def test_split_rows_are_counted_as_documents(tokenizer, make_dist, tmp_path: Path) -> None:
    loader = build_loader(tokenizer, tmp_path, make_dist(), packing=True, max_length=8)
    first_share, second_share = loader.summary.datasets
    assert (first_share.rows, second_share.rows) == (2 * len(loader.datasets[0]), 17) and len(loader.datasets[0]) > 11
    head, first_line, _ = str(loader.summary).splitlines()
    assert head.startswith(f"{first_share.rows + 17} documents, ")
    assert all(f"{count} " in first_line for count in (11, loader.datasets[0].summary.split, first_share.rows))


def test_resuming_with_other_rows_is_an_error(tokenizer, make_dist, tmp_path: Path) -> None:
    loader, shorter = (
        build_loader(tokenizer, tmp_path, make_dist()),
        build_loader(tokenizer, tmp_path, make_dist(), max_length=6),
    )
    shorter.load_state_dict(build_loader(tokenizer, tmp_path, make_dist(), max_length=6).state_dict(0))
    assert loader.state_dict(0) != shorter.state_dict(0)
    documents = list(loader.documents)
    assert len(documents) == len(loader.documents) == 41
    assert [document.tokens.tolist() for document in documents] == [
        loader.documents[i].tokens.tolist() for i in range(41)
    ]
    with pytest.raises(IndexError):
        loader.documents[41]
