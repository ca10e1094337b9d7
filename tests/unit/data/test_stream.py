"""A stream gives the same rows on any layout and from any step, all rows once per pass, and reports bad rows."""

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
def tokenizer(tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs["chatml"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of rows with unique texts."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [json.dumps({"text": f"row {number}" + " so" * (number % 7)}) + "\n" for number in range(ROWS)]
    (folder / "a.jsonl").write_text("".join(rows[:40]))
    (folder / "b.jsonl").write_text("".join(rows[40:]))
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit blocks to 20 rows, or 40 packed ones."""
    monkeypatch.setattr(stream_blocks, "ROUND_DOCUMENTS", 20)
    monkeypatch.setattr(stream_blocks, "BLOCK_STEPS", 1)
    monkeypatch.setattr(stream_blocks, "MIN_STEP_FILL", 0)


def build_stream(source: Path, tokenizer: Tokenizer, dist, micro: int = 4, **options) -> DataLoader:
    dataset = TextDataset(str(source), max_length=LENGTH, streaming=True, num_proc=0, **options)
    return build_dataloader(dataset, tokenizer, 4, micro, dist)


def step_texts(loaders: list[DataLoader], tokenizer: Tokenizer, step: int) -> list[str]:
    """Texts of a step, on all ranks, sorted."""
    end = tokenizer.decode([tokenizer.eos], special=True)
    texts: list[str] = []
    for loader in loaders:
        for batch in loader[step]:
            for row in batch.tokens[(batch.targets != IGNORE).any(1)]:
                texts += [text for text in tokenizer.decode(row.tolist(), special=True).split(end) if text]
    return sorted(texts)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_have_the_same_rows_on_any_layout(pack: bool, size: int, source, tokenizer, make_dist) -> None:
    single = build_stream(source, tokenizer, make_dist(), packing=pack)
    ranks = [
        build_stream(source, tokenizer, make_dist(rank, size), 1 + size // 2, packing=pack) for rank in range(size)
    ]
    for step in range(25):
        assert step_texts(ranks, tokenizer, step) == step_texts([single], tokenizer, step)
    for loader in (single, *ranks):
        loader.close()


@pytest.mark.parametrize("pack", [False, True])
def test_row_repeats_only_after_all_rows(pack: bool, source, tokenizer, make_dist) -> None:
    loader, seen = build_stream(source, tokenizer, make_dist(), packing=pack), Counter()
    texts_by_step = []
    for step in range(60):
        texts = step_texts([loader], tokenizer, step)
        texts_by_step.append(texts)
        seen.update(texts)
        # A block can contain the end of a pass and the start of the next one.
        assert max(seen.values()) <= 1 + (seen.total() + 40) // ROWS
    assert len(seen) == ROWS
    assert min(seen.values()) >= seen.total() // ROWS - 1
    assert texts_by_step[:15] != texts_by_step[15:30]
    loader.close()


@pytest.mark.parametrize(("batch", "length"), [(4, 40), (16, 40), (3, 400), (32, 400)])
def test_packed_steps_have_nearly_the_batch_size(
    batch: int, length: int, source, tokenizer, make_dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(stream_blocks, "ROUND_DOCUMENTS", 50)  # one row of 400 holds nearly as many
    rows = TextDataset(str(source), max_length=length, streaming=True, num_proc=0, packing=True)
    loader = build_dataloader(rows, tokenizer, batch, batch, make_dist())
    first = loader.summary.num_packed_rows
    assert first is not None and first >= 8 * 0.95 * batch
    sizes = [sum(len(batch.tokens) for batch in loader[step]) for step in range(16)]
    assert max(sizes) <= batch
    assert sum(sizes) >= 0.9 * 16 * batch, "leftovers of a block are carried over"
    loader.close()


def test_locations_are_known_for_recent_steps(source, tokenizer, make_dist) -> None:
    loader, locations = build_stream(source, tokenizer, make_dist()), {}
    for step in range(100):  # 20 blocks, of which the last 16 are kept
        batches = loader[step]
        assert sum(len(batch.tokens) for batch in batches) == 4
        locations[step] = loader.row_locations(step)
    assert all(len(step_locations) == 4 for step_locations in locations.values())
    assert {step: loader.row_locations(step) for step in range(20, 100)} == {
        step: locations[step] for step in range(20, 100)
    }
    assert [loader.row_locations(step) for step in range(20)] == [[]] * 20
    loader.close()


def test_rows_stay_in_order_without_shuffling(source, tokenizer, make_dist) -> None:
    loader = build_stream(source, tokenizer, make_dist(), shuffle=False)
    for step in range(40):
        numbers = sorted(number % ROWS for number in range(4 * step, 4 * step + 4))
        assert sorted(int(text.split()[1]) for text in step_texts([loader], tokenizer, step)) == numbers
    loader.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_stream_resumes_from_any_step_on_any_layout(data: st.DataObject, source, tokenizer, make_dist) -> None:
    pack, seed = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    stops = sorted(data.draw(st.lists(st.integers(0, 24), max_size=3)))
    uninterrupted = build_stream(source, tokenizer, make_dist(seed=seed), packing=pack)
    expected = [step_texts([uninterrupted], tokenizer, step) for step in range(25)]
    uninterrupted.close()
    texts, state = [], None
    for first, last in zip([0, *stops], [*stops, 25], strict=True):
        size, micro = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 4))
        ranks = [
            build_stream(source, tokenizer, make_dist(rank, size, seed), micro, packing=pack) for rank in range(size)
        ]
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(json.loads(json.dumps(state)))
        texts += [step_texts(ranks, tokenizer, step) for step in range(first, last)]
        num_prefetched = data.draw(st.integers(0, 1))  # a thread can have prefetched the next step
        if num_prefetched:
            step_texts(ranks, tokenizer, last)
        state = ranks[0].state_dict(last)
        for loader in ranks:
            loader.close()
    assert texts == expected


def test_mixture_keeps_its_fractions_across_blocks(source, tokenizer, make_dist, tmp_path: Path) -> None:
    (tmp_path / "small.jsonl").write_text("".join(json.dumps({"text": f"few {n}"}) + "\n" for n in range(5)))
    members = (
        MixtureMember(TextDataset(str(source), streaming=True, num_proc=0), weight=7),
        MixtureMember(TextDataset(str(tmp_path / "small.jsonl")), weight=3),
    )
    mix = Mixture(members, max_length=LENGTH)
    loader = build_dataloader(mix, tokenizer, 4, 4, make_dist())
    seen = [step_texts([loader], tokenizer, step) for step in range(37)]
    state = loader.state_dict(37)
    seen += [step_texts([loader], tokenizer, step) for step in range(37, 50)]
    counts = Counter(text.split()[0] for step in seen for text in step)
    assert counts == {"row": 140, "few": 60}
    repeats = Counter(text for step in seen for text in step if text.startswith("few"))
    assert set(repeats.values()) == {12}
    resumed = build_dataloader(mix, tokenizer, 4, 2, make_dist())
    resumed.load_state_dict(state)
    assert [step_texts([resumed], tokenizer, step) for step in range(37, 50)] == seen[37:]
    report = str(loader.summary)
    assert all(text in report for text in ("20 rows", "small.jsonl: ", "6 rows (30.0%)"))
    for stream in (loader, resumed):
        stream.close()


def test_mixture_with_a_stream_has_no_epochs(source) -> None:
    streamed = TextDataset(str(source), streaming=True)
    with pytest.raises(FieldError):
        Mixture((MixtureMember(streamed), MixtureMember(TextDataset("b"))))
    with pytest.raises(FieldError):
        Mixture((MixtureMember(streamed, weight=1), MixtureMember(TextDataset("b"), weight=1, max_samples_per_epoch=3)))


def test_errors_of_streams(source, tokenizer, make_dist, tmp_path: Path) -> None:
    loader = build_stream(source, tokenizer, make_dist())
    with pytest.raises(UserError, match="max_steps"):
        loader.num_steps(1)
    with pytest.raises(UserError, match=" 10"):
        loader.check_vocab(10)
    state = loader.state_dict(0)
    rows = [json.dumps({"text": "row"}) + "\n"] * 30 + [json.dumps({"txt": "row"}) + "\n"] + ["{\n"]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    with pytest.raises(UserError, match=r"rows.jsonl:31: .*'text'"):
        build_stream(tmp_path / "rows.jsonl", tokenizer, make_dist())
    (tmp_path / "rows.jsonl").write_text("".join(rows[:30]))
    other = build_stream(tmp_path / "rows.jsonl", tokenizer, make_dist())
    with pytest.raises(UserError, match="data"):
        other.load_state_dict(state)
    (tmp_path / "bad.jsonl").write_text(rows[-1])
    with pytest.raises(UserError):
        build_stream(tmp_path / "bad.jsonl", tokenizer, make_dist(), on_bad_row="skip")
    for stream in (loader, other):
        stream.close()


def test_skipped_rows_are_listed(tokenizer, make_dist, tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {number}"}) + "\n" for number in range(25)]
    (tmp_path / "rows.jsonl").write_text("".join([*rows[:9], "{\n", *rows[9:]]))
    dataset = TextDataset(str(tmp_path / "rows.jsonl"), streaming=True, num_proc=0, on_bad_row="skip")
    loader = build_dataloader(dataset, tokenizer, 4, 4, make_dist(), tmp_path / "run")
    (bad_row,) = map(json.loads, (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines())
    assert bad_row["where"] == f"{tmp_path}/rows.jsonl:10"
    loader.load_state_dict(loader.state_dict(0))
    assert [len(loader[step]) for step in range(20)] == [1] * 20  # three passes
    build_dataloader(dataset, tokenizer, 4, 4, make_dist(), tmp_path / "run").close()
    loader.close()
    (bad_row,) = map(json.loads, (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines())
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    for overwrite, count in ((False, 1), (True, 0)):
        build_dataloader(dataset, tokenizer, 4, 4, make_dist(), tmp_path / "run", overwrite).close()
        bad_rows_path = tmp_path / "run" / "bad_rows.jsonl"
        assert (len(bad_rows_path.read_text().splitlines()) if bad_rows_path.exists() else 0) == count, (
            "lines of the previous run"
        )


@pytest.mark.slow
def test_worker_processes_give_the_same_rows(source, tokenizer, make_dist) -> None:
    rows = TextDataset(str(source), max_length=LENGTH, streaming=True, num_proc=2)
    in_process, with_workers = (
        build_stream(source, tokenizer, make_dist()),
        build_dataloader(rows, tokenizer, 4, 4, make_dist()),
    )
    assert [step_texts([in_process], tokenizer, step) for step in range(25)] == [
        step_texts([with_workers], tokenizer, step) for step in range(25)
    ]
    resumed = build_dataloader(rows, tokenizer, 4, 4, make_dist())
    resumed.load_state_dict(with_workers.state_dict(24))
    assert step_texts([resumed], tokenizer, 24) == step_texts([with_workers], tokenizer, 24)
    for loader in (in_process, with_workers, resumed):
        loader.close()
