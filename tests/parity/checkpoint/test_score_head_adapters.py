"""Adapters with score heads: peft opens ours, tunekit opens those of peft, and both are merged into checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.helpers.random_checkpoints import (
    DEFAULT_MEMORY,
    FP32,
    load_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    rewrite_config,
)
from tunekit import build as assemble
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint, merge, verify
from tunekit.checkpoint.classification_head import with_score_head
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import ModelSource
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.models.decoder import Decoder
from tunekit.models.spec import ScoreHead
from tunekit.quantization.config import NF4Config, NoQuantization

# The tokenizer of these checkpoints pads with its end-of-text token.
PAD = 1
DOCUMENT, TOKEN = ScoreHead(1, pad_token_id=PAD), ScoreHead(2, per_token=True, bias=True, pad_token_id=PAD)
PLAIN = NoQuantization()
TASKS = {False: "SEQ_CLS", True: "TOKEN_CLS"}
CASES = {
    "lora": ("llama3.1", LoRAConfig(4), DOCUMENT),
    "tied": ("llama3.2", LoRAConfig(4, target_modules="attn", modules_to_save="norms"), DOCUMENT),
    "dora": ("qwen3", DoRAConfig(4), replace(DOCUMENT, labels=3)),
    "fused": ("phi3", LoRAConfig(4), DOCUMENT),
    "biases": ("llama-biases", LoRAConfig(4, bias="all"), TOKEN),
    "tokens": ("mistral", DoRAConfig(4), TOKEN),
    "experts": ("mixtral", LoRAConfig(4, target_modules=("experts", "attn")), DOCUMENT),
    "gemma": ("gemma3", LoRAConfig(4), DOCUMENT),
}


def make_rows() -> Tensor:
    """Full rows of tokens without padding."""
    row_tokens = random_tokens()
    return row_tokens.masked_fill(row_tokens == PAD, 5)


def open_classifier(folder: Path, score: ScoreHead) -> transformers.PreTrainedModel:
    """Open the base with the head of transformers, as users do before they add an adapter."""
    auto: Any = (
        transformers.AutoModelForTokenClassification
        if score.per_token
        else transformers.AutoModelForSequenceClassification
    )
    return auto.from_pretrained(
        folder, num_labels=score.labels, pad_token_id=PAD, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def compute_scores(model: Decoder, head: ScoreHead) -> Tensor:
    values = model(make_rows())
    return values if head.per_token else values[:, -1]


def build_model(source: HFCheckpoint, adapter: NoAdapter, weights: NoQuantization = PLAIN) -> Decoder:
    return assemble.build_model(source, weights, adapter, FP32, DEFAULT_MEMORY, DistributedContext(0, "cpu"))


@torch.no_grad()
def change_trained_parameters(model: nn.Module) -> None:
    """Change all trained parameters."""
    torch.manual_seed(2)
    for p in (p for p in model.parameters() if p.requires_grad):
        p.add_(torch.randn(p.shape) * 0.1)


def train_adapter(
    path: Path, shape: str, adapter: LoRAConfig, score: ScoreHead, weights: NoQuantization = PLAIN
) -> tuple[HFCheckpoint, Decoder]:
    """Write a base, and build a model with a new score head and write its adapter, with all parameters changed."""
    source = with_score_head(HFCheckpoint.open(make_checkpoint(path / "base", shape)), score)
    model = build_model(source, adapter, weights)
    change_trained_parameters(model)
    with atomic.AtomicDir(path / "adapter") as out:
        final_checkpoint.save_final(adapter, out, model, source)
    return source, model.eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_peft_opens_trained_adapters(case: str, tmp_path: Path) -> None:
    shape, adapter, score = CASES[case]
    source, model = train_adapter(tmp_path, shape, adapter, score)
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").task_type == TASKS[score.per_token]
    other = peft.PeftModel.from_pretrained(open_classifier(tmp_path / "base", score), tmp_path / "adapter").eval()
    expected = compute_scores(model, score)
    assert relative_error(other(make_rows()).logits, expected) < 3e-5
    assert (
        relative_error(
            compute_scores(
                assemble.load_for_inference(
                    str(tmp_path / "adapter"), FP32, DistributedContext(0, "cpu"), allow_score_head=True
                )[0],
                score,
            ),
            expected,
        )
        == 0
    )
    verification = verify.verify_saved(
        tmp_path / "adapter", model, ModelSource(source, adapter=adapter, precision=FP32), DistributedContext(0, "cpu")
    )
    assert verification.passed and verification.unexplained < 1e-6


@pytest.mark.parametrize("case", ["lora", "tied", "dora", "tokens", "gemma"])
@torch.no_grad()
def test_adapters_of_peft_are_read_and_merged(case: str, tmp_path: Path) -> None:
    """`get_peft_model` adds the head automatically."""
    shape, adapter, score = CASES[case]
    base = make_checkpoint(tmp_path / "base", shape)
    config = peft.LoraConfig(
        task_type=TASKS[score.per_token],
        r=3,
        target_modules=["q_proj", "v_proj", "down_proj"],
        use_dora=isinstance(adapter, DoRAConfig),
    )
    other = peft.get_peft_model(open_classifier(base, score), config).eval()
    change_trained_parameters(other)
    other.save_pretrained(tmp_path / "adapter")
    expected = other(make_rows()).logits
    model, _ = assemble.load_for_inference(
        str(tmp_path / "adapter"), FP32, DistributedContext(0, "cpu"), allow_score_head=True
    )
    assert model.spec.score == score
    assert relative_error(compute_scores(model, score), expected) < 3e-5
    source, merged_adapter, _ = assemble.resolve_model(str(tmp_path / "adapter"))
    assert isinstance(merged_adapter, LoRAConfig)
    with atomic.AtomicDir(tmp_path / "merged") as out:
        assert not merge.merge_adapter(source, source.open_adapter(tmp_path / "adapter"), out, quiet=True)
    assert verify.verify_merge(tmp_path / "merged", source, merged_adapter, torch.device("cpu")).passed
    merged, loading_info = type(open_classifier(base, score)).from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    assert relative_error(merged.eval()(make_rows()).logits, expected) < 3e-5


@pytest.mark.parametrize("adapter", [NoAdapter(), LoRAConfig(4)], ids=["full", "nf4"])
def test_saved_model_equals_trained_model(adapter: NoAdapter, tmp_path: Path) -> None:
    """A full model in the dtype of the base, and an adapter of 4-bit weights."""
    base = make_checkpoint(tmp_path / "base", "llama3.2")
    rewrite_config(base, lambda c: c | {"dtype": "bfloat16"})
    source = with_score_head(HFCheckpoint.open(base), DOCUMENT)
    weights = NF4Config() if isinstance(adapter, LoRAConfig) else NoQuantization()
    model = build_model(source, adapter, weights)
    with atomic.AtomicDir(tmp_path / "out") as out:
        final_checkpoint.save_final(adapter, out, model, source)
    verification = verify.verify_saved(
        tmp_path / "out", model, ModelSource(source, weights, adapter, FP32), DistributedContext(0, "cpu")
    )
    assert verification.passed, verification


def test_errors_of_score_heads(tmp_path: Path) -> None:
    _, adapter, score = CASES["lora"]
    train_adapter(tmp_path, "llama3.1", adapter, score)
    with pytest.raises(UserError, match=" 1 "):
        assemble.load_for_inference(str(tmp_path / "adapter"), FP32, DistributedContext(0, "cpu"))
    with pytest.raises(UserError, match=r"adapter\.modules_to_save: lm_head"):
        build_model(
            with_score_head(HFCheckpoint.open(tmp_path / "base"), score), LoRAConfig(4, target_modules=("attn", "head"))
        )
    with pytest.raises(UserError, match=r"score\.weight"):
        load_model(tmp_path / "base", replace(adapter, adapter_path=str(tmp_path / "adapter")))
    two = with_score_head(HFCheckpoint.open(tmp_path / "base"), replace(score, labels=2))
    with pytest.raises(UserError, match=r"score.weight has shape \[1, 48\].*\[2, 48\]"):
        assemble.build_meta_model(two, NoQuantization(), replace(adapter, adapter_path=str(tmp_path / "adapter")))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": "CAUSAL_LM"}))
    with pytest.raises(UserError, match=r"score\.weight"):
        assemble.resolve_model(str(tmp_path / "adapter"))
