"""Whole steps of the recipe against TRL's trainers: the same rows and start, the same losses, gradients and weights."""

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

from tests.checkpoints import (
    load_inference_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
)
from tests.recipes.stepwise import BATCH, PLAIN, STEADY, STEPS, figures, in_order, texts, told, whole_steps, written
from tunekit.data.datasets import PreferenceDataset as Pairs
from tunekit.data.datasets import UnpairedPreferenceDataset
from tunekit.losses.dpo import DPO
from tunekit.losses.reference_free import ORPO
from tunekit.losses.unpaired import KTO
from tunekit.recipes import preference


def rows(folder: Path) -> str:
    """Prompts and answers of all lengths; every third mark is a bad one."""
    words, lines = texts(), []
    for i in range(STEPS * BATCH):
        row = {"prompt": words(1, 9) + " ", "chosen": words(1, 15), "rejected": words(1, 15), "label": i % 3 > 0}
        lines.append(row | {"completion": row["chosen"]})
    return written(folder, lines)


def config(
    folder: Path, data: Pairs | UnpairedPreferenceDataset, loss: preference.OfPairs | preference.OfMarks
) -> preference.PreferenceConfig:
    return preference.PreferenceConfig(
        model=str(make_checkpoint(folder / "model", "llama3.2")),
        data=data,
        output_dir=str(folder / "run"),
        loss=(loss,),
        optimizer=STEADY,
        **PLAIN,
    )


def documents(cfg: preference.PreferenceConfig) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers as our tokens, in order."""
    (part,) = whole_steps(cfg).datasets
    whole = (part[i] for i in range(len(part)))
    split = [(document.tokens.tolist(), int(document.learnt.argmax())) for document in whole]
    return [(ids[:at], ids[at:]) for ids, at in split]


def trained(kind: Any, settings: type, cfg: preference.PreferenceConfig, lines: list[dict], **more: Any) -> Any:
    """TRL's trainer after the steps, on rows that are tokens already, in order."""

    class Ours(in_order(kind)):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def tokenize_row(self, row: dict, model: Any = None) -> dict:
            return row

    model = load_transformers_model(Path(cfg.model)).train()
    model.generation_config.eos_token_id = model.config.eos_token_id
    args = settings(**told(cfg), **more)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
    trainer = Ours(model, args=args, train_dataset=datasets.Dataset.from_list(lines), processing_class=tokenizer)
    trainer.train()
    return trainer


def compare(cfg: preference.PreferenceConfig, trainer: Any, names: tuple[str, ...]) -> None:
    """Every step's figures, and the model behind the last."""
    preference.main(cfg)
    found = figures(cfg.output_dir)
    wanted = [line for line in trainer.state.log_history if "loss" in line]
    assert len(found) == len(wanted) == STEPS
    for ours, them in zip(found, wanted, strict=True):
        assert ours["grad_norm"] == pytest.approx(float(them["grad_norm"]), rel=1e-5)
        for name in names:
            bound = 1e-6 * abs(ours.get("logps/chosen", 1.0))  # rewards are differences of log-probabilities
            assert ours[name] == pytest.approx(float(them[name]), rel=1e-5, abs=max(1e-5, bound)), name
    assert abs(found[-1]["loss"] - found[0]["loss"]) > 1e-2, "something was learnt"
    with torch.no_grad():
        assert (
            relative_error(
                load_inference_model(Path(cfg.output_dir))(random_tokens()),
                trainer.model.eval()(random_tokens()).logits,
            )
            < 1e-5
        )


FIGURES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


@pytest.mark.parametrize("tail", [None, 0.3])
def test_dpo(tail: float | None, tmp_path: Path) -> None:
    """And LD-DPO, for which a token counts less where the other answer has ended."""
    cfg = config(tmp_path, Pairs(rows(tmp_path), shuffle=False), DPO())
    cfg = cfg if tail is None else replace(cfg, ld_alpha=tail)
    answers = documents(cfg)
    pairs = zip(answers[::2], answers[1::2], strict=True)
    lines = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for (p, c), (_, r) in pairs]
    trainer = trained(DPOTrainer, DPOConfig, cfg, lines, max_length=None, ld_alpha=tail, beta=0.1)
    compare(cfg, trainer, (*FIGURES, "rewards/accuracies", "entropy"))


def test_kto(tmp_path: Path) -> None:
    """A mismatched answer is that of the next row of the step, on both sides."""
    cfg = config(
        tmp_path, UnpairedPreferenceDataset(rows(tmp_path), shuffle=False), KTO(desirable_weight=1.2, beta=0.3)
    )
    answers = documents(cfg)
    nexts = [(i + 1) % BATCH + i // BATCH * BATCH for i in range(len(answers))]
    lines = [
        {"prompt_ids": p, "completion_ids": c, "KL_completion_ids": answers[n][1], "label": i % 3 > 0}
        for i, ((p, c), n) in enumerate(zip(answers, nexts, strict=True))
    ]
    more = {"beta": 0.3, "desirable_weight": 1.2, "max_length": None}
    trainer = trained(KTOTrainer, KTOConfig, cfg, lines, **more)
    compare(cfg, trainer, (*FIGURES, "kl", "entropy"))


def test_orpo(tmp_path: Path) -> None:
    cfg = config(tmp_path, Pairs(rows(tmp_path), shuffle=False), ORPO(beta=0.2))
    answers, lines = documents(cfg), []
    for (prompt, chosen), (_, rejected) in zip(answers[::2], answers[1::2], strict=True):
        line: dict[str, Any] = {"prompt": "", "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            line |= {
                f"{name}_input_ids": prompt + answer,
                f"{name}_attention_mask": [1] * len(prompt + answer),
                f"{name}_labels": [-100] * len(prompt) + answer,
            }
        lines.append(line)
    trainer = trained(ORPOTrainer, ORPOConfig, cfg, lines, beta=0.2, remove_unused_columns=False)
    compare(cfg, trainer, ("loss",))
