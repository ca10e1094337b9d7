"""Results of `evaluate`, compared with transformers on the same rows."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

MULTILINE = 'Is "x" a\nletter? — ja, ß'


@pytest.fixture
def rows(workspace) -> list[list[dict]]:
    """Four memorized rows and two other ones; the last has two turns."""
    memorized = [
        json.loads(line)["messages"] for line in (workspace.folder / "rows.jsonl").read_text().splitlines()[:4]
    ]
    unknown = [
        [{"role": "user", "content": MULTILINE}, {"role": "assistant", "content": "It is 1"}],
        memorized[0] + memorized[1],
    ]
    text = "".join(json.dumps({"messages": row}) + "\n" for row in memorized + unknown)
    (workspace.folder / "asked.jsonl").write_text(text)
    return memorized + unknown


@pytest.fixture
def run_evaluate(workspace, memorized_run, rows):
    """Function that evaluates the base model and the memorized run. Returns the printed text, metrics and changes."""
    data = "{kind: chat, source: asked.jsonl, max_length: 256}"
    lines = [
        f"model: {memorized_run}",
        f"baseline: {workspace.model}",
        f"data: {data}",
        "precision: {compute_dtype: fp32}",
    ]
    lines += ["sampling: {max_new_tokens: 12}", "device: cpu", "output_path: found/figures.json", "recipe: evaluate"]
    (workspace.folder / "evaluate.yaml").write_text("\n".join(lines))

    def call(*args):
        result = workspace.run_tune("run", "evaluate", "evaluate.yaml", *args)
        assert result.code == 0, result.err
        assert result.err == "", "no progress bar without a terminal"
        report = json.loads((workspace.folder / "found/figures.json").read_text())
        return result.out, [first_task_metrics(model) for model in report["models"]], report["changes"]

    return call


def first_task_metrics(model: dict) -> dict:
    """Metrics of the first task."""
    task = next(iter(model["tasks"].values()))
    exact_matches = task["exact_match"]["values"] if task["answers"] else []
    return {"loss": task["loss"]["value"], "answers": task["answers"], "right": sum(exact_matches), "each": task}


@torch.no_grad()
def transformers_results(folder: Path, rows: list[list[dict]]) -> tuple[float, list[str]]:
    """Mean loss of all answers including their end tokens, and the answer to the last question of each row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = model.generation_config.eos_token_id
    losses, answers = [], []
    for row in rows:
        ids = tokenizer.apply_chat_template(row, return_tensors="pt", return_dict=True)["input_ids"]
        token_losses = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        for turn in range(1, len(row), 2):
            prompt = tokenizer.apply_chat_template(
                row[:turn], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            end = next(i for i in range(prompt.shape[1], ids.shape[1]) if ids[0, i] in stops)
            losses.append(token_losses[prompt.shape[1] - 1 : end])
        tokens = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
        answers.append(tokenizer.decode(tokens, skip_special_tokens=True).strip())
    return float(torch.cat(losses).mean()), answers


def test_loss_and_answers_match_transformers(run_evaluate, workspace, memorized_run, rows):
    printed, (before, after), changes = run_evaluate("num_completions_to_print=1")
    for metrics, folder in ((before, workspace.model), (after, memorized_run / "final")):
        loss, answers = transformers_results(folder, rows)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert f"(perplexity {math.exp(metrics['loss']):.4g})" in printed
        assert metrics["answers"] == answers
        assert metrics["right"] == sum(a == row[-1]["content"] for a, row in zip(answers, rows, strict=True))
    assert before["right"] == 0
    assert 4 <= after["right"] < 6
    assert f"{after['right'] / 6:.1%} ({after['right']:.0f} of 6)" in printed
    won = next(change["won"] for change in changes if change["name"] == "exact_match")
    assert won == [i for i, right in enumerate(after["each"]["exact_match"]["values"]) if right]
    assert f"{len(won)} won, 0 lost" in printed
    assert "0.0% (0 of 6)" in printed
    assert printed.count("question") == 1
    assert rows[0][1]["content"] in printed


def test_batch_size_does_not_change_results(run_evaluate):
    all_at_once = run_evaluate("batch_size=6")[1]
    for batch_size in (1, 4):
        for first, second in zip(all_at_once, run_evaluate(f"batch_size={batch_size}")[1], strict=True):
            assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
            assert first["answers"] == second["answers"]


def test_plain_text_has_no_answers(run_evaluate, workspace):
    (workspace.folder / "text.jsonl").write_text('{"text": "It is 2 and it was 1."}\n{"text": "It is"}\n')
    printed, results, changes = run_evaluate("data={kind: text, source: text.jsonl}", "baseline=null")
    assert len(results) == 1
    assert results[0]["answers"] == changes == []
    assert "exact_match" not in printed


def test_adapter_is_evaluated_on_its_base(run_evaluate, workspace):
    data = "data={kind: chat, source: asked.jsonl, max_length: 256}"
    args = (
        "adapter={kind: lora, rank: 8}",
        "optimizer.lr=1e-2",
        data,
        "eval_data=null",
        "max_steps=4",
        "output_dir=lora",
    )
    assert workspace.run_tune("run", "sft", "sft.yaml", *args).code == 0
    before, after = run_evaluate("model=lora")[1]
    assert after["loss"] < before["loss"]
    assert run_evaluate("model=lora/final")[1][1]["loss"] == after["loss"]


def test_results_are_stored_with_the_run(run_evaluate, memorized_run):
    """They are also added to the model card."""
    _, (before, after), _ = run_evaluate("num_completions_to_print=0")
    stored = json.loads((memorized_run / "evaluation.json").read_text())
    assert stored["data"] == "asked.jsonl (train)"
    assert [line["loss"] for line in stored["results"]] == [before["loss"], after["loss"]]
    card = (memorized_run / "final/README.md").read_text()
    assert f"| {after['loss']:.4f} | {math.exp(after['loss']):.4g} |" in card


def test_limit_evaluates_the_first_rows(run_evaluate):
    full, limited = (run_evaluate("baseline=null", *args)[1][0] for args in ((), ("limit=2",)))
    assert limited["answers"] == full["answers"][:2]
    assert limited["each"]["loss"]["values"] == pytest.approx(full["each"]["loss"]["values"][:2], rel=1e-5)


def test_config_errors_are_reported_before_weights_are_read(
    run_evaluate, workspace, memorized_run, make_model, tmp_path, monkeypatch
):
    def tune(*args):
        result = workspace.run_tune("run", "evaluate", "evaluate.yaml", *args)
        assert result.code == 2
        return result.err

    reward_model = make_model(tmp_path / "scores", architectures=["LlamaForSequenceClassification"], pad_token_id=0)
    monkeypatch.setattr("tunekit.build.build_model", lambda *_: pytest.fail("weights are read"))
    assert "language model" in tune(f"baseline={reward_model}")
    (workspace.folder / "file").write_text("")
    assert "file/figures.json" in tune("output_path=file/figures.json")
    assert "is a directory" in tune("output_path=.")
    assert "`tasks` contains none" in tune("num_fewshot=3")


def test_prompt_beyond_the_context_is_an_error(run_evaluate, workspace):
    run_evaluate("limit=1", "baseline=null")  # writes the config
    override = "config_overrides.max_position_embeddings=4"
    result = workspace.run_tune("run", "evaluate", "evaluate.yaml", "baseline=null", override)
    assert result.code == 2 and "asked.jsonl:1: the prompt has" in result.err


def test_answers_are_checked_by_pattern_and_schema(run_evaluate, workspace):
    """Answers are "It is 2!": the groups of the pattern equal those of the row, and a schema of texts needs quotes."""
    (workspace.folder / "schema.json").write_text('{"type": "string"}')
    printed, (_, after), _ = run_evaluate("regex='(\\d)'", "json_schema=schema.json")
    rows = [json.loads(line)["messages"] for line in (workspace.folder / "asked.jsonl").read_text().splitlines()]
    digits = [[character for character in text if character.isdigit()][-1:] for text in after["each"]["answers"]]
    expected = [[character for character in row[-1]["content"] if character.isdigit()][-1:] for row in rows]
    matches = [float(bool(a) and a == b) for a, b in zip(digits, expected, strict=True)]
    assert after["each"]["regex_match"]["values"] == matches and sum(matches) >= 4
    assert after["each"]["json_schema_match"]["values"] == [0.0] * len(rows)
    assert "json_schema_match" in printed


def test_config_overrides_reach_both_models(run_evaluate, workspace):
    plain = run_evaluate()[1]
    scaled = run_evaluate("config_overrides={rope_scaling: {rope_type: linear, factor: 8.0}}")[1]
    assert all(first["loss"] != second["loss"] for first, second in zip(plain, scaled, strict=True))
    result = workspace.run_tune("run", "evaluate", "evaluate.yaml", "json_schema=nope.json")
    assert result.code == 2 and result.err.startswith("error: json_schema: nope.json: ")
