"""Reward runs: config errors, metrics, resuming, and use of the result in other libraries."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from tests.helpers.recipe_runs import SHARED_CONFIG, Workspace
from tests.recipes.test_resume import stop_after

CONFIG = """\
recipe: reward
model: {model}
data: {{source: pairs.jsonl, max_length: 64}}
eval_data: {{source: pairs_held.jsonl, max_length: 64}}
optimizer: {{kind: adamw, lr: 1e-2}}
max_steps: 5
"""
RUN = ("run", "reward", "reward.yaml")
LORA = "adapter={kind: lora, rank: 4, dropout: 0.1}"
CLASS_NAMES = ("even", "odd")


def source_options(name: str) -> tuple[str, str]:
    return f"data.source={name}.jsonl", f"eval_data.source={name}_held.jsonl"


NAMED_CLASSES = ("data={kind: labeled, source: names.jsonl, class_names: [even, odd]}", "loss=classification")
NAMED_CLASSES += ("eval_data={kind: labeled, source: names_held.jsonl, class_names: [even, odd]}",)
KINDS = {
    "pairs": (),
    "names": NAMED_CLASSES,
    "classes": (*source_options("classes"), "loss={kind: classification, num_labels: 3}"),
    "values": (*source_options("values"), "loss=regression"),
    "steps": (*source_options("steps"), "loss=process_reward"),
}
PLAIN_KINDS = {
    "text_pairs": source_options("text_pairs"),
    "reranking": (*source_options("reranking"), "loss=binary_cross_entropy"),
}


def make_rows(n: int) -> dict[str, dict[str, Any]]:
    """One row of each kind."""
    question, text = f"What is {n} plus {n * n}?", f"It is {n + n * n}"
    answers = {"chosen": text, "rejected": f"It is {n + n * n + 7}"}
    pair = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
    steps = {"prompt": question + "\n", "completions": [f"{n * n} and {n}", text], "labels": [n % 2 > 0, n % 3 > 0]}
    return {
        "pairs": {"prompt": [{"role": "user", "content": question}], **pair, "margin": n % 3 / 4},
        "names": {"text": text, "label": CLASS_NAMES[n % 2]},
        "classes": {"text": text, "label": n % 3},
        "values": {"text": text, "label": n / 10},
        "steps": steps,
        "text_pairs": {"prompt": question, **answers},
        "reranking": {"query": question, "document": text, "label": n % 2},
    }


@pytest.fixture
def reward_workspace(workspace: Workspace) -> Workspace:
    """Workspace with `reward.yaml`, and training and held-out rows of each kind."""
    for end, numbers in (("", range(1, 17)), ("_held", range(100, 105))):
        for kind in KINDS | PLAIN_KINDS:
            lines = [json.dumps(make_rows(n)[kind]) + "\n" for n in numbers]
            Path(f"{kind}{end}.jsonl").write_text("".join(lines))
    Path("reward.yaml").write_text((CONFIG + SHARED_CONFIG).format(model=workspace.model))
    return workspace


@pytest.mark.parametrize(("changes", "message"), [
    (("loss=dpo",), "unknown kind 'dpo'"),
    (("loss.center_rewards_coefficient=-1",), "loss.center_rewards_coefficient: "),
    (("loss=classification", "loss.num_labels=1"), "loss.num_labels: "),
    ((*NAMED_CLASSES, "loss.num_labels=3"), "loss.num_labels: "),
    ((*NAMED_CLASSES, "loss=regression"), "data.class_names: "),
    ((*NAMED_CLASSES[:2], NAMED_CLASSES[2].replace("even, odd", "odd, even")), "eval_data.class_names: "),
    ((source_options("values")[1],), "eval_data: "),
    (("parallel.tp=2",), "parallel.tp: "),
    (("data={kind: chat, source: pairs.jsonl}",), "data.kind: "),
    (("data={kind: preference, source: pairs.jsonl}", "loss=process_reward"), "process_reward"),
    (source_options("values"), "bradley_terry"),
    ((*source_options("classes"), "loss=classification"), "classes.jsonl:2"),
    ((*source_options("names"), "loss=classification"), "label: 'odd'"),
    (("data.excess_length_strategy=split",), "excess_length_strategy: "),
    (("forgetting.data.source=pairs.jsonl",), "forgetting"),
])  # fmt: skip
def test_config_errors_name_the_key(changes: tuple[str, ...], message: str, reward_workspace: Workspace) -> None:
    result = reward_workspace.run_tune(*RUN, *changes)
    assert result.code == 2
    assert message in result.err and "Traceback" not in result.err


def test_unused_classes_are_reported(reward_workspace: Workspace) -> None:
    """Reported before a run and by `tune data`. A label that is out of range is an error, also in held-out rows."""
    args = (*source_options("classes"), "eval_data=null", "loss=classification", "loss.num_labels=5", "max_steps=1")
    key = "loss.num_labels"
    result = reward_workspace.run_tune(*RUN, *args)
    assert result.code == 0 and "2 of 5 classes" in result.err and key in result.err
    assert key in " ".join(reward_workspace.run_tune("data", "reward.yaml", *args).out.split())
    Path("classes_held.jsonl").write_text('{"text": "It is 3", "label": 1}\n{"text": "It is 4", "label": 3}\n')
    result = reward_workspace.run_tune(*RUN, *KINDS["classes"], "output_dir=two")
    assert result.code == 2 and "classes_held.jsonl:2" in result.err


def test_bad_eval_row_is_an_error(reward_workspace: Workspace) -> None:
    """The message mentions no keys of `data`, and its remedy works."""
    with Path("pairs_held.jsonl").open("a") as file:
        file.write('{"prompt": "a", "chosen": "b", "rejected": null}\n')
    for args in (RUN, ("data", "reward.yaml")):
        result = reward_workspace.run_tune(*args)
        assert result.code == 2 and "pairs_held.jsonl:6" in result.err and "data." not in result.err
        assert "on_bad_row" in result.err
        assert (
            reward_workspace.run_tune(*args, "eval_data.on_bad_row=skip", "eval_data.max_bad_row_fraction=0.5").code
            == 0
        )


def test_constant_labels_are_an_error(reward_workspace: Workspace) -> None:
    Path("same.jsonl").write_text("".join(json.dumps({"text": f"w {n}", "label": 1}) + "\n" for n in range(16)))
    result = reward_workspace.run_tune(*RUN, "data.source=same.jsonl", "eval_data=null", "loss=classification")
    assert result.code == 2
    assert "data: 100% " in result.err


@pytest.mark.parametrize("changes", [(LORA,), ("adapter={kind: dora, rank: "
                                               "4}", "quantization=nf4", *KINDS["steps"]), NAMED_CLASSES],
                         ids=["lora", "qdora, steps", "full, names"])  # fmt: skip
def test_stopped_run_resumes_bit_exactly(
    changes: tuple[str, ...], reward_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reward_workspace.run_tune(*RUN, *changes, "output_dir=whole").code == 0
    stop_after(monkeypatch, 2)
    assert reward_workspace.run_tune(*RUN, *changes, "output_dir=stopped").code == 143
    assert reward_workspace.run_tune(*RUN, *changes, "output_dir=stopped").code == 0
    assert reward_workspace.is_same_run("stopped", "whole")


def read_metrics(out: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def test_metrics_and_early_stopping(reward_workspace: Workspace) -> None:
    """Early stopping uses the held-out rows."""
    assert reward_workspace.run_tune(*RUN).code == 0
    names = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies", "mean", "min", "max")}
    for line in (line for line in read_metrics("out") if "loss" in line):
        assert names <= line.keys()
        chosen, rejected = line["rewards/chosen"], line["rewards/rejected"]
        assert line["rewards/margins"] == pytest.approx(chosen - rejected, abs=1e-5)
        assert line["rewards/mean"] == pytest.approx((chosen + rejected) / 2, abs=1e-5)
        assert line["rewards/min"] <= min(chosen, rejected) and max(chosen, rejected) <= line["rewards/max"]
    evaluations = [line for line in read_metrics("out") if "eval/loss" in line]
    assert [line["step"] for line in evaluations] == [0, 3, 5]
    assert all(f"eval/{name}" in evaluations[0] for name in names)
    options = ("max_steps=90", "eval_every=1", "early_stopping_patience=2", "optimizer.lr=1", "output_dir=early")
    assert reward_workspace.run_tune(*RUN, *options).code == 0
    assert read_metrics("early")[-1]["step"] < 90


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_code_in_the_card_scores_like_the_run(kind: str, adapter: bool, reward_workspace: Workspace) -> None:
    """The scores of a held-out row in transformers are those of the run."""
    eval_file = f"{kind}_held.jsonl"
    first = Path(eval_file).read_text().splitlines()[0]
    Path(eval_file).write_text(first + "\n")
    assert reward_workspace.run_tune(*RUN, *KINDS[kind], *[LORA] * adapter, "output_dir=runs/mine").code == 0
    code = card_code("runs/mine/final", reward_workspace.model)
    if kind in ("pairs", "steps"):
        code = without_example(code)
    namespace, row = {}, json.loads(first)
    expected = read_metrics("runs/mine")[-2]
    if kind == "pairs":
        rewards = []
        for side in ("chosen", "rejected"):
            namespace = {"messages": row["prompt"] + row[side]}
            exec(code, namespace)
            rewards.append(namespace["model"](**namespace["inputs"]).logits.item())
        assert rewards == pytest.approx([expected[f"eval/rewards/{s}"] for s in ("chosen", "rejected")], abs=1e-4)
        return
    namespace = {"prompt": row.get("prompt"), "steps": row.get("completions")}
    exec(code.replace("Once upon a time", row.get("text", "")), namespace)
    logits = namespace["model"](**namespace["inputs"]).logits
    assert loss_of_logits(kind, logits, row, namespace) == pytest.approx(expected["eval/loss"], rel=1e-4)
    if kind == "names":
        assert namespace["model"].config.id2label == dict(enumerate(CLASS_NAMES))
        if not adapter:
            classify = transformers.pipeline("text-classification", "runs/mine/final", dtype=torch.float32, top_k=None)
            probabilities = {output["label"]: output["score"] for output in classify([row["text"]])[0]}
            assert -math.log(probabilities[row["label"]]) == pytest.approx(expected["eval/loss"], rel=1e-4)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_code_in_the_card_encodes_plain_text_like_the_run(kind: str, reward_workspace: Workspace) -> None:
    """Texts of preference pairs end with the EOS token; a query and a document are a pair of texts."""
    row = json.loads(Path(f"{kind}_held.jsonl").read_text().splitlines()[0])
    Path(f"{kind}_held.jsonl").write_text(json.dumps(row) + "\n")
    assert reward_workspace.run_tune(*RUN, *PLAIN_KINDS[kind]).code == 0
    code, expected, namespace = card_code("out/final", reward_workspace.model), read_metrics("out")[-2], {}
    if kind == "text_pairs":
        exec(code.replace("Once upon a time", row["prompt"] + row["chosen"]), namespace)
        score = namespace["model"](**namespace["inputs"]).logits.item()
        assert score == pytest.approx(expected["eval/rewards/chosen"], abs=1e-4)
        return
    code = code.replace("Where is the red hat?", row["query"]).replace("The red hat is in the hall.", row["document"])
    exec(code, namespace)
    score, label = namespace["model"](**namespace["inputs"]).logits[0, 0], torch.tensor(float(row["label"]))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(score, label).item()
    assert loss == pytest.approx(expected["eval/loss"], rel=1e-4)
    assert "how relevant a document is" in Path("out/final/README.md").read_text()


def test_step_scores_with_a_chat_prompt_match_transformers(reward_workspace: Workspace) -> None:
    """The chat template of transformers writes the prompt."""
    row = make_rows(100)["steps"] | {"prompt": [{"role": "user", "content": "What is 100 plus 10000?"}]}
    for name in ("steps", "steps_held"):
        lines = [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
        lines = [line | {"prompt": [{"role": "user", "content": line["prompt"]}]} for line in lines]
        lines = [row] if name == "steps_held" else lines
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert reward_workspace.run_tune(*RUN, *KINDS["steps"]).code == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("out/final")
    model = transformers.AutoModelForTokenClassification.from_pretrained("out/final")
    tokens = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    ends = []
    for step in row["completions"]:
        tokens += tokenizer(step + "\n", add_special_tokens=False)["input_ids"]
        ends.append(len(tokens) - 1)
    logits = model(torch.tensor([tokens])).logits[0, ends]
    labels = torch.tensor([int(label) for label in row["labels"]])
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert read_metrics("out")[-2]["eval/loss"] == pytest.approx(expected, rel=1e-4)
    namespace: dict[str, Any] = {"prompt": row["prompt"], "steps": row["completions"]}
    exec(without_example(card_code("out/final", reward_workspace.model)), namespace)
    assert namespace["last"].keys() >= set(namespace["ends"])
    logits_of_card = namespace["model"](**namespace["inputs"]).logits
    assert loss_of_logits("steps", logits_of_card, row, namespace) == pytest.approx(expected, rel=1e-4)


def loss_of_logits(kind: str, logits: torch.Tensor, row: dict[str, Any], namespace: dict[str, Any]) -> float:
    if kind == "values":
        return (logits.item() - row["label"]) ** 2
    if kind == "steps":
        logits, labels = (
            logits[0, [namespace["last"][end] for end in namespace["ends"]]],
            [int(x) for x in row["labels"]],
        )
    else:
        labels = [CLASS_NAMES.index(row["label"]) if kind == "names" else row["label"]]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item()


def without_example(code: str) -> str:
    """Code of a card without its example values."""
    return re.sub(r"(messages|prompt, steps) = (?!\[\*prompt).*", "", code)


def card_code(folder: str, base: Path) -> str:
    """Code of a card with names replaced by paths."""
    (code,) = re.findall(r"```python\n(.*?)```", Path(folder, "README.md").read_text(), re.S)
    name = Path(folder).parent.name if Path(folder).name == "final" else Path(folder).name
    return code.replace(f'"{name}"', f'"{folder}"').replace(f'"{base.name}"', f'"{base}"')


def test_merged_adapter_gives_the_same_scores_and_class_names(reward_workspace: Workspace) -> None:
    """A run that starts from it keeps the class names."""
    assert reward_workspace.run_tune(*RUN, *NAMED_CLASSES, LORA, "output_dir=runs/mine").code == 0
    assert reward_workspace.run_tune("merge", str(reward_workspace.model), "runs/mine", "merged").code == 0
    auto = transformers.AutoModelForSequenceClassification
    base = auto.from_pretrained(reward_workspace.model, num_labels=2, pad_token_id=0)
    adapted, merged = PeftModel.from_pretrained(base, "runs/mine/final"), auto.from_pretrained("merged")
    tokens = torch.arange(5, 25)[None]
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits)
    assert merged.config.id2label == dict(enumerate(CLASS_NAMES))
    assert "`even`, `odd`" in Path("merged/README.md").read_text()
    exec(card_code("merged", reward_workspace.model), {})
    assert reward_workspace.run_tune(*RUN, *KINDS["classes"], "loss.num_labels=2", "model=merged").code == 2
    swapped = reward_workspace.run_tune(
        *RUN,
        *(option.replace("even, odd", "odd, even") for option in NAMED_CLASSES),
        "model=merged",
        "output_dir=swapped",
    )
    assert "data.class_names" in swapped.err
    Path("classes.jsonl").write_text(Path("names.jsonl").read_text().replace('"even"', "0").replace('"odd"', "1"))
    second = reward_workspace.run_tune(
        *RUN, *source_options("classes"), "eval_data=null", "loss=classification", "model=merged", "output_dir=again"
    )
    assert second.code == 0 and "fresh" not in second.err
    assert auto.from_pretrained("again/final").config.id2label == dict(enumerate(CLASS_NAMES))


def test_classifier_of_transformers_is_fine_tuned_with_its_head(
    reward_workspace: Workspace, make_model: Callable[..., Path]
) -> None:
    auto = transformers.AutoModelForSequenceClassification
    theirs = auto.from_pretrained(reward_workspace.model, num_labels=3, pad_token_id=0)
    theirs.save_pretrained("theirs")
    for file in reward_workspace.model.glob("*token*"):
        Path("theirs", file.name).write_bytes(file.read_bytes())
    options = ("optimizer={kind: sgd, lr: 1e-12}", "model=theirs", "output_dir=still")
    result = reward_workspace.run_tune(*RUN, *KINDS["classes"], *options)
    assert result.code == 0, result.err
    ours = auto.from_pretrained("still/final")
    assert torch.equal(ours.score.weight, theirs.score.weight)
    result = reward_workspace.run_tune(*RUN, "model=theirs", "output_dir=other")
    assert result.code == 2 and "theirs" in result.err


def test_reward_model_has_no_generation_config(reward_workspace: Workspace) -> None:
    """Like in transformers. This holds for the model, a merged adapter, and a run that starts from either."""
    Path("base").mkdir()
    for file in reward_workspace.model.iterdir():
        Path("base", file.name).write_bytes(file.read_bytes())
    Path("base", "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained("base", num_labels=1, pad_token_id=0).save_pretrained("theirs")
    assert not Path("theirs", "generation_config.json").exists()
    assert reward_workspace.run_tune(*RUN, "model=base", "max_steps=1", "output_dir=whole").code == 0
    assert reward_workspace.run_tune(*RUN, "model=base", "max_steps=1", LORA, "output_dir=adapted").code == 0
    assert reward_workspace.run_tune("merge", "base", "adapted", "merged").code == 0
    args = ("tokenizer=base", "model=whole/final", "max_steps=1", "output_dir=more")
    assert reward_workspace.run_tune(*RUN, *args).code == 0
    for folder in ("whole/final", "adapted/final", "merged", "more/final"):
        assert Path(folder, "tokenizer.json").is_file() and not Path(folder, "generation_config.json").exists()


@pytest.mark.parametrize("adapter", [(), (LORA,)], ids=["full", "lora"])
def test_reward_model_cannot_generate(adapter: tuple[str, ...], reward_workspace: Workspace) -> None:
    assert reward_workspace.run_tune(*RUN, *adapter, "max_steps=1").code == 0
    key = "out: "
    for args in (
        ("chat", "out"),
        ("export", "out", "out.gguf"),
        ("run", "generate", "nano/generate", "model=out", "device=cpu"),
        ("run", "evaluate", "nano/tools", "model=out", "device=cpu"),
    ):
        result = reward_workspace.run_tune(*args)
        assert result.code == 2 and key in result.err, (args, result.err)
    if not adapter:
        assert (
            key.replace("out", "out/final", 1)
            in reward_workspace.run_tune("run", "sft", "sft.yaml", "model=out/final").err
        )


@pytest.mark.slow
def test_nano_reward_model_learns_the_preference(reward_workspace: Workspace) -> None:
    """An eighth of the configured rows; two seeds gave 0.93 and 0.945. Chance is 0.5; the standard error with 200
    held-out pairs is about 0.02.
    """
    args = ("max_steps=28", "global_batch_size=16", "output_dir=out")
    assert reward_workspace.run_tune("run", "reward", "nano/reward", *args).code == 0
    last = [line for line in read_metrics("out") if "eval/loss" in line][-1]
    assert last["eval/rewards/accuracies"] >= 0.85
