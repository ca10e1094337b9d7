"""Weights of messages multiply the loss of their tokens."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit import build
from tunekit.data.dataloader import stream_blocks
from tunekit.data.dataloader.batch import Batch
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.datasets import ChatDataset, PreferenceDataset, UnpairedPreferenceDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.truncation import fit_documents
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.losses.kl_divergence import ForwardKL
from tunekit.losses.sequence_logps import sequence_logps
from tunekit.losses.unpaired import APOZeroUnpaired
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.training.data_checks import check_loss_weights

TEXTS = (("What is 2 plus 2?", "2 plus 2 is 4."), ("And 3 plus 4?", "It is seven, as always."), ("Thanks.", "Bye."))


@pytest.fixture(scope="module")
def nano() -> tuple[Decoder, Tokenizer]:
    dist = DistributedContext(0, "cpu")
    return build.load_for_inference("tunekit/nano", PrecisionConfig("fp32", "fp32", "fp32"), dist)


def make_batch(tokenizer: Tokenizer, path: Path, rows: list[list[float]], **options: object) -> Batch:
    """One micro-batch of conversations whose answers have these weights."""
    lines = []
    for weights in rows:
        pairs = zip(TEXTS[: len(weights)], weights, strict=True)
        turns = [({"role": "user", "content": q}, {"role": "assistant", "content": a, "weight": w})
                 for (q, a), w in pairs]  # fmt: skip
        lines.append(json.dumps({"messages": [message for turn in turns for message in turn]}) + "\n")
    (path / "rows.jsonl").write_text("".join(lines))
    data = ChatDataset(str(path / "rows.jsonl"), train_on="per_message", num_proc=0, **options)
    (batch,) = build_dataloader(data, tokenizer, len(rows), len(rows), DistributedContext(0, "cpu"))[0]
    return batch


def loss_and_gradient(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    model.requires_grad_(True).zero_grad()
    loss = CrossEntropy(z_loss=0.1)(model, batch)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_weighted_loss_is_the_weighted_sum_of_the_messages(nano: tuple[Decoder, Tokenizer], tmp_path: Path) -> None:
    model, tokenizer = nano
    mine = loss_and_gradient(model, make_batch(tokenizer, tmp_path, [[0.25, 1, 0.5]]))
    alone = [loss_and_gradient(model, make_batch(tokenizer, tmp_path, [row])) for row in np.eye(3).tolist()]
    for actual, first, second, third in zip(mine, *alone, strict=True):
        expected = 0.25 * first + second + 0.5 * third
        assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_packed_rows_have_the_same_loss(nano: tuple[Decoder, Tokenizer], tmp_path: Path) -> None:
    """One row of the packed batch also has documents without weights."""
    model, tokenizer = nano
    rows = [[0.25, 1, 0.5], [1.0], [0.0, 0.125]]
    padded = loss_and_gradient(model, make_batch(tokenizer, tmp_path, rows))
    batch = make_batch(tokenizer, tmp_path, rows, packing=True, max_length=256)
    assert batch.loss_weights is not None and batch.cu_seqlens is not None
    for actual, expected in zip(loss_and_gradient(model, batch), padded, strict=True):
        assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_split_and_truncated_rows_keep_the_weights_of_their_tokens(
    nano: tuple[Decoder, Tokenizer], tmp_path: Path
) -> None:
    make_batch(nano[1], tmp_path, [[0.25, 1, 0.5]])
    data = ChatDataset(str(tmp_path / "rows.jsonl"), train_on="per_message", num_proc=0)
    document = build_dataloader(data, nano[1], 1, 1, DistributedContext(0, "cpu")).datasets[0][0]
    windows = fit_documents(document, 16, "split", context=4)
    assert len(windows) > 2
    targets = [window.values[int(window.loss_mask[0]) :] for window in windows]  # the first token is never a target
    np.testing.assert_array_equal(np.concatenate(targets), document.values)
    (truncated,) = fit_documents(document, 30, "truncate", context=0)
    np.testing.assert_array_equal(truncated.values, document.values[: truncated.loss_mask.sum()])
    assert set(document.values) == {0.25, 1, 0.5}


def test_distillation_refuses_weights(nano: tuple[Decoder, Tokenizer], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="message weights"):
        ForwardKL()(nano[0], make_batch(nano[1], tmp_path, [[0.5]]), None)  # type: ignore[arg-type]


class CustomLoss(CrossEntropy):
    measure = staticmethod(F.cross_entropy)


@pytest.mark.parametrize("loss", [ForwardKL(), CustomLoss()], ids=["distill", "custom"])
def test_cached_weights_are_refused_before_training(
    loss: object, nano: tuple[Decoder, Tokenizer], tmp_path: Path
) -> None:
    make_batch(nano[1], tmp_path, [[1], [0.5, 1]])
    data = ChatDataset(str(tmp_path / "rows.jsonl"), train_on="per_message", num_proc=0)
    loaders = [build_dataloader(data, nano[1], 1, 1, DistributedContext(0, "cpu")) for _ in range(2)]
    check_loss_weights(SimpleNamespace(loss=CrossEntropy()), [None, loaders[0]])
    with pytest.raises(UserError, match=rf"^{tmp_path}/rows.jsonl:2: message weights"):
        check_loss_weights(SimpleNamespace(loss=loss), [None, loaders[1]])


def write_unpaired(path: Path, weights: list[float]) -> UnpairedPreferenceDataset:
    """A stream of labeled answers with these weights."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}?"}], "label": bool(i % 2),
         "completion": [{"role": "assistant", "content": "Yes.", "weight": weight}]}
        for i, weight in enumerate(weights)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return UnpairedPreferenceDataset(str(path), train_on="per_message", streaming=True, shuffle=False, num_proc=0)


