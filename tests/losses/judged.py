"""Answers with random log-probabilities, and TRL's own code on the same."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from tunekit.losses.preference_base import PreferenceLoss, StepTotals
from tunekit.losses.sequence_logps import SequenceLogps

PAIRS, LENGTH, VOCAB = 5, 9, 11
ALONE: Any = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda model: model
)


def masks() -> Tensor:
    """Which of the tokens belong to answers, (2 PAIRS, LENGTH): chosen ones first, all of other lengths."""
    begins, ends = torch.tensor([3, 2, 4, 1, 2] * 2), torch.tensor([5, 9, 6, 8, 7, 9, 6, 5, 9, 3])
    at = torch.arange(LENGTH)
    return (at >= begins[:, None]) & (at < ends[:, None])


def logps(seed: int = 0, scale: float = 0.3) -> Tensor:
    """Log-probabilities of tokens from the second on, (2 PAIRS, LENGTH - 1)."""
    draw = torch.Generator().manual_seed(seed)
    return (-scale * torch.rand(2 * PAIRS, LENGTH - 1, generator=draw).exp()).requires_grad_()


def counted(tokens: Tensor) -> Tensor:
    """What is learnt of them: the others are 0."""
    return tokens * masks()[:, 1:]


def interleaved(x: Tensor) -> Tensor:
    """Chosen ones, then rejected ones, become chosen and rejected in turn."""
    return torch.stack(x.chunk(2)).transpose(0, 1).flatten(0, 1)


def answered(tokens: Tensor, reference: Tensor, good: Tensor | None = None) -> SequenceLogps:
    """What is known of answers from the log-probabilities of their tokens, and of the reference's."""
    count = interleaved(masks()[:, 1:].sum(1)).float()
    whole = interleaved(counted(tokens).sum(1))
    good = torch.arange(2 * PAIRS) % 2 == 0 if good is None else good
    return SequenceLogps(
        whole, count, torch.zeros_like(count), whole, count, good, interleaved(counted(reference).sum(1)).detach()
    )


def step(answers: SequenceLogps, kl: float = 0.0) -> StepTotals:
    """A step of these answers alone."""
    tokens = answers.tokens[answers.good].sum()
    lengths = answers.lengths[answers.good].sum()
    count, whole = torch.tensor(len(answers.logps)), answers.detached()
    return StepTotals(count, tokens, lengths, torch.tensor(kl), torch.zeros(()), whole)


def ours(losses: list[PreferenceLoss], tokens: Tensor, reference: Tensor, **more: Any) -> Tensor:
    answers = answered(tokens, reference, **more)
    return sum((loss.mean(answers, step(answers)) for loss in losses), torch.zeros(()))


def batch() -> dict[str, Tensor]:
    mask = masks()
    return {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": torch.ones(mask.shape, dtype=torch.int64),
        "completion_mask": mask.long(),
    }


def outputs(tokens: Tensor) -> Any:
    """What TRL's models give, of which only log-probabilities matter here."""
    other = torch.zeros(tokens.shape)
    return SimpleNamespace(log_probs=tokens, entropy=other, mean_logits=other, is_top1=other > 0)


def trainer(**changes: Any) -> Any:
    """All that the computation of a loss asks of a trainer."""
    metrics: dict[str, dict[str, list]] = {"train": _Lists(), "eval": _Lists()}
    usual: dict[str, Any] = {
        "model": SimpleNamespace(training=True),
        "accelerator": ALONE,
        "aux_loss_enabled": False,
        "ld_alpha": None,
        "precompute_ref_logps": True,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "beta": 0.1,
        "label_smoothing": 0.0,
        "use_weighting": False,
        "args": SimpleNamespace(discopop_tau=0.05),
        "_metrics": metrics,
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**{**usual, **changes})


class _Lists(dict):
    def __missing__(self, key: str) -> list:
        self[key] = []
        return self[key]


def dpo(tokens: Tensor, reference: Tensor, **changes: Any) -> Tensor:
    """The loss that TRL's DPO makes of these."""
    chosen, rejected = counted(reference).sum(1).detach().chunk(2)
    inputs = {**batch(), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return DPOTrainer._compute_loss(trainer(**changes), lambda **_: outputs(counted(tokens)), inputs, False)


def kto(tokens: Tensor, reference: Tensor, good: Tensor, others: Tensor, **changes: Any) -> Tensor:
    """The loss that TRL's KTO makes of these; `others` are log-ratios of mismatched answers."""
    changes = {"loss_type": "kto", "calculate_KL": True, "desirable_weight": 1.0, "undesirable_weight": 1.0} | changes
    inputs = {
        **batch(),
        "label": good,
        "ref_logps": counted(reference).sum(1).detach(),
        "ref_KL_logps": others - others,
    }
    told = trainer(_compute_kl_logps=lambda *_: others, **changes)
    return KTOTrainer._compute_loss(told, lambda **_: outputs(counted(tokens)), inputs, False)


def logits() -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(2 * PAIRS, LENGTH, VOCAB, generator=draw).requires_grad_()


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (2 * PAIRS, LENGTH), generator=torch.Generator().manual_seed(4))


def free(kind: str, made: Tensor, **changes: Any) -> Tensor:
    """The loss that TRL's CPO or ORPO makes of these logits."""
    labels = ids().masked_fill(~masks(), -100)
    whole = torch.ones_like(labels)
    joined = {"concatenated_input_ids": ids(), "concatenated_attention_mask": whole, "concatenated_labels": labels}
    cls = {"cpo": CPOTrainer, "orpo": ORPOTrainer}[kind]
    usual = {"is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0, "alpha": 0.0, "cpo_alpha": 1.0}
    told = trainer(**{**usual, "simpo_gamma": 0.5, "loss_type": "sigmoid", **changes})
    told.concatenated_inputs = lambda *_, **__: joined
    told.get_batch_logps = cls.get_batch_logps
    told.cpo_loss = lambda *some: CPOTrainer.cpo_loss(told, *some)
    told.odds_ratio_loss = lambda *some: ORPOTrainer.odds_ratio_loss(told, *some)
    told.concatenated_forward = lambda *some: cls.concatenated_forward(told, *some)
    asked = {"chosen_labels": labels[:PAIRS]}
    return cls.get_batch_loss_metrics(told, lambda *_, **__: SimpleNamespace(logits=made), asked)[0]


def likely(made: Tensor) -> SequenceLogps:
    """What is known of answers from logits, whole rows included."""
    each = made[:, :-1].log_softmax(-1).gather(2, ids()[:, 1:, None]).squeeze(2)
    found = answered(each, torch.zeros_like(each))
    lengths = torch.full((2 * PAIRS,), float(LENGTH - 1))
    return SequenceLogps(**{**vars(found), "texts": interleaved(each.sum(1)), "lengths": lengths})
