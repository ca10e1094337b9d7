"""Plans of methods beside sft: pairs are two rows, a copy and a teacher are counted, a step takes what was planned."""

import gc
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.parallel.ranks import on
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

LENGTH = 256
SAID = """\
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
    "distill": ("distill", "chat", "none", TEACHER),
    "distill, lora": ("distill", "chat", "lora", TEACHER),
}


def write_rows(folder: Path, kind: str) -> None:
    """Rows that are cut at `LENGTH` tokens, so that all are as long as a plan takes them to be."""
    ask, answer, other = (
        {"role": "user", "content": "Hi"},
        *({"role": "assistant", "content": w * 400} for w in ("a b ", "c d ")),
    )
    row = {"messages": [ask, answer]} if kind == "chat" else {"prompt": [ask], "chosen": [answer], "rejected": [other]}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 16)


def config(folder: Path, name: str) -> tuple[Any, Any]:
    """The recipe and its config."""
    recipe, kind, adapter, more = CASES[name]
    write_rows(folder, kind)
    batch = 8 if kind == "chat" else 4
    (folder / "a.yaml").write_text(
        SAID.format(folder=folder, kind=kind, length=LENGTH, batch=batch, adapter=adapter) + more
    )
    module = recipe_loader.load_recipe(recipe)
    return module, load.load_config(module.CONFIG, folder / "a.yaml", [], [])


def watched(step: Callable[..., Any], most: list[int]) -> Callable[..., Any]:
    """A step that tells what tensors live while it is taken, at most."""

    def work(*args: Any, **more: Any) -> Any:
        with MemoryTracker() as live:
            gc.collect()
            live.see(tensors())
            live.mark()
            found = step(*args, **more)
            most.append(live.mark())
        return found

    return work


def tensors() -> list[Tensor]:
    """All that live, told by their types: to ask an object itself what it is may run code of its own."""
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.device.type == "cpu"]


class AtOnce(ThreadPoolExecutor):
    """Makes what it is given before it goes on: no thread can end a tuple that it fills while `tensors` holds it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(fn(*args, **kwargs))
        return made


def taken(folder: Path) -> list[tuple[int, int]]:
    """Bytes of a step of each case as planned and as they were, in a process that holds nothing else."""
    found = []
    prefetch.ThreadPoolExecutor = AtOnce
    for number, name in enumerate(CASES):
        place = folder / str(number)
        place.mkdir()
        module, cfg = config(place, name)
        plan, most = planned(cfg), []
        forward_backward, step = module.forward_backward, TrainOptimizer.step
        module.forward_backward, TrainOptimizer.step = watched(forward_backward, most), watched(step, most)
        training.check_training(cfg)
        module.main(cfg)
        module.forward_backward, TrainOptimizer.step = forward_backward, step
        moments = (plan.room.phases[phase] for phase in ("forward", "backward", "step"))
        found.append((max(moment.total - moment.parts["process"] for moment in moments), max(most[-2:])))
    return found


@pytest.mark.multi
def test_a_step_takes_what_was_planned(tmp_path: Path) -> None:
    (found,) = on(1, taken, tmp_path)
    for name, (planned, real) in zip(CASES, found, strict=True):
        assert planned == pytest.approx(real, rel=0.02), name


def test_a_teacher_that_is_an_adapter_is_counted_with_its_base(tmp_path: Path) -> None:
    _, cfg = config(tmp_path, "distill")
    alone = planned(replace(cfg, teacher=Teacher(model="tunekit/nano")))
    tensors = adapter(tmp_path / "adapter", alone.task.source.spec, rank=4)
    adapted = planned(replace(cfg, teacher=Teacher(model=str(tmp_path / "adapter"))))
    more = sum(x.numel() for x in tensors.values())
    assert adapted.peak.parts["beside"] - alone.peak.parts["beside"] == 4 * more > 0  # fp32


def adapter(folder: Path, spec: DecoderSpec, rank: int) -> dict[str, Tensor]:
    """Updates of the queries of a nano, as peft writes them."""
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(said | {"base_model_name_or_path": "tunekit/nano"}))
    tensors = {}
    for i, layer in enumerate(spec.layers):
        assert isinstance(layer.mixer, Attention)
        name = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.zeros(rank, spec.dim)
        tensors[f"{name}.lora_B.weight"] = torch.zeros(layer.mixer.heads * layer.mixer.head_dim, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def test_what_is_asked_takes_time(tmp_path: Path) -> None:
    """Twice the products of a token for each of its passes forward: of a copy, a teacher, or the model itself."""
    flops = {name: planned(config(tmp_path, name)[1]).pace.flops for name in CASES}
    forward = flops["dpo"] - flops["dpo, cached"]
    assert forward == pytest.approx(flops["dpo, cached"] / 3, rel=0.05)
    assert flops["distill"] - flops["dpo, cached"] == pytest.approx(forward, rel=0.05)


def test_weights_of_a_copy_travel_as_those_that_are_trained_do(tmp_path: Path) -> None:
    plan = planned(config(tmp_path, "dpo")[1], 2)
    sent = {flow.what: flow.bytes for flow in plan.pace.flows}
    assert sent["weights of the other model"] == pytest.approx(sent["weights, forward"] / 2, rel=0.01)  # in 16 bits


def planned(cfg: Any, devices: int = 1) -> estimate.Estimate:
    return estimate.estimate(make_workload(cfg, ClusterSpec(devices)), ClusterSpec(devices))
