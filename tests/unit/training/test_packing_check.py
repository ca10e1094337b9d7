"""The packing check: packed documents give the same logits as separate ones; otherwise training is refused and the
leaking layer is named.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.helpers.random_checkpoints import load_model, make_checkpoint
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.dataloader.batch import Batch, Collator
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.datasets import PreferenceDataset, TextDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.gated_delta_net import GatedDeltaNet
from tunekit.models.precision import PrecisionConfig
from tunekit.training import packing_check


def make_loader(folder: Path, **options: Any) -> DataLoader:
    """Rows of 8 to 50 tokens."""
    draw = torch.Generator().manual_seed(0)
    rows = [[f"w{int(i)}" for i in torch.randint(0, 60, (n,), generator=draw)] for n in range(8, 50, 3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in rows))
    dataset = TextDataset(str(folder / "rows.jsonl"), max_length=120, **options)
    return build_dataloader(dataset, Tokenizer.open(folder), 4, 2, DistributedContext(0, "cpu"))


def check(model: Decoder, data: DataLoader) -> None:
    packing_check.check_packing(model, data, DistributedContext(0, "cpu"))


# Full attention, sliding windows, chunks, latent attention, delta nets, experts, shared keys, and scaling by position.
FAMILIES = ["llama3.2", "mistral", "gemma2", "llama4", "deepseek-v3", "qwen3.5", "qwen3-next", "qwen3-moe", "gpt-oss"]
FAMILIES += ["gemma4-shared", "ministral3"]
POSITION_DEPENDENT = {"llama4", "ministral3"}  # attention of the other families depends only on relative positions


def drop_cu_seqlens(batch: Batch) -> Batch:
    return replace(batch, cu_seqlens=None)


def continue_positions(batch: Batch) -> Batch:
    return replace(batch, positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens))


def patch_collate(monkeypatch: pytest.MonkeyPatch, change) -> None:
    collate = Collator.collate
    monkeypatch.setattr(Collator, "collate", lambda layout, rows: change(collate(layout, rows)))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_correct_packing_passes_and_leaking_packing_is_refused(
    name: str,
    compute: Literal["fp32", "bf16"],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data = (
        load_model(make_checkpoint(tmp_path, name), precision=PrecisionConfig(compute)).train(),
        make_loader(tmp_path, packing=True),
    )
    check(model, data)
    report = re.fullmatch(r"packing: logits of 6 packed documents differ by (\S+) .*\n", capsys.readouterr().err)
    assert report is not None
    assert float(report[1]) < {"fp32": 1e-5, "bf16": 0.03}[compute]
    assert model.training
    patch_collate(monkeypatch, drop_cu_seqlens)
    with pytest.raises(UserError, match=r"packing: logits of \S+rows\.jsonl:\d+ .*layer 0") as error:
        check(model, data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(POSITION_DEPENDENT))
def test_continued_positions_are_refused_if_attention_depends_on_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = load_model(make_checkpoint(tmp_path, name)), make_loader(tmp_path, packing=True)
    patch_collate(monkeypatch, continue_positions)
    with pytest.raises(UserError, match="packing: "):
        check(model, data)


def test_leaking_layer_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of delta nets, one of two layer types, continue from one document to the next."""
    model, data = load_model(make_checkpoint(tmp_path, "qwen3.5")), make_loader(tmp_path, packing=True)
    mix = GatedDeltaNet.mix

    def leaking(self: GatedDeltaNet, qkv: Tensor, decay: Tensor, beta: Tensor, offsets: Tensor | None) -> Tensor:
        return mix(self, qkv, decay, beta, None)

    monkeypatch.setattr(GatedDeltaNet, "mix", leaking)
    with pytest.raises(UserError, match="layer 0.*DeltaNet"):
        check(model, data)


def test_nan_logits_are_refused(tmp_path: Path) -> None:
    model, data = load_model(make_checkpoint(tmp_path, "llama3.2")), make_loader(tmp_path, packing=True)
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="packing: .*nan"):
        check(model, data)


def test_nan_in_one_of_several_documents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = load_model(make_checkpoint(tmp_path, "llama3.2")), make_loader(tmp_path, packing=True)
    monkeypatch.setattr(packing_check, "logit_differences", lambda *_: [0.0, float("nan"), 0.0])
    with pytest.raises(UserError, match="packing: .*nan"):
        check(model, data)


@pytest.mark.filterwarnings("error")
def test_memory_mapped_rows_cause_no_warning(tmp_path: Path) -> None:
    model, data = load_model(make_checkpoint(tmp_path, "llama3.2")), make_loader(tmp_path, packing=True)
    assert not data.datasets[0].tokens.flags.writeable
    check(model, data)


def test_unpacked_data_is_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(make_checkpoint(tmp_path, "llama3.2"))
    check(model, make_loader(tmp_path))
    check(model, make_loader(tmp_path, packing=True, max_samples=1))
    assert capsys.readouterr().err == ""


def drop_shared_prefixes(batch: Batch) -> Batch:
    assert batch.shared_prefixes is not None
    return replace(batch, shared_prefixes=None)


@pytest.mark.parametrize("name", ["llama3.2", "gemma2", "llama4", "deepseek-v3"])
def test_shared_prompts_are_checked(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose answers do not see their prompt is refused."""
    model, vocabulary = load_model(make_checkpoint(tmp_path, name)), [f"w{i}" for i in range(60)]
    rows = [{"prompt": " ".join(vocabulary[i : i + 20]), "chosen": " w1 w2", "rejected": " w3"} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = PreferenceDataset(str(tmp_path / "rows.jsonl"), max_length=60, packing=True)
    data = build_dataloader(dataset, Tokenizer.open(tmp_path), 4, 2, DistributedContext(0, "cpu"))
    data.share_prefixes()
    check(model, data)
    assert "12 packed documents" in capsys.readouterr().err
    original = Collator.collate_rows
    monkeypatch.setattr(
        Collator, "collate_rows", lambda *args: (drop_shared_prefixes(original(*args)[0]), original(*args)[1])
    )
    with pytest.raises(UserError, match="packing: .*layer 0"):
        check(model, data)


def test_streaming_data_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = (
        load_model(make_checkpoint(tmp_path, "llama3.2")),
        make_loader(tmp_path, packing=True, streaming=True, num_proc=0),
    )
    check(model, data)
    assert "6 packed documents" in capsys.readouterr().err
    data.close()
