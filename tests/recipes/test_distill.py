"""Distillation runs: stored teacher logits, on-policy answers, resuming, and errors."""

import json
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.recipe_runs import SHARED_CONFIG
from tests.recipes.test_resume import stop_after
from tunekit.data.dataloader.batch import IGNORE, Batch, Collator
from tunekit.data.dataloader.unpack import unpack_documents
from tunekit.data.document import Document
from tunekit.data.preprocess.tokenized_dataset import TokenizedDataset
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
ON_POLICY = ("on_policy={lmbda: 0.7, max_new_tokens: 8}",)


@pytest.fixture(scope="module")
def teacher(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("teacher"), num_hidden_layers=3)


@pytest.fixture
def distill_workspace(workspace, teacher: Path):
    """`workspace` with a teacher model in `teacher`."""
    shutil.copytree(teacher, "teacher")
    Path("distill.yaml").write_text((CONFIG + SHARED_CONFIG).format(model=workspace.model, teacher="teacher"))
    return workspace


def distill_metrics(workspace, out: str) -> list[dict[str, float]]:
    """Metrics of all steps and evaluations, without time."""
    lines = map(json.loads, (workspace.folder / out / "metrics.jsonl").read_text().splitlines())
    names = ("loss", "grad_norm", "kl", "top1_agreement", "entropy", "teacher_entropy", "cross_entropy", "divergence")
    names += tuple(f"eval/{name}" for name in names[2:]) + ("eval/loss",)
    return [{name: line[name] for name in names if name in line} for line in lines]


