"""Functions that each rank runs in tests of states and checkpoints. Every rank imports this file: keep it light."""

import ctypes
import json
import os
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tunekit import build
from tunekit.adapters.config import DoRAConfig, FrozenModel, LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, dcp_planner, final_checkpoint, run_dir, verify
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.layerwise_forward import ModelSource
from tunekit.checkpoint.safetensors_io import SafetensorsWriter
from tunekit.checkpoint.save_model import plan_shards, save_model, tensor_entries, write_index
from tunekit.checkpoint.training_state import Checkpointer
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.distributed.sharding import full_tensor, shard_slice, to_local
from tunekit.errors import UserError
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import TIED, Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_map import save_mappings
from tunekit.optim.config import AdamW8bitConfig, AdamWConfig, MuonConfig
from tunekit.publishing import publish
from tunekit.quantization.config import NF4Config, NoQuantization

M_MMAP_THRESHOLD = -3
FP32 = PrecisionConfig("fp32", "fp32", "fp32")
DENSE = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
EXPERTS = DENSE | {
    "model_type": "mixtral",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}
FUSED = DENSE | {"model_type": "phi3", "pad_token_id": 0}


def write_checkpoint(directory: Path, config: dict, shard: int = 60_000) -> Path:
    """Write random weights in small files. Elements of norms are all different."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    source = HFCheckpoint.open(directory)
    with torch.device("meta"):
        model = Decoder(source.spec)
    shapes = {n: s for n, s in model.shapes.items() if not (source.spec.tie_word_embeddings and n == TIED)}
    entries = {
        n: e for move in save_mappings(shapes, source.family.table) for n, e in tensor_entries(model, move, source)
    }
    shards, generator = plan_shards(entries, source, shard), torch.Generator().manual_seed(1)
    for file, names in shards.items():
        with SafetensorsWriter(directory / file, {n: entries[n] for n in names}) as out:
            for n in names:
                shape, dtype = entries[n]
                numbers = torch.randn(shape, generator=generator) * 0.2
                out[n] = (numbers if len(shape) > 1 else 1 + numbers).to(dtype)
    write_index(directory, shards, entries, source)
    return directory


MODELS = {"dense": DENSE, "experts": EXPERTS, "fused": FUSED}
OPTIMIZERS = {"adamw": AdamWConfig(lr=0.01), "adamw8bit": AdamW8bitConfig(lr=0.01), "muon": MuonConfig(lr=0.01)}
# How a model is trained before its final checkpoint is written, by name of the model and variant.
RESULTS = {
    "dense": NoAdapter(),
    "experts": NoAdapter(),
    "fused": LoRAConfig(2, target_modules=("q_proj", "v_proj", "mlp", "embed"), modules_to_save=("head", "norms")),
    "experts-lora": LoRAConfig(2, target_modules=("attn", "experts", "head")),
    "dense-dora": DoRAConfig(3, target_modules="attn"),
    "dense-pissa": LoRAConfig(4, init="pissa"),
    "dense-nf4": LoRAConfig(2),
    "fused-dora-nf4": DoRAConfig(2, target_modules=("v_proj", "gate_proj")),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint and how it is trained."""

    folder: Path
    adapter: NoAdapter | LoRAConfig = NoAdapter()
    optimizer: AdamWConfig | MuonConfig = AdamWConfig(lr=0.01)
    weights: NoQuantization = NoQuantization()

    @property
    def source(self) -> HFCheckpoint:
        return HFCheckpoint.open(self.folder)

    def model(self, dist: DistributedContext) -> Decoder:
        return build.build_model(self.source, self.weights, self.adapter, FP32, MemoryConfig(), dist)

    def state(
        self, directory: Path, model: Decoder, dist: DistributedContext, background: bool = False
    ) -> Checkpointer:
        layer_params = (p for layer in model.layers for p in layer.parameters())
        optimizer = self.optimizer.build(self.adapter.param_groups(model), layer_params)
        return Checkpointer(directory, model, optimizer, LambdaLR(optimizer, constant), 2, dist, background=background)


def constant(step: int) -> float:
    return 1.0


def run_steps(state: Checkpointer, start: int, end: int) -> None:
    """Run steps whose gradients do not depend on the layout."""
    for step in range(start, end):
        for name, p in state.model.named_parameters():
            if p.requires_grad:
                generator = torch.Generator().manual_seed(step * 1000 + len(name))
                grad = torch.randn(shard_slice(p).shape, generator=generator)
                p.grad = torch.zeros_like(p)
                to_local(p.grad).copy_(shard_slice(p).slice_local(grad, to_local(p).shape))
        state.optimizer.step()


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p).clone() for name, p in model.named_parameters() if p.requires_grad}


