"""Distillation as people run it: stored teachers, rows that the student writes, stops, and what is refused."""

import json
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from tests.recipes.conftest import SHORT
from tests.recipes.test_resume import stop_after
from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.dataloader.unpack import unpack_documents
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distillation import teacher_logits
from tunekit.distillation.on_policy import StudentSampler, answer_start, answer_starts
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import Decoder

CONFIG = """\
recipe: distill
model: {model}
teacher: {{model: {teacher}, precision: {{compute_dtype: fp32}}}}
data: {{kind: chat, source: rows.jsonl, max_length: 64}}
eval_data: {{kind: chat, source: held.jsonl, max_length: 64}}
max_steps: 6
"""
RUN = ("run", "distill", "distill.yaml")
STORED = ("teacher={kind: offline, model: teacher, logits_dir: kept, precision: {compute_dtype: fp32}}",)
OWN = ("on_policy={lmbda: 0.7, max_new_tokens: 8}",)


@pytest.fixture(scope="module")
def teacher(make: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("teacher"), num_hidden_layers=3)


@pytest.fixture
def taught(work, teacher: Path):
    """`work`, with a teacher of its own in `teacher`."""
    shutil.copytree(teacher, "teacher")
    Path("distill.yaml").write_text((CONFIG + SHORT).format(model=work.model, teacher="teacher"))
    return work


def figures(work, out: str) -> list[dict[str, float]]:
    """All that the steps and validations of a run say, but for the clock."""
    lines = map(json.loads, (work.folder / out / "metrics.jsonl").read_text().splitlines())
    names = ("loss", "grad_norm", "kl", "top1_agreement", "entropy", "teacher_entropy", "cross_entropy", "divergence")
    names += tuple(f"eval/{name}" for name in names[2:]) + ("eval/loss",)
    return [{name: line[name] for name in names if name in line} for line in lines]


