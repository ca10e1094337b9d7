"""Names of other trainers are answered by ours, and what the tables say is so."""

import dataclasses
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import DistillationConfig, DPOConfig, KTOConfig, RewardConfig
from trl.experimental.gkd import GKDConfig

from tunekit.cli import main as cli
from tunekit.cli import recipe_loader, registry
from tunekit.config.choices import ChoiceRegistry, field_slots, iter_slots
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.config.migration_hints import RECIPES, TABLE, KeyHint, find_hint, suggest_recipe

DOCS = Path(__file__).parents[2] / "docs"
OTHERS = {"num_labels", "id2label", "label2id", "margin", "peft_config", "ref_model"}  # of no config class
TRAIN = ("sft", "preference", "reward", "distill")


LISTS = ("optim", "lr_scheduler", "ref_model", "bf16", "train_on_inputs", "loss_type")  # whose values are listed
BASES = {  # what a recipe must be told
    "sft": "model: m\ndata: {source: s}\noutput_dir: o\n",
    "distill": "model: m\ndata: {source: s}\noutput_dir: o\nteacher: {model: t}\n",
    "evaluate": "model: m\ndata: {source: s}\n",
    "generate": "model: m\nprompts: [p]\n",
}


def keys(recipe: str) -> set[str]:
    places = (place for place, _ in iter_slots(recipe_loader.load_recipe(recipe).CONFIG, ChoiceRegistry()))
    return {".".join(part for part in place if part != "0") for place in places}


KEYS = {name: keys(name) for name in registry.list_recipes()}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.names.split()[0]}-{row.key}")
def test_a_line_is_of_use(row: KeyHint) -> None:
    """It is what some recipe answers by: the keys are there, and no line before it hides it."""
    for name in row.names.split():
        assert any(find_hint(name.split("."), found) is row for found in KEYS.values()), name


def fits(row: KeyHint) -> list[str]:
    """The recipes that answer by a line."""
    return [
        name
        for name, found in KEYS.items()
        if any(find_hint(word.split("."), found) is row for word in row.names.split())
    ]


def mistakes(recipe: str, *words: str) -> list[str]:
    """What is wrong with the words, if a recipe is told all that it must be and these."""
    if any(word.startswith("data.kind=") for word in words):
        words = (*words, "data.source=s")  # another kind begins anew
    try:
        load_config(recipe_loader.load_recipe(recipe).CONFIG, BASES.get(recipe, BASES["sft"]), words)
    except ConfigError as error:
        return [*error.lines]
    return []


def examples(row: KeyHint) -> list[str]:
    """What is written `key=value` in a line, and what it says is written behind the key itself."""
    found = re.findall(r"(?<![\w.])[a-z_.]+=(?:'[^']+'|[\w\[\]]+)", row.how)
    found += [f"{row.key}={whole}" for whole in re.findall(r"^(?:\{.*\}|\[.*\])$|\[\w+\]", row.how)]
    return [word.replace("'", "").replace("=N", "=2") for word in found]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.names.split()[0]}-{row.key}-{row.where}")
def test_what_a_line_says_is_so_in_each_recipe_that_answers_by_it(row: KeyHint) -> None:
    named = re.findall(rf"recipe ({'|'.join(KEYS)})\b", row.how)
    for recipe in fits(row):
        told = named[0] if named else recipe
        assert not (wrong := mistakes(told, *examples(row))), (told, wrong)
        if row.key:
            unknown = [
                line
                for line in mistakes(recipe, *examples(row), f"{row.key}=?")
                if "unknown key" in line and "belongs to" not in line
            ]
            assert not unknown, (recipe, unknown)
        parts = {part for key in KEYS[told] for part in key.split(".")}
        assert {word for word in re.findall(r"`(\w+)`", row.how) if word != "all"} <= parts, recipe
        dotted = re.findall(r"(?<![\w.])([a-z_]+\.(?!kind\b)[a-z_]+)\b", row.how)
        assert set(dotted) <= KEYS[told], recipe
        for name in {row.names.split()[0]} & {*LISTS}:
            values = [word for word in re.split(r",? or |, ", row.how.rpartition(": ")[2]) if word.isalnum()]
            for value in values:
                words = (f"{row.key}={value}", *(["adapter=lora"] if value == "disable_adapter" else []))
                assert not (wrong := mistakes(recipe, *words)), (recipe, name, wrong)


def test_lists_of_values_are_read() -> None:
    """The test above would pass if it found no values at all."""
    (optim,) = (row for row in TABLE if row.names == "optim")
    assert mistakes("sft", "optimizer=adam") and optim.how == "adamw, adamw8bit, muon or sgd"
    found = {example for row in TABLE for example in examples(row)}
    assert {
        "reference=precomputed",
        "adapter=lora",
        "loss=[{kind: dpo, weight: 0.8}, sft]",
        "report_to=[wandb]",
    } <= found


