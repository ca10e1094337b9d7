"""Adapters of models that score: peft opens ours, we open those of peft, and both become a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.checkpoints import FP32, PLAINLY, error, made, ours, rewrite, tokens
from tunekit import build as assemble
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint, merge, verify
from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.verify import ModelSource
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.spec import ScoreHead
from tunekit.quantization.config import NF4Config, NoQuantization

# What the tokenizer of these checkpoints pads with: its end of text.
PAD = 1
DOCUMENT, EACH = ScoreHead(1, pad=PAD), ScoreHead(2, each=True, bias=True, pad=PAD)
PLAIN = NoQuantization()
TASKS = {False: "SEQ_CLS", True: "TOKEN_CLS"}
CASES = {
    "lora": ("llama3.1", LoRAConfig(4), DOCUMENT),
    "tied": ("llama3.2", LoRAConfig(4, target_modules="attn", modules_to_save="norms"), DOCUMENT),
    "dora": ("qwen3", DoRAConfig(4), replace(DOCUMENT, labels=3)),
    "fused": ("phi3", LoRAConfig(4), DOCUMENT),
    "biases": ("llama-biases", LoRAConfig(4, bias="all"), EACH),
    "tokens": ("mistral", DoRAConfig(4), EACH),
    "experts": ("mixtral", LoRAConfig(4, target_modules=("experts", "attn")), DOCUMENT),
    "gemma": ("gemma3", LoRAConfig(4), DOCUMENT),
}


def rows() -> Tensor:
    """Whole rows of tokens that are no padding."""
    found = tokens()
    return found.masked_fill(found == PAD, 5)


def classifier(folder: Path, score: ScoreHead) -> transformers.PreTrainedModel:
    """The base with transformers' head, as people open it before an adapter."""
    auto: Any = (
        transformers.AutoModelForTokenClassification if score.each else transformers.AutoModelForSequenceClassification
    )
    return auto.from_pretrained(
        folder, num_labels=score.labels, pad_token_id=PAD, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def scores(model: Decoder, score: ScoreHead) -> Tensor:
    found = model(rows())
    return found if score.each else found[:, -1]


def build(source: HFCheckpoint, adapter: NoAdapter, weights: NoQuantization = PLAIN) -> Decoder:
    return assemble.build_model(source, weights, adapter, FP32, PLAINLY, DistributedContext(0, "cpu"))


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Every number that is trained."""
    torch.manual_seed(2)
    for p in (p for p in model.parameters() if p.requires_grad):
        p.add_(torch.randn(p.shape) * 0.1)


def trained(
    path: Path, shape: str, adapter: LoRAConfig, score: ScoreHead, weights: NoQuantization = PLAIN
) -> tuple[HFCheckpoint, Decoder]:
    """A base with a fresh head, an adapter beside it in which every number moved, and its folder."""
    source = with_score_head(HFCheckpoint.open(made(path / "base", shape)), score)
    model = build(source, adapter, weights)
    move(model)
    with atomic.AtomicDir(path / "adapter") as out:
        final_checkpoint.save_final(adapter, out, model, source)
    return source, model.eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_peft_opens_what_was_trained(case: str, tmp_path: Path) -> None:
    shape, adapter, score = CASES[case]
    source, model = trained(tmp_path, shape, adapter, score)
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").task_type == TASKS[score.each]
    other = peft.PeftModel.from_pretrained(classifier(tmp_path / "base", score), tmp_path / "adapter").eval()
    wanted = scores(model, score)
    assert error(other(rows()).logits, wanted) < 1e-5
    assert (
        error(
            scores(
                assemble.load_for_inference(str(tmp_path / "adapter"), FP32, DistributedContext(0, "cpu"), scores=True)[
                    0
                ],
                score,
            ),
            wanted,
        )
        == 0
    )
    found = verify.verify_saved(
        tmp_path / "adapter", model, ModelSource(source, adapter=adapter, precision=FP32), DistributedContext(0, "cpu")
    )
    assert found.passed and found.unexplained < 1e-6


@pytest.mark.parametrize("case", ["lora", "tied", "dora", "tokens", "gemma"])
@torch.no_grad()
def test_what_peft_makes_is_read_and_becomes_a_checkpoint(case: str, tmp_path: Path) -> None:
    """`get_peft_model` adds the head by itself."""
    shape, adapter, score = CASES[case]
    base = made(tmp_path / "base", shape)
    config = peft.LoraConfig(
        task_type=TASKS[score.each],
        r=3,
        target_modules=["q_proj", "v_proj", "down_proj"],
        use_dora=isinstance(adapter, DoRAConfig),
    )
    other = peft.get_peft_model(classifier(base, score), config).eval()
    move(other)
    other.save_pretrained(tmp_path / "adapter")
    wanted = other(rows()).logits
    model, _ = assemble.load_for_inference(str(tmp_path / "adapter"), FP32, DistributedContext(0, "cpu"), scores=True)
    assert model.spec.score == score
    assert error(scores(model, score), wanted) < 1e-5
    source, choice, _ = assemble.resolve_model(str(tmp_path / "adapter"))
    assert isinstance(choice, LoRAConfig)
    with atomic.AtomicDir(tmp_path / "merged") as out:
        assert not merge.merge_adapter(source, tmp_path / "adapter", out, quiet=True)
    assert verify.verify_merge(tmp_path / "merged", source, choice, torch.device("cpu")).passed
    whole, told = type(classifier(base, score)).from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert error(whole.eval()(rows()).logits, wanted) < 1e-5


@pytest.mark.parametrize("adapter", [NoAdapter(), LoRAConfig(4)], ids=["full", "nf4"])
def test_what_is_written_is_what_was_trained(adapter: NoAdapter, tmp_path: Path) -> None:
    """Full in the dtype of the base; an adapter beside weights in four bits."""
    base = made(tmp_path / "base", "llama3.2")
    rewrite(base, lambda c: c | {"dtype": "bfloat16"})
    source = with_score_head(HFCheckpoint.open(base), DOCUMENT)
    weights = NF4Config() if isinstance(adapter, LoRAConfig) else NoQuantization()
    model = build(source, adapter, weights)
    with atomic.AtomicDir(tmp_path / "out") as out:
        final_checkpoint.save_final(adapter, out, model, source)
    found = verify.verify_saved(
        tmp_path / "out", model, ModelSource(source, weights, adapter, FP32), DistributedContext(0, "cpu")
    )
    assert found.passed, found


def test_what_goes_wrong(tmp_path: Path) -> None:
    _, adapter, score = CASES["lora"]
    trained(tmp_path, "llama3.1", adapter, score)
    with pytest.raises(UserError, match="gives 1 score to a document and writes no text"):
        assemble.load_for_inference(str(tmp_path / "adapter"), FP32, DistributedContext(0, "cpu"))
    with pytest.raises(UserError, match="adapter.modules_to_save: head is adapted too"):
        build(
            with_score_head(HFCheckpoint.open(tmp_path / "base"), score), LoRAConfig(4, target_modules=("attn", "head"))
        )
    with pytest.raises(UserError, match="score.weight belongs to no layer of a llama model"):
        ours(tmp_path / "base", replace(adapter, adapter_path=str(tmp_path / "adapter")))
    two = with_score_head(HFCheckpoint.open(tmp_path / "base"), replace(score, labels=2))
    with pytest.raises(UserError, match=r"score.weight is \[1, 48\], wanted \[2, 48\]"):
        assemble.build_meta_model(two, NoQuantization(), replace(adapter, adapter_path=str(tmp_path / "adapter")))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": "CAUSAL_LM"}))
    with pytest.raises(UserError, match="score.weight belongs to no layer"):
        assemble.resolve_model(str(tmp_path / "adapter"))
