"""The sft recipe compared with a plain loop around transformers and peft: same initial weights, batches and losses."""

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.helpers.random_checkpoints import (
    FP32,
    load_inference_model,
    load_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
)
from tests.helpers.trl_runs import make_text_generator, open_full_steps, step_metrics, write_rows
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE
from tunekit.data.datasets import ChatDataset, TextDataset
from tunekit.optim.config import AdamWConfig, CosineLRConfig
from tunekit.recipes import sft

STEPS, BATCH = 5, 4


def write_chat_rows(folder: Path) -> str:
    """Short and long conversations."""
    random_text, lines = make_text_generator(), []
    for _ in range(STEPS * BATCH):
        messages = [
            {"role": "user", "content": random_text(1, 9)},
            {"role": "assistant", "content": random_text(1, 20)},
        ]
        lines.append({"messages": messages, "text": random_text(2, 30)})
    return write_rows(folder, lines)


def load_reference_model(model: str, adapter: NoAdapter | LoRAConfig, folder: Path) -> nn.Module:
    """Model of transformers or peft with the initial weights of our adapter."""
    base = load_transformers_model(Path(model)).train()
    if isinstance(adapter, NoAdapter):
        return base
    with atomic.AtomicDir(folder / "start") as out:
        final_checkpoint.save_final(adapter, out, load_model(Path(model), adapter), HFCheckpoint.open(Path(model)))
    return peft.PeftModel.from_pretrained(base, folder / "start", is_trainable=True).train()


def plain_loop(cfg: sft.SFTConfig, folder: Path) -> tuple[list[float], nn.Module]:
    model = load_reference_model(cfg.model, cfg.adapter, folder)
    data = open_full_steps(cfg)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, cfg.optimizer.lr, (0.9, 0.95), 1e-8, 0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, STEPS)
    losses = []
    for step in range(STEPS):
        (batch,) = data[step]
        logits = model(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, cfg.max_grad_norm)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.eval()


@pytest.mark.parametrize(("name", "kind", "adapter"), [
    ("llama3.2", ChatDataset, NoAdapter()),
    ("qwen3-biases", TextDataset, NoAdapter()),
    ("llama-biases", ChatDataset, LoRAConfig(4, 8.0)),
    ("mistral", TextDataset, LoRAConfig(4, 8.0, target_modules=("all-linear", "head", "embed"))),
    ("qwen2", ChatDataset, DoRAConfig(4, 8.0)),
])  # fmt: skip
def test_losses_match_transformers_and_peft(name: str, kind: type, adapter, tmp_path: Path) -> None:
    cfg = sft.SFTConfig(
        model=str(make_checkpoint(tmp_path / "model", name)),
        data=kind(write_chat_rows(tmp_path)),
        data_checks="warn",  # rows of text have unused messages
        output_dir=str(tmp_path / "run"),
        adapter=adapter,
        optimizer=AdamWConfig(lr=3e-3),
        lr_scheduler=CosineLRConfig(),
        precision=FP32,
        device="cpu",
        global_batch_size=BATCH,
        micro_batch_size=2,
        max_steps=STEPS,
    )
    sft.main(cfg)
    expected, model = plain_loop(cfg, tmp_path)
    assert [line["loss"] for line in step_metrics(cfg.output_dir)] == pytest.approx(expected, rel=1e-5)
    assert abs(expected[-1] - expected[0]) > 1e-2, "the loss changed"
    with torch.no_grad():
        logits = load_inference_model(tmp_path / "run")(random_tokens())
        # Adam divides by the gradient norm, which amplifies rounding errors of gradients near zero.
        assert relative_error(logits, model(random_tokens()).logits) < 2e-3
