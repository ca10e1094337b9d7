"""`tune report`: the page of runs in any state, its texts, its size, and the errors of damaged directories."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.helpers.recipe_runs import Workspace
from tunekit.api.result import Run
from tunekit.cli import main as cli
from tunekit.report.curves import Curve, downsample

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags, attributes that load something, texts, and the data of the curves of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text, self.inside = "", ""
        self.data: dict = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.inside = values.get("id") or tag
        self.links += [name for name in values if name in ("src", "href", "onerror", "onload")]

    def handle_data(self, text: str) -> None:
        if self.inside == "data":
            self.data, self.inside = json.loads(text), ""
        elif self.inside not in ("script", "style"):
            self.text += text

    def curve(self, metric: str, run: int = 0, is_eval: bool = False) -> dict:
        (chart,) = (chart for chart in self.data["charts"] if chart["metric"] == metric)
        return next(curve for curve in chart["curves"] if (curve["run"], curve["eval"]) == (run, is_eval))


def read_page(file: Path) -> Page:
    text = file.read_text("utf-8")
    assert len(text) < 2e6 and "default-src 'none'" in text and "MIT License" in text
    page = Page(text)
    assert not page.links and "img" not in page.tags
    return page


def train(workspace: Workspace, *args: str) -> str:
    result = workspace.run_tune("run", "sft.yaml", *args)
    assert result.code == 0, result.err
    return result.err


def test_page_of_a_run_is_complete(workspace: Workspace) -> None:
    prompts = f"generation_eval={{prompts: [{json.dumps(HOSTILE)}], sampling: {{max_new_tokens: 4}}}}"
    assert "warning" not in train(workspace, prompts, "optimizer.lr=0.02")
    page = read_page(Path("out/report.html"))
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert page.curve("loss")["values"] == pytest.approx(losses, rel=1e-4)
    assert page.curve("loss", is_eval=True)["steps"] == [0, 3, 6]
    assert {"lr", "grad_norm", "tokens_per_second", "step_time"} <= {chart["metric"] for chart in page.data["charts"]}
    assert not [chart for chart in page.data["charts"] if chart["metric"].startswith("verify")]
    for text in (HOSTILE, "before training", "after step 6", "finished after step 6 of 6", "passed", "10 rows", "sft"):
        assert text in page.text, text
    assert re.search(r"optimizer.lr[\d.e-]+0.02", page.text) and "tune run sft out/config.yaml" in page.text
    info = json.loads(Path("out/run_info.json").read_text())
    assert info["num_steps"] == 6 and 0 < info["num_trained_parameters"] == info["num_parameters"]


def test_runs_are_drawn_side_by_side(workspace: Workspace) -> None:
    train(workspace)
    train(workspace, "output_dir=other", "optimizer.lr=0.02", "max_steps=4")
    result = workspace.run_tune("report", "out", "other")
    assert result.code == 0 and Path("report.html").is_file(), result.err
    page = read_page(Path("report.html"))
    assert page.data["runs"] == ["out", "other"]
    assert [len(page.curve("loss", run)["values"]) for run in (0, 1)] == [6, 4]
    assert (
        "optimizer.lr" in page.text
        and "max_steps" in page.text
        and "global_batch_size" not in page.text.split("Repeat")[0]
    )


def test_unfinished_and_damaged_directories(workspace: Workspace) -> None:
    train(workspace, "max_steps=2")
    assert Run("out").report("own.html") == Path("own.html")
    shutil.rmtree("out/final")
    with Path("out/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # is being written
    assert workspace.run_tune("report", "out", "--output", "part.html").code == 0
    assert "not finished" in read_page(Path("part.html")).text
    with Path("out/metrics.jsonl").open("a") as file:
        file.write("\n")
    num_lines = len(Path("out/metrics.jsonl").read_text().splitlines())
    for name, text in ((f"metrics.jsonl:{num_lines}", None), ("run_info.json", "{"), ("config.yaml", "a: [")):
        if text is not None:
            Path("out/metrics.jsonl").unlink(missing_ok=True)
            Path("out", name).write_text(text)
        result = workspace.run_tune("report", "out")
        assert (result.code, result.err.count("\n")) == (2, 1) and f"out/{name}" in result.err, result.err
    assert workspace.run_tune("report", "nowhere").code == 2
    assert workspace.run_tune("report", "out", "--output", "page.pdf").code == 2


def test_run_survives_an_error_of_its_report(workspace: Workspace) -> None:
    Path("out/report.html").mkdir(parents=True)
    Path("out/config.yaml").write_text("recipe: sft\n")
    message = train(workspace, "max_steps=2")
    assert message.count("warning: out/report.html is not written") == 1 and Path("out/final/complete").is_file()


def test_page_of_episodes(tmp_path: Path) -> None:
    record = {"step": 2, "row": "p:1", "prompt_text": HOSTILE, "token_ids": [1, 2], "tokens": ["Hi", HOSTILE]}
    record |= {"sampled": [True, False], "logprobs": [-0.5, 0.0], "advantages": [1.0, 0.0], "rewards": {"exact": 1.0}}
    record |= {"reward": 1.0, "metrics": {}, "finish_reason": "stop", "num_prompt_tokens": 3}
    (tmp_path / "episodes.jsonl").write_text(json.dumps({"step": 1}) + "\n" + json.dumps(record) + "\n")
    (tmp_path / "config.yaml").write_text(yaml.dump({"recipe": "grpo", "max_steps": 4}))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": null, "reward": 0.5, "kl": 0.1, "eval/reward": 0.25}\n'
    )
    assert cli.main(["report", str(tmp_path)]) == 0
    page = read_page(tmp_path / "report.html")
    assert "Episodes of step 2" in page.text and "exact 1" in page.text and "not finite" in page.text
    assert page.curve("reward", is_eval=True)["values"] == [0.25] and page.curve("loss")["values"] == [None]
    assert page.text.index("Rewards and episodes") > page.text.index("Loss")


def test_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    names = [f"metric_{number}" for number in range(40)]
    (tmp_path / "config.yaml").write_text("recipe: sft\n")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            file.write(json.dumps({"step": step} | {name: step**0.5 + 1 / 3 for name in names}) + "\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert len(read_page(tmp_path / "report.html").data["charts"]) == 40


def test_downsampling_keeps_extremes_and_ends() -> None:
    values: list[float | None] = [0.5] * 10_000
    values[1234], values[7777], values[20:30] = 9.0, -9.0, [None] * 10
    curve = downsample(Curve(0, "loss", range(1, 10_001), values), 2000)
    assert len(curve.steps) <= 2000 and (curve.steps[0], curve.steps[-1]) == (1, 10_000)
    points = dict(zip(curve.steps, curve.values, strict=True))
    assert points[1235] == 9.0 and points[7778] == -9.0
    short = Curve(0, "loss", [1, 2], [0.123456789, None])
    assert downsample(short, 2000).values == [0.12346, None]
