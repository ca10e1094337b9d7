"""A training step does not synchronize with the host, which would make it wait for all queued work."""

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.optimizer_step import step_optimizer
from tests.helpers.pairwise import pairwise
from tests.helpers.random_checkpoints import load_model, make_batch, make_checkpoint, random_tokens
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.data.datasets import TextDataset
from tunekit.distributed.context import DistributedContext
from tunekit.loggers.metric_logger import copy_to_host
from tunekit.memory.config import MemoryConfig
from tunekit.optim.config import AdamWConfig, MuonConfig
from tunekit.recipes import sft

# Operations whose result or shape is needed on the host.
SYNCHRONIZING_OPS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "equal", "bincount"}


class SyncRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in SYNCHRONIZING_OPS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_synchronizing_ops_are_recorded() -> None:
    with SyncRecorder() as recorder:
        torch.ones(3).nonzero()
        torch.ones(()).item()
        assert recorder.names == ["nonzero", "_local_scalar_dense"]


def test_metric_line_synchronizes_once() -> None:
    values = torch.tensor(1.5), torch.tensor(2.5, dtype=torch.bfloat16)
    with SyncRecorder() as recorder:
        copy = copy_to_host([*values, 1e-4])
        assert copy is not None and copy.read() == [1.5, 2.5]
    assert len(recorder.names) <= 1


@pairwise(
    optimizer={"adamw": AdamWConfig(), "muon": MuonConfig()},
    adapter={"full": NoAdapter(), "lora": LoRAConfig(4, dropout=0.1)},
    memory=[MemoryConfig(), MemoryConfig("full"), MemoryConfig(optimizer_in_bwd=True)],
)
def test_training_step_does_not_synchronize(optimizer, adapter, memory: MemoryConfig, tmp_path: Path) -> None:
    in_bwd = memory.optimizer_in_bwd
    sizes = (
        {"max_grad_norm": 0.0, "global_batch_size": 2, "micro_batch_size": 2}
        if in_bwd
        else {"max_grad_norm": 1.0, "global_batch_size": 4, "micro_batch_size": 2}
    )
    cfg = sft.SFTConfig(model="m", data=TextDataset("t"), output_dir="o", optimizer=optimizer, memory=memory, **sizes)
    model, run = load_model(make_checkpoint(tmp_path, "llama3.2"), adapter, memory=memory), DistributedContext(0, "cpu")
    inner = (p for layer in model.layers for p in layer.parameters())
    train_optimizer = memory.wrap_optimizer(optimizer.build(adapter.param_groups(model), inner), run)
    steps = [[make_batch(random_tokens(seed=step))] * (1 if in_bwd else 2) for step in range(2)]
    with SyncRecorder() as recorder:
        for batches in steps:
            sft.forward_backward(model, batches, cfg, run)
            step_optimizer(train_optimizer, cfg.max_grad_norm)
    assert not recorder.names
