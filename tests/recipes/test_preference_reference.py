"""Whole steps of the recipe against TRL's trainers: the same rows and start, the same losses, gradients and weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from torch.utils.data import SequentialSampler
from trl import DPOConfig, KTOConfig
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from tests.checkpoints import FP32, error, made, opened, theirs, tokens
from tunekit.data.rows import Marked
from tunekit.data.rows import Preference as Pairs
from tunekit.data.steps.loader import load
from tunekit.data.tokenizer import Tokenizer
from tunekit.losses.comparison import Loss
from tunekit.losses.likely import ORPO
from tunekit.losses.marks import KTO
from tunekit.losses.pairs import DPO
from tunekit.optim import AdamW, Constant
from tunekit.parallel.run import Run
from tunekit.recipes import preference

STEPS, BATCH = 3, 4
# A larger epsilon leaves steps of Adam in proportion where gradients are nearly zero.
STEADY = AdamW(lr=0.05, eps=0.1)


def rows(folder: Path) -> str:
    """Prompts and answers of all lengths; every third mark is a bad one."""
    draw = torch.Generator().manual_seed(7)

    def words(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=draw))
        return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (count,), generator=draw))

    lines = []
    for i in range(STEPS * BATCH):
        row = {"prompt": words(1, 9) + " ", "chosen": words(1, 15), "rejected": words(1, 15), "label": i % 3 > 0}
        lines.append(json.dumps(row | {"completion": row["chosen"]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    return str(folder / "rows.jsonl")


def config(folder: Path, data: Pairs | Marked, loss: Loss) -> preference.Preference:
    return preference.Preference(
        model=str(made(folder / "model", "llama3.2")),
        data=data,
        out=str(folder / "run"),
        loss=(loss,),
        optimizer=STEADY,
        schedule=Constant(),
        precision=FP32,
        device="cpu",
        batch=BATCH,
        micro_batch=2,
        steps=STEPS,
    )


def documents(cfg: preference.Preference) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers as our tokens, in order."""
    (part,) = load(cfg.data, Tokenizer.open(Path(cfg.model)), BATCH, BATCH, Run(0, "cpu")).parts
    whole = (part[i] for i in range(len(part)))
    split = [(document.tokens.tolist(), int(document.learnt.argmax())) for document in whole]
    return [(ids[:at], ids[at:]) for ids, at in split]


def trained(kind: type, settings: type, cfg: preference.Preference, lines: list[dict], **more: Any) -> Any:
    """TRL's trainer after the steps, on rows that are tokens already, in order."""

    class Ours(kind):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def tokenize_row(self, row: dict, model: Any = None) -> dict:
            return row

    model = theirs(Path(cfg.model)).train()
    model.generation_config.eos_token_id = model.config.eos_token_id
    args = settings(
        output_dir=str(Path(cfg.out).with_name("theirs")),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=cfg.optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=cfg.optimizer.eps,
        weight_decay=0.0,
        max_grad_norm=cfg.clip,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
    trainer = Ours(model, args=args, train_dataset=datasets.Dataset.from_list(lines), processing_class=tokenizer)
    trainer.train()
    return trainer


def compare(cfg: preference.Preference, trainer: Any, names: tuple[str, ...]) -> None:
    """Every step's figures, and the model behind the last."""
    preference.main(cfg)
    lines = [json.loads(line) for line in (Path(cfg.out) / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "loss" in line]
    wanted = [line for line in trainer.state.log_history if "loss" in line]
    assert len(found) == len(wanted) == STEPS
    for ours, them in zip(found, wanted, strict=True):
        assert ours["norm"] == pytest.approx(float(them["grad_norm"]), rel=1e-5)
        for name in names:
            bound = 1e-6 * abs(ours.get("logps/chosen", 1.0))  # rewards are differences of log-probabilities
            assert ours[name] == pytest.approx(float(them[name]), rel=1e-5, abs=max(1e-5, bound)), name
    assert abs(found[-1]["loss"] - found[0]["loss"]) > 1e-2, "something was learnt"
    with torch.no_grad():
        assert error(opened(Path(cfg.out))(tokens()), trainer.model.eval()(tokens()).logits) < 1e-5


FIGURES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


@pytest.mark.parametrize("tail", [None, 0.3])
def test_dpo(tail: float | None, tmp_path: Path) -> None:
    """And LD-DPO, for which a token counts less where the other answer has ended."""
    cfg = config(tmp_path, Pairs(rows(tmp_path), shuffle=False), DPO())
    cfg = cfg if tail is None else replace(cfg, tail=tail)
    answers = documents(cfg)
    pairs = zip(answers[::2], answers[1::2], strict=True)
    lines = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for (p, c), (_, r) in pairs]
    trainer = trained(DPOTrainer, DPOConfig, cfg, lines, max_length=None, ld_alpha=tail, beta=0.1)
    compare(cfg, trainer, (*FIGURES, "rewards/accuracies", "entropy"))


def test_kto(tmp_path: Path) -> None:
    """A mismatched answer is that of the next row of the step, on both sides."""
    cfg = config(tmp_path, Marked(rows(tmp_path), shuffle=False), KTO(good=1.2, beta=0.3))
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