def resume_and_train(
    case: Case, directory: Path, dist: DistributedContext, steps: int, stop: int, background: bool
) -> dict[str, Tensor]:
    """Restore the state of a directory, train to `steps` and save, and train to `stop` while it is written."""
    model = case.model(dist)
    with case.state(directory, model, dist, background) as state:
        start = state.restore()
        if steps > start:
            run_steps(state, start, steps)
            state.save(steps)
        run_steps(state, max(start, steps), stop)
    return trained_tensors(model)


def save_result(name: str, base: Path, out: Path, dist: DistributedContext) -> dict[str, object]:
    """Write the final checkpoint and verify it against the model."""
    case = Case(
        base / name.partition("-")[0], RESULTS[name], weights=NF4Config() if name.endswith("nf4") else NoQuantization()
    )
    model = case.model(dist)
    run_steps(case.state(out, model, dist), 0, 1)
    with atomic.AtomicDir(out / name, dist) as directory:
        final_checkpoint.save_final(case.adapter, directory, model, case.source, dist)
        verification = verify.verify_saved(
            directory, model, ModelSource(case.source, case.weights, case.adapter, FP32), dist
        )
    return vars(verification)


def save_without_space(case: Case, directory: Path, dist: DistributedContext, background: bool) -> tuple[str, int, str]:
    """Message, polling count and directory contents when the last rank cannot write large files."""
    model, message, num_polls = case.model(dist), "", 0
    state = case.state(directory, model, dist, background)
    run_steps(state, 0, 1)
    state.save(1)
    state.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.rank == dist.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        state.save(2)
        while state.async_save:
            num_polls += 1
            state.poll()
    except UserError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    file_names = " ".join(sorted(path.name for path in directory.iterdir()))
    state.save(3)  # works again without the limit
    state.wait()
    return message, num_polls, file_names


