"""Launches of every Triton kernel without a GPU: which specializations the launchers of tunekit ask for.

The launchers run with tensors on the meta device and a driver that only reports a target. Triton then derives the
signature, constants and argument attributes of each launch as it does on a GPU, and a hook records them instead of
compiling. `LAUNCHES` lists the launches of each kernel module: for a new `kernels/<name>_triton.py`, add an entry.
`triton_compile.py` compiles the records; `tests/gpu/test_triton_compiles.py` checks the results.
"""

import ast
import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tunekit.kernels import (
    adamw8bit_triton,
    cross_entropy_triton,
    divergence_triton,
    experts_triton,
    float8_triton,
    glu_triton,
    nf4_triton,
    norm_triton,
    probe_triton,
    rope_triton,
)
from tunekit.kernels.adamw8bit import Moments, Rule

ROOT = Path(__file__).resolve().parents[1]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (BF16, FP32)  # of activations and trained weights: `precision` has no fp16
STORED = (BF16, FP16, FP32)  # of checkpoints: weights are quantized from these, and merged into these
TOKENS = 2048
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")


@dataclass(frozen=True)
class Launch:
    """Inputs of Triton to compile one launch, and the numbers that it passes."""

    kernel: JITFunction
    key: str  # equal for launches that share one compiled kernel
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    grid: tuple[int, ...]
    integers: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__}"

    @property
    def pointers(self) -> str:
        """Element types of the pointers, without repeats."""
        return "/".join(dict.fromkeys(t[1:] for t in self.signature.values() if t.startswith("*")))

    @property
    def variant(self) -> str:
        """The constants that select code: block sizes and flags, and arguments that are 1."""
        names = list(self.signature)
        return " ".join(f"{names[i]}={value}" for (i, *_), value in self.constants.items())


class TargetDriver:
    """A Triton driver that knows its target and nothing else: launches need it to find their specialization."""

    def __init__(self) -> None:
        self.targets: list[GPUTarget] = []

    def get_current_device(self) -> int:  # a number for each target: Triton caches the compiler of a device
        return len(self.targets) - 1

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.targets[-1]


DRIVER = TargetDriver()


