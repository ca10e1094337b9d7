"""What a rank does in tests of states and files that several write. Lean: every rank imports it."""

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
from tunekit.checkpoint.safetensors_io import SafetensorsWriter
from tunekit.checkpoint.save_model import described, plan_shards, save_model, write_index
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


def checkpoint(folder: Path, config: dict, shard: int = 60_000) -> Path:
    """Random weights in small files. Of norms no two numbers are the same."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    source = HFCheckpoint.open(folder)
    with torch.device("meta"):
        model = Decoder(source.spec)
    held = {n: s for n, s in model.shapes.items() if not (source.spec.tied and n == TIED)}
    entries = {n: e for move in save_mappings(held, source.family.table) for n, e in described(model, move, source)}
    shards, draw = plan_shards(entries, source, shard), torch.Generator().manual_seed(1)
    for file, names in shards.items():
        with SafetensorsWriter(folder / file, {n: entries[n] for n in names}) as out:
            for n in names:
                shape, dtype = entries[n]
                numbers = torch.randn(shape, generator=draw) * 0.2
                out[n] = (numbers if len(shape) > 1 else 1 + numbers).to(dtype)
    write_index(folder, shards, entries, source)
    return folder


MODELS = {"dense": DENSE, "experts": EXPERTS, "fused": FUSED}
OPTIMIZERS = {"adamw": AdamWConfig(lr=0.01), "adamw8bit": AdamW8bitConfig(lr=0.01), "muon": MuonConfig(lr=0.01)}
# Files of the Hub: how a model is trained whose result is written.
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
    """A model of a folder, and how it is trained."""

    folder: Path
    adapter: NoAdapter | LoRAConfig = NoAdapter()
    optimizer: AdamWConfig | MuonConfig = AdamWConfig(lr=0.01)
    weights: NoQuantization = NoQuantization()

    @property
    def source(self) -> HFCheckpoint:
        return HFCheckpoint.open(self.folder)

    def model(self, run: DistributedContext) -> Decoder:
        return build.build_model(self.source, self.weights, self.adapter, FP32, MemoryConfig(), run)

    def state(self, folder: Path, model: Decoder, run: DistributedContext, background: bool = False) -> Checkpointer:
        inner = (p for layer in model.layers for p in layer.parameters())
        optimizer = self.optimizer.build(self.adapter.trained(model), inner)
        return Checkpointer(folder, model, optimizer, LambdaLR(optimizer, constant), 2, run, background=background)


def constant(step: int) -> float:
    return 1.0


def moved(state: Checkpointer, first: int, last: int) -> None:
    """Steps whose gradients are the same on any layout."""
    for step in range(first, last):
        for name, p in state.model.named_parameters():
            if p.requires_grad:
                draw = torch.Generator().manual_seed(step * 1000 + len(name))
                grad = torch.randn(shard_slice(p).shape, generator=draw)
                p.grad = torch.zeros_like(p)
                to_local(p.grad).copy_(shard_slice(p).of(grad, to_local(p).shape))
        state.optimizer.step()


def held(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p).clone() for name, p in model.named_parameters() if p.requires_grad}


def gone_on(
    case: Case, folder: Path, run: DistributedContext, steps: int, stop: int, background: bool
) -> dict[str, Tensor]:
    """Take up the state in a folder; train to `steps` and save, and train on to `stop` at once."""
    model = case.model(run)
    with case.state(folder, model, run, background) as state:
        start = state.restore()
        if steps > start:
            moved(state, start, steps)
            state.save(steps)
        moved(state, max(start, steps), stop)
    return held(model)


def result(name: str, base: Path, out: Path, run: DistributedContext) -> dict[str, object]:
    """Write what a training leaves for others, and compare it with the model."""
    case = Case(
        base / name.partition("-")[0], RESULTS[name], weights=NF4Config() if name.endswith("nf4") else NoQuantization()
    )
    model = case.model(run)
    moved(case.state(out, model, run), 0, 1)
    with atomic.SharedAtomicDir(out / name, run) as folder:
        final_checkpoint.save_final(case.adapter, folder, model, case.source, run)
        found = verify.verify_saved(
            folder, model, verify.ModelSource(case.source, case.weights, case.adapter, FP32), run
        )
    return vars(found)


def refused(case: Case, folder: Path, run: DistributedContext, background: bool) -> tuple[str, int, str]:
    """A rank that may not write large files while others may: what it says, at which look, and what is left."""
    model, told, look = case.model(run), "", 0
    state = case.state(folder, model, run, background)
    moved(state, 0, 1)
    state.save(1)
    state.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.rank == run.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        state.save(2)
        while state.writing:
            look += 1
            state.look()
    except UserError as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run.barrier()
    left = " ".join(sorted(path.name for path in folder.iterdir()))
    state.save(3)  # and goes on as soon as it can
    state.wait()
    return told, look, left


def damaged(case: Case, folder: Path, run: DistributedContext) -> list[str]:
    """What this rank says of a state of which a file is cut off, whichever rank has looked at that file."""
    model, told = case.model(run), []
    state = case.state(folder, model, run)
    state.save(1)
    for name in (dcp_planner.METADATA, "progress.pt"):
        file, whole = folder / "00000001" / name, (folder / "00000001" / name).read_bytes()
        run.barrier()
        run.shared(partial(file.write_bytes, whole[: len(whole) // 2]))
        try:
            state.restore()
        except UserError as error:
            told.append(str(error).partition(";")[0])
        run.shared(partial(file.write_bytes, whole))
    return told


def sent(case: Case, folder: Path, run: DistributedContext, patch: Any) -> list[str]:
    """What this rank sends of a checkpoint that all of them write."""
    found: list[str] = []
    patch.aside = lambda choice, place, message, about: found.extend(sorted(file.name for file in place.iterdir()))
    model = case.model(run)
    sender = patch.HubUploader(
        patch.PushToHubConfig("ann/model", push_every=2),
        folder,
        lambda place: final_checkpoint.save_final(case.adapter, place, model, case.source, run),
        run,
    )
    for step in (1, 2):
        sender.step(step, 3)
    if sender.thread is not None:
        sender.thread.join()
    run.barrier()
    return found


def claimed(out: Path, run: DistributedContext) -> list[str]:
    """What each rank is told of a folder that is taken, of one with another config, and what it is given."""
    told = []
    with run_dir.open_run_dir(out, "seed: 1", frozenset(), False, run) as space:
        told.append(str(space.day))
        for words in ((out, "seed: 1", False), (out, "seed: 2", True)):
            try:
                run_dir.open_run_dir(words[0], words[1], frozenset(), words[2], run)
            except UserError as error:
                told.append(re.sub(r"process \d+", "process", str(error)))
        run.shared((out / "metrics.jsonl").touch)
    run.barrier()
    try:
        run_dir.open_run_dir(out, "seed: 2", frozenset(), False, run)
    except UserError as error:
        told.append(str(error))
    run_dir.open_run_dir(out, "seed: 2", frozenset(), True, run).begin()
    told.append(" ".join(sorted(path.name for path in out.iterdir())))
    return told


def on_two(base: Path, out: Path) -> dict[str, object]:
    """All that two ranks can tell."""
    found: dict[str, object] = {}
    with DistributedContext(0, "cpu") as run:
        for name, optimizer in OPTIMIZERS.items():
            case = Case(base / "dense", optimizer=optimizer)
            found[f"background {name}"] = gone_on(case, out / f"two-{name}", run, 2, 4, True)
            found[f"again {name}"] = gone_on(case, out / f"two-{name}", run, 2, 4, False)
            found[f"of one {name}"] = gone_on(case, out / f"one-{name}", run, 2, 4, False)
        for name in RESULTS:
            found[name] = result(name, base, out / "two", run)
        for background in (False, True):
            where = out / f"refused-{background}"
            found[f"refused {background}"] = refused(Case(base / "dense"), where, run, background)
        found["damaged"] = damaged(Case(base / "dense"), out / "damaged", run)
        found["sent"] = sent(Case(base / "dense"), out / "sender", run, publish)
        found["claimed"] = claimed(out / "claimed", run)
    return found


def status(key: str) -> int:
    return next(int(x.split()[1]) * 1024 for x in Path("/proc/self/status").open() if x.startswith(f"{key}:"))


def peak(act: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that this rank had at most above what it had before."""
    Path("/proc/self/clear_refs").write_text("5")
    before, done = status("VmRSS"), act()
    return status("VmHWM") - before, done


