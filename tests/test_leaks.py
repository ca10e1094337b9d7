"""Packed documents are what each is alone; where they are not, no training begins, and a line says where it leaks."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.checkpoints import made, ours
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


def opened(folder: Path, **options: Any) -> DataLoader:
    """Rows of 8 to 50 tokens."""
    draw = torch.Generator().manual_seed(0)
    rows = [[f"w{int(i)}" for i in torch.randint(0, 60, (n,), generator=draw)] for n in range(8, 50, 3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in rows))
    choice = TextDataset(str(folder / "rows.jsonl"), max_length=120, **options)
    return build_dataloader(choice, Tokenizer.open(folder), 4, 2, DistributedContext(0, "cpu"))


def check(model: Decoder, data: DataLoader) -> None:
    packing_check.check(model, data, DistributedContext(0, "cpu"))


# Full attention, windows, chunks, latent attention, delta nets, experts, shared keys, and growth with the position.
KINDS = ["llama3.2", "mistral", "gemma2", "llama4", "deepseek-v3", "qwen3.5", "qwen3-next", "qwen3-moe", "gpt-oss"]
KINDS += ["gemma4-shared", "ministral3"]
POSITIONED = {"llama4", "ministral3"}  # attention of the others knows distances only


def without_bounds(batch: Batch) -> Batch:
    return replace(batch, offsets=None)


def without_beginnings(batch: Batch) -> Batch:
    return replace(batch, positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens))


def plant(monkeypatch: pytest.MonkeyPatch, fault) -> None:
    collate = Collator.collate
    monkeypatch.setattr(Collator, "collate", lambda layout, rows: fault(collate(layout, rows)))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_right_goes_on_and_what_leaks_is_refused(
    name: str,
    compute: Literal["fp32", "bf16"],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data = ours(made(tmp_path, name), precision=PrecisionConfig(compute)).train(), opened(tmp_path, packing=True)
    check(model, data)
    told = re.fullmatch(
        r"packing: 6 documents together are what each is alone, to (\S+) of .*\n", capsys.readouterr().err
    )
    assert told is not None
    assert float(told[1]) < {"fp32": 1e-5, "bf16": 0.03}[compute]
    assert model.training
    plant(monkeypatch, without_bounds)
    with pytest.raises(UserError, match=r"packing: \S+rows.jsonl:\d+ .* layer 0 on, .*`data.packing: false`") as error:
        check(model, data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(POSITIONED))
def test_positions_that_go_on_are_refused_where_they_matter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = ours(made(tmp_path, name)), opened(tmp_path, packing=True)
    plant(monkeypatch, without_beginnings)
    with pytest.raises(UserError, match="packing: "):
        check(model, data)


def test_the_kind_of_layer_that_leaks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two kinds, the states of delta nets go on from one document to the next."""
    model, data = ours(made(tmp_path, "qwen3.5")), opened(tmp_path, packing=True)
    mixed = GatedDeltaNet.mixed

    def leaking(self: GatedDeltaNet, qkv: Tensor, decay: Tensor, beta: Tensor, offsets: Tensor | None) -> Tensor:
        return mixed(self, qkv, decay, beta, None)

    monkeypatch.setattr(GatedDeltaNet, "mixed", leaking)
    with pytest.raises(UserError, match="from layer 0 on, DeltaNet"):
        check(model, data)


def test_a_number_that_is_none_is_no_agreement(tmp_path: Path) -> None:
    model, data = ours(made(tmp_path, "llama3.2")), opened(tmp_path, packing=True)
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="packing: .* differ by nan"):
        check(model, data)


def test_of_several_documents_one_number_that_is_none_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = ours(made(tmp_path, "llama3.2")), opened(tmp_path, packing=True)
    monkeypatch.setattr(packing_check, "logit_differences", lambda *_: [0.0, float("nan"), 0.0])
    with pytest.raises(UserError, match="packing: .* differ by nan"):
        check(model, data)


@pytest.mark.filterwarnings("error")
def test_rows_that_are_mapped_are_read_without_a_warning(tmp_path: Path) -> None:
    model, data = ours(made(tmp_path, "llama3.2")), opened(tmp_path, packing=True)
    assert not data.parts[0].tokens.flags.writeable
    check(model, data)


def test_there_is_nothing_to_compare_without_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ours(made(tmp_path, "llama3.2"))
    check(model, opened(tmp_path))
    check(model, opened(tmp_path, packing=True, max_samples=1))
    assert capsys.readouterr().err == ""


def without_prompts(batch: Batch) -> Batch:
    assert batch.prefixes is not None
    return replace(batch, prefixes=None)


@pytest.mark.parametrize("name", ["llama3.2", "gemma2", "llama4", "deepseek-v3"])
def test_answers_that_go_on_from_one_prompt_are_asked_too(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the prompt is not seen, no training begins."""
    model, words = ours(made(tmp_path, name)), [f"w{i}" for i in range(60)]
    rows = [{"prompt": " ".join(words[i : i + 20]), "chosen": " w1 w2", "rejected": " w3"} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice = PreferenceDataset(str(tmp_path / "rows.jsonl"), max_length=60, packing=True)
    data = build_dataloader(choice, Tokenizer.open(tmp_path), 4, 2, DistributedContext(0, "cpu"))
    data.share()
    check(model, data)
    assert "12 documents together are what each is alone" in capsys.readouterr().err
    written = Collator.written
    monkeypatch.setattr(Collator, "written", lambda *args: (without_prompts(written(*args)[0]), written(*args)[1]))
    with pytest.raises(UserError, match="packing: .* layer 0 on"):
        check(model, data)


def test_a_stream_is_asked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = ours(made(tmp_path, "llama3.2")), opened(tmp_path, packing=True, streaming=True, num_proc=0)
    check(model, data)
    assert "6 documents together" in capsys.readouterr().err
    data.close()
