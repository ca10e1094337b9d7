"""Kernel launches and host waits of a training step of an 8B Llama, counted without a GPU.

python benchmarks/kernel_launches.py [tunekit] [peft] [torchtune] [--methods full lora qlora] [--operators]

A step is one row of 2,048 tokens: forward, backward, gradient norm and clipping at 1.0, fused AdamW. Adapters have
rank 16 on all linear layers. `per layer` is the difference between models of 4 and of 2 layers, divided by 2. The
counting rules of launch_counter.py give the minimum that a program needs, and are the same for all libraries.
transformers and PEFT run as under Trainer (bf16 weights, autocast, adapters in fp32), without Trainer's own work;
`peft_bf16` has adapters in bf16 and no autocast, which is the minimum that PEFT can launch. torchtune is included if
it can be imported.
"""

import argparse
import importlib
import importlib.util
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from launch_counter import CUDA, Counts, LaunchCounter, count_step, simulated_capabilities
from torch import Tensor, nn

from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import CheckpointDir, HFCheckpoint
from tunekit.data.dataloader.batch import Batch
from tunekit.distributed.context import DistributedContext
from tunekit.losses.cross_entropy import CrossEntropy
from tunekit.memory.config import MemoryConfig
from tunekit.models.families.registry import find_family
from tunekit.models.precision import PrecisionConfig
from tunekit.optim.config import AdamWConfig
from tunekit.quantization.config import NF4Config, NoQuantization
from tunekit.recipes import sft

LENGTH, RANK, BF16 = 2048, 16, torch.bfloat16
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PHASES = ("forward", "backward", "optimizer")

StepFunction = Callable[[LaunchCounter], object]


# tunekit


def build_tunekit_step(method: str, num_layers: int) -> StepFunction:
    """The step of recipes/sft.py."""
    config = LLAMA_8B | {"num_hidden_layers": num_layers}
    source = HFCheckpoint(CheckpointDir(Path()), "random", config, *find_family(config, "config.json"))
    adapter = NoAdapter() if method == "full" else LoRAConfig(RANK)
    quantization = NF4Config(double_quant=True) if method == "qlora" else NoQuantization()
    model = build.build_meta_model(source, quantization, adapter)
    dist = DistributedContext.single_process()
    dist.device = CUDA
    PrecisionConfig("bf16", frozen_dtype="bf16").apply(model, {}, CUDA)
    MemoryConfig().apply(model, CUDA)
    optimizer = AdamWConfig().build(adapter.param_groups(model))
    train_optimizer = MemoryConfig().wrap_optimizer(optimizer, dist)
    cfg = SimpleNamespace(loss=CrossEntropy())
    tokens, positions = torch.zeros(1, LENGTH, dtype=torch.long), torch.arange(LENGTH)[None]
    cu_seqlens = torch.tensor([0, 700, 1500, LENGTH], dtype=torch.int32)
    batch = Batch(tokens, tokens, positions, cu_seqlens, LENGTH, LENGTH)

    def run_step(counter: LaunchCounter) -> None:
        counter.phase = "forward"
        with backward_phase(counter):
            sft.forward_backward(model, [batch], cfg, dist)
        counter.phase = "optimizer"
        train_optimizer.clip_grad_norm(1.0)
        train_optimizer.step()
        train_optimizer.zero_grad()

    return run_step


@contextmanager
def backward_phase(counter: LaunchCounter) -> Iterator[None]:
    """Start the backward phase when Tensor.backward is called in the block."""
    backward = Tensor.backward

    def run_backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        counter.phase = "backward"
        backward(tensor, *args, **kwargs)

    with patch.object(Tensor, "backward", run_backward):
        yield


# transformers and PEFT


