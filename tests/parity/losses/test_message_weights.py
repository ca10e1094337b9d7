"""The loss of weighted messages is the weighted mean of the losses of transformers' logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunekit import build
from tunekit.assets import model_dir
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.datasets import ChatDataset
from tunekit.distributed.context import DistributedContext
from tunekit.losses.cross_entropy import CrossEntropy, eval_loss
from tunekit.models.precision import PrecisionConfig
from tunekit.recipes import sft

CONVERSATIONS = (
    (("What is 2 plus 2?", "2 plus 2 is 4.", 0.25), ("And 3 plus 4?", "It is seven, as always.", 1)),
    (("Hello.", "Hello, how are you?", 0), ("Thanks.", "Bye.", 0.5)),
    (("Which day is it?", "Monday.", 1),),
)


def messages_of(turns: Any) -> list[dict[str, Any]]:
    pairs = (({"role": "user", "content": q}, {"role": "assistant", "content": a, "weight": w}) for q, a, w in turns)
    return [message for pair in pairs for message in pair]


def reference_sums(model: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[Tensor, float]:
    """Sum of weight times loss of a conversation, and sum of the weights."""
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    weights = torch.zeros(len(ids))
    for i in range(1, len(messages), 2):
        start = len(
            tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=True)["input_ids"]
        )
        end = len(tokenizer.apply_chat_template(messages[: i + 1], return_dict=True)["input_ids"])
        weights[start:end] = messages[i]["weight"]
    logits = model(torch.tensor([ids])).logits[0, :-1]
    losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return (losses * weights[1:]).sum(), float(weights[1:].sum())


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 256}], ids=["padded", "packed"])
def test_step_and_evaluation_equal_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    rows = [messages_of(turns) for turns in CONVERSATIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    hf_model = AutoModelForCausalLM.from_pretrained(model_dir("tunekit/nano"), dtype=torch.float32)
    hf_tokenizer = AutoTokenizer.from_pretrained(model_dir("tunekit/nano"))
    sums, weights = zip(*(reference_sums(hf_model, hf_tokenizer, row) for row in rows), strict=True)
    expected = sum(sums) / sum(weights)
    expected.backward()

    dist = DistributedContext(0, "cpu")
    model, tokenizer = build.load_for_inference("tunekit/nano", PrecisionConfig("fp32", "fp32", "fp32"), dist)
    data = ChatDataset(str(tmp_path / "rows.jsonl"), train_on="per_message", **options)
    loader = build_dataloader(data, tokenizer, 1 if options else 3, 1, dist)  # one packed row, or 3 micro-batches
    cfg = sft.SFTConfig(model="m", data=data, output_dir="o")
    loss = sft.forward_backward(model.requires_grad_(True), loader[0], cfg, dist)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    actual, reference = model.embed.weight.grad, hf_model.get_input_embeddings().weight.grad
    assert (actual - reference).norm() < 1e-5 * reference.norm()
    assert eval_loss(CrossEntropy(), model, loader, dist) == pytest.approx(expected.item(), rel=1e-6)


def test_weights_of_one_change_no_bit(tmp_path: Path) -> None:
    """Weights of 0 or 1 only select target tokens, as `train` does."""
    rows = [messages_of((q, a, float(w > 0.3)) for q, a, w in turns) for turns in CONVERSATIONS]
    flags = [[{k if k != "weight" else "train": v if k != "weight" else v > 0 for k, v in message.items()}
              for message in row] for row in rows]  # fmt: skip
    dist, batches = DistributedContext(0, "cpu"), []
    tokenizer = build.load_for_inference("tunekit/nano", PrecisionConfig(), dist)[1]
    for name, items in (("weight", rows), ("train", flags)):
        (tmp_path / name).write_text("".join(json.dumps({"messages": row}) + "\n" for row in items))
        (tmp_path / name).rename(tmp_path / f"{name}.jsonl")
        data = ChatDataset(str(tmp_path / f"{name}.jsonl"), train_on="per_message", num_proc=0)
        batches += build_dataloader(data, tokenizer, 3, 3, dist)[0]
    weighted, flagged = batches
    assert weighted.loss_weights is None and weighted.loss_denominator == flagged.num_target_tokens
    torch.testing.assert_close(weighted.targets, flagged.targets, rtol=0, atol=0)
