"""`tune data`: output, exit codes and errors."""

import json
import re
from pathlib import Path

import pytest

from tunekit.cli import main as cli

CONFIG = """\
recipe: sft
model: tunekit/nano
data: {{source: {source}, max_length: {length}}}
output_dir: out
"""


def chat_row(question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with rows and a config, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("rows.jsonl").write_text("".join(chat_row(f"What is {n} and {n}?", f"It is {2 * n}.") for n in range(30)))
    Path("sft.yaml").write_text(CONFIG.format(source="rows.jsonl", length=64))
    return tmp_path


def run_tune_data(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[str, str]:
    assert cli.main(["data", *args]) == code
    return capsys.readouterr()


def test_data_of_a_config_is_shown_without_training(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run_tune_data(capsys, "sft.yaml", "--num-rows", "2")
    assert "30 documents, " in out and "OpenAI messages (column 'messages')\n" in out and "tokens per row" in out
    assert "data row 2  rows.jsonl:2  " in out and "data row 3" not in out
    assert "⟦It is 2.<|turn|>⟧" in out.replace("\n", "") and "\x1b" not in out
    assert "no problems found" in out and not err
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["7", "rows.jsonl:7"])
def test_row_is_selected_by_number_or_location(work_dir: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    out, _ = run_tune_data(capsys, "sft.yaml", "--row", name)
    assert re.findall(r"data row (\d+)", out) == ["7"] and "What is 6 and 6?" in out


def test_truncated_tokens_are_shown(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run_tune_data(capsys, "sft.yaml", "data.max_length=15", "--row", "30")
    assert "truncated: " in out and "⟪" in out and "truncated to 15 tokens: 30 documents" in out
    assert "all 30 rows are truncated to 15 tokens" in out


def test_json_output(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run_tune_data(capsys, "sft.yaml", "--json", "--num-rows", "1")[0])
    (dataset,), (row,) = report["datasets"], report["rows"]
    assert dataset["rows"] == 30 and sum(dataset["lengths"]["counts"]) == 30 and report["findings"] == []
    assert len(row["spans"][0]["tokens"]) == len(row["spans"][0]["roles"]) and row["location"] == "rows.jsonl:1"


def test_html_page_has_a_default_name(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run_tune_data(capsys, "sft.yaml", "--html")
    assert err == "written: data.html\n" and Path("data.html").read_text().startswith("<!doctype html>")


def test_warnings_succeed_and_errors_fail(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows + chat_row("And?", ""))
    assert "doubtful\n  data: 1 of 31 rows (3.2%) has an empty answer" in run_tune_data(capsys, "sft.yaml")[0]
    Path("rows.jsonl").write_text(rows + '{"messages": 3}\n{"messages": [\n' + chat_row("And?", "So."))
    out, err = run_tune_data(capsys, "sft.yaml", code=2)
    assert err.startswith("error: ") and "2 of 33 rows" in err and err.count("\n") == 1
    assert "bad: rows.jsonl:31: " in out and "bad: rows.jsonl:32: " in out and "rows.jsonl:31" in err
    _, err = run_tune_data(capsys, "sft.yaml", "data.on_bad_row=skip", code=2)
    assert "2 of 33 rows" in err and "max_bad_row_fraction" in err
    out, _ = run_tune_data(capsys, "sft.yaml", "data.on_bad_row=skip", "data.max_bad_row_fraction=0.1")
    assert "2 of 33 rows" in out


def test_eval_rows_in_the_training_data_are_an_error(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("sft.yaml", "eval_data.kind=chat", "eval_data.source=rows.jsonl", "eval_data.max_length=64")
    _, err = run_tune_data(capsys, *args, code=2)
    assert "eval_data: all 30 rows" in err


def test_mixture_shows_fractions_and_rows_of_each_dataset(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"Once there were {n} cats."}) + "\n" for n in range(9)))
    datasets = "{dataset: {source: rows.jsonl}}, {dataset: {source: text.jsonl}}"
    Path("mix.yaml").write_text(
        f"recipe: sft\nmodel: tunekit/nano\ndata: {{kind: mixture, datasets: [{datasets}]}}\noutput_dir: out\n"
    )
    out, _ = run_tune_data(capsys, "mix.yaml", "--num-rows", "1")
    assert "39 documents, " in out and "text.jsonl: plain text (column 'text'); 23% of the documents" in out
    assert "rows.jsonl:1" in out and "text.jsonl:1" in out


def test_data_of_an_evaluation_config_is_shown(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tune_data(capsys, "nano/tools", "model=tunekit/nano", "--num-rows", "0")


def test_eval_rows_of_another_kind_are_an_error_with_a_remedy(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"text": "It is {n}.", "label": {n % 2}}}\n' for n in range(9)))
    args = ("nano/reward", "data.source=rows.jsonl", "data.kind=labeled", "loss=classification")
    _, err = run_tune_data(capsys, *args, code=2)
    assert "eval_data: " in err
    assert "eval_data=null" in err
    assert "texts with labels" in run_tune_data(capsys, *args, "eval_data=null")[0]


@pytest.mark.parametrize(("recipe", "row", "texts"), [
    ("preference", {"prompt": "1 + 1 = ", "chosen": "two", "rejected": "one"}, ("1 pair,", "good:", "bad:")),
    ("preference", {"prompt": "1 + 1 = ", "completion": "one", "label": False}, ("1 document,", "bad:")),
    ("reward", {"prompt": "a", "chosen": "two", "rejected": "one", "margin": 0.5}, ("good, margin 0.5:", "bad:")),
    ("reward", {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}, ("steps 1 0:",)),
    ("reward", {"prompt": [{"role": "user", "content": "a"}], "completions": ["b", "c"], "labels": [True, False]},
     ("steps 1 0:",)),
    ("reward", {"text": "two", "label": 3}, ("label 3:",)),
])  # fmt: skip
def test_labels_of_documents_are_shown(
    work_dir: Path, capsys: pytest.CaptureFixture[str], recipe: str, row: dict[str, object], texts: tuple[str, ...]
) -> None:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    kinds = {"completions": "process_reward", "label": "{kind: regression}"}
    loss = [f"loss={kinds[name]}" for name in row if name in kinds and recipe == "reward"]
    assert cli.main(["data", "sft.yaml", "--recipe", recipe, *loss, "--html"]) == 0
    out, _ = capsys.readouterr()
    lines, page = out.splitlines(), Path("data.html").read_text()
    for text in texts:
        assert text in lines or text in out and text.endswith(",")
        assert text.endswith(",") or f"<h4>{text[:-1]}</h4>" in page


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["sft.yaml", "--row", "99"], "--row 99: "),
        (["sft.yaml", "--row", "rows.jsonl:99"], "--row rows.jsonl:99: "),
        (["sft.yaml", "--html", "page.txt"], "must end in .html"),
        (["sft.yaml", "--html", "no/such/folder.html"], "cannot be written"),
        (["sft.yaml", "data.lenght=3"], "'max_length'?"),
        (["sft.yaml", "data.source=no.jsonl"], "no.jsonl"),
        (["sft.yaml", "--num-rows", "-1"], "-1"),
        (["nano/generate"], "does not train on data"),
        (["nosuch"], "nosuch"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line(
    work_dir: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: str
) -> None:
    _, err = run_tune_data(capsys, *args, code=2)
    assert err.startswith("error: ") and err.count("\n") == 1 and expected in err, err


def test_training_starts_with_the_data_checks(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows + rows)
    Path("held.jsonl").write_text(rows)
    eval_options = ("eval_data.kind=chat", "eval_data.source=held.jsonl", "eval_data.max_length=64")
    args = ["run", "sft", "sft.yaml", "device=cpu", "max_steps=1", *eval_options]
    assert cli.main(args) == 2
    err = capsys.readouterr().err
    assert "doubtful: data: 30 of 60 rows (50%) are copies" in err
    last = err.splitlines()[-1]
    assert last.startswith("error: eval_data: all 30 rows") and "data_checks" in last
    assert not Path("out/final").exists()
    assert cli.main([*args, "data_checks=warn"]) == 0
    assert "wrong: eval_data: all 30 rows" in capsys.readouterr().err and Path("out/final").is_dir()


def test_first_block_of_a_stream_is_shown_without_duplicates(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = run_tune_data(capsys, "sft.yaml", "data.streaming=true", "max_steps=2", "--num-rows", "1")
    assert "first block" in out and "data row 1  rows.jsonl:1  " in out
    assert "copies" not in out and "no problems found" in out


def test_prompts_have_no_target_tokens(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step trains on answers: 64 prompts are 2 steps of 32 prompts with 8 answers each."""
    out = " ".join(run_tune_data(capsys, "nano/grpo", "steps_per_generation=1")[0].split())
    assert "64 prompts, tokens per prompt: min 11, median 12, max 13" in out
    assert "num_generations=8: a generation has 32 prompts x 8 answers and 1 step of 256 answers" in out
    assert "2 generations per epoch" in out and "target tokens" not in out and "packed" not in out
    assert "⟦" not in out.partition("data row 1")[2].partition("⟦target⟧")[0]


def test_report_of_prompts_in_json(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run_tune_data(capsys, "nano/ppo", "--json")[0])
    stats = report["datasets"][0]
    assert stats["prompt_lengths"] == {"minimum": 11, "median": 12, "maximum": 13}
    assert stats["num_target_tokens"] == 0 and stats["targets"] is None
    assert {role for span in report["rows"][0]["spans"] for role in span["roles"]} == {0}