def test_a_key_of_ours_is_not_taken_for_a_foreign_one() -> None:
    for recipe in TRAIN:
        own = set(field_slots(recipe_loader.load_recipe(recipe).CONFIG))
        assert not own & {name for row in TABLE for name in row.names.split()}, recipe


@pytest.mark.parametrize(
    ("config", "word", "says"),
    [
        ("nano/dpo", "learning_rate", "here it is optimizer.lr"),
        (
            "nano/dpo",
            "per_device_train_batch_size",
            "here it is micro_batch_size: `global_batch_size` is the number of rows",
        ),
        ("nano/dpo", "gradient_accumulation_steps", "here it is global_batch_size: "),
        ("nano/dpo", "num_train_epochs", "here it is epochs"),
        ("nano/dpo", "precompute_ref_log_probs", "here it is reference: set reference=precomputed"),
        ("nano/dpo", "max_length", "'max_length' is a key of data"),
        ("nano/dpo", "ref_model", "here it is reference: always the initial policy"),
        ("nano/dpo", "loss_type", "here it is loss: set loss=ipo"),
        ("nano/dpo", "reward_weights", "reward functions belong to GRPO, which is not supported"),
        ("nano/dpo", "beta", "'beta' is a key of loss.0"),
        ("nano/dpo", "loss.0.smoothing", "here it is loss.0.label_smoothing"),
        ("nano/dpo", "label_smoothing", "'label_smoothing' is a key of loss.0"),
        (
            "nano/dpo",
            "label_smoothing_factor",
            "which this recipe does not use; recipe sft has loss.label_smoothing",
        ),
        ("nano/tools_lora", "label_smoothing_factor", "here it is loss.label_smoothing: of cross-entropy"),
        ("nano/generate", "load_in_4bit", "here it is quantization: set quantization=nf4"),
        ("nano/known", "max_completion_length", "here it is sampling.max_new_tokens"),
        ("nano/dpo", "optimizer.learning_rate", "here it is optimizer.lr"),
        ("nano/distill", "lmbda", "'lmbda' is a key of on_policy"),
        ("nano/distill", "temperature", "here it is loss.temperature"),
        ("nano/distill", "beta", "here it is loss.beta: requires loss=jensen_shannon"),
        ("nano/distill", "max_completion_length", "here it is on_policy.max_new_tokens"),
        ("nano/dpo", "max_completion_length", "here it is data.max_length"),
        ("nano/reward", "batch", "here it is global_batch_size"),
        ("nano/reward", "loss.center", "here it is loss.center_rewards_coefficient"),
        ("nano/reward", "data.too_long", "here it is data.excess_length_strategy"),
        ("nano/dpo", "data.length", "here it is data.max_length"),
        ("nano/tools_lora", "num_labels", "only recipe reward has classes"),
    ],
)
def test_a_name_of_another_trainer_is_answered(config: str, word: str, says: str) -> None:
    line = mistake(config, f"{word}=1")
    assert f"{word}: unknown key" in line and says in line


def mistake(config: str, word: str) -> str:
    """The only one that a config has with a word of the command line."""
    path = registry.find_config(config)
    recipe = registry.recipe_of_config(path)
    assert recipe is not None
    with pytest.raises(ConfigError) as caught:
        load_config(recipe_loader.load_recipe(recipe).CONFIG, path, [word])
    (line,) = caught.value.lines
    return line


@pytest.mark.parametrize(
    ("config", "word", "says"),
    [
        (
            "nano/distill",
            "teacher=g/teacher",
            "there is online or offline; for the model 'g/teacher', write teacher.model=g/",
        ),
        ("nano/dpo", "data=my.jsonl", "; for the source 'my.jsonl', write data.source=my.jsonl"),
        ("nano/dpo", "loss=dop", "did you mean 'dpo'? there is, for pairs, compared with a reference: dpo, sigmoid"),
        (
            "nano/dpo",
            "loss=dop",
            "; for pairs, without a reference: sft, cpo, simpo, alphapo, orpo; for single answers",
        ),
        ("nano/dpo", "loss=dop", "that are marked: kto, bco, apo_zero_unpaired"),
    ],
)
def test_a_word_that_is_no_kind_is_answered(config: str, word: str, says: str) -> None:
    assert says in mistake(config, word)


@pytest.mark.parametrize(
    ("recipe", "text", "words", "says"),
    [
        ("sft", "data: {kind: alpaca, source: rows.jsonl}\n", (), "data.kind: unknown kind 'alpaca'"),
        ("sft", "data: {source: rows.jsonl}\n", ("data.kind=alpaca",), "data.kind: unknown kind 'alpaca'"),
        (
            "distill",
            "data: {source: s}\nteacher: {kind: stored_once, model: x, logits_dir: f}\n",
            (),
            "teacher.kind: unknown kind 'stored_once'",
        ),
    ],
)
def test_what_is_written_as_a_kind_is_taken_for_nothing_else(recipe: str, text: str, words, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe_loader.load_recipe(recipe).CONFIG, f"model: m\noutput_dir: o\n{text}", words)
    (line,) = caught.value.lines
    assert says in line and "write" not in line