def build_peft_step(method: str, num_layers: int, autocast: bool = True) -> StepFunction:
    """Device work of a step of Trainer: the model with its loss, clipping, the optimizer."""
    transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    options = {k: v for k, v in LLAMA_8B.items() if k not in ("architectures", "model_type", "torch_dtype")}
    config = transformers.LlamaConfig(**options, num_hidden_layers=num_layers, attn_implementation="sdpa")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to(torch.float32 if method == "full" and autocast else BF16).train()
    if method == "qlora":
        quantize_with_bitsandbytes(model.model)
    if method != "full":
        lora = peft.LoraConfig(r=RANK, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=autocast)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)

    def run_step(counter: LaunchCounter) -> None:
        counter.phase = "forward"
        inputs = {name: tokens.to("cuda", non_blocking=True) for name in ("input_ids", "attention_mask", "labels")}
        with autocast_linear(autocast):
            loss = model(**inputs, use_cache=False, num_items_in_batch=LENGTH).loss
        counter.phase = "backward"
        loss.backward()
        counter.phase = "optimizer"
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run_step


@contextmanager
def autocast_linear(enabled: bool) -> Iterator[None]:
    """Casts of autocast, which does not support meta tensors: to bf16 before matmuls, of weights once per step."""
    linear, matmul, cache = F.linear, torch.matmul, {}

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dtype != torch.float32:
            return tensor
        if not tensor.is_leaf:
            return tensor.to(BF16)
        if tensor not in cache:
            cache[tensor] = tensor.to(BF16)
        return cache[tensor]

    if not enabled:
        yield
        return
    with (
        patch.object(F, "linear", lambda x, w, b=None: linear(cast(x), cast(w), cast(b))),
        patch.object(torch, "matmul", lambda x, y: matmul(cast(x), cast(y))),
    ):
        yield


def quantize_with_bitsandbytes(model: nn.Module) -> None:
    """Replace linear layers by NF4 layers of bitsandbytes with double quantization, without quantizing values."""
    bitsandbytes = importlib.import_module("bitsandbytes")
    functional = importlib.import_module("bitsandbytes.functional")
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        quantized = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=BF16, quant_type="nf4", device="meta"
        )
        numel = layer.weight.numel()
        code, scale_code = torch.empty(16, device="meta"), torch.empty(256, device="meta")
        outer_scales = torch.empty(numel // 64 // 256, device="meta")
        scale_state = functional.QuantState(outer_scales, code=scale_code, blocksize=256)
        scale_state.dtype = torch.float32
        state = functional.QuantState(
            torch.empty(numel // 64, dtype=torch.uint8, device="meta"), layer.weight.shape, code, 64, "nf4", BF16,
            offset=torch.empty((), device="meta"), state2=scale_state,
        )  # fmt: skip
        packed = torch.empty(numel // 2, 1, dtype=torch.uint8, device="meta")
        quantized.weight = bitsandbytes.nn.Params4bit(
            packed, requires_grad=False, quant_state=state, blocksize=64, quant_type="nf4", bnb_quantized=True
        )
        quantized.quant_state = state
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, quantized)


# torchtune


def build_torchtune_model(method: str, num_layers: int) -> nn.Module:
    """Llama of torchtune on the meta device, in bf16, with LoRA unless the method is "full"."""
    builders = importlib.import_module("torchtune.models.llama3_1._component_builders")
    peft = importlib.import_module("torchtune.modules.peft")
    sizes = {"vocab_size": 128256, "num_layers": num_layers, "num_heads": 32, "num_kv_heads": 8, "embed_dim": 4096}
    sizes |= {"max_seq_len": 8192, "intermediate_dim": 14336, "norm_eps": 1e-5, "rope_base": 500000}
    targets = ["q_proj", "k_proj", "v_proj", "output_proj"]
    with torch.device("meta"):
        if method == "full":
            model = builders.llama3_1(**sizes)
        else:
            model = builders.lora_llama3_1(targets, True, False, **sizes, lora_rank=RANK, lora_alpha=32)
    for module in model.modules():
        if module.__class__.__name__.endswith("RoPE"):  # its tables cannot be on the meta device
            with torch.device("cpu"):
                module.rope_init()
    model.to(device="meta", dtype=BF16)
    if method != "full":
        peft.set_trainable_params(model, peft.get_adapter_params(model))
    return model


def build_torchtune_step(method: str, num_layers: int) -> StepFunction:
    """Step of the single-device recipes: all tensors in bf16, the loss in eight chunks."""
    model = build_torchtune_model(method, num_layers)
    loss_fn = importlib.import_module("torchtune.modules.loss").CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_fn.num_output_chunks)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    tokens, ignored_label = torch.zeros(1, LENGTH, dtype=torch.long), torch.full((1, 1), loss_fn.ignore_index)

    def run_step(counter: LaunchCounter) -> None:
        counter.phase = "forward"
        inputs, labels, last_label = (t.to("cuda", non_blocking=True) for t in (tokens, tokens, ignored_label))
        num_tokens = (labels != loss_fn.ignore_index).sum()
        logits = model(inputs)
        labels = torch.hstack((labels[..., 1:], last_label))
        loss = loss_fn(logits, labels) * num_tokens
        counter.phase = "backward"
        loss.backward()
        counter.phase = "optimizer"
        for parameter in parameters:  # training.scale_grads
            parameter.grad *= 1 / num_tokens
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run_step


# Report


@dataclass(frozen=True)
class Library:
    title: str
    build_step: Callable[[str, int], StepFunction]  # method, number of layers
    methods: tuple[str, ...] = ("full", "lora", "qlora")


LIBRARIES = {
    "tunekit": Library("tunekit", build_tunekit_step),
    "peft": Library("transformers + PEFT, autocast", build_peft_step),
    "peft_bf16": Library("transformers + PEFT, all bf16", partial(build_peft_step, autocast=False)),
    "torchtune": Library("torchtune", build_torchtune_step, ("full", "lora")),
}
PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "torchtune", "torchao")


