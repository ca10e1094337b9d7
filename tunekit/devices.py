"""The capabilities of each kind of device: one table that everything else reads.

`describe` asks torch what a device is, and `find_row` looks it up. The latter is a pure function, so tests can ask what
is chosen on a GPU that is not present.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tunekit import system
from tunekit.errors import UserError

DeviceChoice = Literal["auto", "cpu", "cuda", "xpu", "mps"]
ACCELERATORS = ("cuda", "xpu", "mps")  # in the order in which `auto` tries them
HALF_DTYPES = (torch.bfloat16, torch.float16)  # what FlashAttention and other kernels for 16 bits take
LABELS = {"cuda": "an NVIDIA or AMD GPU", "xpu": "an Intel GPU", "mps": "an Apple GPU"}
# Names of instructions in /proc/cpuinfo, x86 and Arm. Without them bf16 matmuls are slower than fp32: 1024 x 1024 took
# 21 ms instead of 14 on a processor limited to AVX-512, and 2.4 s instead of 22 ms with AVX2.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
# Values of ONEDNN_MAX_CPU_ISA (DNNL_MAX_CPU_ISA in older versions), which keep oneDNN from using these instructions.
ISAS_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"}


class Device(NamedTuple):
    """The facts that select a row of the table."""

    type: str  # of torch.device; ROCm reports `cuda`
    capability: tuple[int, int] = (0, 0)  # compute capability of an NVIDIA GPU
    arch: str = ""  # gfx942, ... for AMD GPUs; empty for all others


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of one kind of device in torch 2.11 or newer, and whether tunekit has been tested on it."""

    name: str
    tested: bool = False
    bf16: bool = False  # bf16 matmuls in hardware: what `precision.compute_dtype: auto` selects
    fp16: bool = False  # fp16 matmuls on tensor cores: what `auto` selects without bf16
    tf32: bool = False  # fp32 matmuls on tensor cores with 10 bits of mantissa
    fp64: bool = True  # float64 tensors exist
    flash: bool = False  # torch's FlashAttention kernels for packed rows (aten::_flash_attention_forward)
    flash_lse: bool = False  # their log-sum-exp is (heads, tokens), which attention sinks and merging need
    flex: bool = False  # FlexAttention, compiled
    triton: bool = False  # Triton kernels of tunekit
    fused_adamw: bool = False
    nf4: Literal["cpp", "triton", "torch"] = "torch"  # kernels for NF4 weights
    compile: bool = False  # torch.compile
    pinned_memory: bool = False  # copies from pinned host memory overlap with computation
    own_memory: bool = False  # memory apart from the host's, so offloading to the host saves some
    graphs: bool = False  # CUDA graphs
    memory_stats: bool = False  # mem_get_info, memory_stats and peaks of the allocator
    backend: str | None = None  # of torch.distributed for tensors on the device; None: one process only


CPU = Capabilities(
    "cpu", tested=True, bf16=True, fused_adamw=True, nf4="cpp", compile=True, backend="gloo"
)  # fmt: skip
AMPERE = Capabilities(
    "cuda", tested=True, bf16=True, fp16=True, tf32=True, flash=True, flash_lse=True, flex=True, triton=True,
    fused_adamw=True, nf4="triton", compile=True, pinned_memory=True, own_memory=True, graphs=True,
    memory_stats=True, backend="nccl",
)  # fmt: skip
# T4, RTX 20: tensor cores for fp16 only. torch's FlashAttention and FlexAttention need 8.0.
TURING = replace(
    AMPERE, name="cuda-turing", tested=False, bf16=False, tf32=False, flash=False, flash_lse=False, flex=False
)
# V100 and older. Triton supports 7.5 and newer, and torch.compile generates Triton.
VOLTA = replace(TURING, name="cuda-volta", triton=False, nf4="torch", compile=False)
PASCAL = replace(VOLTA, name="cuda-pascal", fp16=False)
# The log-sum-exp of ROCm's FlashAttention is (documents, heads, longest). TF32 needs an environment variable there.
CDNA = replace(AMPERE, name="rocm-cdna", tested=False, tf32=False, flash_lse=False)
RDNA = replace(CDNA, name="rocm-rdna")
# Triton for Intel GPUs exists; the kernels of tunekit have never been compiled for it.
XPU = Capabilities(
    "xpu", bf16=True, fused_adamw=True, compile=True, pinned_memory=True, own_memory=True,
    memory_stats=True, backend="xccl",
)  # fmt: skip
# All Apple GPUs that torch supports have bf16 (pytorch#175804). Memory is shared with the CPU.
MPS = Capabilities("mps", bf16=True, fp64=False, fused_adamw=True)
OTHER = Capabilities("other")  # the meta device, and backends that torch loads as plugins
TABLE = (CPU, AMPERE, TURING, VOLTA, PASCAL, CDNA, RDNA, XPU, MPS, OTHER)


