"""The recipe against a plain loop around transformers and peft: the same start, the same batches, the same losses."""

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.checkpoints import (
    FP32,
    load_inference_model,
    load_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
)
from tests.recipes.stepwise import figures, texts, whole_steps, written
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.data.dataloader.batch import IGNORE
from tunekit.data.datasets import ChatDataset, TextDataset
from tunekit.optim.config import AdamWConfig, CosineLRConfig
from tunekit.recipes import sft

STEPS, BATCH = 5, 4


def rows(folder: Path) -> str:
    """Short conversations and long ones."""
    words, lines = texts(), []
    for _ in range(STEPS * BATCH):
        turns = [{"role": "user", "content": words(1, 9)}, {"role": "assistant", "content": words(1, 20)}]
        lines.append({"messages": turns, "text": words(2, 30)})
    return written(folder, lines)


def start(model: str, adapter: NoAdapter | LoRAConfig, folder: Path) -> nn.Module:
    """What transformers and peft begin with: our first values of the adapter, in the files that peft reads."""
    base = load_transformers_model(Path(model)).train()
    if isinstance(adapter, NoAdapter):
        return base
    with atomic.AtomicDir(folder / "start") as out:
        final_checkpoint.save_final(adapter, out, load_model(Path(model), adapter), HFCheckpoint.open(Path(model)))
    return peft.PeftModel.from_pretrained(base, folder / "start", is_trainable=True).train()


def plain_loop(cfg: sft.SFTConfig, folder: Path) -> tuple[list[float], nn.Module]:
    model = start(cfg.model, cfg.adapter, folder)
    data = whole_steps(cfg)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, cfg.optimizer.lr, (0.9, 0.95), 1e-8, 0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, STEPS)
    losses = []
    for step in range(STEPS):
        (part,) = data[step]
        logits = model(part.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), part.targets.flatten(), ignore_index=IGNORE)
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
def test_losses_are_those_of_transformers_and_peft(name: str, kind: type, adapter, tmp_path: Path) -> None:
    cfg = sft.SFTConfig(
        model=str(make_checkpoint(tmp_path / "model", name)),
        data=kind(rows(tmp_path)),
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
    wanted, model = plain_loop(cfg, tmp_path)
    assert [line["loss"] for line in figures(cfg.output_dir)] == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted[-1] - wanted[0]) > 1e-2, "something was learnt"
    with torch.no_grad():
        found = load_inference_model(tmp_path / "run")(random_tokens())
        # Adam divides by the size of a gradient, and so makes much of the rounding of those near zero.
        assert relative_error(found, model(random_tokens()).logits) < 2e-3
