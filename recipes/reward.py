"""Models that score: rewards from pairs, classes or values of documents, and whether each step of an answer is right.

tune run reward nano/reward
tune run reward llama3_2/1b_reward data.max_length=1024 loss.center_rewards_coefficient=0.01
"""

from dataclasses import dataclass

import torch
from tqdm import tqdm

from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import DataLoader
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.reward_data import RewardData
from tunekit.data.datasets import DatasetConfig
from tunekit.data.reward_datasets import LabeledDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError
from tunekit.losses.reward import BradleyTerry, Classification, ProcessReward, Regression, RewardMetrics
from tunekit.memory.config import TrainOptimizer
from tunekit.models.decoder import Decoder
from tunekit.training import config as training
from tunekit.training.config import Job, Method, Taken, TrainConfig


def class_names(rows: DatasetConfig | MixtureBase) -> tuple[str, ...]:
    """The names that rows have for classes."""
    return next((rows.class_names for rows in MixtureBase.from_config(rows).dataset_configs if isinstance(rows, LabeledDataset)), ())


@dataclass(frozen=True, kw_only=True)
class RewardConfig(TrainConfig):
    """Everything this recipe can be told: what every training can, and what scores are to say."""

    data: RewardData  # pairs, texts with labels, or answers whose steps have labels
    eval_data: RewardData | None = None  # held-out rows
    loss: BradleyTerry | Classification | Regression | ProcessReward = BradleyTerry()  # what scores are to say

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel.tp > 1:
            raise FieldError("parallel.tp", "a head that scores is too small to be divided: use parallel.dp_shard")
        self.loss.check_datasets(MixtureBase.from_config(self.data), "data")
        self.loss.score_head(0, len(self.names))
        if self.eval_data is not None:
            self.loss.check_datasets(MixtureBase.from_config(self.eval_data), "eval_data")
            if (held := class_names(self.eval_data)) and held != self.names:
                raise FieldError("eval_data.class_names", "are not those of `data`, in their order")

    @property
    def names(self) -> tuple[str, ...]:
        """What rows call their classes."""
        return class_names(self.data)

    def headed(self, source: HFCheckpoint) -> HFCheckpoint:
        """The checkpoint with a head for the scores of the loss, a fresh one on a language model."""
        score = self.loss.score_head(Tokenizer.open(source.tokenizer_path).pad, len(self.names))
        return with_score_head(source, score, self.seed, self.names, self.loss.problem_type)


RECIPE = RewardConfig


def words(cfg: RewardConfig) -> Tokenizer:
    """The tokenizer of the checkpoint."""
    return training.get_tokenizer(cfg)


def check(cfg: RewardConfig) -> None:
    """Whether checkpoint, rows and adapter are there and fit each other."""
    training.check_training(cfg)
    for key, rows in (("data", cfg.data), ("eval_data", cfg.eval_data)):
        if rows is not None:
            cfg.loss.check_datasets(MixtureBase.from_config(rows).resolve(), key)


def main(cfg: RewardConfig, overwrite: bool = False) -> None:
    """Train, and leave what transformers opens as a model for sequence or token classification."""
    training.run(cfg, Method("reward", forward_backward, evaluate, beside), overwrite)


def beside(job: Job) -> dict[str, object]:
    """Nothing; people are told of a head that knows nothing yet."""
    for key, data in (("data", job.data), ("eval_data", job.held)):
        if data is not None:
            job.cfg.loss.check(data.mixture, key)
            job.cfg.loss.check_labels(data.datasets, job.model.spec.outputs)
            if job.model.shares_prefixes(data.mixture.max_length):
                data.share_prefixes()
    if job.source.new_head is not None or job.cfg.init == "random":
        shape = "{} x {}".format(*job.model.shapes["head.weight"])
        job.run.log(f"head: {shape} fresh weights, in place of the vocabulary's")
    return {}


def forward_backward(
    model: Decoder, batches: list[Batch], cfg: RewardConfig, update: TrainOptimizer, run: DistributedContext
) -> Taken:
    """One optimizer step. A pair, a document or a step of one weighs the same, wherever it lies."""
    count, seen = run.sum_counts(sum(cfg.loss.num_units(batch, model.spec.outputs) for batch in batches)), RewardMetrics()
    for number, batch in enumerate(batches, start=1):
        run.set_gradient_sync(model, enabled=number == len(batches))
        found = cfg.loss(model, batch.to(run.device))
        (found.loss / count * run.grad_scale).backward()
        seen.add(found)
    figures = seen.means(run, count)
    loss = figures.pop("loss")
    return Taken(loss, update(loss), figures)


@torch.no_grad()
def evaluate(model: Decoder, held: DataLoader, cfg: RewardConfig, run: DistributedContext) -> dict[str, float]:
    """The same figures of held-out rows."""
    training, seen, count = model.training, RewardMetrics(), 0
    model.eval()
    for step in tqdm(range(held.num_steps(1)), "validating", disable=not run.is_main_process or None, leave=False):
        for batch in held[step]:
            count += cfg.loss.num_units(batch, model.spec.outputs)
            seen.add(cfg.loss(model, batch.to(run.device)))
    model.train(training)
    return {name: float(value) for name, value in seen.means(run, run.sum_counts(count)).items()}
