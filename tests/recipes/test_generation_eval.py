"""Answers of the model in training: they do not change the run, are logged and resumed, and select the best step."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.generation_runs import run_layouts
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_runs import Workspace, addition_rows, stop_after
from tests.helpers.training_methods import Case, make_config, write_rows
from tunekit import build
from tunekit.data.datasets import ChatDataset
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import UserError
from tunekit.models.spec import ScoreHead
from tunekit.recipes import sft
from tunekit.training.config import GenerationEvalConfig

QUESTION = "What is 1 plus 1?"
DATA = "data: {kind: chat, source: rows.jsonl, max_length: 64, max_samples: 3}"
ANSWERS = f"generation_eval={{{DATA}, prompts: ['{QUESTION}'], sampling: {{max_new_tokens: 8}}, regex: '(\\d+)'}}"
RUN = ("run", "sft", "sft.yaml", "optimizer.lr=1e-2", "lr_scheduler=constant")
METRICS = ("eval/exact_match", "eval/regex_match")


def run_ok(workspace: Workspace, *args: str) -> str:
    result = workspace.run_tune(*args)
    assert result.code == 0, result.err
    return result.err


def read_lines(out: str, name: str = "completions.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out, name).read_text().splitlines()]


def eval_metrics(out: str) -> dict[int, dict[str, float]]:
    """Metrics of each evaluation by step."""
    lines = [line for line in read_lines(out, "metrics.jsonl") if any(name.startswith("eval/") for name in line)]
    return {line["step"]: {name: line[name] for name in line if name != "step"} for line in lines}


@pytest.mark.parametrize("method", ["sft", "dpo", "distill"])
def test_answers_do_not_change_the_run(method: str, workspace: Workspace, tiny_model: Path, make_model: Any) -> None:
    """Neither random numbers, such as those of dropout, nor the order of the rows."""
    write_rows(workspace.folder)
    make_model(workspace.folder / "teacher")
    config = make_config(Case(method, "lora", False), workspace.folder, tiny_model, workspace.folder / "out")
    Path("method.yaml").write_text(config)
    recipe = config.partition("\n")[0].removeprefix("recipe: ")
    run = ("run", recipe, "method.yaml", "adapter.dropout=0.3", "max_steps=4", "eval_every=1")
    run_ok(workspace, *run, "output_dir=plain")
    sampled = f"generation_eval={{prompts: ['{QUESTION}'], {DATA}, sampling: {{temperature: 1.0, max_new_tokens: 5}}}}"
    run_ok(workspace, *run, sampled.replace("rows.jsonl", "chats.jsonl"), "output_dir=out")
    names = ("step", "loss", "grad_norm")
    plain, with_answers = (
        [[line[name] for name in names] for line in read_lines(out, "metrics.jsonl") if "loss" in line]
        for out in ("plain", "out")
    )
    assert len(plain) == 4 and plain == with_answers
    assert all(
        torch.equal(tensor, workspace.tensors("out")[name]) for name, tensor in workspace.tensors("plain").items()
    )
    steps = [line["step"] for line in read_lines("out")]
    assert steps == [step for step in range(5) for _ in range(4)]
    assert [*eval_metrics("out")] == [*range(5)], "without eval_data too"


def test_answers_and_metrics_are_those_of_the_weights(workspace: Workspace) -> None:
    """Answers of the last step equal those of the result; metrics are their means over the rows."""
    log = run_ok(workspace, *RUN, ANSWERS, "max_steps=20", "eval_every=10")
    lines = read_lines("out")
    assert {line["step"] for line in lines} == {0, 10, 20}
    last = [line for line in lines if line["step"] == 20]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (QUESTION, *questions())))
    options = ("sampling.max_new_tokens=8", "device=cpu", "precision.compute_dtype=fp32", "output_path=answers.jsonl")
    Path("generate.yaml").write_text("recipe: generate\nmodel: out\nsource: prompts.jsonl\n")
    run_ok(workspace, "run", "generate", "generate.yaml", *options)
    assert [line["completion"] for line in last] == [
        line["answer"].strip() for line in read_lines(".", "answers.jsonl")
    ]
    assert [line["expected"] for line in last] == [None, *expected_answers()]
    matches = [line["completion"] == line["expected"] for line in last[1:]]
    assert [line["exact_match"] for line in last] == [None, *matches]
    assert eval_metrics("out")[20]["eval/exact_match"] == sum(matches) / 3
    assert eval_metrics("out")[20]["eval/regex_match"] == sum(line["regex_match"] for line in last) / 4
    assert list(eval_metrics("out")[20])[0] == "eval/loss"
    assert f'step 20: "{QUESTION}" -> {json.dumps(last[0]["completion"])}' in log
    assert log.count("step 20: ") == 4, "three answers and the metrics"


def questions() -> list[str]:
    return [json.loads(line)["messages"][0]["content"] for line in Path("rows.jsonl").read_text().splitlines()[:3]]


def expected_answers() -> list[str]:
    return [json.loads(line)["messages"][1]["content"] for line in Path("rows.jsonl").read_text().splitlines()[:3]]


def test_resumed_run_has_the_answers_of_an_uninterrupted_one(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = (*RUN, ANSWERS, "max_steps=9", "eval_every=2", "save_every=3")
    run_ok(workspace, *run, "output_dir=unbroken")
    stop_after(monkeypatch, 3)
    result = workspace.run_tune(*run)
    assert result.code == 128 + signal.SIGTERM, result.err
    monkeypatch.undo()
    monkeypatch.chdir(workspace.folder)
    with Path("out/completions.jsonl").open("a") as file:  # of a run that was killed after a later evaluation
        file.write(json.dumps({"step": 4, "prompt": "lost"}) + "\n" + '{"step": 4, "pro')
    run_ok(workspace, *run)
    assert read_lines("out") == read_lines("unbroken")
    assert workspace.is_same_run("out", "unbroken")
    assert eval_metrics("out") == eval_metrics("unbroken")
    run_ok(workspace, *run, "output_dir=out", "generation_eval=null", "--overwrite")
    assert not Path("out/completions.jsonl").exists()


def test_best_step_by_exact_match_without_eval_data(workspace: Workspace) -> None:
    """The run learns its rows, and stops when no more answers become right."""
    Path("rows.jsonl").write_text(addition_rows(1, 3))
    best = ("metric_for_best_model=exact_match", "early_stopping_patience=2", "eval_data=null", "eval_every=0.1")
    answers = ANSWERS.replace("max_new_tokens: 8", "max_new_tokens: 12")
    log = run_ok(workspace, *RUN, answers, *best, "max_steps=100")
    matches = {step: values["eval/exact_match"] for step, values in eval_metrics("out").items()}
    assert set(matches) == set(range(0, max(matches) + 1, 10))
    first_best = next(step for step in matches if matches[step] == max(matches.values()))
    assert matches[first_best] == 1 and max(matches) == first_best + 20 < 100
    assert f"after step {first_best}. The result has" in log


@pytest.mark.parametrize(("args", "evaluated", "saved"), [
    (("epochs=2", "eval_every=epoch", "save_every=epoch"), [0, 3, 6], [3, 6]),  # 10 rows: 3 steps, the last of 2 rows
    (("epochs=2", "eval_every=0.5", "save_every=0.34"), [0, 3, 6], [3, 6]),
    (("max_steps=4", "eval_every=epoch", "save_every=0.25"), [0, 3, 4], [1, 2, 3, 4]),
])  # fmt: skip
def test_fractions_and_epochs_are_intervals(
    args: tuple[str, ...], evaluated: list[int], saved: list[int], workspace: Workspace
) -> None:
    Path("rows.jsonl").write_text(addition_rows(1, 10))
    text = Path("sft.yaml").read_text().replace("max_steps: 6\n", "")
    Path("sft.yaml").write_text(text)
    run_ok(workspace, *RUN, *args, "save_total_limit=9")
    assert list(eval_metrics("out")) == evaluated
    assert sorted(int(path.name) for path in Path("out/state").iterdir()) == saved


@pytest.mark.parametrize(("args", "key"), [
    (["generation_eval={}"], "generation_eval.prompts"),
    (["generation_eval={prompts: [a], batch_size: 0}"], "generation_eval.batch_size"),
    (["generation_eval={data: {kind: chat, source: nope.jsonl}}"], "nope.jsonl"),
    (["generation_eval={data: {kind: chat, source: rows.jsonl, streaming: true}}"], "generation_eval.data"),
    (["generation_eval={prompts: [a], regex: (}"], "generation_eval.regex"),
    (["generation_eval={prompts: [a], json_schema: nope.json}"], "generation_eval.json_schema"),
    (["generation_eval={data: {kind: text, source: texts.jsonl}}"], "generation_eval.data"),
    (["generation_eval.prompts=['Why?']", "config_overrides.max_position_embeddings=4"], "generation_eval.prompts.0"),
    ([f"generation_eval={{{DATA}}}", "config_overrides.max_position_embeddings=4"], "rows.jsonl:1: the prompt has"),
    (["metric_for_best_model=exact_match", "load_best_model_at_end=true"], "exact_match requires generation_eval.data"),
    (["generation_eval.prompts=[a]", "early_stopping_patience=1", "eval_data=null"], "generation_eval: has no metric"),
    ([ANSWERS, "load_best_model_at_end=true", "metric_for_best_model=json_schema_match"], "metric_for_best_model"),
    ([ANSWERS, "eval_data=null", "early_stopping_patience=2"], "metric_for_best_model"),
    (["eval_every=1.5"], "eval_every"), (["save_every=0"], "save_every"), (["eval_every=epochs"], "eval_every"),
    (["data.streaming=true", "eval_every=epoch"], "eval_every"),
])  # fmt: skip
def test_mistakes_are_one_line_errors(args: list[str], key: str, workspace: Workspace) -> None:
    Path("texts.jsonl").write_text('{"text": "no prompt"}\n')
    result = workspace.run_tune(*RUN, *args)
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert result.code == 2 and len(lines) == 1 and key in lines[0], result.err


def test_reward_model_is_refused(memorized_run: Path) -> None:
    cfg = sft.SFTConfig(model=str(memorized_run / "final"), data=ChatDataset("rows.jsonl"), output_dir="out")
    spec = build.read_checkpoint(cfg).spec.with_score_head(ScoreHead(1))
    with pytest.raises(UserError, match="^generation_eval: "):
        GenerationEvalConfig(("Why?",)).check(spec, cfg.open_tokenizer())


@pytest.mark.multi
def test_two_ranks_give_the_answers_of_one(workspace: Workspace) -> None:
    text = Path("sft.yaml").read_text().replace("source: ", f"source: {workspace.folder}/")
    answers = ANSWERS.replace("=", ": ", 1).replace("source: ", f"source: {workspace.folder}/")
    config = f"{text}\noptimizer: {{kind: adamw, lr: 0.01, eps: 0.1}}\n{answers}\n"
    config = config.replace("output_dir: out", f"output_dir: {workspace.folder}").replace("recipe: sft\n", "")
    layouts = {
        "sharded": ParallelConfig(), "replicated": ParallelConfig(dp_replicate=2), "tp": ParallelConfig(tp=2),
        "cp": ParallelConfig(cp=2),
    }  # fmt: skip
    run_layouts(config, [("one", ParallelConfig())])
    run_ranks(2, run_layouts, config, list(layouts.items()), limit=300)
    for name in layouts:
        assert read_lines(name) == read_lines("one"), name
        for step, values in eval_metrics("one").items():
            assert eval_metrics(name)[step] == pytest.approx(values, rel=1e-5), name