def test_an_element_that_is_told_has_the_key() -> None:
    text = BASES["sft"] + "loss: [sft, {kind: dpo, weight: 0.5}]\n"
    with pytest.raises(ConfigError) as caught:
        load_config(recipe_loader.load_recipe("preference").CONFIG, text, ["label_smoothing=0.1"])
    assert "'label_smoothing' is a key of loss" in caught.value.lines[0]
    load_config(recipe_loader.load_recipe("preference").CONFIG, text, ["loss.1.label_smoothing=0.1"])


def test_in_a_file_such_a_word_is_answered_in_yaml() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            recipe_loader.load_recipe("distill").CONFIG,
            "model: m\ndata: {source: s}\noutput_dir: o\nteacher: g/teacher\n",
        )
    assert caught.value.lines[0].endswith("; for the model 'g/teacher', write teacher: {model: g/teacher}")
    with pytest.raises(ConfigError) as caught:
        load_config(
            recipe_loader.load_recipe("distill").CONFIG, "model: m\ndata: {source: s}\noutput_dir: o\nteacher: onlin\n"
        )
    assert caught.value.lines[0].endswith("did you mean 'online'? there is online or offline")


def test_losses_that_are_told_are_losses() -> None:
    slot = next(
        slot
        for place, slot in iter_slots(recipe_loader.load_recipe("preference").CONFIG, ChoiceRegistry())
        if place == ("loss", "0")
    )
    assert set(RECIPES[0][0].split()) <= set(ChoiceRegistry().kinds(slot))
    for word in (word for names, _ in RECIPES for word in names.split()):
        if found := re.search(r"tune run (\w+) CONFIG (loss=\S+)", suggest_recipe(word) or ""):
            assert not mistakes(found[1], found[2]), word
    for names, _ in RECIPES:
        assert not set(names.split()) & set(registry.list_recipes())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("dpo", "it is a loss of recipe preference: tune run preference CONFIG loss=dpo"),
        ("KTO", "tune run preference CONFIG loss=kto"),
        ("grpo", "online reinforcement learning is not supported"),
        ("prm", "tune run reward CONFIG loss=process_reward"),
        ("rm", "tune run reward CONFIG loss=bradley_terry"),
        ("regression", "tune run reward CONFIG loss=regression"),
        ("full_dpo_distributed", "with adapter=none"),
        ("full_finetune_single_device", "tune run sft llama3_2/1b_full"),
    ],
)
def test_a_recipe_of_another_trainer_is_answered(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", word, "nano/dpo"]) == 2
    assert f"error: no recipe '{word}': " in (told := capsys.readouterr().err) and says in told
    assert suggest_recipe("sft") is None


def test_configs_that_are_told_are_there() -> None:
    words = {word.strip(",:") for _, how in RECIPES for word in how.split() if "/" in word}
    assert words <= set(registry.list_configs())
    told = [re.findall(r"tune run (\w+) (\w+/\w+)((?: \S+=\S+)*)", how) for _, how in RECIPES]
    assert sum(map(len, told)) > 4
    for recipe, config, said in (found for line in told for found in line):
        path = registry.find_config(config)
        assert registry.recipe_of_config(path) == recipe
        load_config(recipe_loader.load_recipe(recipe).CONFIG, path, said.split())


@pytest.mark.parametrize(
    ("page", "configs"),
    [("reward", (RewardConfig,)), ("distill", (GKDConfig, DistillationConfig)), ("preference", (DPOConfig, KTOConfig))],
)
def test_tables_name_keys_of_trl(page: str, configs: tuple[type, ...]) -> None:
    """What stands in the first column is a key of TRL, and a number in brackets behind it a default of it."""
    fields = [(field.name, field.default) for one in (TrainingArguments, *configs) for field in dataclasses.fields(one)]
    text = (DOCS / f"{page}.md").read_text().partition("## From TRL")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    told = {code.partition("=")[0] for row in rows for code in row.split("`")[1::2] if code[0].islower()}
    assert len(told) > 4 and told - OTHERS <= {name for name, _ in fields}
    for name, brackets in (found for row in rows for found in re.findall(r"`([a-z_]+)`,? \(([^)]*\d[^)]*)\)", row)):
        assert {float(number) for number in re.findall(r"(?<!\w)[\d.]+(?:e-\d+)?", brackets)} <= {
            float(default) for field, default in fields if field == name and isinstance(default, int | float)
        }, name
