"""Every loss of preference and its gradient, against TRL's own code on the same log-probabilities."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.cpo import CPOTrainer

from tests.losses.judged import (
    PAIRS,
    answered,
    counted,
    dpo,
    free,
    interleaved,
    kto,
    likely,
    logits,
    logps,
    ours,
    step,
    trainer,
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


def same(found: Tensor, wanted: Tensor, of: Tensor) -> None:
    """Two losses and their gradients. TRL's are computed in fp32 too."""
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(loss, of, retain_graph=True)[0] for loss in (found, wanted))
    assert theirs.abs().max() > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def told(loss: PreferenceLoss) -> dict[str, Any]:
    return {"beta": vars(loss)["beta"]} if "beta" in vars(loss) else {}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", PAIRED)
def test_pairs(kind: str, seed: int) -> None:
    loss, changes = PAIRED[kind]
    assert kind_name(type(loss)) == kind
    tokens, reference = logps(seed), logps(seed + 10)
    wanted = dpo(tokens, reference, loss_types=[kind], **told(loss), **changes)
    same(ours([loss], tokens, reference), wanted, tokens)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"])
def test_divergences(kind: str, divergence: str) -> None:
    chosen, more = DIVERGENCES[divergence]
    assert kind_name(type(chosen)) == divergence
    loss, changes = PAIRED[kind]
    tokens, reference = logps(2), logps(3)
    changes = {**changes, **more, "f_divergence_type": divergence}
    wanted = dpo(tokens, reference, loss_types=[kind], **told(loss), **changes)
    same(ours([replace(loss, f_divergence=chosen)], tokens, reference), wanted, tokens)


def test_terms_are_weighted() -> None:
    """The mix of MPO."""
    losses = [Sigmoid(weight=0.8), BCOPair(weight=0.2), SFTTerm(weight=0.5)]
    tokens, reference = logps(5), logps(6)
    kinds = [kind_name(type(loss)) for loss in losses]
    wanted = dpo(tokens, reference, loss_types=kinds, loss_weights=[0.8, 0.2, 0.5])
    same(ours(losses, tokens, reference), wanted, tokens)


@pytest.mark.parametrize("loss", [
    KTO(desirable_weight=0.7, undesirable_weight=1.3),
    KTO(beta=0.5),
    APOZeroUnpaired(desirable_weight=1.2),
], ids=["weighted", "kto", "apo_zero_unpaired"])  # fmt: skip
@pytest.mark.parametrize("off", [0.4, -0.4])
def test_marks(loss: KTO, off: float) -> None:
    """A divergence below 0 counts as none."""
    draw = torch.Generator().manual_seed(1)
    good = torch.rand(2 * PAIRS, generator=draw) < 0.4
    others = torch.randn(2 * PAIRS, generator=draw) + off
    tokens, reference = logps(7), logps(8)
    kind = kind_name(type(loss))
    weights = {"desirable_weight": loss.desirable_weight, "undesirable_weight": loss.undesirable_weight}
    wanted = kto(tokens, reference, good, others, loss_type=kind, calculate_KL=loss.others, **told(loss), **weights)
    answers = answered(tokens, reference, interleaved(good))
    same(loss.mean(answers, step(answers, max(0.0, float(others.mean())))), wanted, tokens)


def test_bco_around_zero_is_that_of_pairs() -> None:
    tokens, reference = logps(7), logps(8)
    wanted = dpo(tokens, reference, loss_types=["bco_pair"])
    same(2 * ours([BCO()], tokens, reference), wanted, tokens)


@pytest.mark.parametrize(("loss", "kind", "changes"), [
    (CPO(), "cpo", {}),
    (CPO(cpo_alpha=0.0, label_smoothing=0.1), "cpo", {"cpo_alpha": 0, "label_smoothing": 0.1}),
    (SimPO(simpo_gamma=0.5), "cpo", {"cpo_alpha": 0, "loss_type": "simpo"}),
    (AlphaPO(alpha=0.25, simpo_gamma=0.5), "cpo", {"cpo_alpha": 0, "loss_type": "simpo", "alpha": 0.25}),
    (AlphaPO(alpha=0.0, simpo_gamma=0.5), "cpo", {"cpo_alpha": 0, "loss_type": "simpo"}),
    (ORPO(beta=0.2), "orpo", {}),
], ids=["cpo", "conservative", "simpo", "alphapo", "alphapo0", "orpo"])  # fmt: skip
def test_without_a_reference(loss: PreferenceLoss, kind: str, changes: dict[str, Any]) -> None:
    made = logits()
    wanted = free(kind, made, **told(loss), **changes)
    answers = likely(made)
    same(loss.mean(answers, step(answers)), wanted, made)


def test_conservative_dpo() -> None:
    """TRL has label smoothing in CPO alone, of which log-ratios in the place of log-probabilities make cDPO."""
    tokens, reference = logps(7), logps(8)
    chosen, rejected = counted(tokens - reference.detach()).sum(1).chunk(2)
    told = trainer(alpha=0.0, loss_type="sigmoid", label_smoothing=0.3)
    wanted = CPOTrainer.cpo_loss(told, chosen, rejected)[0].mean()
    same(ours([DPO(label_smoothing=0.3)], tokens, reference), wanted, tokens)


def test_odds_of_very_likely_and_very_unlikely_tokens() -> None:
    logs = -torch.logspace(-6, 2.5, 40, dtype=torch.float64).requires_grad_()
    wanted = -torch.log(torch.expm1(-logs))
    found = log_odds(logs.float())
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)
    slopes, exact = (torch.autograd.grad(x.sum(), logs)[0] for x in (found, wanted))
    torch.testing.assert_close(slopes, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [ORPO(), DiscoPOP()], ids=["orpo", "discopop"])
@pytest.mark.parametrize("far", [0.0, -3000.0], ids=["certain", "hopeless"])
def test_what_is_certain_or_hopeless_has_a_gradient(loss: PreferenceLoss, far: float) -> None:
    """Where exponents and odds have no room, numbers stay numbers."""
    tokens, reference = logps(9), logps(10).detach()
    sums = answered(tokens, reference)
    answers = replace(sums, logps=(sums.logps * 0 + far * sums.good).requires_grad_())
    found = loss(answers, step(answers))
    (slope,) = torch.autograd.grad(found.sum(), answers.logps)
    assert found.isfinite().all() and slope.isfinite().all()