def find_row(device: Device) -> Capabilities:
    """The row of the table for a device that `describe` has described."""
    if device.type != "cuda":
        return {"cpu": CPU, "xpu": XPU, "mps": MPS}.get(device.type, OTHER)
    if device.arch:
        return CDNA if device.arch.startswith("gfx9") else RDNA
    generations = (((8, 0), AMPERE), ((7, 5), TURING), ((7, 0), VOLTA))
    return next((row for least, row in generations if device.capability >= least), PASCAL)


def describe_device(device: torch.device) -> Device:
    """The facts about a device that is present."""
    if device.type != "cuda":
        return Device(device.type)
    if torch.version.hip is not None:
        return Device("cuda", arch=torch.cuda.get_device_properties(device).gcnArchName)
    return Device("cuda", torch.cuda.get_device_capability(device))


@cache
def device_capabilities(device: torch.device) -> Capabilities:
    """The row of the table for a device of this machine."""
    return find_row(describe_device(device))


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matmuls are at least as fast as fp32. On a CPU that depends on the instructions that oneDNN uses."""
    if device.type == "cpu":
        max_isa = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
        has_instructions = not BF16_FLAGS.isdisjoint(" ".join(system.read_cpu_info()).split())
        return has_instructions and max_isa.upper() not in ISAS_WITHOUT_BF16
    return device_capabilities(device).bf16


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype for sums of many numbers: float64 where it exists."""
    return torch.float64 if device_capabilities(device).fp64 else torch.float32


# Selection


def count_devices() -> dict[str, int]:
    """The number of devices of each type that torch can use on this machine. Starts no CUDA context."""
    mps = torch.mps.device_count() if torch.backends.mps.is_available() else 0
    return {"cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count(), "mps": mps}


def choose_type(choice: str, counts: Mapping[str, int]) -> str:
    """The device type for `device: choice`. Raise UserError if there is none."""
    if choice == "auto":
        return next((kind for kind in ACCELERATORS if counts[kind]), "cpu")
    if choice != "cpu" and not counts[choice]:
        problem = f"device: torch {torch.__version__} finds no device of type {choice} ({LABELS[choice]})"
        raise UserError(f"{problem}. Set device=auto, or install a build of torch for it.")
    return choice


def select_device(choice: str) -> torch.device:
    """The device of this process for `device: choice`."""
    kind = choose_type(choice, count_devices()) if choice != "cpu" else "cpu"
    if kind in ("cpu", "mps"):  # neither has an index
        return torch.device(kind)
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))


def activate_device(device: torch.device) -> None:
    """Make a device the current one of its type, on which kernels without an explicit device run."""
    if device.index is not None:
        torch.accelerator.set_device_index(device)


def backend_of(kind: str, row: Capabilities) -> str:
    """The argument of init_process_group: gloo for tensors on the CPU, and the backend of a type of device."""
    if row.backend is None:
        raise UserError(f"device: several processes are not supported on {kind}. Set device=cpu.")
    return row.backend if kind == "cpu" else f"cpu:{CPU.backend},{kind}:{row.backend}"


