"""Plans of methods other than sft: pairs are two rows, reference copies and teachers are counted, memory matches a
real step.
"""

import gc
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tunekit.cli import recipe_loader
from tunekit.config import load
from tunekit.data.dataloader import prefetch
from tunekit.distillation.teacher import OnlineTeacherConfig as Teacher
from tunekit.models.spec import Attention, DecoderSpec
from tunekit.optim.train_optimizer import TrainOptimizer
from tunekit.plan import estimate
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.memory_tracker import MemoryTracker
from tunekit.plan.workload import make_workload
from tunekit.training import config as training

LENGTH = 128
CONFIG = """\
model: tunekit/nano
data: {{kind: {kind}, source: {folder}/rows.jsonl, max_length: {length}}}
output_dir: {folder}/run
global_batch_size: {batch}
micro_batch_size: {batch}
max_steps: 2
log_every: 1
adapter: {adapter}
precision: {{compute_dtype: bf16}}
device: cpu
"""
TEACHER = "teacher: {model: tunekit/nano, precision: {compute_dtype: bf16}}\n"
CASES = {
    "dpo": ("preference", "preference", "none", ""),
    "dpo, lora": ("preference", "preference", "lora", ""),
    "dpo, cached": ("preference", "preference", "none", "reference: precomputed\n"),
    "orpo": ("preference", "preference", "none", "loss: orpo\n"),
    "reward": ("reward", "preference", "none", ""),
    "embed": ("embed", "retrieval", "none", ""),
    "embed, lora": ("embed", "retrieval", "lora", ""),
    "distill": ("distill", "chat", "none", TEACHER),
    "distill, lora": ("distill", "chat", "lora", TEACHER),
}


def write_rows(folder: Path, kind: str) -> None:
    """Rows that are truncated to `LENGTH` tokens, the length that a plan assumes."""
    question, answer, rejected = (
        {"role": "user", "content": "Hi"},
        *({"role": "assistant", "content": w * 400} for w in ("a b ", "c d ")),
    )
    row = {
        "chat": {"messages": [question, answer]},
        "preference": {"prompt": [question], "chosen": [answer], "rejected": [rejected]},
        "retrieval": {"query": answer["content"], "positive": rejected["content"]},
    }[kind]
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 16)


def make_config(folder: Path, name: str) -> tuple[Any, Any]:
    """Recipe module and its config."""
    recipe, kind, adapter, extra = CASES[name]
    write_rows(folder, kind)
    batch = 8 if kind == "chat" else 4
    (folder / "a.yaml").write_text(
        CONFIG.format(folder=folder, kind=kind, length=LENGTH, batch=batch, adapter=adapter) + extra
    )
    module = recipe_loader.load_recipe(recipe)
    return module, load.load_config(module.CONFIG, folder / "a.yaml", [], [])