def near(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


def test_a_stored_teacher_says_what_a_live_one_does(taught) -> None:
    """In every step and validation, in four bits too; and then it is needed no more."""
    vocab = json.loads(Path("teacher/config.json").read_text())["vocab_size"]
    for top, weights in ((vocab, "none"), (5, "nf4")):
        kept = f"teacher.quantization={weights}"
        live = "teacher.top_k=null" if top == vocab else f"teacher.top_k={top}"
        assert taught.tune(*RUN, live, kept, f"output_dir=live{top}").code == 0
        stored = (*STORED, kept, f"teacher.top_k={top}")
        done = taught.tune(*RUN, *stored, f"output_dir=stored{top}")
        assert done.code == 0, done.err
        near(figures(taught, f"stored{top}"), figures(taught, f"live{top}"))
    Path("teacher").rename("away")
    packed = ("data.packing=true", "eval_data.packing=true", "global_batch_size=1", "micro_batch_size=1", "seed=4")
    done = taught.tune(*RUN, *stored, "output_dir=again", *packed)
    assert done.code == 0, done.err
    done = taught.tune(*RUN, *stored, "output_dir=more", "teacher.top_k=6")
    assert done.code == 2 and "teacher.model: " in done.err and "not there yet: asking teacher" in done.err + done.out


def test_what_is_half_stored_is_gone_on_with(taught, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_logits, "BLOCK", 64)
    words = (*RUN, *STORED, "teacher.top_k=9")
    assert taught.tune(*words, "output_dir=one").code == 0
    place = max(
        (file.parent for file in Path("kept").glob("*/about.json")),
        key=lambda folder: teacher_logits.read_info(folder)["blocks"],
    )
    assert teacher_logits.read_info(place)["blocks"] > 2
    kept = {file: file.stat().st_mtime_ns for file in place.glob("*/*")}
    gone = place / "00001"
    shutil.rmtree(gone)
    assert taught.tune(*words, "output_dir=two").code == 0
    assert figures(taught, "one") == figures(taught, "two")
    same = {file for file, time in kept.items() if file.stat().st_mtime_ns == time}
    assert same == {file for file in kept if gone not in file.parents}
    Path("teacher/model.safetensors").touch()
    refused = taught.tune(*words, "output_dir=three")
    assert refused.code == 2 and "another teacher wrote these files" in refused.err


@pytest.mark.parametrize("words", [(), OWN, ("adapter={kind: dora, rank: 4, dropout: 0.3}", *OWN)], ids=len)
def test_stopped_runs_go_on_to_the_same_end(taught, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    assert taught.tune(*RUN, *words).code == 0
    stop_after(monkeypatch, 3)
    assert taught.tune(*RUN, *words, "output_dir=broken").code == 143
    assert taught.tune(*RUN, *words, "output_dir=broken").code == 0
    assert taught.same("out", "broken")
    assert figures(taught, "out") == figures(taught, "broken")


def test_tokens_that_are_counted_are_those_that_are_learnt(taught, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the student has written, in place of the rows' own."""
    counts: dict[str, list[list[int]]] = {"came": [], "written": []}
    write = StudentSampler.__call__

    def counted(writer: StudentSampler, model: Decoder, batches: list[Batch], run: DistributedContext) -> list[Batch]:
        written = write(writer, model, batches, run)
        for name, some in (("came", batches), ("written", written)):
            tokens = [len(span.document.tokens) for batch in some for span in unpack_documents(batch)]
            counts[name].append([sum(tokens), sum(int((batch.targets != IGNORE).sum()) for batch in some)])
        return written

    monkeypatch.setattr(StudentSampler, "__call__", counted)
    assert taught.tune(*RUN, "on_policy={lmbda: 1, max_new_tokens: 8}", "data.train_on=last").code == 0
    lines = [line for line in map(json.loads, Path("out/metrics.jsonl").read_text().splitlines()) if "loss" in line]
    assert [line["num_target_tokens"] for line in lines] == list(
        accumulate(targets for _, targets in counts["written"])
    )
    assert [line["num_tokens"] for line in lines] == list(accumulate(tokens for tokens, _ in counts["written"]))
    assert all(learnt != own for (_, learnt), (_, own) in zip(counts["written"], counts["came"], strict=True))
    for line, (_, targets) in zip(lines, counts["written"], strict=True):
        assert line["target_tokens_per_second"] == pytest.approx(targets / line["step_time"])


def swapped(model: Path, folder: str) -> str:
    """A copy of a model to which two tokens are each other's."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = [token for token in vocab if token.isalpha()][:2]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_files_for_one_vocabulary_do_not_vouch_for_another(taught) -> None:
    """Where they are there for the first student, its teacher is not looked at; for another it is."""
    assert taught.tune(*RUN, *STORED, "max_steps=1").code == 0
    model = swapped(taught.model, "student")
    done = taught.tune(*RUN, *STORED, "output_dir=two", f"model={model}")
    assert done.code == 2 and "another vocabulary" in done.err


def test_what_cannot_be_is_told_in_a_line(taught) -> None:
    swapped(Path("teacher"), "other")
    vocab = json.loads(Path("teacher/config.json").read_text())["vocab_size"]
    many, above = (
        f"teacher.top_k={vocab + 1}",
        f"teacher.top_k: {vocab + 1:,} tokens are more than the {vocab:,} of the ",
    )
    Path("begun").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (Path("begun") / name).touch()
    for words, told in {
        ("teacher.model=other",): "has another vocabulary than the student",
        ("teacher.model=nowhere/else/here",): "teacher.model: no such folder",
        ("teacher.model=begun",): "teacher.model: begun: this run has not ended",
        (*STORED, *OWN): "on_policy.lmbda",
        (*STORED, "data.streaming=true"): "teacher: rows of a stream",
        ("teacher.top_k=0",): "top_k: must be 1 or more",
        (many,): f"{above}vocabulary that student and teacher share: say {vocab} at most, or null, for each token",
        (*STORED, many): above,
        (
            "on_policy={lmbda: 1, max_new_tokens: 64}",
        ): "on_policy.max_new_tokens: answers of 64 tokens leave no room for a prompt in "
        "rows of data.max_length=64: lower it, or raise data.max_length",
        ("on_policy.lmbda=0.1",): "on_policy.max_new_tokens: answers of 256 tokens leave no room",
        (
            "on_policy={lmbda: 0.5, max_new_tokens: 8}",
            "loss.kd_ratio=0.9",
        ): "loss.kd_ratio: cross-entropy on answers that the student generated",
        ("on_policy.lmbda=2",): "lmbda",
        ("loss={kind: skewed_kl, alpha: 1}",): "alpha",
        ("loss.temperature=0",): "temperature",
        ("loss.kd_ratio=0",): "kd_ratio",
    }.items():
        done = taught.tune(*RUN, *words)
        assert done.code == 2 and told in done.err and len(done.err.splitlines()) <= 3, done.err
        assert not (taught.folder / "out" / "final").exists()


def test_files_tell_the_vocabulary_of_a_teacher_that_is_gone(taught) -> None:
    assert taught.tune(*RUN, *STORED, "teacher.top_k=3", "max_steps=1").code == 0
    vocab = json.loads(Path("teacher/config.json").read_text())["vocab_size"]
    Path("teacher").rename("away")
    for top, told in (
        (vocab + 1, f"teacher.top_k: {vocab + 1:,} tokens are more than the {vocab:,} of"),
        (vocab, None),
    ):
        done = taught.tune("validate", *RUN[2:], *STORED, f"teacher.top_k={top}")
        assert done.code == (2 if told else 0) and (told or "") in done.err, done.err


def test_answers_without_room_are_told(taught) -> None:
    """Beside the longest prompt, and not where it leaves as much room as an answer may want."""
    rows = [[("user", "What is it? " * n), ("assistant", f"It is {n}.")] for n in range(1, 7)]
    lines = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = Tokenizer.open(taught.model)
    rooms = sorted(64 - len(tokenizer.encode_prompt(line["messages"][:1])) for line in lines)
    tokens = rooms[0] + 1
    assert 0 < rooms[0] < tokens <= rooms[1]
    words = (*RUN, "max_steps=1", "data.train_on=last")
    done = taught.tune(*words, f"on_policy={{lmbda: 0.5, max_new_tokens: {tokens}}}")
    told = (
        f"doubtful: on_policy: 1 of 6 rows (17%) have no room for answers of "
        f"on_policy.max_new_tokens={tokens} behind their "
    )
    assert (
        told + f"prompt in data.max_length=64, the fullest for {rooms[0]}: answers are cut there" in done.err + done.out
    )
    done = taught.tune(*words, f"on_policy={{lmbda: 0.5, max_new_tokens: {rooms[0]}}}", "output_dir=fits")
    assert done.code == 0 and "no room" not in done.err + done.out
    done = taught.tune(*words, f"on_policy={{lmbda: 0, max_new_tokens: {tokens}}}", "output_dir=none")
    assert done.code == 0 and "no room" not in done.err + done.out


def test_answers_begin_where_each_document_says() -> None:
    """Of whole blocks as of one document in a batch."""
    draw = np.random.default_rng(0)
    rows = []
    for size in draw.integers(1, 12, 200):
        learnt = draw.random(size) < draw.choice([0.1, 0.5, 0.9, 1])
        rows.append(Document(draw.integers(1, 9, size).astype(np.int32), learnt, int(size)))
    layout, wanted = Collator(1, 1, 0, 1, 0, None), []
    for row in rows:
        spans = list(unpack_documents(layout.collate([[row]])))
        wanted.append(answer_start(spans[0]) if spans else 0)
    found = TokenizedDataset(rows)
    assert answer_starts(found, 0, 200).tolist() == wanted and len(set(wanted)) > 5
    assert answer_starts(found, 17, 60).tolist() == wanted[17:60]


@pytest.mark.parametrize("capacity", [None, 40])
def test_batches_come_apart_into_the_documents_they_were_made_of(capacity: int | None) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for size in (5, 9, 3, 12):
        learnt = np.arange(size) >= size // 2
        rows.append(Document(draw.integers(1, 9, size).astype(np.int32), learnt, size))
    layout = Collator(4, 4, 0, 1, 0, capacity)
    batch = layout.collate([rows[:2], rows[2:]] if capacity else [[row] for row in rows])
    spans = list(unpack_documents(batch))
    assert [span.row for span in spans] == ([0, 0, 1, 1] if capacity else [0, 1, 2, 3])
    for span, row in zip(spans, rows, strict=True):
        assert np.array_equal(span.document.tokens, row.tokens) and np.array_equal(span.document.loss_mask, row.learnt)
        assert span.num_target_tokens == row.learnt[1:].sum()
        assert span.key == next(unpack_documents(layout.collate([[row]]))).key
    assert len({span.key for span in spans}) == 4