def untested_warning(row: Capabilities) -> str | None:
    """The line to log when a run starts on a kind of device on which tunekit has never been tested."""
    if row.tested:
        return None
    return f"warning: tunekit has not been tested on devices of kind {row.name}; docs/gpus.md lists what has been tried"


# Memory


def is_pinned_on(device: torch.device) -> bool:
    """Whether host memory that is copied to or from this device should be pinned."""
    return device_capabilities(device).pinned_memory


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Free and total bytes of a device, over all processes; None where the system does not report them."""
    if not device_capabilities(device).memory_stats:
        return None
    try:
        return torch.get_device_module(device).mem_get_info(device)
    except RuntimeError:
        if device.type != "xpu":
            raise
        return None  # integrated Intel GPUs do not report free memory (pytorch#159728)


def shares_host_memory(device: torch.device) -> bool:
    """Whether an NVIDIA GPU has no memory apart from the host's, such as GB10 (DGX Spark) and Jetson."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return bool(torch.cuda.get_device_properties(device).is_integrated)


def empty_cache(device: torch.device) -> None:
    """Give cached memory of torch's allocator back to the device. Does nothing on a CPU."""
    if device.type in ACCELERATORS:
        torch.accelerator.empty_cache()


def memory_stats(device: torch.device) -> dict[str, int] | None:
    """Statistics of torch's allocator on a device; None where there are none."""
    if not device_capabilities(device).memory_stats:
        return None
    return torch.get_device_module(device).memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Maximum number of bytes in tensors on a device so far; None where it is not recorded."""
    if not device_capabilities(device).memory_stats:
        return None
    return torch.get_device_module(device).max_memory_allocated(device)


# Random numbers


def get_rng_state(device: torch.device) -> Tensor | None:
    """The state of the generator of an accelerator; None for other devices: the CPU's generator is torch's own."""
    if device.type not in ACCELERATORS:
        return None
    return torch.mps.get_rng_state() if device.type == "mps" else torch.get_device_module(device).get_rng_state(device)


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Restore what `get_rng_state` returned."""
    if device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def fork_rng(device: torch.device) -> Iterator[None]:
    """Restore the generators of the CPU and of a device at the end. Unlike torch's, works on MPS."""
    state = get_rng_state(device)
    with torch.random.fork_rng([]):
        try:
            yield
        finally:
            if state is not None:
                set_rng_state(device, state)


# Numerics


class Numerics(NamedTuple):
    """The process-wide switches of torch that a run sets."""

    deterministic: bool
    warn_only: bool
    fill_memory: bool
    matmul: str


def read_numerics() -> Numerics:
    """The current switches."""
    return Numerics(
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        torch.get_float32_matmul_precision(),
    )


def set_numerics(numerics: Numerics) -> None:
    """Set all switches, such as those that `read_numerics` returned earlier."""
    torch.use_deterministic_algorithms(numerics.deterministic, warn_only=numerics.warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = numerics.fill_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_float32_matmul_precision(numerics.matmul)


def use_deterministic_algorithms(warn_only: bool = False) -> None:
    """Make operations repeat the same bits on the same device, and raise or warn where torch has no such version.

    cuBLAS reads the variable when its first handle is created, so this comes before the first matmul. torch would also
    fill all new memory with NaN, which costs time and changes nothing here: no tensor is read before it is written.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def full_fp32_matmuls() -> Iterator[None]:
    """Compute fp32 matmuls in fp32 until the end, also in a run that uses TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_tf32(name: str, row: Capabilities) -> None:
    """Raise UserError where fp32 matmuls cannot use TF32. `name`: the device, for the message."""
    if not row.tf32:
        raise UserError(
            f"precision.compute_dtype: tf32 needs an NVIDIA GPU of compute capability 8.0 or newer, got {name}. "
            "Set precision.compute_dtype=fp32 or auto."
        )
