"""Answers with random log-probabilities, and the losses that TRL computes for them."""

from dataclasses import replace
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
ACCELERATOR: Any = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda model: model
)


def answer_mask() -> Tensor:
    """Mask of answer tokens, (2 PAIRS, LENGTH): chosen answers first, all of different lengths."""
    starts, ends = torch.tensor([3, 2, 4, 1, 2] * 2), torch.tensor([5, 9, 6, 8, 7, 9, 6, 5, 9, 3])
    positions = torch.arange(LENGTH)
    return (positions >= starts[:, None]) & (positions < ends[:, None])


def make_logps(seed: int = 0, scale: float = 0.3) -> Tensor:
    """Log-probabilities of all tokens except the first, (2 PAIRS, LENGTH - 1)."""
    generator = torch.Generator().manual_seed(seed)
    return (-scale * torch.rand(2 * PAIRS, LENGTH - 1, generator=generator).exp()).requires_grad_()


def mask_logps(tokens: Tensor) -> Tensor:
    """Log-probabilities of target tokens; others are 0."""
    return tokens * answer_mask()[:, 1:]


def interleave(x: Tensor) -> Tensor:
    """Reorder chosen answers followed by rejected answers to alternating pairs."""
    return torch.stack(x.chunk(2)).transpose(0, 1).flatten(0, 1)


def make_answers(tokens: Tensor, reference: Tensor, is_desirable: Tensor | None = None) -> SequenceLogps:
    """SequenceLogps of answers, from the log-probabilities of the policy and of the reference."""
    count = interleave(answer_mask()[:, 1:].sum(1)).float()
    sums = interleave(mask_logps(tokens).sum(1))
    is_desirable = torch.arange(2 * PAIRS) % 2 == 0 if is_desirable is None else is_desirable
    return SequenceLogps(
        sums,
        count,
        torch.zeros_like(count),
        sums,
        is_desirable,
        interleave(mask_logps(reference).sum(1)).detach(),
    )


def step_totals(answers: SequenceLogps, kl: float = 0.0) -> StepTotals:
    """Totals of a step with only these answers, whose rows with prompts have `LENGTH` tokens."""
    tokens = answers.num_tokens[answers.is_desirable].sum()
    lengths = answers.is_desirable.sum() * float(LENGTH - 1)
    count, detached = torch.tensor(len(answers.logps)), answers.detach()
    return StepTotals(count, tokens, lengths, torch.tensor(kl), torch.zeros(()), detached)


def tunekit_loss(losses: list[PreferenceLoss], tokens: Tensor, reference: Tensor, **options: Any) -> Tensor:
    answers = make_answers(tokens, reference, **options)
    return sum((loss.mean(answers, step_totals(answers)) for loss in losses), torch.zeros(()))


def make_batch() -> dict[str, Tensor]:
    mask = answer_mask()
    return {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": torch.ones(mask.shape, dtype=torch.int64),
        "completion_mask": mask.long(),
    }


def make_outputs(tokens: Tensor) -> Any:
    """Outputs of TRL's models, of which only log-probabilities matter."""
    zeros = torch.zeros(tokens.shape)
    return SimpleNamespace(log_probs=tokens, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)


def make_trainer(**changes: Any) -> Any:
    """The attributes that TRL's loss functions read from a trainer."""
    metrics: dict[str, dict[str, list]] = {"train": _Lists(), "eval": _Lists()}
    defaults: dict[str, Any] = {
        "model": SimpleNamespace(training=True),
        "accelerator": ACCELERATOR,
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
    return SimpleNamespace(**{**defaults, **changes})


class _Lists(dict):
    def __missing__(self, key: str) -> list:
        self[key] = []
        return self[key]


def trl_dpo(tokens: Tensor, reference: Tensor, **changes: Any) -> Tensor:
    """Loss of TRL's DPOTrainer."""
    chosen, rejected = mask_logps(reference).sum(1).detach().chunk(2)
    inputs = {**make_batch(), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return DPOTrainer._compute_loss(
        make_trainer(**changes), lambda **_: make_outputs(mask_logps(tokens)), inputs, False
    )


def trl_kto(tokens: Tensor, reference: Tensor, is_desirable: Tensor, others: Tensor, **changes: Any) -> Tensor:
    """Loss of TRL's KTOTrainer. `others` are log-ratios of mismatched answers."""
    changes = {"loss_type": "kto", "calculate_KL": True, "desirable_weight": 1.0, "undesirable_weight": 1.0} | changes
    inputs = {
        **make_batch(),
        "label": is_desirable,
        "ref_logps": mask_logps(reference).sum(1).detach(),
        "ref_KL_logps": others - others,
    }
    trainer = make_trainer(_compute_kl_logps=lambda *_: others, **changes)
    return KTOTrainer._compute_loss(trainer, lambda **_: make_outputs(mask_logps(tokens)), inputs, False)


def make_logits() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2 * PAIRS, LENGTH, VOCAB, generator=generator).requires_grad_()


def make_token_ids() -> Tensor:
    return torch.randint(0, VOCAB, (2 * PAIRS, LENGTH), generator=torch.Generator().manual_seed(4))


def trl_reference_free(kind: str, model_logits: Tensor, **changes: Any) -> Tensor:
    """Loss of TRL's CPOTrainer or ORPOTrainer for the logits."""
    labels = make_token_ids().masked_fill(~answer_mask(), -100)
    attention_mask = torch.ones_like(labels)
    concatenated = {
        "concatenated_input_ids": make_token_ids(),
        "concatenated_attention_mask": attention_mask,
        "concatenated_labels": labels,
    }
    trainer_class = {"cpo": CPOTrainer, "orpo": ORPOTrainer}[kind]
    defaults = {"is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0, "alpha": 0.0, "cpo_alpha": 1.0}
    trainer = make_trainer(**{**defaults, "simpo_gamma": 0.5, "loss_type": "sigmoid", **changes})
    trainer.concatenated_inputs = lambda *_, **__: concatenated
    trainer.get_batch_logps = trainer_class.get_batch_logps
    trainer.cpo_loss = lambda *args: CPOTrainer.cpo_loss(trainer, *args)
    trainer.odds_ratio_loss = lambda *args: ORPOTrainer.odds_ratio_loss(trainer, *args)
    trainer.concatenated_forward = lambda *args: trainer_class.concatenated_forward(trainer, *args)
    batch = {"chosen_labels": labels[:PAIRS]}
    output = SimpleNamespace(logits=model_logits)
    return trainer_class.get_batch_loss_metrics(trainer, lambda *_, **__: output, batch)[0]


def answers_from_logits(model_logits: Tensor) -> SequenceLogps:
    """SequenceLogps of answers, from logits, including those of full rows."""
    token_logps = model_logits[:, :-1].log_softmax(-1).gather(2, make_token_ids()[:, 1:, None]).squeeze(2)
    answers = make_answers(token_logps, torch.zeros_like(token_logps))
    return replace(answers, full_logps=interleave(token_logps.sum(1)))
