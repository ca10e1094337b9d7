"""Steps of the reward recipe compared with TRL's trainer, or with transformers and torch: same initial weights,
rows, metrics and final weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from tests.helpers.random_checkpoints import make_checkpoint, relative_error
from tests.helpers.trl_runs import (
    BATCH,
    SHARED_OPTIONS,
    STEPS,
    make_text_generator,
    open_full_steps,
    step_metrics,
    trl_options,
    unshuffled,
    write_rows,
)
from tunekit import build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint import atomic, save_model
from tunekit.data.datasets import PreferenceDataset
from tunekit.data.embedding_datasets import RerankingDataset, RerankingPairsDataset
from tunekit.data.reward_datasets import LabeledDataset, StepwiseDataset
from tunekit.distributed.context import DistributedContext
from tunekit.losses.reward import (
    BinaryCrossEntropy,
    BradleyTerry,
    Classification,
    ProcessReward,
    Regression,
    RewardLoss,
)
from tunekit.optim.config import SGDConfig
from tunekit.recipes import reward

# Padding token of these checkpoints.
PAD = 1


def write_reward_rows(folder: Path) -> str:
    """Pairs of many lengths."""
    random_text, lines = make_text_generator(), []
    for i in range(BATCH * STEPS):
        pair = {
            "prompt": f"{random_text(1, 9)} ",
            "chosen": random_text(1, 20),
            "rejected": random_text(1, 20),
            "margin": i / 4,
        }
        steps = {"completions": [random_text(1, 5), random_text(1, 5)], "labels": [i % 2 > 0, i % 3 > 0]}
        lines.append(pair | steps | {"text": random_text(1, 20), "label": i % 3})
    return write_rows(folder, lines)


def make_config(folder: Path, shape: str = "llama3.2", **changes: Any) -> reward.RewardConfig:
    cfg = reward.RewardConfig(
        model=str(make_checkpoint(folder / "model", shape)),
        data=PreferenceDataset(write_reward_rows(folder)),
        output_dir=str(folder / "run"),
        optimizer=SGDConfig(lr=0.05, momentum=0.0),
        **SHARED_OPTIONS,
    )
    return replace(cfg, **changes)


def save_initial_model(cfg: reward.RewardConfig, folder: Path) -> transformers.PreTrainedModel:
    """The initial model of a run, loaded by transformers."""
    source = build.read_checkpoint(cfg)
    model = build.build_model(
        source, cfg.quantization, NoAdapter(), cfg.precision, cfg.memory, DistributedContext(cfg.seed, "cpu")
    )
    with atomic.AtomicDir(folder / "start") as out:
        save_model.save_model(out, model, source, quiet=True)
    return load_scoring_model(folder / "start")


def load_scoring_model(folder: Path) -> transformers.PreTrainedModel:
    is_token_level = "ForTokenClassification" in (folder / "config.json").read_text()
    auto: Any = (
        transformers.AutoModelForTokenClassification
        if is_token_level
        else transformers.AutoModelForSequenceClassification
    )
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def trl_steps(cfg: reward.RewardConfig, model: transformers.PreTrainedModel, folder: Path) -> tuple[list[dict], Any]:
    """Metrics of TRL's trainer on the documents of each of our steps, and its model after the last one."""
    data, lines = open_full_steps(cfg), []
    for step in range(STEPS):
        (batch,) = data[step]
        documents = [batch.tokens[batch.documents.ids == i].tolist() for i in range(2 * BATCH)]
        pairs = zip(documents[::2], documents[1::2], batch.documents.margins.tolist(), strict=True)
        lines += [
            {"chosen_ids": chosen, "rejected_ids": rejected, "margin": margin} for chosen, rejected, margin in pairs
        ]
    assert isinstance(cfg.loss, BradleyTerry)
    args = RewardConfig(
        **trl_options(cfg), max_length=None, center_rewards_coefficient=cfg.loss.center_rewards_coefficient or None
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD)
    rows = datasets.Dataset.from_list(lines)
    trainer = unshuffled(RewardTrainer)(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line], trainer.model


def check_trl_match(cfg: reward.RewardConfig, folder: Path) -> None:
    model = save_initial_model(cfg, folder)
    expected, trl_model = trl_steps(cfg, model, folder)
    reward.main(cfg)
    metrics = step_metrics(cfg.output_dir)
    names = {"loss": "loss", "grad_norm": "grad_norm", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}
    names |= {"rewards/max": "max_reward", "rewards/mean": "mean_reward", "rewards/min": "min_reward"}
    for name_of_ours, trl_name in names.items():
        values = [line[name_of_ours] for line in metrics]
        assert values == pytest.approx([float(line[trl_name]) for line in expected], rel=1e-5, abs=1e-6), name_of_ours
    assert abs(expected[-1]["loss"] - expected[0]["loss"]) > 1e-2, "the loss changed"
    tensors = load_scoring_model(folder / "run" / "final").state_dict()
    for name, tensor in trl_model.state_dict().items():
        assert relative_error(tensors[name], tensor) < 3e-5, name


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_steps_match_trl(center: float, tmp_path: Path) -> None:
    check_trl_match(make_config(tmp_path, loss=BradleyTerry(center)), tmp_path)


