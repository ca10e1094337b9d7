"""`tune data` and the start of a run refuse rows with a context that the model does not see, in every recipe."""

import json
from pathlib import Path
from typing import Any

import pytest

from tunekit.cli import recipe_loader
from tunekit.config.dump import to_yaml
from tunekit.config.load import load_config
from tunekit.data.dataloader import stream_blocks
from tunekit.data.inspect.report import build_report
from tunekit.errors import UserError
from tunekit.training.data_checks import check_targets, column_warnings

TEXTS = {"prompt": "The capital is", "completion": " called Oslo."}
PAIR = {"prompt": "The capital is", "chosen": " called Oslo.", "rejected": " called Bergen."}
STEPS = {"prompt": "The capital is", "completions": ["a port.", "Oslo."]}
SIMILAR, SOURCE = {"sentence1": "a", "sentence2": "b", "score": 0.5}, {"source": "rows.jsonl"}
REWARD = {"rewards": [{"kind": "exact_match", "column": "answer"}]}
GENERATION = {"global_batch_size": 2, "num_generations": 2}
MIXTURE = {
    "kind": "mixture",
    "datasets": [{"dataset": {"source": "rows.jsonl"}}, {"dataset": {"source": "rows.jsonl"}}],
}
# A recipe, one or two rows, and keys of the config.
RUNS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "sft": ("sft", [TEXTS], {}),
    "mixture": ("sft", [TEXTS], {"data": MIXTURE}),
    "stream": ("sft", [TEXTS], {"data": {"source": "rows.jsonl", "streaming": True, "num_proc": 0}, "max_steps": 1}),
    "distill": ("distill", [TEXTS], {"teacher": {"model": "tunekit/nano"}}),
    "evaluate": ("evaluate", [TEXTS], {}),
    "preference": ("preference", [PAIR], {}),
    "kto": ("preference", [{**TEXTS, "label": True}, {**TEXTS, "label": False}], {"loss": "kto"}),
    "pairs": ("reward", [PAIR], {}),
    "classes": ("reward", [{"text": "a", "label": 0}, {"text": "b", "label": 1}], {"loss": "classification"}),
    "steps": ("reward", [{**STEPS, "labels": [True, False]}], {"loss": "process_reward"}),
    "reranking": (
        "reward",
        [{"query": "a", "document": "b", "label": 0}, {"query": "c", "document": "d", "label": 1}],
        {"loss": "binary_cross_entropy"},
    ),
    "retrieval": ("embed", [{"query": "a", "positive": "b"}], {"global_batch_size": 2}),
    "similarity": ("embed", [SIMILAR], {"loss": "cosine_similarity", "data": {"kind": "similarity", **SOURCE}}),
    "grpo": ("grpo", [{"prompt": "2 + 2?", "answer": "4"}], {**REWARD, **GENERATION}),
    "ppo": ("ppo", [{"prompt": "2 + 2?", "answer": "4"}], {**REWARD, "global_batch_size": 2}),
}


@pytest.fixture
def open_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Config of a run whose rows have further columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stream_blocks, "ROUND_DOCUMENTS", 8)

    def open_config(name: str, columns: dict[str, Any], **changes: Any) -> Any:
        recipe, rows, keys = RUNS[name]
        lines = [json.dumps(row | columns | {"id": i}) for i, row in enumerate((rows * 2)[:2])]
        Path("rows.jsonl").write_text("".join(line + "\n" for line in lines))
        tree = {"recipe": recipe, "model": "tunekit/nano", "data": {"source": "rows.jsonl"}, **keys, **changes}
        tree |= {} if recipe == "evaluate" else {"output_dir": "out"}
        Path("config.yaml").write_text(to_yaml(tree))
        return load_config(recipe_loader.load_recipe(recipe).CONFIG, Path("config.yaml"))

    return open_config


def find_columns(cfg: Any) -> dict[str, str]:
    """Severities of the findings about columns, by kind."""
    findings = build_report(cfg, 0, check_targets).findings
    return {item.kind: item.severity for item in findings if item.kind in ("unused context", "unused columns")}


@pytest.mark.parametrize("name", RUNS)
def test_unseen_context_is_an_error(name: str, open_run) -> None:
    assert find_columns(open_run(name, {})) == {}
    cfg = open_run(name, {"context": "The river is blue.", "notes": "short"})
    assert find_columns(cfg) == {"unused context": "wrong", "unused columns": "note"}
    if name != "evaluate":
        assert sum("'context'" in warning for warning in column_warnings(cfg)) == (2 if name == "mixture" else 1)


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([{"question": "2 + 2?", "reply": "4"}], "unknown format"),
        ([{"prompt": "2 + 2?", "completion": 4}], "completion: must be"),
        ([{"messages": [{"role": "bot", "content": "4"}]}], "unknown role"),
        ([{"messages": [{"role": "user", "content": "2 + 2?"}]}], "no target tokens"),
    ],
)
def test_unusable_rows_name_their_cause(rows: list[dict[str, Any]], cause: str, open_run) -> None:
    cfg = open_run("sft", {})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError) as error:
        build_report(cfg, 0, check_targets)
    assert "rows.jsonl:1: " in str(error.value) and cause in str(error.value)
    assert ("no target tokens" in str(error.value)) == (cause == "no target tokens")


def test_filtered_and_long_rows_name_their_cause(open_run) -> None:
    data = {"source": "rows.jsonl", "transforms": [{"kind": "filter", "columns": {"id": 7}}]}
    with pytest.raises(UserError, match="transforms"):
        build_report(open_run("sft", {}, data=data), 0, check_targets)
    data = {"source": "rows.jsonl", "max_length": 2, "excess_length_strategy": "drop"}
    with pytest.raises(UserError, match="max_length"):
        build_report(open_run("sft", {}, data=data), 0, check_targets)
