"""The head on CUDA: aligned rows of logits, and gradients that accumulate in fp32 in one product."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tunekit.kernels import cross_entropy, fake_mode
from tunekit.kernels.cross_entropy import CrossEntropyTerms, linear_cross_entropy
from tunekit.kernels.lm_head import VocabShard

BF16, FP32 = torch.bfloat16, torch.float32
VOCAB, DIM, TOKENS = 101, 16, 12


@dataclass(frozen=True)
class PlainHead:
    """A head that is one product."""

    weight: nn.Parameter
    scale: float = 1.0
    softcap: float | None = None
    vocab_shard: VocabShard | None = None
    is_plain_linear: bool = True

    def raw_logits(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def parameters(self):
        return iter((self.weight,))


class CudaProducts(TorchDispatchMode):
    """Compute products with `out_dtype`, which exist on CUDA alone, on the CPU; count products and additions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten.mm.out, torch.ops.aten.add_.Tensor, torch.ops.aten.addmm.dtype_out):
            self.calls[str(func)] += 1
        if func is not torch.ops.aten.addmm.dtype_out:
            return func(*args, **kwargs)
        total, a, b, dtype = args
        assert total.dtype == dtype == kwargs["out"].dtype and a.dtype == b.dtype == BF16
        product = a.to(dtype) @ b.to(dtype)
        return kwargs["out"].copy_(product if kwargs.get("beta", 1) == 0 else total + product)


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_mode, "device_type", lambda x: "cuda")
    monkeypatch.setattr(cross_entropy, "GRAD_SLICE_SIZE", {"cpu": 30 * DIM})


def run_head(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Loss and gradients in several chunks."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(VOCAB, DIM, generator=generator))
    hidden = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    loss = linear_cross_entropy(hidden, targets, PlainHead(weight), CrossEntropyTerms())
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "TOKEN_MULTIPLE", 4)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 1})


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16], ids=str)
def test_rows_of_logits_are_aligned_on_cuda(dtype: torch.dtype) -> None:
    like = torch.empty(1, DIM, dtype=dtype, device="meta")
    with fake_mode.fake_mode("cuda"):
        for vocab in (1, 64, 49155, 151936):
            logits = cross_entropy.logits_buffer(like, 8, vocab)
            assert logits.shape == (8, vocab) and logits.stride(1) == 1
            assert logits.stride(0) * dtype.itemsize % 128 == 0 and logits.stride(0) < vocab + 64
    assert cross_entropy.logits_buffer(torch.empty(1, DIM), 8, 49155).is_contiguous()


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_alignment_does_not_change_results(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_head(dtype)
    sizes = []

    def padded(like: Tensor, rows: int, vocab: int) -> Tensor:
        sizes.append(vocab)
        return like.new_empty(rows, 128)[:, :vocab]

    monkeypatch.setattr(cross_entropy, "logits_buffer", padded)
    for a, b in zip(run_head(dtype), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert sizes == [VOCAB]


@pytest.mark.usefixtures("as_cuda", "chunks_of_four")
def test_gradients_of_the_head_are_one_product_for_each_chunk() -> None:
    """They were two operations for each slice, with a rounding to bf16 in between."""
    with CudaProducts() as seen:
        _, _, gradient = run_head(BF16)
    chunks = TOKENS // 4
    assert seen.calls == {"aten.mm.out": chunks, "aten.addmm.dtype_out": chunks}  # the former are the logits
    _, _, exact = run_head(FP32)
    assert gradient.dtype == FP32
    torch.testing.assert_close(gradient, exact, rtol=0, atol=0.02)


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("first", [True, False])
def test_one_product_accumulates_in_fp32(first: bool) -> None:
    total, grad, x = torch.randn(VOCAB, DIM), torch.randn(TOKENS, VOCAB).to(BF16), torch.randn(TOKENS, DIM).to(BF16)
    expected = grad.double().T @ x.double() + (0 if first else total.double())
    if first:
        total.fill_(torch.nan)  # uninitialized memory
    with CudaProducts():
        cross_entropy.add_product(total, grad, x, first)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "hip"), [("cuda", "6.4"), ("cpu", None)])
def test_others_round_a_slice_at_a_time(device: str, hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with `out_dtype` exist for neither."""
    monkeypatch.setattr(fake_mode, "device_type", lambda x: device)
    monkeypatch.setattr(torch.version, "hip", hip)
    total = torch.zeros(VOCAB, DIM)
    with CudaProducts() as seen:
        cross_entropy.add_product(total, torch.ones(4, VOCAB).to(BF16), torch.ones(4, DIM).to(BF16), True)
    assert "aten.addmm.dtype_out" not in seen.calls and (total == 4).all()