class PeakRecorder:
    """Peak bytes of tensors in each step of a recipe, from its forward pass to the end of its optimizer step.

    One tracker must see the whole step: gradients are no Python objects that a second one could find.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module, self.peaks = module, []
        self.forward_backward, self.step = module.forward_backward, TrainOptimizer.step
        self.tracker = MemoryTracker()

    def __enter__(self) -> "PeakRecorder":
        self.module.forward_backward = self.begin
        TrainOptimizer.step = lambda optimizer: self.end(optimizer)
        return self

    def __exit__(self, *error: object) -> None:
        self.module.forward_backward, TrainOptimizer.step = self.forward_backward, self.step

    def begin(self, *args: Any) -> Any:
        self.tracker = MemoryTracker()
        self.tracker.__enter__()
        gc.collect()
        self.tracker.record(live_cpu_tensors())
        self.tracker.mark()
        return self.forward_backward(*args)

    def end(self, optimizer: TrainOptimizer) -> None:
        self.step(optimizer)
        self.peaks.append(self.tracker.mark())
        self.tracker.__exit__(None, None, None)


def live_cpu_tensors() -> list[Tensor]:
    """All CPU tensors. Checked by type, because isinstance may run code of the objects."""
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.device.type == "cpu"]


class SynchronousExecutor(ThreadPoolExecutor):
    """Executor that runs tasks immediately. A thread could otherwise change a tuple while `live_cpu_tensors` holds
    it.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def planned_and_measured(folder: Path) -> list[tuple[int, int]]:
    """Estimated and measured bytes of a step of each case, in a process without other tensors."""
    results = []
    prefetch.ThreadPoolExecutor = SynchronousExecutor
    for index, name in enumerate(CASES):
        directory = folder / str(index)
        directory.mkdir()
        module, cfg = make_config(directory, name)
        plan = plan_config(cfg)
        training.check_training(cfg)
        with PeakRecorder(module) as recorder:
            module.main(cfg)
        peaks = (plan.memory.phases[phase] for phase in ("forward", "backward", "optimizer_step"))
        results.append((max(peak.total - peak.components["runtime"] for peak in peaks), recorder.peaks[-1]))
    return results


@pytest.mark.multi
def test_estimated_memory_matches_a_real_step(tmp_path: Path) -> None:
    (results,) = run_ranks(1, planned_and_measured, tmp_path)
    for name, (estimated, measured) in zip(CASES, results, strict=True):
        assert estimated == pytest.approx(measured, rel=0.02), name


def test_adapter_of_a_teacher_is_counted_with_its_base(tmp_path: Path) -> None:
    _, cfg = make_config(tmp_path, "distill")
    without_adapter = plan_config(replace(cfg, teacher=Teacher(model="tunekit/nano")))
    tensors = write_adapter(tmp_path / "adapter", without_adapter.workload.source.spec, rank=4)
    with_adapter = plan_config(replace(cfg, teacher=Teacher(model=str(tmp_path / "adapter"))))
    num_added = sum(x.numel() for x in tensors.values())
    assert (
        with_adapter.peak.components["auxiliary_models"] - without_adapter.peak.components["auxiliary_models"]
        == 4 * num_added
        > 0
    )  # fp32


def write_adapter(folder: Path, spec: DecoderSpec, rank: int) -> dict[str, Tensor]:
    """Write a LoRA adapter for the queries of the nano model, in the format of peft."""
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps(adapter_config | {"base_model_name_or_path": "tunekit/nano"})
    )
    tensors = {}
    for i, layer in enumerate(spec.layers):
        assert isinstance(layer.mixer, Attention)
        name = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.zeros(rank, spec.dim)
        tensors[f"{name}.lora_B.weight"] = torch.zeros(layer.mixer.heads * layer.mixer.head_dim, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def test_extra_forward_passes_take_time(tmp_path: Path) -> None:
    """Each extra forward pass, of a copy, a teacher or the model, takes two FLOPs per parameter and token."""
    names = ("dpo", "dpo, cached", "distill")
    flops = {name: plan_config(make_config(tmp_path, name)[1]).step_time.flops for name in names}
    forward = flops["dpo"] - flops["dpo, cached"]
    assert forward == pytest.approx(flops["dpo, cached"] / 3, rel=0.05)
    assert flops["distill"] - flops["dpo, cached"] == pytest.approx(forward, rel=0.05)


def test_weights_of_a_reference_copy_are_gathered(tmp_path: Path) -> None:
    plan = plan_config(make_config(tmp_path, "dpo")[1], 2)
    sent = {volume.tensors: volume.bytes for volume in plan.step_time.comm_volumes}
    assert sent["weights of auxiliary models"] == pytest.approx(sent["weights, forward"] / 2, rel=0.01)  # in 16 bits


def plan_config(cfg: Any, devices: int = 1) -> estimate.Estimate:
    return estimate.estimate(make_workload(cfg, ClusterSpec(devices)), ClusterSpec(devices))
