"""Runs of imported configs of TRL compared with TRL's trainers: the same first losses."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.helpers.random_checkpoints import load_transformers_model, make_checkpoint
from tests.helpers.trl_runs import make_text_generator, step_metrics, unshuffled, write_rows
from tunekit.cli import recipe_loader
from tunekit.config.load import load_config
from tunekit.importers import imported

STEPS, BATCH = 3, 4
SHARED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "use_cpu": True}
SHARED |= {"bf16": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
SHARED |= {"train_sampling_strategy": "sequential", "learning_rate": 1e-3, "adam_epsilon": 0.1, "max_length": 24}


def make_rows(kind: str) -> list[dict[str, Any]]:
    random_text, rows = make_text_generator(), []
    for _ in range(STEPS * BATCH):
        user, answer, other = random_text(1, 6), random_text(2, 12), random_text(2, 12)
        chat = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        rows.append(
            {
                "messages": {"messages": chat},
                "text": {"text": f"{user} {answer}"},
                "completion": {"prompt": user, "completion": f" {answer}"},
                "pairs": {
                    "prompt": chat[:1],
                    "chosen": chat[1:],
                    "rejected": [{"role": "assistant", "content": other}],
                },
            }[kind]
        )
    return rows


def run_imported(values: dict[str, Any], task: str) -> list[float]:
    """Losses of the imported config."""
    words = [word for name, value in values.items() for word in to_words(name, value)]
    result = imported.import_command(["trl", task, *words], None, recipe_loader.keys_of_recipe)
    recipe = recipe_loader.load_recipe(result.draft.recipe)
    cfg = load_config(recipe.CONFIG, result.text)
    recipe.main(cfg)
    return [line["loss"] for line in step_metrics(cfg.output_dir)]


def to_words(name: str, value: Any) -> list[str]:
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}", str(value)]


def run_trl(trainer_class: Any, args: Any, model: Path, rows: list[dict[str, Any]], **options: Any) -> list[float]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
    trainer = unshuffled(trainer_class)(
        load_transformers_model(model).train(),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        **options,
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def prepare(folder: Path, kind: str) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """Checkpoint, rows, and the arguments that both sides get."""
    model, rows = make_checkpoint(folder / "model", "llama3.2"), make_rows(kind)
    source = write_rows(folder, rows)
    names = {"model_name_or_path": str(model), "dataset_name": source, "output_dir": str(folder / "run")}
    return model, rows, names


@pytest.mark.parametrize("kind", ["messages", "text", "completion"])
def test_sft_has_the_losses_of_trl(kind: str, tmp_path: Path) -> None:
    model, rows, names = prepare(tmp_path, kind)
    args = SFTConfig(**SHARED, output_dir=str(tmp_path / "theirs"))
    expected = run_trl(SFTTrainer, args, model, rows)
    assert run_imported(names | SHARED, "sft") == pytest.approx(expected, rel=1e-4)
    assert abs(expected[-1] - expected[0]) > 1e-3


@pytest.mark.parametrize("options", [{"beta": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]}])
def test_dpo_has_the_losses_of_trl(options: dict[str, Any], tmp_path: Path) -> None:
    model, rows, names = prepare(tmp_path, "pairs")
    shared = SHARED | options
    if "loss_weights" in options:  # TRL averages the likelihood over each micro-batch, and not over the step
        shared |= {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1}
    args = DPOConfig(**shared, output_dir=str(tmp_path / "theirs"))
    expected = run_trl(DPOTrainer, args, model, rows)
    assert run_imported(names | shared, "dpo") == pytest.approx(expected, rel=2e-4)


def test_lora_has_the_first_loss_of_trl(tmp_path: Path) -> None:
    """Before the first step, an adapter changes nothing: later losses depend on its random initialization."""
    model, rows, names = prepare(tmp_path, "messages")
    args = SFTConfig(**SHARED, output_dir=str(tmp_path / "theirs"))
    peft_config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    expected = run_trl(SFTTrainer, args, model, rows, peft_config=peft_config)
    lora = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    assert run_imported(names | SHARED | lora, "sft")[0] == pytest.approx(expected[0], rel=1e-4)