def count_launches(
    build_step: Callable[[str, int], StepFunction], method: str, num_layers: int, capability: tuple[int, int]
) -> Counts:
    with simulated_capabilities(capability):
        run_step = build_step(method, num_layers)
    return count_step(run_step, capability)


def format_row(name: str, counts: Counts, shallow: Counts, deep: Counts) -> str:
    """A row of the table. `shallow` and `deep`: of models with 2 and 4 layers."""
    launches = " | ".join(f"{counts.launches[phase]:,}" for phase in PHASES)
    per_layer = " | ".join(f"{(deep.launches[phase] - shallow.launches[phase]) / 2:g}" for phase in PHASES[:2])
    waits = ", ".join(f"{n} {phase}" for phase, n in counts.waits.items()) or "0"
    return f"| {name} | {counts.num_launches:,} | {launches} | {per_layer} | {waits} |"


def print_operators(shallow: Counts, deep: Counts) -> None:
    """Print the launches of each operator in a layer, and each host wait of a step."""
    for phase in PHASES:
        names = [name for operator_phase, name in deep.operators if operator_phase == phase]
        launches = {n: (deep.operators[phase, n] - shallow.operators[phase, n]) / 2 for n in names}
        text = ", ".join(f"{n} {v:g}" for n, v in sorted(launches.items(), key=lambda x: -x[1]) if v)
        print(f"  {phase}: {text}")
    for (phase, name), number in deep.causes.items():
        print(f"  wait in {phase}: {name} x {number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", default=[*LIBRARIES], help=", ".join(LIBRARIES))
    parser.add_argument("--methods", nargs="+", default=["full", "lora", "qlora"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--capability", type=int, nargs=2, default=(9, 0), help="of the simulated device")
    parser.add_argument("--operators", action="store_true", help="list the operators of a layer, and each wait")
    args = parser.parse_args()
    capability = (args.capability[0], args.capability[1])
    libraries = [LIBRARIES[n] for n in args.libraries if n != "torchtune" or importlib.util.find_spec("torchtune")]
    versions = [f"{name} {version(name)}" for name in PACKAGES if importlib.util.find_spec(name)]
    print(f"{', '.join(versions)}, Python {platform.python_version()}")
    for method in args.methods:
        print(f"\n| {method}, {args.layers} layers, 1 x {LENGTH} | launches | forward | backward | optimizer "
              "| per layer forward | per layer backward | waits |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
        for library in libraries:
            if method not in library.methods:
                continue
            total, *per_layer = (count_launches(library.build_step, method, n, capability) for n in (args.layers, 2, 4))
            print(format_row(library.title, total, *per_layer), flush=True)
            if args.operators:
                print_operators(*per_layer)


if __name__ == "__main__":
    main()
