"""A step asks the device for nothing: a question would make the host wait until all work before it is done."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoints import load_model, make_batch, make_checkpoint, random_tokens
from tests.helpers.optimizer_step import step_optimizer
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.loggers.metric_logger import copy_to_host
from tunekit.memory.config import MemoryConfig
from tunekit.optim.config import AdamWConfig, MuonConfig
from tunekit.recipes import sft

# Operations whose result, or the shape of it, a host must know.
QUESTIONS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "equal", "bincount"}


class Asked(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in QUESTIONS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_questions_are_seen() -> None:
    with Asked() as asked:
        torch.ones(3).nonzero()
        torch.ones(()).item()
        assert asked.names == ["nonzero", "_local_scalar_dense"]


def test_a_line_of_the_log_asks_once() -> None:
    values = torch.tensor(1.5), torch.tensor(2.5, dtype=torch.bfloat16)
    with Asked() as asked:
        copy = copy_to_host([*values, 1e-4])
        assert copy is not None and copy.read() == [1.5, 2.5]
    assert len(asked.names) <= 1


@pytest.mark.parametrize("optimizer", [AdamWConfig(), MuonConfig()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("adapter", [NoAdapter(), LoRAConfig(4, dropout=0.1)], ids=["full", "lora"])
@pytest.mark.parametrize("memory", [MemoryConfig(), MemoryConfig("full"), MemoryConfig(optimizer_in_bwd=True)], ids=str)
def test_a_step_asks_nothing(optimizer, adapter, memory: MemoryConfig, tmp_path: Path) -> None:
    early = memory.optimizer_in_bwd
    sizes = (
        {"max_grad_norm": 0.0, "global_batch_size": 2, "micro_batch_size": 2}
        if early
        else {"max_grad_norm": 1.0, "global_batch_size": 4, "micro_batch_size": 2}
    )
    cfg = sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o", optimizer=optimizer, memory=memory, **sizes)
    model, run = load_model(make_checkpoint(tmp_path, "llama3.2"), adapter, memory=memory), DistributedContext(0, "cpu")
    inner = (p for layer in model.layers for p in layer.parameters())
    train_optimizer = memory.wrap_optimizer(optimizer.build(adapter.param_groups(model), inner), run)
    steps = [[make_batch(random_tokens(seed=step))] * (1 if early else 2) for step in range(2)]
    with Asked() as asked:
        for batches in steps:
            sft.forward_backward(model, batches, cfg, run)
            step_optimizer(train_optimizer, cfg.max_grad_norm)
    assert not asked.names