def assert_metrics_close(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


def test_offline_teacher_matches_online_teacher(distill_workspace) -> None:
    """Also with quantized teachers. With complete logits the teacher model is not needed."""
    vocab = json.loads(Path("teacher/config.json").read_text())["vocab_size"]
    for top, kind in ((vocab, "none"), (5, "nf4")):
        quantization = f"teacher.quantization={kind}"
        top_k = "teacher.top_k=null" if top == vocab else f"teacher.top_k={top}"
        assert distill_workspace.run_tune(*RUN, top_k, quantization, f"output_dir=live{top}").code == 0
        offline = (*STORED, quantization, f"teacher.top_k={top}")
        result = distill_workspace.run_tune(*RUN, *offline, f"output_dir=stored{top}")
        assert result.code == 0, result.err
        assert_metrics_close(
            distill_metrics(distill_workspace, f"stored{top}"), distill_metrics(distill_workspace, f"live{top}")
        )
    Path("teacher").rename("away")
    packed = ("data.packing=true", "eval_data.packing=true", "global_batch_size=1", "micro_batch_size=1", "seed=4")
    result = distill_workspace.run_tune(*RUN, *offline, "output_dir=again", *packed)
    assert result.code == 0, result.err
    result = distill_workspace.run_tune(*RUN, *offline, "output_dir=more", "teacher.top_k=6")
    assert (
        result.code == 2 and "teacher.model: " in result.err and "teacher logits are missing" in result.err + result.out
    )


def test_incomplete_logits_are_completed(distill_workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_logits, "BLOCK", 64)
    args = (*RUN, *STORED, "teacher.top_k=9")
    assert distill_workspace.run_tune(*args, "output_dir=one").code == 0
    directory = max(
        (file.parent for file in Path("kept").glob("*/about.json")),
        key=lambda folder: teacher_logits.read_info(folder)["blocks"],
    )
    assert teacher_logits.read_info(directory)["blocks"] > 2
    modified = {file: file.stat().st_mtime_ns for file in directory.glob("*/*")}
    removed = directory / "00001"
    shutil.rmtree(removed)
    assert distill_workspace.run_tune(*args, "output_dir=two").code == 0
    assert distill_metrics(distill_workspace, "one") == distill_metrics(distill_workspace, "two")
    unchanged = {file for file, time in modified.items() if file.stat().st_mtime_ns == time}
    assert unchanged == {file for file in modified if removed not in file.parents}
    Path("teacher/model.safetensors").touch()
    refused = distill_workspace.run_tune(*args, "output_dir=three")
    assert refused.code == 2 and "written by a different version of teacher" in refused.err


@pytest.mark.parametrize("words", [(), ON_POLICY, ("adapter={kind: dora, rank: 4, dropout: 0.3}", *ON_POLICY)], ids=len)
def test_stopped_run_resumes_bit_exactly(
    distill_workspace, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    assert distill_workspace.run_tune(*RUN, *words).code == 0
    stop_after(monkeypatch, 3)
    assert distill_workspace.run_tune(*RUN, *words, "output_dir=broken").code == 143
    assert distill_workspace.run_tune(*RUN, *words, "output_dir=broken").code == 0
    assert distill_workspace.is_same_run("out", "broken")
    assert distill_metrics(distill_workspace, "out") == distill_metrics(distill_workspace, "broken")


def test_token_counts_include_generated_answers(distill_workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts include tokens that the student generated instead of those of the rows."""
    counts: dict[str, list[list[int]]] = {"came": [], "written": []}
    original = StudentSampler.__call__

    def count_tokens(
        writer: StudentSampler, model: Decoder, batches: list[Batch], dist: DistributedContext
    ) -> list[Batch]:
        written = original(writer, model, batches, dist)
        for name, batches_of_kind in (("came", batches), ("written", written)):
            tokens = [len(span.document.tokens) for batch in batches_of_kind for span in unpack_documents(batch)]
            counts[name].append([sum(tokens), sum(int((batch.targets != IGNORE).sum()) for batch in batches_of_kind)])
        return written

    monkeypatch.setattr(StudentSampler, "__call__", count_tokens)
    assert distill_workspace.run_tune(*RUN, "on_policy={lmbda: 1, max_new_tokens: 8}", "data.train_on=last").code == 0
    lines = [line for line in map(json.loads, Path("out/metrics.jsonl").read_text().splitlines()) if "loss" in line]
    assert [line["num_target_tokens"] for line in lines] == list(
        accumulate(targets for _, targets in counts["written"])
    )
    assert [line["num_tokens"] for line in lines] == list(accumulate(tokens for tokens, _ in counts["written"]))
    assert all(generated != given for (_, generated), (_, given) in zip(counts["written"], counts["came"], strict=True))
    for line, (_, targets) in zip(lines, counts["written"], strict=True):
        assert line["target_tokens_per_second"] == pytest.approx(targets / line["step_time"])


def copy_with_swapped_tokens(model: Path, folder: str) -> str:
    """Copy of a model whose tokenizer has two tokens swapped."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = [token for token in vocab if token.isalpha()][:2]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_stored_logits_are_bound_to_a_vocabulary(distill_workspace) -> None:
    """Complete logits replace the teacher for the first student, but not for a student with another vocabulary."""
    assert distill_workspace.run_tune(*RUN, *STORED, "max_steps=1").code == 0
    model = copy_with_swapped_tokens(distill_workspace.model, "student")
    result = distill_workspace.run_tune(*RUN, *STORED, "output_dir=two", f"model={model}")
    assert result.code == 2 and "teacher.model: the vocabulary of" in result.err


def test_invalid_configs_are_one_line_errors(distill_workspace) -> None:
    copy_with_swapped_tokens(Path("teacher"), "other")
    vocab = json.loads(Path("teacher/config.json").read_text())["vocab_size"]
    too_many, top_k_error = f"teacher.top_k={vocab + 1}", f"teacher.top_k: must be <= {vocab:,}, "
    Path("begun").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (Path("begun") / name).touch()
    for args, message in {
        ("teacher.model=other",): "teacher.model: the vocabulary of other differs",
        ("teacher.model=nowhere/else/here",): "teacher.model: nowhere/else/here: ",
        ("teacher.model=begun",): "teacher.model: begun: ",
        (*STORED, *ON_POLICY): "on_policy.lmbda",
        (*STORED, "data.streaming=true"): "teacher: ",
        ("teacher.top_k=0",): "top_k: must be >= 1, got 0",
        (too_many,): f"got {vocab + 1:,}, or null for the full distribution",
        (*STORED, too_many): top_k_error,
        ("on_policy={lmbda: 1, max_new_tokens: 64}",): "on_policy.max_new_tokens: must be less than data.max_length=64",
        ("on_policy.lmbda=0.1",): "on_policy.max_new_tokens: must be less than data.max_length=64",
        (
            "on_policy={lmbda: 0.5, max_new_tokens: 8}",
            "loss.kd_ratio=0.9",
        ): "loss.kd_ratio: cross-entropy on answers that the student generated",
        ("on_policy.lmbda=2",): "lmbda",
        ("loss={kind: skewed_kl, alpha: 1}",): "alpha",
        ("loss.temperature=0",): "temperature",
        ("loss.kd_ratio=0",): "kd_ratio",
    }.items():
        result = distill_workspace.run_tune(*RUN, *args)
        assert result.code == 2 and message in result.err and len(result.err.splitlines()) <= 3, result.err
        assert not (distill_workspace.folder / "out" / "final").exists()


def test_vocabulary_is_known_without_the_teacher(distill_workspace) -> None:
    assert distill_workspace.run_tune(*RUN, *STORED, "teacher.top_k=3", "max_steps=1").code == 0
    vocab = json.loads(Path("teacher/config.json").read_text())["vocab_size"]
    Path("teacher").rename("away")
    for top, message in (
        (vocab + 1, f"teacher.top_k: must be <= {vocab:,}, "),
        (vocab, None),
    ):
        result = distill_workspace.run_tune("validate", *RUN[2:], *STORED, f"teacher.top_k={top}")
        assert result.code == (2 if message else 0) and (message or "") in result.err, result.err


def test_rows_without_room_for_answers_are_reported(distill_workspace) -> None:
    """Reported for the longest prompt, but not if there is room for `max_new_tokens`."""
    rows = [[("user", "What is it? " * n), ("assistant", f"It is {n}.")] for n in range(1, 7)]
    lines = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = Tokenizer.open(distill_workspace.model)
    free_tokens = sorted(64 - len(tokenizer.encode_prompt(line["messages"][:1])) for line in lines)
    tokens = free_tokens[0] + 1
    assert 0 < free_tokens[0] < tokens <= free_tokens[1]
    args = (*RUN, "max_steps=1", "data.train_on=last")
    result = distill_workspace.run_tune(*args, f"on_policy={{lmbda: 0.5, max_new_tokens: {tokens}}}")
    key = "on_policy.max_new_tokens"
    output = result.err + result.out
    assert "1 of 6 rows (17%)" in output and f"{key}={tokens}" in output and f" {free_tokens[0]}" in output
    result = distill_workspace.run_tune(
        *args, f"on_policy={{lmbda: 0.5, max_new_tokens: {free_tokens[0]}}}", "output_dir=fits"
    )
    assert result.code == 0 and "no room" not in result.err + result.out
    result = distill_workspace.run_tune(*args, f"on_policy={{lmbda: 0, max_new_tokens: {tokens}}}", "output_dir=none")
    assert result.code == 0 and "no room" not in result.err + result.out


def test_answer_starts_match_each_document() -> None:
    """Vectorized over a range of documents, compared with one document per batch."""
    rng = np.random.default_rng(0)
    rows = []
    for size in rng.integers(1, 12, 200):
        loss_mask = rng.random(size) < rng.choice([0.1, 0.5, 0.9, 1])
        rows.append(Document(rng.integers(1, 9, size).astype(np.int32), loss_mask, int(size)))
    collator, expected = Collator(1, 1, 0, 1, 0, None), []
    for row in rows:
        spans = list(unpack_documents(collator.collate([[row]])))
        expected.append(answer_start(spans[0]) if spans else 0)
    dataset = TokenizedDataset.from_documents(rows)
    assert answer_starts(dataset, 0, 200).tolist() == expected and len(set(expected)) > 5
    assert answer_starts(dataset, 17, 60).tolist() == expected[17:60]


@pytest.mark.parametrize("capacity", [None, 40])
def test_unpacked_documents_are_those_of_the_batch(capacity: int | None) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for size in (5, 9, 3, 12):
        loss_mask = np.arange(size) >= size // 2
        rows.append(Document(rng.integers(1, 9, size).astype(np.int32), loss_mask, size))
    collator = Collator(4, 4, 0, 1, 0, capacity)
    batch = collator.collate([rows[:2], rows[2:]] if capacity else [[row] for row in rows])
    spans = list(unpack_documents(batch))
    assert [span.row for span in spans] == ([0, 0, 1, 1] if capacity else [0, 1, 2, 3])
    for span, row in zip(spans, rows, strict=True):
        assert np.array_equal(span.document.tokens, row.tokens) and np.array_equal(
            span.document.loss_mask, row.loss_mask
        )
        assert span.num_target_tokens == row.loss_mask[1:].sum()
        assert span.key == next(unpack_documents(collator.collate([[row]]))).key
    assert len({span.key for span in spans}) == 4
