"""Token entropies equal their float64 definition, also together with log-probabilities."""

from types import ModuleType

import pytest
import torch

from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import relative_error
from tests.helpers.triton_interpreter import requires_interpreter_loops
from tunekit.kernels import cross_entropy
from tunekit.kernels.cross_entropy import token_entropies, token_logps, token_logps_and_entropies
from tunekit.kernels.loss_cases import finish_logits
from tunekit.models.decoder import Head
from tunekit.models.spec import DecoderSpec

KERNEL = cross_entropy
INF = float("inf")
RULES = [(1.0, None), (0.4, None), (2.5, 7.0)]  # scale and softcap


def entropy_definition(logits: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    return torch.special.entr(finish_logits(logits, scale, softcap).softmax(-1)).sum(-1)


def logit_rows(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits: all equal, random, large, one-hot, partly -inf, and huge."""
    torch.manual_seed(vocab)
    rows = [torch.full((vocab,), 3.0), *torch.randn(4, vocab), 9 * torch.randn(vocab), torch.full((vocab,), -40.0)]
    rows[-1][vocab // 2] = 60
    impossible = torch.randn(vocab)
    impossible[::2] = -INF
    if vocab == 1:
        impossible[0] = 2
    return torch.stack([*rows, impossible, 1e4 * torch.randn(vocab)]).to(dtype)


@pytest.mark.usefixtures("backend")
@pairwise(
    indirect=["backend"],
    backend=("fast", "reference"),
    vocab=[1, 15, 16, 129, 5003, 9000],
    dtype=[torch.float32, torch.bfloat16, torch.half],
    rule=RULES,
)
def test_entropies_equal_definition(vocab: int, dtype: torch.dtype, rule: tuple[float, float | None]) -> None:
    scale, softcap = rule
    logits = logit_rows(vocab, dtype)
    before = logits.clone()
    actual, expected = token_entropies(logits, scale, softcap), entropy_definition(logits, scale, softcap)
    assert torch.equal(logits, before) and actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=5e-6, atol=5e-6)
    strided = torch.stack([logits, logits], dim=1)[:, 0]  # strided rows
    assert torch.equal(token_entropies(strided, scale, softcap), actual)


@requires_interpreter_loops
@pytest.mark.parametrize("vocab", [3, 130])
@pytest.mark.parametrize(("scale", "softcap"), RULES)
def test_interpreted_kernel_equals_definition(
    vocab: int, scale: float, softcap: float | None, interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreted, "MAX_BLOCK_SIZE", 32)  # several blocks; the interpreter adds numbers one by one
    for dtype in (torch.float32, torch.bfloat16):
        logits = logit_rows(vocab, dtype)[:, : vocab - 1]
        actual = interpreted.token_entropies(logits, [scale, softcap or 0.0, 0.0, 0.0])
        torch.testing.assert_close(actual.double(), entropy_definition(logits, scale, softcap), rtol=2e-6, atol=2e-6)
    assert interpreted.token_entropies(logits[:0], [scale, 0.0, 0.0, 0.0]).shape == (0,)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rows", [None, torch.tensor([5, 2, 8]), torch.tensor([], dtype=torch.long)])
def test_entropies_do_not_change_log_probabilities(
    trained: bool, rows: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and their gradients are unchanged. Chunks have four tokens."""
    monkeypatch.setattr(cross_entropy, "TOKEN_MULTIPLE", 4)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 1})
    torch.manual_seed(0)
    head = Head(DecoderSpec(30, 10, (), logit_scale=0.7, logit_softcap=4.0))
    head.weight.data.normal_()
    head.requires_grad_(trained)
    hidden, targets = torch.randn(11, 10, requires_grad=True), torch.randint(0, 30, (11,))
    logps, entropies = token_logps_and_entropies(hidden, targets, head, rows)
    expected = token_logps(hidden, targets, head, rows)
    assert torch.equal(logps, expected) and not entropies.requires_grad
    leaves = [hidden, *([head.weight] if trained else [])]
    weights = torch.linspace(1, 2, len(logps))
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (logps, expected)), strict=True):
        assert torch.equal(a, b)
    logits = (hidden if rows is None else hidden[rows]) @ head.weight.T
    assert entropies.shape == logps.shape
    assert not len(logps) or relative_error(entropies.double(), entropy_definition(logits.detach(), 0.7, 4.0)) < 1e-6
