"""What `evaluate` says of a model is what transformers finds on the same rows."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

WIDE = 'Is "x" a\nletter? — ja, ß'


@pytest.fixture
def rows(work) -> list[list[dict]]:
    """Four rows that the model knows by heart, and two that it does not; the first has two turns."""
    known = [json.loads(line)["messages"] for line in (work.folder / "rows.jsonl").read_text().splitlines()[:4]]
    other = [[{"role": "user", "content": WIDE}, {"role": "assistant", "content": "It is 1"}], known[0] + known[1]]
    text = "".join(json.dumps({"messages": row}) + "\n" for row in known + other)
    (work.folder / "asked.jsonl").write_text(text)
    return known + other


@pytest.fixture
def evaluate(work, learnt, rows):
    """Evaluate what has been learnt, before and after, with some options; what was printed and the file it wrote."""
    data = "{kind: chat, source: asked.jsonl, max_length: 256}"
    lines = [f"model: {learnt}", f"baseline: {work.model}", f"data: {data}", "precision: {compute_dtype: fp32}"]
    lines += ["sampling: {max_new_tokens: 12}", "device: cpu", "output_path: found/figures.json", "recipe: evaluate"]
    (work.folder / "evaluate.yaml").write_text("\n".join(lines))

    def call(*words):
        done = work.tune("run", "evaluate", "evaluate.yaml", *words)
        assert done.code == 0, done.err
        assert done.err == "", "bars are for terminals"
        found = json.loads((work.folder / "found/figures.json").read_text())
        return done.out, [flat(one) for one in found["models"]], found["changes"]

    return call


def flat(model: dict) -> dict:
    """The figures of the first task."""
    task = next(iter(model["tasks"].values()))
    right = task["exact_match"]["values"] if task["answers"] else []
    return {"loss": task["loss"]["value"], "answers": task["answers"], "right": sum(right), "each": task}


@torch.no_grad()
def theirs(folder: Path, rows: list[list[dict]]) -> tuple[float, list[str]]:
    """Mean loss of all answers with the tokens that end them, and what is answered to the last question of each row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = model.generation_config.eos_token_id
    losses, answers = [], []
    for row in rows:
        ids = tokenizer.apply_chat_template(row, return_tensors="pt", return_dict=True)["input_ids"]
        each = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        for turn in range(1, len(row), 2):
            prompt = tokenizer.apply_chat_template(
                row[:turn], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            end = next(i for i in range(prompt.shape[1], ids.shape[1]) if ids[0, i] in stops)
            losses.append(each[prompt.shape[1] - 1 : end])
        found = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
        answers.append(tokenizer.decode(found, skip_special_tokens=True).strip())
    return float(torch.cat(losses).mean()), answers


def test_loss_and_answers_are_those_of_transformers(evaluate, work, learnt, rows):
    printed, (before, after), changes = evaluate("num_completions_to_print=1")
    for found, folder in ((before, work.model), (after, learnt / "final")):
        loss, answers = theirs(folder, rows)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert f"(perplexity {math.exp(found['loss']):.4g})" in printed
        assert found["answers"] == answers
        assert found["right"] == sum(a == row[-1]["content"] for a, row in zip(answers, rows, strict=True))
    assert before["right"] == 0
    assert 4 <= after["right"] < 6
    assert f"{after['right'] / 6:.1%} ({after['right']:.0f} of 6)" in printed
    won = next(change["won"] for change in changes if change["name"] == "exact_match")
    assert won == [i for i, right in enumerate(after["each"]["exact_match"]["values"]) if right]
    assert f"{len(won)} won, 0 lost" in printed
    assert "0.0% (0 of 6)" in printed
    assert printed.count("question") == 1
    assert rows[0][1]["content"] in printed


def test_the_size_of_a_batch_changes_nothing(evaluate):
    whole = evaluate("batch_size=6")[1]
    for batch in (1, 4):
        for one, other in zip(whole, evaluate(f"batch_size={batch}")[1], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
            assert one["answers"] == other["answers"]


def test_text_asks_nothing(evaluate, work):
    (work.folder / "text.jsonl").write_text('{"text": "It is 2 and it was 1."}\n{"text": "It is"}\n')
    printed, figures, changes = evaluate("data={kind: text, source: text.jsonl}", "baseline=null")
    assert len(figures) == 1
    assert figures[0]["answers"] == changes == []
    assert "exact_match" not in printed


def test_an_adapter_is_asked_on_its_base(evaluate, work):
    data = "data={kind: chat, source: asked.jsonl, max_length: 256}"
    words = (
        "adapter={kind: lora, rank: 8}",
        "optimizer.lr=1e-2",
        data,
        "eval_data=null",
        "max_steps=4",
        "output_dir=lora",
    )
    assert work.tune("run", "sft", "sft.yaml", *words).code == 0
    before, after = evaluate("model=lora")[1]
    assert after["loss"] < before["loss"]
    assert evaluate("model=lora/final")[1][1]["loss"] == after["loss"]


def test_the_figures_stay_with_the_run(evaluate, learnt):
    """And come into its card; a model that no run has made keeps nothing."""
    _, (before, after), _ = evaluate("num_completions_to_print=0")
    told = json.loads((learnt / "evaluation.json").read_text())
    assert told["data"] == "asked.jsonl (train)"
    assert [one["loss"] for one in told["results"]] == [before["loss"], after["loss"]]
    card = (learnt / "final/README.md").read_text()
    assert f"| {after['loss']:.4f} | {math.exp(after['loss']):.4g} |" in card


def test_the_first_rows_only(evaluate):
    whole, first = (evaluate("baseline=null", *words)[1][0] for words in ((), ("limit=2",)))
    assert first["answers"] == whole["answers"][:2]
    assert first["each"]["loss"]["values"] == pytest.approx(whole["each"]["loss"]["values"][:2], rel=1e-5)


def test_what_cannot_be_is_told_before_anything_is_measured(evaluate, work, learnt, make, tmp_path, monkeypatch):
    def tune(*words):
        done = work.tune("run", "evaluate", "evaluate.yaml", *words)
        assert done.code == 2
        return done.err

    scores = make(tmp_path / "scores", architectures=["LlamaForSequenceClassification"], pad_token_id=0)
    monkeypatch.setattr("tunekit.build.build_model", lambda *_: pytest.fail("weights are read"))
    assert "writes no text: name a language model" in tune(f"baseline={scores}")
    (work.folder / "file").write_text("")
    assert "cannot write file/figures.json" in tune("output_path=file/figures.json")
    assert "it is a folder; name a file in it" in tune("output_path=.")
    assert "`tasks` contains none" in tune("num_fewshot=3")