@pytest.mark.parametrize("bad_row", [1, 5])
def test_weights_of_a_stream_are_refused_when_their_row_is_read(
    bad_row: int, nano: tuple[Decoder, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has 4 rows."""
    monkeypatch.setattr(stream_blocks, "ROUND_DOCUMENTS", 4)
    weights = [1.0] * 8
    weights[bad_row] = 0.5
    data = write_unpaired(tmp_path / "rows.jsonl", weights)
    loader = build_dataloader(data, nano[1], 2, 2, DistributedContext(0, "cpu"))
    cfg = SimpleNamespace(loss=(APOZeroUnpaired(),))
    try:
        if bad_row >= 4:
            check_loss_weights(cfg, [loader])
            assert len([loader[0], loader[1]]) == 2
        with pytest.raises(UserError, match=rf"rows.jsonl:{bad_row + 1}: message weights"):
            _ = loader[2] if bad_row >= 4 else check_loss_weights(cfg, [loader])
    finally:
        loader.close()


def test_log_probabilities_refuse_weights(nano: tuple[Decoder, Tokenizer], tmp_path: Path) -> None:
    data = replace(write_unpaired(tmp_path / "rows.jsonl", [0.5, 1]), streaming=False)
    (batch,) = build_dataloader(data, nano[1], 2, 2, DistributedContext(0, "cpu"))[0]
    with pytest.raises(UserError, match="message weights"):
        sequence_logps(nano[0], batch)


@pytest.mark.parametrize("fields", [{}, {"margin": 0.25}], ids=["plain", "margin"])
@pytest.mark.parametrize("weighted", ["chosen", "rejected"])
def test_preference_pairs_refuse_weights(
    weighted: str, fields: dict[str, float], nano: tuple[Decoder, Tokenizer], tmp_path: Path
) -> None:
    """Weights of 0 or 1 are allowed: they only select the target tokens."""
    question, answer = TEXTS[0]
    prompt = [{"role": "user", "content": question}]
    for weight in (1, 0.5):
        weights = {"chosen": 1, "rejected": 1, weighted: weight}
        row = {name: [*prompt, {"role": "assistant", "content": f"{answer} {name}", "weight": weights[name]}]
               for name in ("chosen", "rejected")}  # fmt: skip
        (tmp_path / "rows.jsonl").write_text(json.dumps({**row, **fields}) + "\n")
        data = PreferenceDataset(str(tmp_path / "rows.jsonl"), train_on="per_message", num_proc=0)
        if weight == 1:
            build_dataloader(data, nano[1], 1, 1, DistributedContext(0, "cpu"))
        else:
            with pytest.raises(UserError, match=r"rows.jsonl:1: message weights between 0 and 1"):
                build_dataloader(data, nano[1], 1, 1, DistributedContext(0, "cpu"))
