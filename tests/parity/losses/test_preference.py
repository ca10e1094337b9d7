"""Every preference loss and its gradient equal those of TRL for the same log-probabilities."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.cpo import CPOTrainer

from tests.helpers.trl_losses import (
    PAIRS,
    answers_from_logits,
    interleave,
    make_answers,
    make_logits,
    make_logps,
    make_trainer,
    mask_logps,
    step_totals,
    trl_dpo,
    trl_kto,
    trl_reference_free,
    tunekit_loss,
)
from tunekit.config.choices import kind_name
from tunekit.losses.dpo import (
    AOT,
    DPO,
    IPO,
    AlphaDivergence,
    AOTUnpaired,
    APODown,
    APOZero,
    BCOPair,
    DiscoPOP,
    EXOPair,
    ForwardKLDivergence,
    Hinge,
    JSDivergence,
    NCAPair,
    Robust,
    Sigmoid,
    SigmoidNorm,
    SPPOHard,
)
from tunekit.losses.preference_base import PreferenceLoss
from tunekit.losses.reference_free import CPO, ORPO, AlphaPO, SFTTerm, SimPO, log_odds
from tunekit.losses.unpaired import BCO, KTO, APOZeroUnpaired

DIVERGENCES = {
    "forward_kl": (ForwardKLDivergence(), {}),
    "js_divergence": (JSDivergence(), {}),
    "alpha_divergence": (AlphaDivergence(0.3), {"f_alpha_divergence_coef": 0.3}),
}
PAIRED: dict[str, tuple[PreferenceLoss, dict[str, Any]]] = {
    "sigmoid": (Sigmoid(), {}),
    "hinge": (Hinge(beta=0.4), {}),
    "ipo": (IPO(beta=0.3), {}),
    "exo_pair": (EXOPair(label_smoothing=0.05), {"label_smoothing": 0.05}),
    "nca_pair": (NCAPair(), {}),
    "robust": (Robust(label_smoothing=0.2), {"label_smoothing": 0.2}),
    "bco_pair": (BCOPair(), {}),
    "sppo_hard": (SPPOHard(), {}),
    "aot": (AOT(label_smoothing=0.1), {"label_smoothing": 0.1}),
    "aot_unpaired": (AOTUnpaired(beta=0.3), {}),
    "apo_zero": (APOZero(), {}),
    "apo_down": (APODown(), {}),
    "discopop": (DiscoPOP(discopop_tau=0.2), {"args": SimpleNamespace(discopop_tau=0.2)}),
    "sft": (SFTTerm(), {}),
    "sigmoid_norm": (SigmoidNorm(beta=2.0), {}),
}


def assert_same(actual: Tensor, expected: Tensor, inputs: Tensor) -> None:
    """Compare two losses and their gradients. Both are computed in fp32."""
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    grad, expected_grad = (torch.autograd.grad(loss, inputs, retain_graph=True)[0] for loss in (actual, expected))
    assert expected_grad.abs().max() > 1e-4
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


def trl_options(loss: PreferenceLoss) -> dict[str, Any]:
    return {"beta": vars(loss)["beta"]} if "beta" in vars(loss) else {}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", PAIRED)
def test_paired_losses_equal_trl(kind: str, seed: int) -> None:
    loss, changes = PAIRED[kind]
    assert kind_name(type(loss)) == kind
    tokens, reference = make_logps(seed), make_logps(seed + 10)
    expected = trl_dpo(tokens, reference, loss_types=[kind], **trl_options(loss), **changes)
    assert_same(tunekit_loss([loss], tokens, reference), expected, tokens)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"])
def test_divergences_equal_trl(kind: str, divergence: str) -> None:
    f_divergence, options = DIVERGENCES[divergence]
    assert kind_name(type(f_divergence)) == divergence
    loss, changes = PAIRED[kind]
    tokens, reference = make_logps(2), make_logps(3)
    changes = {**changes, **options, "f_divergence_type": divergence}
    expected = trl_dpo(tokens, reference, loss_types=[kind], **trl_options(loss), **changes)
    assert_same(tunekit_loss([replace(loss, f_divergence=f_divergence)], tokens, reference), expected, tokens)


def test_weighted_losses_equal_trl() -> None:
    """The mix of losses of MPO."""
    losses = [Sigmoid(weight=0.8), BCOPair(weight=0.2), SFTTerm(weight=0.5)]
    tokens, reference = make_logps(5), make_logps(6)
    kinds = [kind_name(type(loss)) for loss in losses]
    expected = trl_dpo(tokens, reference, loss_types=kinds, loss_weights=[0.8, 0.2, 0.5])
    assert_same(tunekit_loss(losses, tokens, reference), expected, tokens)


@pytest.mark.parametrize("loss", [
    KTO(desirable_weight=0.7, undesirable_weight=1.3),
    KTO(beta=0.5),
    APOZeroUnpaired(desirable_weight=1.2),
], ids=["weighted", "kto", "apo_zero_unpaired"])  # fmt: skip
@pytest.mark.parametrize("offset", [0.4, -0.4])
def test_unpaired_losses_equal_trl(loss: KTO, offset: float) -> None:
    """A negative KL estimate counts as zero."""
    generator = torch.Generator().manual_seed(1)
    is_desirable = torch.rand(2 * PAIRS, generator=generator) < 0.4
    mismatched = torch.randn(2 * PAIRS, generator=generator) + offset
    tokens, reference = make_logps(7), make_logps(8)
    kind = kind_name(type(loss))
    weights = {"desirable_weight": loss.desirable_weight, "undesirable_weight": loss.undesirable_weight}
    expected = trl_kto(
        tokens,
        reference,
        is_desirable,
        mismatched,
        loss_type=kind,
        calculate_KL=loss.needs_mismatched,
        **trl_options(loss),
        **weights,
    )
    answers = make_answers(tokens, reference, interleave(is_desirable))
    assert_same(loss.mean(answers, step_totals(answers, max(0.0, float(mismatched.mean())))), expected, tokens)


def test_bco_without_shift_equals_bco_pair() -> None:
    tokens, reference = make_logps(7), make_logps(8)
    expected = trl_dpo(tokens, reference, loss_types=["bco_pair"])
    assert_same(2 * tunekit_loss([BCO()], tokens, reference), expected, tokens)


@pytest.mark.parametrize(("loss", "kind", "changes"), [
    (CPO(), "cpo", {}),
    (CPO(cpo_alpha=0.0, label_smoothing=0.1), "cpo", {"cpo_alpha": 0, "label_smoothing": 0.1}),
    (SimPO(simpo_gamma=0.5), "cpo", {"cpo_alpha": 0, "loss_type": "simpo"}),
    (AlphaPO(alpha=0.25, simpo_gamma=0.5), "cpo", {"cpo_alpha": 0, "loss_type": "simpo", "alpha": 0.25}),
    (AlphaPO(alpha=0.0, simpo_gamma=0.5), "cpo", {"cpo_alpha": 0, "loss_type": "simpo"}),
    (ORPO(beta=0.2), "orpo", {}),
], ids=["cpo", "conservative", "simpo", "alphapo", "alphapo0", "orpo"])  # fmt: skip
def test_reference_free_losses_equal_trl(loss: PreferenceLoss, kind: str, changes: dict[str, Any]) -> None:
    model_logits = make_logits()
    expected = trl_reference_free(kind, model_logits, **trl_options(loss), **changes)
    answers = answers_from_logits(model_logits)
    assert_same(loss.mean(answers, step_totals(answers)), expected, model_logits)


def test_conservative_dpo_equals_trl() -> None:
    """TRL has label smoothing only in CPO. With log-ratios instead of log-probabilities, CPO is cDPO."""
    tokens, reference = make_logps(7), make_logps(8)
    chosen, rejected = mask_logps(tokens - reference.detach()).sum(1).chunk(2)
    cpo_trainer = make_trainer(alpha=0.0, loss_type="sigmoid", label_smoothing=0.3)
    expected = CPOTrainer.cpo_loss(cpo_trainer, chosen, rejected)[0].mean()
    assert_same(tunekit_loss([DPO(label_smoothing=0.3)], tokens, reference), expected, tokens)


def test_log_odds_of_extreme_probabilities() -> None:
    log_probs = -torch.logspace(-6, 2.5, 40, dtype=torch.float64).requires_grad_()
    expected = -torch.log(torch.expm1(-log_probs))
    actual = log_odds(log_probs.float())
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)
    grad, expected_grad = (torch.autograd.grad(x.sum(), log_probs)[0] for x in (actual, expected))
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [ORPO(), DiscoPOP()], ids=["orpo", "discopop"])
@pytest.mark.parametrize("shift", [0.0, -3000.0], ids=["certain", "hopeless"])
def test_gradients_of_extreme_probabilities_are_finite(loss: PreferenceLoss, shift: float) -> None:
    """Results stay finite if exponentials and odds overflow."""
    tokens, reference = make_logps(9), make_logps(10).detach()
    sums = make_answers(tokens, reference)
    answers = replace(sums, logps=(sums.logps * 0 + shift * sums.is_desirable).requires_grad_())
    losses = loss(answers, step_totals(answers))
    (grad,) = torch.autograd.grad(losses.sum(), answers.logps)
    assert losses.isfinite().all() and grad.isfinite().all()
