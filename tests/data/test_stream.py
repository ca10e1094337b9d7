"""A stream gives the same rows on any layout and from any step on, all of a pass once, and says what goes wrong."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.data.dataloader import stream_blocks
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import IGNORE
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.mixture import Mixture, MixtureMember
from tunekit.data.datasets import TextDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import FieldError, UserError

ROWS, LENGTH = 61, 40


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(folders["chatml"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of rows that say which they are."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [json.dumps({"text": f"row {number}" + " so" * (number % 7)}) + "\n" for number in range(ROWS)]
    (folder / "a.jsonl").write_text("".join(rows[:40]))
    (folder / "b.jsonl").write_text("".join(rows[40:]))
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of a few rows: 20, or 40 where they are packed."""
    monkeypatch.setattr(stream_blocks, "DOCUMENTS", 20)
    monkeypatch.setattr(stream_blocks, "STEPS", 1)
    monkeypatch.setattr(stream_blocks, "FULL", 0)


def opened(source: Path, tokenizer: Tokenizer, place, micro: int = 4, **options) -> DataLoader:
    rows = TextDataset(str(source), max_length=LENGTH, streaming=True, num_proc=0, **options)
    return build_dataloader(rows, tokenizer, 4, micro, place)


def texts(loaders: list[DataLoader], tokenizer: Tokenizer, step: int) -> list[str]:
    """The texts of a step, on all ranks."""
    end = tokenizer.decode([tokenizer.eos], special=True)
    found: list[str] = []
    for loader in loaders:
        for batch in loader[step]:
            for row in batch.tokens[(batch.targets != IGNORE).any(1)]:
                found += [text for text in tokenizer.decode(row.tolist(), special=True).split(end) if text]
    return sorted(found)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_hold_the_same_rows_on_any_layout(pack: bool, size: int, source, tokenizer, place) -> None:
    want = opened(source, tokenizer, place(), packing=pack)
    ranks = [opened(source, tokenizer, place(rank, size), 1 + size // 2, packing=pack) for rank in range(size)]
    for step in range(25):
        assert texts(ranks, tokenizer, step) == texts([want], tokenizer, step)
    for loader in (want, *ranks):
        loader.close()


@pytest.mark.parametrize("pack", [False, True])
def test_a_row_comes_again_only_when_all_have_come(pack: bool, source, tokenizer, place) -> None:
    loader, seen = opened(source, tokenizer, place(), packing=pack), Counter()
    orders = []
    for step in range(60):
        found = texts([loader], tokenizer, step)
        orders.append(found)
        seen.update(found)
        # A block may hold the end of a pass and the beginning of the next one.
        assert max(seen.values()) <= 1 + (seen.total() + 40) // ROWS
    assert len(seen) == ROWS
    assert min(seen.values()) >= seen.total() // ROWS - 1
    assert orders[:15] != orders[15:30]
    loader.close()


@pytest.mark.parametrize(("batch", "length"), [(4, 40), (16, 40), (3, 400), (64, 400)])
def test_packed_steps_are_nearly_as_large_as_a_batch(
    batch: int, length: int, source, tokenizer, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(stream_blocks, "DOCUMENTS", 50)  # one row of 400 holds nearly as many
    rows = TextDataset(str(source), max_length=length, streaming=True, num_proc=0, packing=True)
    loader = build_dataloader(rows, tokenizer, batch, batch, place())
    first = loader.report.packed
    assert first is not None and first >= 8 * 0.95 * batch
    held = [sum(len(one.tokens) for one in loader[step]) for step in range(16)]
    assert max(held) <= batch
    assert sum(held) >= 0.9 * 16 * batch, "rounded up from one block after the other"
    loader.close()


def test_where_rows_are_from_is_known_of_steps_that_are_long_done(source, tokenizer, place) -> None:
    loader, found = opened(source, tokenizer, place()), {}
    for step in range(100):  # 20 blocks, of which the last 16 are kept
        batches = loader[step]
        assert sum(len(one.tokens) for one in batches) == 4
        found[step] = loader.where(step)
    assert all(len(places) == 4 for places in found.values())
    assert {step: loader.where(step) for step in range(20, 100)} == {step: found[step] for step in range(20, 100)}
    assert [loader.where(step) for step in range(20)] == [[]] * 20
    loader.close()


def test_rows_stay_in_order_where_they_are_not_shuffled(source, tokenizer, place) -> None:
    loader = opened(source, tokenizer, place(), shuffle=False)
    for step in range(40):
        numbers = sorted(number % ROWS for number in range(4 * step, 4 * step + 4))
        assert sorted(int(text.split()[1]) for text in texts([loader], tokenizer, step)) == numbers
    loader.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_it_goes_on_from_any_step_on_any_layout(data: st.DataObject, source, tokenizer, place) -> None:
    pack, seed = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    stops = sorted(data.draw(st.lists(st.integers(0, 24), max_size=3)))
    whole = opened(source, tokenizer, place(seed=seed), packing=pack)
    want = [texts([whole], tokenizer, step) for step in range(25)]
    whole.close()
    found, state = [], None
    for first, last in zip([0, *stops], [*stops, 25], strict=True):
        size, micro = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 4))
        ranks = [opened(source, tokenizer, place(rank, size, seed), micro, packing=pack) for rank in range(size)]
        if state is not None:
            for loader in ranks:
                loader.restore(json.loads(json.dumps(state)))
        found += [texts(ranks, tokenizer, step) for step in range(first, last)]
        ahead = data.draw(st.integers(0, 1))  # a thread may have made the next step
        if ahead:
            texts(ranks, tokenizer, last)
        state = ranks[0].state(last)
        for loader in ranks:
            loader.close()
    assert found == want


def test_a_mix_keeps_its_shares_from_block_to_block(source, tokenizer, place, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": f"few {n}"}) + "\n" for n in range(5)))
    parts = (
        MixtureMember(TextDataset(str(source), streaming=True, num_proc=0), weight=7),
        MixtureMember(TextDataset(str(tmp_path / "few.jsonl")), weight=3),
    )
    mix = Mixture(parts, max_length=LENGTH)
    loader = build_dataloader(mix, tokenizer, 4, 4, place())
    seen = [texts([loader], tokenizer, step) for step in range(37)]
    state = loader.state(37)
    seen += [texts([loader], tokenizer, step) for step in range(37, 50)]
    kinds = Counter(text.split()[0] for step in seen for text in step)
    assert kinds == {"row": 140, "few": 60}
    times = Counter(text for step in seen for text in step if text.startswith("few"))
    assert set(times.values()) == {12}
    again = build_dataloader(mix, tokenizer, 4, 2, place())
    again.restore(state)
    assert [texts([again], tokenizer, step) for step in range(37, 50)] == seen[37:]
    report = str(loader.report)
    assert report.startswith("a stream, whose first block has 20 rows, ")
    assert "few.jsonl: " in report
    assert "the block takes 6 rows (30.0%)" in report
    for one in (loader, again):
        one.close()


def test_a_mix_with_a_stream_has_no_epochs(source) -> None:
    streamed = TextDataset(str(source), streaming=True)
    with pytest.raises(FieldError, match="so the mix has no epochs: give all parts a weight"):
        Mixture((MixtureMember(streamed), MixtureMember(TextDataset("b"))))
    with pytest.raises(FieldError, match="epochs and caps say nothing"):
        Mixture((MixtureMember(streamed, weight=1), MixtureMember(TextDataset("b"), weight=1, max_samples_per_epoch=3)))


def test_what_goes_wrong_is_told(source, tokenizer, place, tmp_path: Path) -> None:
    loader = opened(source, tokenizer, place())
    with pytest.raises(UserError, match="nobody knows how many steps a stream has: set `max_steps`"):
        loader.steps(1)
    with pytest.raises(UserError, match="this tokenizer is another model's"):
        loader.check(10)
    state = loader.state(0)
    rows = [json.dumps({"text": "row"}) + "\n"] * 30 + [json.dumps({"txt": "row"}) + "\n"] + ["{\n"]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    with pytest.raises(UserError, match=r"rows.jsonl:31: .*'text'"):
        opened(tmp_path / "rows.jsonl", tokenizer, place())
    (tmp_path / "rows.jsonl").write_text("".join(rows[:30]))
    other = opened(tmp_path / "rows.jsonl", tokenizer, place())
    with pytest.raises(UserError, match="not the rows that the run began with"):
        other.restore(state)
    (tmp_path / "none.jsonl").write_text(rows[-1])
    with pytest.raises(UserError, match="nothing is left to learn from in any of its rows"):
        opened(tmp_path / "none.jsonl", tokenizer, place(), on_bad_row="skip")
    for one in (loader, other):
        one.close()


def test_rows_that_are_skipped_are_listed(tokenizer, place, tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {number}"}) + "\n" for number in range(25)]
    (tmp_path / "rows.jsonl").write_text("".join([*rows[:9], "{\n", *rows[9:]]))
    choice = TextDataset(str(tmp_path / "rows.jsonl"), streaming=True, num_proc=0, on_bad_row="skip")
    loader = build_dataloader(choice, tokenizer, 4, 4, place(), tmp_path / "run")
    (fault,) = map(json.loads, (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines())
    assert fault["where"] == f"{tmp_path}/rows.jsonl:10"
    loader.restore(loader.state(0))
    assert [len(loader[step]) for step in range(20)] == [1] * 20  # three passes
    build_dataloader(choice, tokenizer, 4, 4, place(), tmp_path / "run").close()
    loader.close()
    (fault,) = map(json.loads, (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines())
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    for fresh, count in ((False, 1), (True, 0)):
        build_dataloader(choice, tokenizer, 4, 4, place(), tmp_path / "run", fresh).close()
        listed = tmp_path / "run" / "bad_rows.jsonl"
        assert (len(listed.read_text().splitlines()) if listed.exists() else 0) == count, "lines of the run before"


@pytest.mark.slow
def test_processes_prepare_the_same(source, tokenizer, place) -> None:
    rows = TextDataset(str(source), max_length=LENGTH, streaming=True, num_proc=2)
    here, there = opened(source, tokenizer, place()), build_dataloader(rows, tokenizer, 4, 4, place())
    assert [texts([here], tokenizer, step) for step in range(25)] == [
        texts([there], tokenizer, step) for step in range(25)
    ]
    again = build_dataloader(rows, tokenizer, 4, 4, place())
    again.restore(there.state(24))
    assert texts([again], tokenizer, 24) == texts([there], tokenizer, 24)
    for one in (here, there, again):
        one.close()
