"""The recipe of rewards against TRL's trainer, and where it has none against transformers and torch: the same start,
the same rows, the same steps and what they leave."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from tests.checkpoints import make_checkpoint, relative_error
from tests.recipes.stepwise import BATCH, PLAIN, STEPS, figures, in_order, texts, told, whole_steps, written
from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint import atomic, save_model
from tunekit.data.datasets import PreferenceDataset
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.distributed.context import DistributedContext
from tunekit.losses.reward import BradleyTerry, Classification, ProcessReward, Regression, RewardLoss
from tunekit.optim.config import SGDConfig
from tunekit.recipes import reward

# What the tokenizer of these checkpoints pads with.
PAD = 1


def rows(folder: Path) -> str:
    """Pairs of many lengths."""
    words, lines = texts(), []
    for i in range(BATCH * STEPS):
        pair = {"prompt": f"{words(1, 9)} ", "chosen": words(1, 20), "rejected": words(1, 20), "margin": i / 4}
        steps = {"completions": [words(1, 5), words(1, 5)], "labels": [i % 2 > 0, i % 3 > 0]}
        lines.append(pair | steps | {"text": words(1, 20), "label": i % 3})
    return written(folder, lines)


def config(folder: Path, shape: str = "llama3.2", **changes: Any) -> reward.RewardConfig:
    cfg = reward.RewardConfig(
        model=str(make_checkpoint(folder / "model", shape)),
        data=PreferenceDataset(rows(folder)),
        output_dir=str(folder / "run"),
        optimizer=SGDConfig(lr=0.05, momentum=0.0),
        **PLAIN,
    )
    return replace(cfg, **changes)


def started(cfg: reward.RewardConfig, folder: Path) -> transformers.PreTrainedModel:
    """The model that training begins with, as transformers opens it."""
    source = build.read_checkpoint(cfg)
    model = build.build_model(
        source, cfg.quantization, NoAdapter(), cfg.precision, cfg.memory, DistributedContext(cfg.seed, "cpu")
    )
    with atomic.AtomicDir(folder / "start") as out:
        save_model.save_model(out, model, source, quiet=True)
    return opened(folder / "start")


def opened(folder: Path) -> transformers.PreTrainedModel:
    each = "ForTokenClassification" in (folder / "config.json").read_text()
    auto: Any = (
        transformers.AutoModelForTokenClassification if each else transformers.AutoModelForSequenceClassification
    )
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def trl_steps(cfg: reward.RewardConfig, model: transformers.PreTrainedModel, folder: Path) -> tuple[list[dict], Any]:
    """Figures of every step of TRL's trainer on the documents of each of our steps, and the model behind the last."""
    data, lines = whole_steps(cfg), []
    for step in range(STEPS):
        (part,) = data[step]
        texts = [part.tokens[part.document_ids == i].tolist() for i in range(2 * BATCH)]
        pairs = zip(texts[::2], texts[1::2], part.margins.tolist(), strict=True)
        lines += [{"chosen_ids": one, "rejected_ids": other, "margin": margin} for one, other, margin in pairs]
    assert isinstance(cfg.loss, BradleyTerry)
    args = RewardConfig(
        **told(cfg), max_length=None, center_rewards_coefficient=cfg.loss.center_rewards_coefficient or None
    )
    words = transformers.AutoTokenizer.from_pretrained(cfg.model)
    words.pad_token = words.convert_ids_to_tokens(PAD)
    rows = datasets.Dataset.from_list(lines)
    trainer = in_order(RewardTrainer)(model, args, train_dataset=rows, processing_class=words)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line], trainer.model


def agrees(cfg: reward.RewardConfig, folder: Path) -> None:
    model = started(cfg, folder)
    wanted, other = trl_steps(cfg, model, folder)
    reward.main(cfg)
    found = figures(cfg.output_dir)
    names = {"loss": "loss", "grad_norm": "grad_norm", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}
    names |= {"rewards/max": "max_reward", "rewards/mean": "mean_reward", "rewards/min": "min_reward"}
    for ours, theirs in names.items():
        exact = [line[ours] for line in found]
        assert exact == pytest.approx([float(line[theirs]) for line in wanted], rel=1e-5, abs=1e-6), ours
    assert abs(wanted[-1]["loss"] - wanted[0]["loss"]) > 1e-2, "something was learnt"
    mine = opened(folder / "run" / "final").state_dict()
    for name, tensor in other.state_dict().items():
        assert relative_error(mine[name], tensor) < 1e-5, name


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_a_step_is_that_of_trl(center: float, tmp_path: Path) -> None:
    agrees(config(tmp_path, loss=BradleyTerry(center)), tmp_path)


def torch_steps(cfg: reward.RewardConfig, model: transformers.PreTrainedModel) -> list[dict[str, float]]:
    """Losses that transformers computes from labels, with steps of torch."""
    data = whole_steps(cfg)
    optimizer, lines = torch.optim.SGD(model.parameters(), cfg.optimizer.lr), []
    model.eval()  # where it scores tokens it drops some of what it reads, and we do not
    for step in range(STEPS):
        (part,) = data[step]
        assert part.labels is not None and part.document_ids is not None
        labels = part.labels if isinstance(cfg.loss, Regression) else part.labels.long()
        labels = part.targets if isinstance(cfg.loss, ProcessReward) else labels
        loss = model(part.tokens, attention_mask=(part.document_ids >= 0).long(), labels=labels).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        lines.append({"loss": loss.item(), "grad_norm": norm.item()})
    return lines


@pytest.mark.parametrize("loss", [Classification(3), Regression(), ProcessReward()], ids=["classes", "values", "steps"])
def test_a_step_of_labels_is_that_of_transformers(loss: RewardLoss, tmp_path: Path) -> None:
    """IGNORE is what transformers ignores; a mean of documents of one batch is that of a step."""
    source = rows(tmp_path)
    data = StepwiseDataset(source, step_separator=" w7 ") if isinstance(loss, ProcessReward) else LabeledDataset(source)
    cfg = config(tmp_path, loss=loss, data=data)
    other = started(cfg, tmp_path)
    wanted = torch_steps(cfg, other)
    reward.main(cfg)
    found = figures(cfg.output_dir)
    for name in ("loss", "grad_norm"):
        exact = [line[name] for line in found]
        assert exact == pytest.approx([line[name] for line in wanted], rel=1e-5), name
    mine = opened(tmp_path / "run" / "final").state_dict()
    assert all(relative_error(mine[name], tensor) < 1e-5 for name, tensor in other.state_dict().items())
