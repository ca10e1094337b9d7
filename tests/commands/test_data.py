"""`tune data`, as people and programs use it: what it shows, its exit codes, and what it says to mistakes."""

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


def talk(question: str, answer: str) -> str:
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": said}) + "\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows and a config, where the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("rows.jsonl").write_text("".join(talk(f"What is {n} and {n}?", f"It is {2 * n}.") for n in range(30)))
    Path("sft.yaml").write_text(CONFIG.format(source="rows.jsonl", length=64))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert cli.main(["data", *words]) == code
    return capsys.readouterr()


def test_a_config_is_shown_and_no_run_begins(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, "sft.yaml", "--num-rows", "2")
    assert "30 documents, " in out and "OpenAI messages (column 'messages')\n" in out and "tokens in a row" in out
    assert "data row 2  rows.jsonl:2  " in out and "data row 3" not in out
    assert "⟦It is 2.<|turn|>⟧" in out.replace("\n", "") and "\x1b" not in out
    assert "nothing wrong was found" in out and not err
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["7", "rows.jsonl:7"])
def test_a_row_is_found_by_number_and_by_place(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    out, _ = told(capsys, "sft.yaml", "--row", name)
    assert re.findall(r"data row (\d+)", out) == ["7"] and "What is 6 and 6?" in out


def test_what_is_cut_is_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, "sft.yaml", "data.max_length=15", "--row", "30")
    assert "cut: " in out and "⟪" in out and "cut at 15 tokens: 30 documents" in out
    assert "answers of all 30 rows are cut at 15 tokens" in out


def test_programs_get_json(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(capsys, "sft.yaml", "--json", "--num-rows", "1")[0])
    (part,), (row,) = found["parts"], found["rows"]
    assert part["rows"] == 30 and sum(part["lengths"]["counts"]) == 30 and found["findings"] == []
    assert len(row["stretches"][0]["tokens"]) == len(row["stretches"][0]["states"]) and row["where"] == "rows.jsonl:1"


def test_a_page_is_written_under_the_usual_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = told(capsys, "sft.yaml", "--html")
    assert err == "written: data.html\n" and Path("data.html").read_text().startswith("<!doctype html>")


def test_what_is_doubtful_is_no_mistake_and_what_is_wrong_is(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows + talk("And?", ""))
    assert "doubtful\n  data: 1 of 31 rows (3.2%) has an empty answer" in told(capsys, "sft.yaml")[0]
    Path("rows.jsonl").write_text(rows + '{"messages": 3}\n{"messages": [\n' + talk("And?", "So."))
    out, err = told(capsys, "sft.yaml", code=2)
    assert err.startswith("error: this data cannot be trained on: data: 2 of 33 rows are bad") and err.count("\n") == 1
    assert "bad: rows.jsonl:31: " in out and "bad: rows.jsonl:32: " in out and "rows.jsonl:31" in err
    _, err = told(capsys, "sft.yaml", "data.on_bad_row=skip", code=2)
    assert "2 of 33 rows are bad (6.1%, `max_bad_row_fraction` allows 1.0%): " in err
    out, _ = told(capsys, "sft.yaml", "data.on_bad_row=skip", "data.max_bad_row_fraction=0.1")
    assert "2 of 33 rows are bad (6.1%, `max_bad_row_fraction` allows 10%): " in out


def test_held_out_rows_that_are_learnt_are_wrong(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sft.yaml", "eval_data.kind=chat", "eval_data.source=rows.jsonl", "eval_data.max_length=64")
    _, err = told(capsys, *words, code=2)
    assert "eval_data: all 30 rows are in `data` too" in err


def test_a_mix_shows_its_shares_and_the_rows_of_each_source(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"Once there were {n} cats."}) + "\n" for n in range(9)))
    datasets = "{dataset: {source: rows.jsonl}}, {dataset: {source: text.jsonl}}"
    Path("mix.yaml").write_text(
        f"recipe: sft\nmodel: tunekit/nano\ndata: {{kind: mixture, datasets: [{datasets}]}}\noutput_dir: out\n"
    )
    out, _ = told(capsys, "mix.yaml", "--num-rows", "1")
    assert "39 documents, " in out and "text.jsonl: plain text (column 'text'); 23% of the documents" in out
    assert "rows.jsonl:1" in out and "text.jsonl:1" in out


