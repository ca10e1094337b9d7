"""Steps of the preference recipe compared with TRL's trainers: same rows and initial weights, losses, gradients and
weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

from tests.helpers.random_checkpoints import (
    load_inference_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
)
from tests.helpers.trl_runs import (
    BATCH,
    PROPORTIONAL_ADAMW,
    SHARED_OPTIONS,
    STEPS,
    make_text_generator,
    open_full_steps,
    step_metrics,
    trl_options,
    unshuffled,
    write_rows,
)
from tunekit.data.datasets import PreferenceDataset as Pairs
from tunekit.data.datasets import UnpairedPreferenceDataset
from tunekit.losses.dpo import DPO
from tunekit.losses.preference_base import PreferenceLoss
from tunekit.losses.reference_free import ORPO
from tunekit.losses.unpaired import KTO
from tunekit.recipes import preference


def write_preference_rows(folder: Path) -> str:
    """Prompts and answers of all lengths; every third row is labeled undesirable."""
    random_text, lines = make_text_generator(), []
    for i in range(STEPS * BATCH):
        row = {
            "prompt": random_text(1, 9) + " ",
            "chosen": random_text(1, 15),
            "rejected": random_text(1, 15),
            "label": i % 3 > 0,
        }
        lines.append(row | {"completion": row["chosen"]})
    return write_rows(folder, lines)


def make_config(
    folder: Path, data: Pairs | UnpairedPreferenceDataset, loss: PreferenceLoss, family: str = "llama3.2"
) -> preference.PreferenceConfig:
    return preference.PreferenceConfig(
        model=str(make_checkpoint(folder / "model", family)),
        data=data,
        output_dir=str(folder / "run"),
        loss=(loss,),
        optimizer=PROPORTIONAL_ADAMW,
        **SHARED_OPTIONS,
    )


def split_documents(cfg: preference.PreferenceConfig) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer tokens of each document."""
    (dataset,) = open_full_steps(cfg).datasets
    docs = (dataset[i] for i in range(len(dataset)))
    split = [(document.tokens.tolist(), int(document.loss_mask.argmax())) for document in docs]
    return [(ids[:start], ids[start:]) for ids, start in split]


def train_with_trl(
    kind: Any, args_class: type, cfg: preference.PreferenceConfig, lines: list[dict], **options: Any
) -> Any:
    """TRL trainer after the steps, on tokenized rows in order."""

    class Ours(unshuffled(kind)):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def tokenize_row(self, row: dict, model: Any = None) -> dict:
            return row

    model = load_transformers_model(Path(cfg.model)).train()
    model.generation_config.eos_token_id = model.config.eos_token_id
    args = args_class(**trl_options(cfg), **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
    trainer = Ours(model, args=args, train_dataset=datasets.Dataset.from_list(lines), processing_class=tokenizer)
    trainer.train()
    return trainer


def compare_with_run(cfg: preference.PreferenceConfig, trainer: Any, names: tuple[str, ...]) -> None:
    """Compare the metrics of each step and the model after the last one."""
    preference.main(cfg)
    metrics = step_metrics(cfg.output_dir)
    expected = [line for line in trainer.state.log_history if "loss" in line]
    assert len(metrics) == len(expected) == STEPS
    for ours, them in zip(metrics, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(float(them["grad_norm"]), rel=3e-5)
        for name in names:
            bound = 1e-6 * abs(ours.get("logps/chosen", 1.0))  # rewards are differences of log-probabilities
            assert ours[name] == pytest.approx(float(them[name]), rel=1e-5, abs=max(1e-5, bound)), name
    assert abs(metrics[-1]["loss"] - metrics[0]["loss"]) > 1e-2, "the loss changed"
    with torch.no_grad():
        assert (
            relative_error(
                load_inference_model(Path(cfg.output_dir))(random_tokens()),
                trainer.model.eval()(random_tokens()).logits,
            )
            < 1e-5
        )


METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


@pytest.mark.parametrize("ld_alpha", [None, 0.3])
def test_dpo_matches_trl(ld_alpha: float | None, tmp_path: Path) -> None:
    """Also LD-DPO, which reduces the weight of tokens beyond the length of the other answer."""
    cfg = make_config(tmp_path, Pairs(write_preference_rows(tmp_path), shuffle=False), DPO())
    cfg = cfg if ld_alpha is None else replace(cfg, ld_alpha=ld_alpha)
    answers = split_documents(cfg)
    pairs = zip(answers[::2], answers[1::2], strict=True)
    lines = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for (p, c), (_, r) in pairs]
    trainer = train_with_trl(DPOTrainer, DPOConfig, cfg, lines, max_length=None, ld_alpha=ld_alpha, beta=0.1)
    compare_with_run(cfg, trainer, (*METRICS, "rewards/accuracies", "entropy"))


def test_router_loss_matches_trl(tmp_path: Path) -> None:
    """The load-balancing loss of a mixture of experts is added to the loss of the pairs."""
    data = Pairs(write_preference_rows(tmp_path), shuffle=False)
    cfg = replace(make_config(tmp_path, data, DPO(), "mixtral"), router_aux_loss_coef=0.5, micro_batch_size=BATCH)
    answers = split_documents(cfg)
    pairs = zip(answers[::2], answers[1::2], strict=True)
    lines = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for (p, c), (_, r) in pairs]
    options = {"max_length": None, "beta": 0.1, "router_aux_loss_coef": 0.5}
    trainer = train_with_trl(DPOTrainer, DPOConfig, cfg, lines, **options)
    compare_with_run(cfg, trainer, (*METRICS, "aux_loss"))


def test_kto_matches_trl(tmp_path: Path) -> None:
    """The mismatched answer is that of the next row of the step."""
    cfg = make_config(
        tmp_path,
        UnpairedPreferenceDataset(write_preference_rows(tmp_path), shuffle=False),
        KTO(desirable_weight=1.2, beta=0.3),
    )
    answers = split_documents(cfg)
    mismatched = [(i + 1) % BATCH + i // BATCH * BATCH for i in range(len(answers))]
    lines = [
        {"prompt_ids": p, "completion_ids": c, "KL_completion_ids": answers[n][1], "label": i % 3 > 0}
        for i, ((p, c), n) in enumerate(zip(answers, mismatched, strict=True))
    ]
    options = {"beta": 0.3, "desirable_weight": 1.2, "max_length": None}
    trainer = train_with_trl(KTOTrainer, KTOConfig, cfg, lines, **options)
    compare_with_run(cfg, trainer, (*METRICS, "kl", "entropy"))


def test_orpo_matches_trl(tmp_path: Path) -> None:
    cfg = make_config(tmp_path, Pairs(write_preference_rows(tmp_path), shuffle=False), ORPO(beta=0.2))
    answers, lines = split_documents(cfg), []
    for (prompt, chosen), (_, rejected) in zip(answers[::2], answers[1::2], strict=True):
        line: dict[str, Any] = {"prompt": "", "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            line |= {
                f"{name}_input_ids": prompt + answer,
                f"{name}_attention_mask": [1] * len(prompt + answer),
                f"{name}_labels": [-100] * len(prompt) + answer,
            }
        lines.append(line)
    trainer = train_with_trl(ORPOTrainer, ORPOConfig, cfg, lines, beta=0.2, remove_unused_columns=False)
    compare_with_run(cfg, trainer, ("loss",))