@contextmanager
def record_launches(target: GPUTarget) -> Iterator[list[Launch]]:
    """Collect the launches inside the block, as they would be compiled for a target. Nothing runs."""
    launches: list[Launch] = []
    pending: dict[str, Any] = {}
    run = JITFunction.run

    def run_recorded(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        pending.update(grid=grid, values=dict(zip(self.arg_names, args, strict=False)))
        run(self, *args, grid=grid, warmup=warmup, **options)

    def add_launch(**event: Any) -> bool:
        compiled, function = event["compile"], event["fn"].jit_function
        options = {name: compiled[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        integers = {name: value for name, value in pending["values"].items() if isinstance(value, int)}
        key = f"{function.__module__}.{event['repr']}{event['key']}"
        form = compiled["signature"], compiled["constants"], compiled["configs"][0]
        launches.append(Launch(function, key, *form, options, tuple(pending["grid"]), integers))
        return True  # do not compile

    DRIVER.targets.append(target)
    driver.set_active(DRIVER)
    JITFunction.run, knobs.runtime.jit_cache_hook = run_recorded, add_launch
    try:
        yield launches
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, None


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Shapes of the presets


@dataclass(frozen=True)
class PresetShapes:
    """Sizes in `tunekit/models/presets/*/config.json` that reach kernels."""

    norms: frozenset[int]
    gated: frozenset[int]
    heads: frozenset[tuple[int, int, int]]  # number, channels, rotated channels
    vocabularies: frozenset[int]


def read_presets() -> PresetShapes:
    configs = [json.loads(file.read_text("utf-8")) for file in (ROOT / "tunekit/models/presets").glob("*/config.json")]
    assert configs
    norms, gated, heads, vocabularies = set(), set(), set(), set()
    for config in configs:
        number, groups = config["num_attention_heads"], config["num_key_value_heads"]
        channels = config.get("head_dim") or config["hidden_size"] // number
        names = "hidden_size", "q_lora_rank", "kv_lora_rank", "linear_value_head_dim"
        norms |= {config[name] for name in names if config.get(name)} | {channels, channels * number, channels * groups}
        names = "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"
        gated |= {config[name] for name in names if config.get(name)}
        if rotated := config.get("qk_rope_head_dim"):  # latent attention: one key of which all channels turn
            heads |= {(number, config["qk_nope_head_dim"] + rotated, rotated), (1, rotated, rotated)}
        else:
            rotated = int(channels * config.get("partial_rotary_factor", 1.0))
            heads |= {(number, channels, rotated), (groups, channels, rotated)}
        vocabularies.add(config["vocab_size"])
    return PresetShapes(frozenset(norms), frozenset(gated), frozenset(heads), frozenset(vocabularies))


PRESETS = read_presets()


# Launches of one kernel module: each function below calls a launcher


def glu(shape: tuple[int, int], act: str, dtype: torch.dtype = BF16, stride: int | None = None) -> None:
    """Both ways, of contiguous rows or of rows that are parts of wider ones."""
    rows, dim = shape
    x = meta(rows, stride or dim, dtype=dtype)[:, :dim]
    y = meta(rows, dim, dtype=dtype)
    glu_triton.forward(x, x, y, act)
    glu_triton.backward(y, x, x, y, y, act)


def glu_variants() -> None:
    for dim in sorted(PRESETS.gated):
        for act in ACTIVATIONS:
            for dtype in FLOATS:
                glu((1, TOKENS * dim), act, dtype)
                glu((TOKENS, dim), act, dtype, 2 * dim)  # of a joined projection
                glu((1, 7), act, dtype)


def norm(  # noqa: PLR0913 (what a norm depends on)
    rows: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    late: bool,
    stride: int = 0,
    learnt: bool = True,
) -> None:
    dtype, weight_dtype = dtypes
    x = meta(rows, stride or dim, dtype=dtype)[:, :dim]
    y, rstd = meta(rows, dim, dtype=dtype), meta(rows, dtype=FP32)
    weight = None if weight_dtype is None else meta(dim, dtype=weight_dtype)
    parts = meta(-(-rows // 64) if learnt and weight is not None else 0, dim, dtype=FP32)
    norm_triton.forward(x, weight, y, rstd, 1e-6, 0.0, late)
    norm_triton.backward(y, x, weight, rstd, y, parts, 0.0, late)


def norm_variants() -> None:
    pairs = [(a, b) for a in FLOATS for b in (a, FP32, None) if a != b or b == a]
    for dim in sorted(PRESETS.norms | {100}):
        for dtypes in dict.fromkeys(pairs):
            for late in (False, True) if dtypes[1] else (False,):
                norm(TOKENS, dim, dtypes, late)
                norm(TOKENS, dim, dtypes, late, learnt=False)


def rope(
    shape: tuple[int, int, int], rotated: int, paired: tuple[bool, bool], last: bool, dtype: torch.dtype = BF16
) -> None:
    x, table = meta(*shape, dtype=dtype), meta(shape[0], rotated // 2, dtype=FP32)
    rope_triton.rotate(x, x, table, table, shape[2] - rotated if last else 0, 1.0, *paired)


def rope_variants() -> None:
    for number, channels, rotated in sorted(PRESETS.heads):
        for paired in ((False, False), (True, True), (True, False), (False, True)):
            for dtype in FLOATS:
                for last in (False, True):
                    rope((TOKENS, number, channels), rotated, paired, last, dtype)


def cross_entropy(rows: int, vocab: int, softcap: float, dtype: torch.dtype = BF16) -> None:
    """Losses as evaluation and both kinds of training take them, and entropies."""
    logits, targets = meta(rows, vocab, dtype=dtype), meta(rows, dtype=torch.int64)
    terms = [1.0, softcap, 0.0, 0.0]
    cross_entropy_triton.token_losses(logits, targets, None, terms, False)
    cross_entropy_triton.token_losses(logits, targets, None, terms, True)
    cross_entropy_triton.token_losses(logits, targets, meta(rows, dtype=FP32), terms, True)
    cross_entropy_triton.token_entropies(logits, terms)


def cross_entropy_variants() -> None:
    for vocab in sorted(PRESETS.vocabularies | {1000}):
        for softcap in (0.0, 30.0):
            for dtype in FLOATS:
                cross_entropy(64, vocab, softcap, dtype)


def adamw8bit(count: int, row: int | None, dtype: torch.dtype = BF16, number: int = 3) -> None:
    blocks = -(-count // 256) if row is None else count // row * -(-row // 256)
    code = meta(count, dtype=torch.uint8)
    x, moments = meta(count, dtype=dtype), Moments(code, code, meta(2, blocks, dtype=FP32), row)
    adamw8bit_triton.step(x, x, moments, Rule(1e-3, 0.1, (0.9, 0.95), 1e-8, number))


def adamw8bit_variants() -> None:
    for dtype in FLOATS:
        for rows, row in ((64, 4096), (64, 100), (64, 1), (1, 256)):
            adamw8bit(rows * row, row, dtype)


def nf4_weight(out: int, width: int, nested: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bytes, scales and outer scales of a weight (out, width)."""
    scales = meta(out, width // 64 * (1 if nested else 4), dtype=torch.uint8)
    outer = meta(4 * (-(-out * width // 64 // 256) + 1), dtype=torch.uint8) if nested else None
    return meta(out, width // 2, dtype=torch.uint8), scales, outer


def nf4(out: int, width: int, nested: bool, dtype: torch.dtype = BF16) -> None:
    tables = meta(16, dtype=FP32), meta(256, dtype=FP32)
    nf4_triton.dequantize(*nf4_weight(out, width, nested), *tables, dtype)


def nf4_few(rows: int, out: int, width: int, nested: bool, dtype: torch.dtype = BF16, bias: bool = False) -> None:
    tables = meta(16, dtype=FP32), meta(256, dtype=FP32)
    x, b = meta(rows, width, dtype=dtype), meta(out, dtype=dtype) if bias else None
    nf4_triton.few(x, nf4_weight(out, width, nested), *tables, b)


def nf4_quantize(count: int, dtype: torch.dtype = BF16) -> None:
    nf4_triton.quantize(meta(count, dtype=dtype), meta(15, dtype=FP32), meta(16, dtype=torch.uint8))


def nf4_variants() -> None:
    for nested in (False, True):
        for dtype in STORED:
            nf4(4096, 4096, nested, dtype)
        for dtype in FLOATS:
            for rows in (1, 2, 4, 8):
                nf4_few(rows, 4096, 4096, nested, dtype)
                nf4_few(rows, 4096, 4096, nested, dtype, bias=True)
    for dtype in STORED:
        for count in (4096 * 4096, 64 * 77, 64 * 77 + 16, 1001):
            nf4_quantize(count, dtype)


def float8(blocks: int, dtype: torch.dtype = BF16) -> None:
    float8_triton.dequantize(meta(blocks, 64, dtype=torch.uint8), meta(blocks, dtype=FP32), dtype)


def float8_variants() -> None:
    for dtype in STORED:
        for blocks in (4096 * 64, 77, 1):
            float8(blocks, dtype)


Mixture = tuple[float, float, float, float]  # weight and skew of the forward KL divergence, and of the reverse one
FORWARD, REVERSE, BOTH, SKEWED = (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.5, 0.0, 0.5, 0.0), (0.5, 0.1, 0.5, 0.1)
MIXTURES = (FORWARD, REVERSE, BOTH, SKEWED, (1.0, 0.1, 0.0, 0.0), (0.0, 0.0, 1.0, 0.1))


def divergence(  # noqa: PLR0913 (what a divergence depends on)
    rows: int,
    vocab: int,
    mixture: Mixture,
    caps: tuple[float, float] = (0.0, 0.0),
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    gradient: bool = True,
) -> None:
    """Terms of a teacher that has fewer ids than the student."""
    numbers = [1.0, caps[0], 1.0, caps[1], 2.0, *mixture, 1.0]
    student, teacher = meta(rows, vocab, dtype=dtypes[0]), meta(rows, vocab - 8, dtype=dtypes[1])
    divergence_triton.divergences(student, teacher, numbers, vocab - 8, gradient)


def divergence_variants() -> None:
    for vocab in sorted(PRESETS.vocabularies | {100, 1000}):
        for mixture in MIXTURES:
            divergence(64, vocab, mixture)
        divergence(64, vocab, FORWARD, gradient=False)
        divergence(64, vocab, SKEWED, gradient=False)
        divergence(64, vocab, BOTH, (30.0, 0.0), (BF16, FP32))
        divergence(64, vocab, REVERSE, (0.0, 30.0), (FP32, BF16))
        divergence(64, vocab, SKEWED, (30.0, 30.0), (FP32, FP32), gradient=False)
        divergence(64, vocab, SKEWED, (30.0, 30.0))


def experts(rows: int, number: int, width: int, inner: int, expert_rows: int = 0) -> None:
    """Products of `x` (rows, inner) with weights (number, width, inner) forth and back, and of both sides.

    `expert_rows`: distance of two experts in rows, where weights are parts of larger tensors.
    """
    x, y, ends = meta(rows, inner), meta(rows, width), meta(number, dtype=torch.int32)
    weight = meta(number, expert_rows or width, inner)[:, :width]
    experts_triton.grouped_product(x, weight.mT, ends)
    experts_triton.grouped_product(y, weight, ends)
    experts_triton.grouped_outer(y, x, ends)
    experts_triton.grouped_outer(y, meta(rows, 8), ends)  # gradients of biases: products with ones


def experts_variants() -> None:
    for number in (8, 128, 512):
        experts(TOKENS, number, 1536, 4096)
        experts(TOKENS, number, 520, 1000)  # multiples of 8 and not of 16


# The largest tensors: rows times row length, or their distance in memory, is above 2^31


def glu_large() -> None:
    for act in ACTIVATIONS:
        glu((1, 2**31 - 1), act)
        glu((1, 2**31 + 512), act)
        glu((2**18, 18432), act, stride=2 * 18432)


def norm_large() -> None:
    norm(2**18, 16384, (BF16, BF16), late=False)
    norm(2**15, 128, (BF16, BF16), late=False, stride=2**17)


def rope_large() -> None:
    for paired in ((False, False), (True, True)):
        rope((2**18, 128, 128), 128, paired, last=False)
    heads = meta(128, 2**17, 256).transpose(0, 1)  # heads are farther apart than tokens
    table = meta(2**17, 128, dtype=FP32)
    rope_triton.rotate(heads, meta(2**17, 128, 256), table, table, 0, 1.0, False, False)


def cross_entropy_large() -> None:
    cross_entropy(8192, 262144, 0.0)
    cross_entropy(8192 + 64, 262144 + 1, 30.0)


def adamw8bit_large() -> None:
    adamw8bit(2**18 * 16384, 16384, number=2**20)
    adamw8bit(2**32, None)
    adamw8bit(2**31 - 1, None)


def nf4_large() -> None:
    for nested in (False, True):
        nf4(2**15 + 2**14, 2**16, nested)  # 1.6e9 bytes: they fit an int32 and twice as many do not
        nf4(2**17, 2**16, nested)
        nf4_few(8, 2**17, 2**16, nested)
        nf4_few(2, 2**17, 2**16, nested)
    for count in (2**31 - 64, 2**31 - 1, 2**33, 2**33 + 7):
        nf4_quantize(count)


def float8_large() -> None:
    float8(2**25 - 1)
    float8(2**31 + 32)


def divergence_large() -> None:
    for mixture in MIXTURES:
        divergence(8192 + 64, 262144, mixture, (30.0, 0.0))
    divergence(8192 + 64, 262144 + 1, SKEWED)


def experts_large() -> None:
    experts(2**19, 64, 8192, 4096)  # activations, and weights of all experts
    experts(2**18, 8, 2**16, 2**16)  # weights of one expert
    experts(2**18, 8, 2**15, 2**15, expert_rows=2**17)


# What changes from one training step to the next: token counts, step numbers


def glu_step(tokens: int, number: int) -> None:
    glu((1, tokens * 11008), "silu")


def norm_step(tokens: int, number: int) -> None:
    norm(tokens, 4096, (BF16, BF16), late=False)
    norm(tokens, 4096, (BF16, BF16), late=False, learnt=False)


def rope_step(tokens: int, number: int) -> None:
    rope((tokens, 32, 128), 128, (False, False), last=False)


def cross_entropy_step(tokens: int, number: int) -> None:
    cross_entropy(tokens, 49155, 0.0)


def adamw8bit_step(tokens: int, number: int) -> None:
    adamw8bit(64 * 4096, 4096, number=number)


def nf4_step(tokens: int, number: int) -> None:
    nf4(64 + tokens % 7, 4096, nested=True)  # experts, projections: weights of many sizes
    nf4_quantize((64 + tokens % 7) * 4096)
    nf4_few(1, 4096, 4096, nested=True)


def float8_step(tokens: int, number: int) -> None:
    float8((64 + tokens % 7) * 64)


def divergence_step(tokens: int, number: int) -> None:
    divergence(tokens, 49160, FORWARD)


def experts_step(tokens: int, number: int) -> None:
    experts(tokens, 128, 768, 2048)


def probe(*_: int) -> None:
    probe_triton.launch(meta(1, dtype=FP32))


@dataclass(frozen=True)
class KernelLaunches:
    """Launches of the kernels of one module."""

    variants: Callable[[], None]  # every specialization that a run with a preset can ask for
    large: Callable[[], None]  # with more than 2^31 numbers
    step: Callable[[int, int], None]  # a training step: number of tokens, number of the step


LAUNCHES = {
    "adamw8bit_triton": KernelLaunches(adamw8bit_variants, adamw8bit_large, adamw8bit_step),
    "cross_entropy_triton": KernelLaunches(cross_entropy_variants, cross_entropy_large, cross_entropy_step),
    "divergence_triton": KernelLaunches(divergence_variants, divergence_large, divergence_step),
    "experts_triton": KernelLaunches(experts_variants, experts_large, experts_step),
    "float8_triton": KernelLaunches(float8_variants, float8_large, float8_step),
    "glu_triton": KernelLaunches(glu_variants, glu_large, glu_step),
    "nf4_triton": KernelLaunches(nf4_variants, nf4_large, nf4_step),
    "norm_triton": KernelLaunches(norm_variants, norm_large, norm_step),
    "probe_triton": KernelLaunches(probe, probe, probe),
    "rope_triton": KernelLaunches(rope_variants, rope_large, rope_step),
}


@cache
def unique_launches(backend: str, form: str = "variants") -> list[Launch]:
    """Launches of all modules that are compiled separately, in a fixed order.

    They depend on the backend, "cuda" or "hip", but on no architecture.
    """
    with record_launches(GPUTarget(backend, {"cuda": 80, "hip": "gfx942"}[backend], 32)) as launches:
        for kernels in LAUNCHES.values():
            {"variants": kernels.variants, "large": kernels.large}[form]()
    return list({launch.key: launch for launch in launches}.values())


def find_kernels() -> dict[str, JITFunction]:
    """Every function of `kernels/` that Triton compiles, by module and name."""
    modules = [file.stem for file in sorted((ROOT / "kernels").glob("*.py")) if "triton.jit" in file.read_text("utf-8")]
    loaded = [importlib.import_module(f"tunekit.kernels.{name}") for name in modules]
    members = ((module.__name__.rpartition(".")[2], name, x) for module in loaded for name, x in vars(module).items())
    return {f"{module}.{name}": x for module, name, x in members if isinstance(x, JITFunction)}


def find_uncovered(form: str = "variants") -> list[str]:
    """Kernels that no launch reaches, directly or through a kernel that calls it."""
    kernels = find_kernels()
    reached = {launch.name for launch in unique_launches("cuda", form)}
    pending = list(reached)
    while pending:
        current = pending.pop()
        tree, module = ast.parse(kernels[current].src), current.partition(".")[0]
        names = {f"{module}.{node.id}" for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(kernels)
        pending += names - reached
        reached |= names
    return sorted(set(kernels) - reached)


def count_compiles(steps: Iterable[tuple[int, int]], module: str) -> int:
    """Specializations that training steps, each of (number of tokens, number of the step), ask of a module."""
    with record_launches(GPUTarget("cuda", 80, 32)) as launches:
        for tokens, number in steps:
            LAUNCHES[module].step(tokens, number)
    return len({launch.key for launch in launches})


def describe_versions() -> str:
    return f"triton {triton.__version__}, torch {torch.__version__}"