def test_the_rows_of_an_evaluation_are_shown_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "nano/tools", "model=tunekit/nano", "--num-rows", "0")


def test_other_rows_than_those_held_out_are_told_how_to_go_without_these(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"text": "It is {n}.", "label": {n % 2}}}\n' for n in range(9)))
    words = ("nano/reward", "data.source=rows.jsonl", "data.kind=labeled", "loss=classification")
    _, err = told(capsys, *words, code=2)
    assert "eval_data: these are preference rows, and `loss: classification` learns from labeled rows" in err
    assert ": leave them out by eval_data=null, or take other rows by eval_data.source and eval_data.kind=" in err
    assert "texts with labels" in told(capsys, *words, "eval_data=null")[0]


@pytest.mark.parametrize(("recipe", "row", "says"), [
    ("preference", {"prompt": "1 + 1 = ", "chosen": "two", "rejected": "one"}, ("1 pair,", "good:", "bad:")),
    ("preference", {"prompt": "1 + 1 = ", "completion": "one", "label": False}, ("1 document,", "bad:")),
    ("reward", {"prompt": "a", "chosen": "two", "rejected": "one", "margin": 0.5}, ("good, margin 0.5:", "bad:")),
    ("reward", {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}, ("steps 1 0:",)),
    ("reward", {"prompt": [{"role": "user", "content": "a"}], "completions": ["b", "c"], "labels": [True, False]},
     ("steps 1 0:",)),
    ("reward", {"text": "two", "label": 3}, ("label 3:",)),
])  # fmt: skip
def test_what_a_row_says_of_its_documents_is_shown(
    place: Path, capsys: pytest.CaptureFixture[str], recipe: str, row: dict[str, object], says: tuple[str, ...]
) -> None:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    kinds = {"completions": "process_reward", "label": "{kind: regression}"}
    loss = [f"loss={kinds[name]}" for name in row if name in kinds and recipe == "reward"]
    assert cli.main(["data", "sft.yaml", "--recipe", recipe, *loss, "--html"]) == 0
    out, _ = capsys.readouterr()
    lines, page = out.splitlines(), Path("data.html").read_text()
    for one in says:
        assert one in lines or one in out and one.endswith(",")
        assert one.endswith(",") or f"<h4>{one[:-1]}</h4>" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sft.yaml", "--row", "99"], "--row 99: there is no such row"),
        (["sft.yaml", "--row", "rows.jsonl:99"], "there is no such row"),
        (["sft.yaml", "--html", "page.txt"], "name a file that ends in .html"),
        (["sft.yaml", "--html", "no/such/folder.html"], "cannot be written"),
        (["sft.yaml", "data.lenght=3"], "did you mean 'max_length'"),
        (["sft.yaml", "data.source=no.jsonl"], "no.jsonl"),
        (["sft.yaml", "--num-rows", "-1"], "-1"),
        (["nano/generate"], "learns from no rows"),
        (["nosuch"], "nosuch"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_in_a_line(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    _, err = told(capsys, *words, code=2)
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err, err


def test_training_begins_with_the_checks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows + rows)
    Path("held.jsonl").write_text(rows)
    held = ("eval_data.kind=chat", "eval_data.source=held.jsonl", "eval_data.max_length=64")
    words = ["run", "sft", "sft.yaml", "device=cpu", "max_steps=1", *held]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "doubtful: data: 30 of 60 rows (50%) are copies" in err
    last = err.splitlines()[-1]
    assert last.startswith("error: eval_data: all 30 rows are in `data` too") and "`data_checks: warn`" in last
    assert not Path("out/final").exists()
    assert cli.main([*words, "data_checks=warn"]) == 0
    assert "wrong: eval_data: all 30 rows" in capsys.readouterr().err and Path("out/final").is_dir()


def test_of_a_stream_the_first_block_is_shown_and_another_pass_is_no_copy(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = told(capsys, "sft.yaml", "data.streaming=true", "max_steps=2", "--num-rows", "1")
    assert "a stream, of which this is the first block" in out and "data row 1  rows.jsonl:1  " in out
    assert "copies" not in out and "nothing wrong was found" in out