def torch_steps(cfg: reward.RewardConfig, model: transformers.PreTrainedModel) -> list[dict[str, float]]:
    """Losses that transformers computes from labels, with optimizer steps of torch."""
    data = open_full_steps(cfg)
    optimizer, lines = torch.optim.SGD(model.parameters(), cfg.optimizer.lr), []
    model.eval()  # the token classifier of transformers has dropout, ours has none
    for step in range(STEPS):
        (batch,) = data[step]
        labels = batch.documents.labels if isinstance(cfg.loss, Regression) else batch.documents.labels.long()
        labels = batch.targets if isinstance(cfg.loss, ProcessReward) else labels
        loss = model(batch.tokens, attention_mask=(batch.documents.ids >= 0).long(), labels=labels).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        lines.append({"loss": loss.item(), "grad_norm": norm.item()})
    return lines


@pytest.mark.parametrize("loss", [Classification(3), Regression(), ProcessReward()], ids=["classes", "values", "steps"])
def test_labeled_steps_match_transformers(loss: RewardLoss, tmp_path: Path) -> None:
    """Our IGNORE is the ignore_index of transformers. The mean over documents of one batch is that of the step."""
    source = write_reward_rows(tmp_path)
    data = StepwiseDataset(source, step_separator=" w7 ") if isinstance(loss, ProcessReward) else LabeledDataset(source)
    cfg = make_config(tmp_path, loss=loss, data=data, data_checks="warn")  # rows of text have unused prompts
    reference = save_initial_model(cfg, tmp_path)
    expected = torch_steps(cfg, reference)
    reward.main(cfg)
    metrics = step_metrics(cfg.output_dir)
    for name in ("loss", "grad_norm"):
        values = [line[name] for line in metrics]
        assert values == pytest.approx([line[name] for line in expected], rel=1e-5), name
    tensors = load_scoring_model(tmp_path / "run" / "final").state_dict()
    assert all(relative_error(tensors[name], tensor) < 3e-5 for name, tensor in reference.state_dict().items())


@pytest.mark.parametrize("kind", ["reranking", "reranking_pairs"])
def test_reranker_steps_match_cross_encoder(kind: str, tmp_path: Path) -> None:
    """Losses of sentence-transformers with the weights before and after a step, also of truncated pairs."""
    random_text, prompt = make_text_generator(), "w5 "
    rows = [{name: random_text(1, 20) for name in ("query", "positive", "negative")} for _ in range(BATCH)]
    lines = [{**row, "document": row["positive"], "label": i / 3} for i, row in enumerate(rows)]
    dataset = RerankingDataset if kind == "reranking" else RerankingPairsDataset
    cfg, loss = make_config(tmp_path), BinaryCrossEntropy(3.0) if kind == "reranking" else BradleyTerry()
    cfg = replace(
        cfg, loss=loss, max_steps=2, data=dataset(write_rows(tmp_path, lines), max_length=20, document_prompt=prompt)
    )

    def cross_encoder_loss(final: Path) -> float:
        options: Any = {"device": "cpu", "activation_fn": torch.nn.Identity(), "model_kwargs": {"dtype": torch.float32}}
        model = CrossEncoder(str(final), **options)
        assert model.num_labels == 1 and model.tokenizer.chat_template is not None
        queries, documents, negatives = ([row[name] for row in rows] for name in ("query", "positive", "negative"))
        documents, negatives = ([prompt + text for text in texts] for texts in (documents, negatives))
        if kind == "reranking":
            oracle = BinaryCrossEntropyLoss(model, pos_weight=torch.tensor(3.0))
            return float(oracle([queries, documents], torch.tensor([line["label"] for line in lines])).detach())
        scores, others = (torch.tensor(model.predict([*zip(queries, t, strict=True)])) for t in (documents, negatives))
        return -float(torch.nn.functional.logsigmoid(scores - others).mean())

    reward.main(replace(cfg, optimizer=SGDConfig(lr=1e-30), max_steps=1, output_dir=str(tmp_path / "zero")))
    reward.main(replace(cfg, max_steps=1, output_dir=str(tmp_path / "one")))
    reward.main(cfg)
    losses = [line["loss"] for line in step_metrics(cfg.output_dir)]
    expected = [cross_encoder_loss(tmp_path / name / "final") for name in ("zero", "one")]
    assert losses == pytest.approx(expected, rel=1e-5) and abs(losses[0] - losses[1]) > 1e-3