def restore_damaged(case: Case, directory: Path, dist: DistributedContext) -> list[str]:
    """Error messages of this rank for truncated files of a state, whichever rank reads the file."""
    model, messages = case.model(dist), []
    state = case.state(directory, model, dist)
    state.save(1)
    for name in (dcp_planner.METADATA, "progress.pt"):
        path, contents = directory / "00000001" / name, (directory / "00000001" / name).read_bytes()
        dist.barrier()
        dist.run_on_main(partial(path.write_bytes, contents[: len(contents) // 2]))
        try:
            state.restore()
        except UserError as error:
            messages.append(str(error).partition(";")[0])
        dist.run_on_main(partial(path.write_bytes, contents))
    return messages


def upload_checkpoint(case: Case, directory: Path, dist: DistributedContext, patch: Any) -> list[str]:
    """Names of the files of a checkpoint that this rank uploads. All ranks write it."""
    file_names: list[str] = []
    patch.push_checkpoint = lambda config, folder, message, description: file_names.extend(
        sorted(file.name for file in folder.iterdir())
    )
    model = case.model(dist)
    uploader = patch.HubUploader(
        patch.PushToHubConfig("ann/model", push_every=2),
        directory,
        dist,
    )
    for step in (1, 2):
        uploader.push_if_due(
            step, 3, lambda path: final_checkpoint.save_final(case.adapter, path, model, case.source, dist)
        )
    if uploader.thread is not None:
        uploader.thread.join()
    dist.barrier()
    return file_names


def open_in_use(out: Path, dist: DistributedContext) -> list[str]:
    """Messages of each rank for a run directory that is in use, has another config, or is overwritten."""
    messages = []
    with run_dir.open_run_dir(out, "seed: 1", frozenset(), False, dist) as opened_dir:
        messages.append(str(opened_dir.started_on))
        for request in ((out, "seed: 1", False), (out, "seed: 2", True)):
            try:
                run_dir.open_run_dir(request[0], request[1], frozenset(), request[2], dist)
            except UserError as error:
                messages.append(re.sub(r"process \d+", "process", str(error)))
        dist.run_on_main((out / "metrics.jsonl").touch)
    dist.barrier()
    try:
        run_dir.open_run_dir(out, "seed: 2", frozenset(), False, dist)
    except UserError as error:
        messages.append(str(error))
    run_dir.open_run_dir(out, "seed: 2", frozenset(), True, dist).start()
    messages.append(" ".join(sorted(path.name for path in out.iterdir())))
    return messages


def run_on_two(base: Path, out: Path) -> dict[str, object]:
    """Run everything that two ranks test."""
    results: dict[str, object] = {}
    with DistributedContext(0, "cpu") as dist:
        for name, optimizer in OPTIMIZERS.items():
            case = Case(base / "dense", optimizer=optimizer)
            results[f"background {name}"] = resume_and_train(case, out / f"two-{name}", dist, 2, 4, True)
            results[f"restored {name}"] = resume_and_train(case, out / f"two-{name}", dist, 2, 4, False)
            results[f"of one {name}"] = resume_and_train(case, out / f"one-{name}", dist, 2, 4, False)
        for name in RESULTS:
            results[name] = save_result(name, base, out / "two", dist)
        for background in (False, True):
            directory = out / f"refused-{background}"
            results[f"refused {background}"] = save_without_space(Case(base / "dense"), directory, dist, background)
        results["damaged"] = restore_damaged(Case(base / "dense"), out / "damaged", dist)
        results["sent"] = upload_checkpoint(Case(base / "dense"), out / "sender", dist, publish)
        results["claimed"] = open_in_use(out / "claimed", dist)
    return results


def memory_status(key: str) -> int:
    return next(int(x.split()[1]) * 1024 for x in Path("/proc/self/status").open() if x.startswith(f"{key}:"))


def peak_memory(fn: Callable[[], Any]) -> tuple[int, Any]:
    """Peak memory of this rank during a call, in bytes above that before, and the result."""
    Path("/proc/self/clear_refs").write_text("5")
    before, result = memory_status("VmRSS"), fn()
    return memory_status("VmHWM") - before, result


def return_freed_memory() -> None:
    """Return freed tensors of more than 64 KB to the kernel.

    Otherwise the heap retains up to 64 MiB, and so do the malloc arenas of the threads of gloo.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1


def measure_memory(directory: Path, out: Path) -> tuple[int, int, int]:
    """Bytes of the local shard of a sharded model, and peak bytes of loading and saving it."""
    with DistributedContext(0, "cpu") as dist:
        return_freed_memory()
        source, precision = HFCheckpoint.open(directory), PrecisionConfig("fp32", "fp32", "checkpoint")
        small = dist.run_on_main(partial(write_checkpoint, out.with_name("small"), DENSE))
        Case(small).model(dist)  # torch imports modules when it shards a model for the first time
        loading, model = peak_memory(
            lambda: build.build_model(source, NoQuantization(), FrozenModel(), precision, MemoryConfig(), dist)
        )
        dist.run_on_main(out.mkdir)
        dist.barrier()
        saving, _ = peak_memory(lambda: save_model(out, model, source, quiet=True, dist=dist))
        return sum(to_local(p).nbytes for p in model.parameters()), loading, saving


def run_on_four(base: Path, out: Path, parallel: ParallelConfig, model: str) -> dict[str, object]:
    """Four ranks restore the states of one process and save them."""
    results: dict[str, object] = {}
    with DistributedContext(0, "cpu", parallel) as dist:
        for name in ("adamw", "muon"):
            case = Case(base / model, optimizer=OPTIMIZERS[name])
            results[name] = resume_and_train(case, out / f"four-{name}", dist, 3, 4, True)
        results[model] = save_result(model, base, out / "four", dist)
        try:
            resume_and_train(
                Case(base / model, optimizer=OPTIMIZERS["adamw8bit"]), out / "four-adamw8bit", dist, 3, 4, True
            )
        except UserError as error:
            results["refused"] = str(error)
    return results


def kill_one_rank(base: Path, out: Path) -> None:
    """Kill one rank after it wrote its shard and before the other did."""
    with DistributedContext(0, "cpu") as dist:
        case = Case(base / "dense")
        model = case.model(dist)
        state = case.state(out, model, dist, True)
        run_steps(state, 0, 1)
        state.save(1)
        state.wait()
        write_shards, has_written = dcp_planner.write_shards, out / "written"

        def write_or_die(*args: Any) -> dcp_planner.ShardWriteResult:
            if dist.rank == 1:
                while not has_written.exists():
                    time.sleep(0.01)
                os._exit(9)
            result = write_shards(*args)
            has_written.touch()
            return result

        dcp_planner.write_shards = write_or_die
        run_steps(state, 1, 2)
        state.save(2)
        state.wait()
