"""`tune new`: the config that it writes is valid and runs; what it cannot find out is one line."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.helpers.recipe_runs import Workspace
from tunekit.cli import recipe_loader
from tunekit.plan.estimate import estimate
from tunekit.plan.hardware import GIB, ClusterSpec, gpu_by_memory
from tunekit.plan.workload import make_workload

CHATS = [
    {"conversations": [{"from": "human", "value": f"What is {n} plus 1?"}, {"from": "gpt", "value": f"It is {n + 1}."}]}
    for n in range(200)
]
QUESTION, ANSWER = {"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "It is 2."}
ROWS = {
    "chat": CHATS,
    "few": [{"text": f"Text {n}"} for n in range(9)],
    "kto": [{"prompt": f"Say {n}", "completion": f"{n}", "label": n % 2 == 0} for n in range(40)],
    "pairs": [{"prompt": f"Say {n}", "chosen": f"{n}", "rejected": "no"} for n in range(40)],
    "classes": [{"text": f"Text {n}", "label": ("bad", "good")[n % 2]} for n in range(40)],
    "stars": [{"text": f"Text {n}", "label": n % 5} for n in range(40)],
    "grades": [{"text": f"Text {n}", "label": n / 7} for n in range(40)],
    "steps": [{"prompt": f"Add {n}", "completions": ["One.", "Two."], "labels": [True, False]} for n in range(40)],
    "sorted": [{"text": f"Text {n}", "label": n // 600} for n in range(1800)],
    "sizes": [{"text": f"Text {n}", "label": ('5" pipe, {steel}', "a: ${b}")[n % 2]} for n in range(40)],
    "relevance": [{"query": f"Q {n}", "document": f"D {n}", "label": n % 2} for n in range(40)],
    "triplets": [{"query": f"Q {n}", "positive": f"D {n}", "negative": "no"} for n in range(40)],
    "lists": [
        {"anchor": f"Where is the red hat number {n}?", "pos": [f"Hat {n} is in a box."], "neg": ["no", "none"]}
        for n in range(1200)
    ],
    "questions": [{"question": f"Q {n}", "answer": f"D {n}"} for n in range(40)],
    "scores": [{"sentence1": f"A {n}", "sentence2": f"B {n}", "score": n / 40} for n in range(40)],
    "one": [{"text": f"Text {n}", "label": 1} for n in range(40)],
    "other": [{"foo": 1}],
    "numbers": [1, 2],
    "weights": [{"messages": [QUESTION, ANSWER | {"weight": 0}, QUESTION, ANSWER]} for _ in range(9)],
    "mixed": [*CHATS[:9], {"instruction": "Say 1", "output": "1"}],
    "turns": [{"thread": [QUESTION, ANSWER]} for _ in range(9)],
    "input": [{"id": str(n), "input": f"Q {n}", "output": f"D {n}"} for n in range(9)],
}
# Contents of files with rows that cannot be used, and the lines of these.
BAD_ROWS = {
    "cut.jsonl": (json.dumps(CHATS[0]) + "\n" + '{"conversations": [' + "\n" + json.dumps(CHATS[1]), [2]),
    "empty.jsonl": ("{}\n" + '{"conversations": []}' + "\n" + json.dumps(CHATS[0]), [1, 2]),
    "more.csv": ("prompt,completion\nSay 1,1\na,b,c\n", [3]),
}


@pytest.fixture(autouse=True)
def row_files(workspace: Workspace) -> None:
    for name, rows in ROWS.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def shallow_model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model with one layer, whose plans take less time."""
    return make_model(tmp_path_factory.mktemp("shallow"), num_hidden_layers=1)


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ("chat", "", {"recipe": "sft", "adapter": "lora"}),
        ("few", "--full", {"recipe": "sft", "eval_data": None, "adapter": None}),
        ("kto", "", {"recipe": "preference", "loss": "kto"}),
        ("pairs", "", {"recipe": "preference", "loss": None}),
        ("pairs", "--task orpo", {"recipe": "preference", "loss": "orpo"}),
        ("pairs", "--task reward", {"recipe": "reward", "loss": None}),
        ("classes", "", {"recipe": "reward", "loss": "classification"}),
        ("stars", "", {"recipe": "reward", "loss": {"kind": "classification", "num_labels": 5}}),
        ("sorted", "", {"recipe": "reward", "loss": {"kind": "classification", "num_labels": 3}}),
        ("sizes", "", {"recipe": "reward", "loss": "classification"}),
        ("relevance", "", {"recipe": "reward", "loss": "binary_cross_entropy"}),
        ("triplets", "", {"recipe": "embed", "loss": None, "global_batch_size": None}),
        ("triplets", "--task reward", {"recipe": "reward", "loss": None}),
        ("questions", "--task embed", {"recipe": "embed", "loss": None}),
        ("scores", "", {"recipe": "embed", "loss": "cosent"}),
        ("grades", "", {"recipe": "reward", "loss": "regression"}),
        ("steps", "", {"recipe": "reward", "loss": "process_reward"}),
        ("weights", "", {"recipe": "sft", "data.train_on": "per_message"}),
        ("mixed", "", {"recipe": "sft", "data.kind": None}),
        (
            "questions",
            "",
            {"data.kind": "instruct", "data.columns": {"prompt": "question", "completion": "answer"}},
        ),
        ("turns", "", {"data.kind": "chat", "data.columns": {"messages": "thread"}}),
        ("input", "", {"data.columns": {"prompt": "input", "completion": "output", "input": None}}),
    ],
)
def test_config_follows_the_rows(
    rows: str, options: str, expected: dict[str, object], workspace: Workspace, shallow_model: Path
) -> None:
    args = ("new", str(shallow_model), f"{rows}.jsonl", "--output", "new.yaml", *options.split())
    result = workspace.run_tune(*args)
    assert result.code == 0, result.err
    tree = yaml.safe_load(Path("new.yaml").read_text())
    tree |= {f"data.{key}": value for key, value in tree["data"].items()}
    assert {key: tree.get(key) for key in expected} == expected
    assert workspace.run_tune(*args).code == 2, "an existing file is kept"


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_cannot_be_used_are_listed(name: str, workspace: Workspace, shallow_model: Path) -> None:
    text, lines = BAD_ROWS[name]
    Path(name).write_text(text)
    result = workspace.run_tune("new", str(shallow_model), name, "--output", "new.yaml")
    assert result.code == 0, result.err
    for output in (result.err, Path("new.yaml").read_text()):
        assert all(f"{name}:{line}: " in output for line in lines) and "on_bad_row: skip" in output


