"""What a person meets who trains a model that scores: mistakes, figures, stopped runs, and what others make of it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from tests.recipes.conftest import SHORT, Work
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
NAMES = ("even", "odd")


def rows(name: str) -> tuple[str, str]:
    return f"data.source={name}.jsonl", f"eval_data.source={name}_held.jsonl"


NAMED = ("data={kind: labeled, source: names.jsonl, class_names: [even, odd]}", "loss=classification")
NAMED += ("eval_data={kind: labeled, source: names_held.jsonl, class_names: [even, odd]}",)
KINDS = {
    "pairs": (),
    "names": NAMED,
    "classes": (*rows("classes"), "loss={kind: classification, num_labels: 3}"),
    "values": (*rows("values"), "loss=regression"),
    "steps": (*rows("steps"), "loss=process_reward"),
}


def written(n: int) -> dict[str, dict[str, Any]]:
    """A row of each kind about a number."""
    asked, text = f"What is {n} plus {n * n}?", f"It is {n + n * n}"
    told = {"chosen": text, "rejected": f"It is {n + n * n + 7}"}
    pair = {name: [{"role": "assistant", "content": said}] for name, said in told.items()}
    steps = {"prompt": asked + "\n", "completions": [f"{n * n} and {n}", text], "labels": [n % 2 > 0, n % 3 > 0]}
    return {
        "pairs": {"prompt": [{"role": "user", "content": asked}], **pair, "margin": n % 3 / 4},
        "names": {"text": text, "label": NAMES[n % 2]},
        "classes": {"text": text, "label": n % 3},
        "values": {"text": text, "label": n / 10},
        "steps": steps,
    }


@pytest.fixture
def scored(work: Work) -> Work:
    """A folder with `reward.yaml`, rows of each kind and held-out ones."""
    for end, numbers in (("", range(1, 17)), ("_held", range(100, 105))):
        for kind in KINDS:
            lines = [json.dumps(written(n)[kind]) + "\n" for n in numbers]
            Path(f"{kind}{end}.jsonl").write_text("".join(lines))
    Path("reward.yaml").write_text((CONFIG + SHORT).format(model=work.model))
    return work


@pytest.mark.parametrize(("changes", "told"), [
    (("loss=dpo",), "unknown kind 'dpo'"),
    (("loss.center_rewards_coefficient=-1",), "loss.center_rewards_coefficient: must not be below 0, not -1.0"),
    (("loss=classification", "loss.num_labels=1"), "loss.num_labels: must be 2 or more, not 1"),
    ((*NAMED, "loss.num_labels=3"), "loss.num_labels: 3, but the rows name 2: leave one of both out"),
    ((*NAMED, "loss=regression"), "data.class_names: `loss: regression` learns numbers: leave it out"),
    ((*NAMED[:2], NAMED[2].replace("even, odd", "odd, even")), "eval_data.class_names: are not those of `data`"),
    ((rows("values")[1],), "eval_data: these are labeled rows, and `loss: bradley_terry` learns from preference rows"),
    (("parallel.tp=2",), "parallel.tp: a head that scores is too small to be divided: use parallel.dp_shard"),
    (("data={kind: chat, source: pairs.jsonl}",), "data.kind: unknown kind 'chat'"),
    (("data={kind: preference, source: pairs.jsonl}", "loss=process_reward"), "`loss: process_reward` learns "
                                                                              "from stepwise rows"),
    (rows("values"), "these are labeled rows, and `loss: bradley_terry` learns from preference rows"),
    ((*rows("classes"), "loss=classification"), "classes.jsonl:2: the label 2 is none of 2 classes"),
    ((*rows("names"), "loss=classification"), "label: 'odd' needs `class_names`"),
    (("data.excess_length_strategy=split",), "excess_length_strategy: what is said of a text is not said of its "
                                             "parts: truncate or drop"),
    (("forgetting.data.source=pairs.jsonl",), "a model that scores writes nothing whose likelihood could be watched"),
])  # fmt: skip
def test_mistakes(changes: tuple[str, ...], told: str, scored: Work) -> None:
    outcome = scored.tune(*RUN, *changes)
    assert outcome.code == 2
    assert told in outcome.err and "Traceback" not in outcome.err


def test_classes_that_no_row_has(scored: Work) -> None:
    """Before a run and by `tune data`; a label too many is still an error, of held-out rows too."""
    words = (*rows("classes"), "eval_data=null", "loss=classification", "loss.num_labels=5", "max_steps=1")
    told = "data: no row has the label 3, 4: 2 of 5 classes (`loss.num_labels`) cannot be learnt; is that meant?"
    outcome = scored.tune(*RUN, *words)
    assert outcome.code == 0 and f"doubtful: {told}" in outcome.err
    assert told in " ".join(scored.tune("data", "reward.yaml", *words).out.split())
    Path("classes_held.jsonl").write_text('{"text": "It is 3", "label": 1}\n{"text": "It is 4", "label": 3}\n')
    outcome = scored.tune(*RUN, *KINDS["classes"], "output_dir=two")
    assert outcome.code == 2 and "classes_held.jsonl:2: the label 3 is none of 3 classes" in outcome.err


def test_held_out_rows_that_nothing_can_be_learnt_from(scored: Work) -> None:
    """The cure names no key of other rows, and it helps where they are named."""
    with Path("pairs_held.jsonl").open("a") as file:
        file.write('{"prompt": "a", "chosen": "b", "rejected": null}\n')
    for words in (RUN, ("data", "reward.yaml")):
        outcome = scored.tune(*words)
        assert outcome.code == 2 and "pairs_held.jsonl:6" in outcome.err and "data." not in outcome.err
        assert "by `on_bad_row: skip` beside the `source` that names this file" in outcome.err
        assert scored.tune(*words, "eval_data.on_bad_row=skip", "eval_data.max_bad_row_fraction=0.5").code == 0


def test_labels_that_are_all_the_same(scored: Work) -> None:
    Path("same.jsonl").write_text("".join(json.dumps({"text": f"w {n}", "label": 1}) + "\n" for n in range(16)))
    outcome = scored.tune(*RUN, "data.source=same.jsonl", "eval_data=null", "loss=classification")
    assert outcome.code == 2
    assert "data: 100% of the labels are 1: there is little to tell apart; is that meant?" in outcome.err


@pytest.mark.parametrize("changes", [(LORA,), ("adapter={kind: dora, rank: "
                                               "4}", "quantization=nf4", *KINDS["steps"]), NAMED],
                         ids=["lora", "qdora, steps", "full, names"])  # fmt: skip
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    changes: tuple[str, ...], scored: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scored.tune(*RUN, *changes, "output_dir=whole").code == 0
    stop_after(monkeypatch, 2)
    assert scored.tune(*RUN, *changes, "output_dir=stopped").code == 143
    assert scored.tune(*RUN, *changes, "output_dir=stopped").code == 0
    assert scored.same("stopped", "whole")


def figures(out: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


def test_figures(scored: Work) -> None:
    """Of every step, and of held-out rows, after which a run may end early."""
    assert scored.tune(*RUN).code == 0
    names = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies", "mean", "min", "max")}
    for line in (line for line in figures("out") if "loss" in line):
        assert names <= line.keys()
        chosen, rejected = line["rewards/chosen"], line["rewards/rejected"]
        assert line["rewards/margins"] == pytest.approx(chosen - rejected, abs=1e-5)
        assert line["rewards/mean"] == pytest.approx((chosen + rejected) / 2, abs=1e-5)
        assert line["rewards/min"] <= min(chosen, rejected) and max(chosen, rejected) <= line["rewards/max"]
    held = [line for line in figures("out") if "eval/loss" in line]
    assert [line["step"] for line in held] == [0, 3, 5]
    assert all(f"eval/{name}" in held[0] for name in names)
    early = ("max_steps=90", "eval_every=1", "early_stopping_patience=2", "optimizer.lr=1", "output_dir=early")
    assert scored.tune(*RUN, *early).code == 0
    assert figures("early")[-1]["step"] < 90


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_others_score_with_the_code_of_the_card(kind: str, adapter: bool, scored: Work) -> None:
    """What transformers says of a held-out row is what the run has said of it."""
    alone = f"{kind}_held.jsonl"
    first = Path(alone).read_text().splitlines()[0]
    Path(alone).write_text(first + "\n")
    assert scored.tune(*RUN, *KINDS[kind], *[LORA] * adapter, "output_dir=runs/mine").code == 0
    code = code_of("runs/mine/final", scored.model)
    if kind in ("pairs", "steps"):
        code = without_example(code)
    space, row = {}, json.loads(first)
    wanted = figures("runs/mine")[-2]
    if kind == "pairs":
        rewards = []
        for side in ("chosen", "rejected"):
            space = {"messages": row["prompt"] + row[side]}
            exec(code, space)
            rewards.append(space["model"](**space["inputs"]).logits.item())
        assert rewards == pytest.approx([wanted[f"eval/rewards/{s}"] for s in ("chosen", "rejected")], abs=1e-4)
        return
    space = {"prompt": row.get("prompt"), "steps": row.get("completions")}
    exec(code.replace("Once upon a time", row.get("text", "")), space)
    logits = space["model"](**space["inputs"]).logits
    assert logits_loss(kind, logits, row, space) == pytest.approx(wanted["eval/loss"], rel=1e-4)
    if kind == "names":
        assert space["model"].config.id2label == dict(enumerate(NAMES))


def test_steps_behind_messages(scored: Work) -> None:
    """What transformers says of them behind the prompt that its own template writes."""
    row = written(100)["steps"] | {"prompt": [{"role": "user", "content": "What is 100 plus 10000?"}]}
    for name in ("steps", "steps_held"):
        lines = [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
        lines = [line | {"prompt": [{"role": "user", "content": line["prompt"]}]} for line in lines]
        lines = [row] if name == "steps_held" else lines
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert scored.tune(*RUN, *KINDS["steps"]).code == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("out/final")
    model = transformers.AutoModelForTokenClassification.from_pretrained("out/final")
    tokens = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    ends = []
    for step in row["completions"]:
        tokens += tokenizer(step + "\n", add_special_tokens=False)["input_ids"]
        ends.append(len(tokens) - 1)
    logits = model(torch.tensor([tokens])).logits[0, ends]
    labels = torch.tensor([int(label) for label in row["labels"]])
    wanted = torch.nn.functional.cross_entropy(logits, labels).item()
    assert figures("out")[-2]["eval/loss"] == pytest.approx(wanted, rel=1e-4)
    space: dict[str, Any] = {"prompt": row["prompt"], "steps": row["completions"]}
    exec(without_example(code_of("out/final", scored.model)), space)
    assert space["last"].keys() >= set(space["ends"])
    found = space["model"](**space["inputs"]).logits
    assert logits_loss("steps", found, row, space) == pytest.approx(wanted, rel=1e-4)


def logits_loss(kind: str, logits: torch.Tensor, row: dict[str, Any], space: dict[str, Any]) -> float:
    if kind == "values":
        return (logits.item() - row["label"]) ** 2
    if kind == "steps":
        logits, labels = logits[0, [space["last"][end] for end in space["ends"]]], [int(x) for x in row["labels"]]
    else:
        labels = [NAMES.index(row["label"]) if kind == "names" else row["label"]]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item()


def without_example(code: str) -> str:
    """The code of a card for texts that are given to it."""
    return re.sub(r"(messages|prompt, steps) = .*", "", code)


def code_of(folder: str, base: Path) -> str:
    """The code in a card, with folders in place of the names in it."""
    (code,) = re.findall(r"```python\n(.*?)```", Path(folder, "README.md").read_text(), re.S)
    name = Path(folder).parent.name if Path(folder).name == "final" else Path(folder).name
    return code.replace(f'"{name}"', f'"{folder}"').replace(f'"{base.name}"', f'"{base}"')


def test_a_merged_adapter_scores_the_same(scored: Work) -> None:
    """And knows what its classes are called, as does a run that goes on from it."""
    assert scored.tune(*RUN, *NAMED, LORA, "output_dir=runs/mine").code == 0
    assert scored.tune("merge", str(scored.model), "runs/mine", "merged").code == 0
    auto = transformers.AutoModelForSequenceClassification
    base = auto.from_pretrained(scored.model, num_labels=2, pad_token_id=0)
    adapted, merged = PeftModel.from_pretrained(base, "runs/mine/final"), auto.from_pretrained("merged")
    tokens = torch.arange(5, 25)[None]
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits)
    assert merged.config.id2label == dict(enumerate(NAMES))
    assert "`even`, `odd`" in Path("merged/README.md").read_text()
    exec(code_of("merged", scored.model), {})
    assert scored.tune(*RUN, *KINDS["classes"], "loss.num_labels=2", "model=merged").code == 2
    swapped = scored.tune(
        *RUN, *(told.replace("even, odd", "odd, even") for told in NAMED), "model=merged", "output_dir=swapped"
    )
    assert "its classes are even, odd: name them in `data.class_names` in this order" in swapped.err
    Path("classes.jsonl").write_text(Path("names.jsonl").read_text().replace('"even"', "0").replace('"odd"', "1"))
    again = scored.tune(
        *RUN, *rows("classes"), "eval_data=null", "loss=classification", "model=merged", "output_dir=again"
    )
    assert again.code == 0 and "fresh" not in again.err
    assert auto.from_pretrained("again/final").config.id2label == dict(enumerate(NAMES))


def test_a_classifier_of_transformers_goes_on(scored: Work, make: Callable[..., Path]) -> None:
    """With the head that it has."""
    auto = transformers.AutoModelForSequenceClassification
    theirs = auto.from_pretrained(scored.model, num_labels=3, pad_token_id=0)
    theirs.save_pretrained("theirs")
    for file in scored.model.glob("*token*"):
        Path("theirs", file.name).write_bytes(file.read_bytes())
    still = ("optimizer={kind: sgd, lr: 1e-12}", "model=theirs", "output_dir=still")
    outcome = scored.tune(*RUN, *KINDS["classes"], *still)
    assert outcome.code == 0, outcome.err
    ours = auto.from_pretrained("still/final")
    assert torch.equal(ours.score.weight, theirs.score.weight)
    wanted = "theirs: gives 3 scores to a document, and 1 score for a document is wanted"
    assert wanted in scored.tune(*RUN, "model=theirs", "output_dir=other").err


def test_what_scores_is_not_told_how_to_write(scored: Work) -> None:
    """As by transformers: neither a model, nor one that an adapter was merged into, nor one that goes on from it."""
    Path("base").mkdir()
    for file in scored.model.iterdir():
        Path("base", file.name).write_bytes(file.read_bytes())
    Path("base", "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained("base", num_labels=1, pad_token_id=0).save_pretrained("theirs")
    assert not Path("theirs", "generation_config.json").exists()
    assert scored.tune(*RUN, "model=base", "max_steps=1", "output_dir=whole").code == 0
    assert scored.tune(*RUN, "model=base", "max_steps=1", LORA, "output_dir=adapted").code == 0
    assert scored.tune("merge", "base", "adapted", "merged").code == 0
    words = ("tokenizer=base", "model=whole/final", "max_steps=1", "output_dir=more")
    assert scored.tune(*RUN, *words).code == 0
    for folder in ("whole/final", "adapted/final", "merged", "more/final"):
        assert Path(folder, "tokenizer.json").is_file() and not Path(folder, "generation_config.json").exists()


@pytest.mark.parametrize("adapter", [(), (LORA,)], ids=["full", "lora"])
def test_what_scores_writes_no_text(adapter: tuple[str, ...], scored: Work) -> None:
    assert scored.tune(*RUN, *adapter, "max_steps=1").code == 0
    told = "out: gives 1 score to a document and writes no text: name a language model, or go on with it by the recipe"
    for words in (
        ("chat", "out"),
        ("export", "out", "out.gguf"),
        ("run", "generate", "nano/generate", "model=out", "device=cpu"),
        ("run", "evaluate", "nano/tools", "model=out", "device=cpu"),
    ):
        outcome = scored.tune(*words)
        assert outcome.code == 2 and told in outcome.err, (words, outcome.err)
    if not adapter:
        assert told.replace("out", "out/final", 1) in scored.tune("run", "sft", "sft.yaml", "model=out/final").err


@pytest.mark.slow
def test_a_nano_learns_which_answer_is_better(scored: Work) -> None:
    """Half of the config's epochs. Chance is 0.5; 200 held-out pairs leave a standard error of about 0.02."""
    assert scored.tune("run", "reward", "nano/reward", "epochs=1", "output_dir=out").code == 0
    last = [line for line in figures("out") if "eval/loss" in line][-1]
    assert last["eval/rewards/accuracies"] >= 0.9
