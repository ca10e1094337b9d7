"""Rewards from a model with a score head: the result of the `reward` recipe, or another one with a single label."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tunekit import build
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data import tokenize
from tunekit.data.chat_template.messages import Conversation
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError, check_range
from tunekit.hub import download
from tunekit.models.decoder import Decoder, Head
from tunekit.models.precision import PrecisionConfig
from tunekit.rewards.base import RewardFunction
from tunekit.rollouts.rollout import Rollout


class Scorer(NamedTuple):
    """A model with a score head, and its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer


@dataclass(frozen=True)
class RewardModel(RewardFunction):
    """Score of the whole conversation by a model for sequence classification with one label.

    Conversations are rendered with the chat template of that model. Each process loads the model once.
    """

    kind: ClassVar[str] = "reward_model"
    model: str  # Directory of a checkpoint, adapter or run; a Hub name
    batch_size: int = 8  # Conversations per forward pass
    precision: PrecisionConfig = PrecisionConfig()  # dtypes of its weights and computation
    loaded: list[Scorer] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "batch_size", ge=1)

    def check(self, columns: Collection[str]) -> None:
        """Raise UserError if the model does not exist, or has no single score."""
        checkpoint, _, tokenizer = build.resolve_model(self.model, download.SMALL)
        check_single_score(checkpoint, self.model)
        tokenizer.template()  # raises UserError if there is none

    def prepare(self, dist: DistributedContext) -> None:
        """Load the model on the device of this rank. Each rank has all of its weights."""
        if not self.loaded:
            local = DistributedContext.single_process()
            local.device = dist.device
            model, tokenizer = build.load_for_inference(self.model, self.precision, local, allow_score_head=True)
            self.loaded.append(Scorer(model.requires_grad_(False), tokenizer))

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[float | None]:
        assert self.loaded, "prepare() loads the model"
        model, tokenizer = self.loaded[0]
        rows = [encode_rollout(tokenizer, rollout) for rollout in rollouts]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
        scores = [0.0] * len(rows)
        for first in range(0, len(rows), self.batch_size):
            indices = order[first : first + self.batch_size]
            for index, score in zip(indices, score_rows(model, [rows[i] for i in indices]).tolist(), strict=True):
                scores[index] = score
        return scores


def check_single_score(checkpoint: HFCheckpoint, name: str) -> None:
    """Raise UserError unless a model gives one score for each text."""
    score = checkpoint.spec.score
    if score is None or score.labels != 1 or score.per_token:
        count = "none" if score is None else "one for each token" if score.per_token else f"{score.labels}"
        raise UserError(
            f"model: {name}: a reward model has one score for each text, this model has {count}. "
            "Train one with: tune run reward"
        )


def encode_rollout(tokenizer: Tokenizer, rollout: Rollout) -> Tensor:
    """Token ids (N,) of a conversation as the `reward` recipe encodes its rows."""
    tools = None if rollout.prompt.tools is None else list(rollout.prompt.tools)
    conversation = Conversation([*rollout.prompt.messages, *rollout.messages], tools)
    try:
        text = tokenize.render_conversation(tokenizer, conversation, "all")
    except UserError as error:
        raise UserError(f"{rollout.prompt.where}: {error}") from None
    return torch.from_numpy(tokenize.tokenize_texts(tokenizer, [text])[0].tokens).long()


@torch.inference_mode()
def score_rows(model: Decoder, rows: Sequence[Tensor]) -> Tensor:
    """Scores (B,) in fp32 on the CPU, at the last token of each row that is not a padding token."""
    assert model.spec.score is not None
    pad = model.spec.score.pad_token_id
    last = torch.tensor([last_index(row, pad) for row in rows], device=model.device)
    tokens = pad_sequence(list(rows), batch_first=True).to(model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)

    def score_last(hidden: Tensor, head: Head) -> Tensor:
        return head(hidden[torch.arange(len(rows), device=hidden.device), last].float())

    return model(tokens, lengths=lengths, head_fn=score_last).squeeze(1).float().cpu()


def last_index(row: Tensor, pad: int | None) -> int:
    """Index of the last token that is not `pad`; 0 if all are."""
    indices = range(len(row)) if pad is None else (row != pad).nonzero().flatten().tolist()
    return indices[-1] if indices else 0