def test_embedding_config(workspace: Workspace) -> None:
    """Rows are not packed, so that each step has as many in-batch negatives; lists of texts are no conversations."""
    (workspace.model / "chat_template.jinja").rename("template.jinja")
    try:
        result = workspace.run_tune("new", str(workspace.model), "lists.jsonl", "--output", "new.yaml")
    finally:
        Path("template.jinja").rename(workspace.model / "chat_template.jinja")
    tree = yaml.safe_load(Path("new.yaml").read_text())
    assert tree["data"] == {"kind": "retrieval", "source": "lists.jsonl", "split": "train[:95%]", "max_length": 128}
    assert (tree["recipe"], tree["global_batch_size"]) == ("embed", 128) and "new_special_tokens" not in tree
    assert "tune run new.yaml" in result.out and "tune chat" not in result.out


def test_next_command_trains(workspace: Workspace) -> None:
    result = workspace.run_tune("new", str(workspace.model), "chat.jsonl", "--output", "new.yaml")
    command = next(line.strip() for line in result.out.splitlines() if line.startswith("  tune run"))
    words = shlex.split(command.partition("  ")[0])[1:]
    run = workspace.run_tune(*words, "max_steps=1", "device=cpu")
    assert run.code == 0, run.err
    assert (Path(yaml.safe_load(Path("new.yaml").read_text())["output_dir"]) / "final").is_dir()


def test_model_without_a_template_gets_chatml(workspace: Workspace) -> None:
    (workspace.model / "chat_template.jinja").rename("kept.jinja")
    try:
        assert workspace.run_tune("new", str(workspace.model), "chat.jsonl", "--output", "new.yaml").code == 0
        tree = yaml.safe_load(Path("new.yaml").read_text())
        assert tree["new_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
        assert tree["data"]["chat_template"] == tree["eval_data"]["chat_template"] == "chatml"
        assert tree["data"]["split"] == "train[:95%]" and tree["eval_data"]["split"] == "train[95%:]"
    finally:
        Path("kept.jinja").rename(workspace.model / "chat_template.jinja")


@pytest.mark.slow
def test_config_fits_the_machine(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated model is planned with the shape of a preset; a small GPU needs four bits."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    args = ("new", "Qwen/Qwen3-4B", "chat.jsonl", "--gpu-memory", "8G", "--output", "new.yaml")
    result = workspace.run_tune(*args)
    assert result.code == 0 and result.err.count("preset") == 1, result.err
    assert yaml.safe_load(Path("new.yaml").read_text())["quantization"] == "nf4"
    cfg = recipe_loader.load_recipe_config(recipe_loader.load_recipe("sft"), "new.yaml", [], [])
    cluster = ClusterSpec(gpu=gpu_by_memory(8 * GIB), memory=8 * GIB)
    assert estimate(make_workload(cfg, cluster), cluster).fits is True


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ("tunekit/nano other.jsonl", "other.jsonl: unknown format"),
        ("tunekit/nano numbers.jsonl", "numbers.jsonl:1: row must be a JSON object"),
        ("tunekit/nano one.jsonl", "one.jsonl: all rows have label 1"),
        ("tunekit/nano missing.jsonl", "missing.jsonl: no such file"),
        ("tunekit/nanoo chat.jsonl", "tunekit/nano?"),
        ("tunekit/qwen3_8b chat.jsonl", "has no weights"),
        ("tunekit/nano chat.jsonl --task kto", "Use --task sft"),
        ("tunekit/nano chat.jsonl --task tokens", "--task"),
        ("tunekit/nano", "DATA"),
    ],
)
def test_mistakes_are_one_line(args: str, problem: str, workspace: Workspace) -> None:
    result = workspace.run_tune("new", *args.split())
    assert result.code == 2 and problem in result.err and result.err.count("\n") == 1
    assert not [*Path().glob("nano*.yaml")]
