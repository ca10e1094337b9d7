"""Entropies beside log-probabilities, against their definition in float64."""

from types import ModuleType

import pytest
import torch

from tests.checkpoints import error
from tests.interpreter import needs_loops
from tunekit.kernels import cross_entropy
from tunekit.kernels.cross_entropy import token_entropies, token_logps, token_logps_and_entropies
from tunekit.models.decoder import Head
from tunekit.models.spec import DecoderSpec

KERNEL = cross_entropy
INF = float("inf")
RULES = [(1.0, None), (0.4, None), (2.5, 7.0)]  # scale and softcap


def defined(logits: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    x = logits.double() * scale
    x = x if softcap is None else (x / softcap).tanh() * softcap
    return torch.special.entr(x.softmax(-1)).sum(-1)


def kinds(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of one size, some, a few large ones, one that is all, and some that cannot be."""
    torch.manual_seed(vocab)
    rows = [torch.full((vocab,), 3.0), *torch.randn(4, vocab), 9 * torch.randn(vocab), torch.full((vocab,), -40.0)]
    rows[-1][vocab // 2] = 60
    never = torch.randn(vocab)
    never[::2] = -INF
    if vocab == 1:
        never[0] = 2
    return torch.stack([*rows, never, 1e4 * torch.randn(vocab)]).to(dtype)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.half])
@pytest.mark.parametrize("vocab", [1, 15, 16, 129, 5003, 9000])
@pytest.mark.parametrize(("scale", "softcap"), RULES)
def test_entropies_are_as_defined(vocab: int, dtype: torch.dtype, scale: float, softcap: float | None) -> None:
    logits = kinds(vocab, dtype)
    before = logits.clone()
    found, wanted = token_entropies(logits, scale, softcap), defined(logits, scale, softcap)
    assert torch.equal(logits, before) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)
    apart = torch.stack([logits, logits], dim=1)[:, 0]  # rows that stand apart
    assert torch.equal(token_entropies(apart, scale, softcap), found)


@needs_loops
@pytest.mark.parametrize("vocab", [3, 130])
@pytest.mark.parametrize(("scale", "softcap"), RULES)
def test_the_kernel_of_a_gpu(
    vocab: int, scale: float, softcap: float | None, interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted, "MOST", 32)  # several turns; the interpreter adds numbers one by one
    for dtype in (torch.float32, torch.bfloat16):
        logits = kinds(vocab, dtype)[:, : vocab - 1]
        found = interpreted.token_entropies(logits, [scale, softcap or 0.0, 0.0, 0.0])
        torch.testing.assert_close(found.double(), defined(logits, scale, softcap), rtol=2e-6, atol=2e-6)
    assert interpreted.token_entropies(logits[:0], [scale, 0.0, 0.0, 0.0]).shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("vocab", [3, 5003, 128_256])
def test_on_a_gpu(vocab: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for scale, softcap in RULES:
            logits = kinds(vocab, dtype).cuda()
            found = token_entropies(logits, scale, softcap)
            torch.testing.assert_close(found.double(), defined(logits, scale, softcap), rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rows", [None, torch.tensor([5, 2, 8]), torch.tensor([], dtype=torch.long)])
def test_they_stand_beside_log_probabilities(
    trained: bool, rows: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which stay as they are, with their gradients; chunks are of four tokens."""
    monkeypatch.setattr(cross_entropy, "MULTIPLE", 4)
    monkeypatch.setattr(cross_entropy, "ROOM", {"cpu": 1})
    torch.manual_seed(0)
    head = Head(DecoderSpec(30, 10, (), logit_scale=0.7, logit_softcap=4.0))
    head.weight.data.normal_()
    head.requires_grad_(trained)
    hidden, targets = torch.randn(11, 10, requires_grad=True), torch.randint(0, 30, (11,))
    found, entropies = token_logps_and_entropies(hidden, targets, head, rows)
    wanted = token_logps(hidden, targets, head, rows)
    assert torch.equal(found, wanted) and not entropies.requires_grad
    learnt = [hidden, *([head.weight] if trained else [])]
    weights = torch.linspace(1, 2, len(found))
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), learnt) for x in (found, wanted)), strict=True):
        assert torch.equal(a, b)
    logits = (hidden if rows is None else hidden[rows]) @ head.weight.T
    assert entropies.shape == found.shape
    assert not len(found) or error(entropies.double(), defined(logits.detach(), 0.7, 4.0)) < 1e-6