def memory(folder: Path, out: Path) -> tuple[int, int, int]:
    """Of a model that is divided: what its share takes, and what loading and saving it take at most."""
    with DistributedContext(0, "cpu") as run:
        source, precision = HFCheckpoint.open(folder), PrecisionConfig("fp32", "fp32", "checkpoint")
        small = run.shared(partial(checkpoint, out.with_name("small"), DENSE))
        Case(small).model(run)  # now torch has all that it loads when it first divides a model
        loading, model = peak(
            lambda: build.build_model(source, NoQuantization(), FrozenModel(), precision, MemoryConfig(), run)
        )
        run.shared(out.mkdir)
        run.barrier()
        saving, _ = peak(lambda: save_model(out, model, source, quiet=True, run=run))
        return sum(to_local(p).nbytes for p in model.parameters()), loading, saving


def on_four(base: Path, out: Path, parallel: ParallelConfig, model: str) -> dict[str, object]:
    """States of one process taken up by four ranks, and saved there."""
    found: dict[str, object] = {}
    with DistributedContext(0, "cpu", parallel) as run:
        for name in ("adamw", "muon"):
            case = Case(base / model, optimizer=OPTIMIZERS[name])
            found[name] = gone_on(case, out / f"four-{name}", run, 3, 4, True)
        found[model] = result(model, base, out / "four", run)
        try:
            gone_on(Case(base / model, optimizer=OPTIMIZERS["adamw8bit"]), out / "four-adamw8bit", run, 3, 4, True)
        except UserError as error:
            found["refused"] = str(error)
    return found


def killed(base: Path, out: Path) -> None:
    """One rank ends when it has written its share and the other has not."""
    with DistributedContext(0, "cpu") as run:
        case = Case(base / "dense")
        model = case.model(run)
        state = case.state(out, model, run, True)
        moved(state, 0, 1)
        state.save(1)
        state.wait()
        usual, mine = dcp_planner.write_shards, out / "written"

        def writes(*args: Any) -> dcp_planner.ShardWriteResult:
            if run.rank == 1:
                while not mine.exists():
                    time.sleep(0.01)
                os._exit(9)
            done = usual(*args)
            mine.touch()
            return done

        dcp_planner.write_shards = writes
        moved(state, 1, 2)
        state.save(2)
        state.wait()
