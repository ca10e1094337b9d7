"""Specifications of GPUs and clusters: memory, compute rates and bandwidths."""

import re
from dataclasses import dataclass, replace

import torch

from tunekit import devices, env_info
from tunekit.devices import Capabilities, Device, find_row
from tunekit.errors import UserError, did_you_mean

GIB = 2**30
VOLTA, TURING, AMPERE, SM86 = (Device("cuda", sm) for sm in ((7, 0), (7, 5), (8, 0), (8, 6)))
ADA, HOPPER, BLACKWELL, SM120 = (Device("cuda", sm) for sm in ((8, 9), (9, 0), (10, 0), (12, 0)))
GFX942 = Device("cuda", arch="gfx942")


@dataclass(frozen=True)
class GPUSpec:
    """GPU with the rates of its data sheet: dense matmuls, bandwidth in one direction."""

    label: str
    memory_gib: float  # GiB that torch reports, less than in the label
    tflops: float  # 10^12 operations a second in 16 bits on tensor cores, sums in fp32
    memory_bandwidth: float  # GB/s of its memory
    intra_node_bandwidth: float  # GB/s to another device of the same node
    inter_node_bandwidth: float  # GB/s to another node, for each device
    fp32: float  # 10^12 operations a second in fp32 without TF32
    tf32: float | None = None  # 10^12 operations per second with TF32
    device: Device = AMPERE  # its row in the table of capabilities

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of this GPU."""
        return find_row(self.device)

    def rate(self, compute: str) -> float:
        """TFLOP/s in a `precision.compute_dtype`. One without hardware support runs at the rate of fp32."""
        if compute == "tf32":
            return self.fp32 if self.tf32 is None else self.tf32
        has_tensor_cores = {"bf16": self.capabilities.bf16, "fp16": self.capabilities.fp16}
        return self.tflops if has_tensor_cores.get(compute) else self.fp32

    def scaled(self, tflops: float) -> "GPUSpec":
        """A GPU without a name that is faster or slower in proportion."""
        factor = tflops / self.tflops
        tf32 = None if self.tf32 is None else factor * self.tf32
        return replace(self, label="GPU", tflops=tflops, fp32=factor * self.fp32, tf32=tf32)


# Rates and bandwidths: NVIDIA's and AMD's datasheets and architecture whitepapers, without sparsity; of H20, B200 and
# B300 from several public comparison tables of them. GeForce cards: with fp32 sums, which halve their rate in fp16.
# 16 and 32 GB/s are PCIe 4 and 5 x16 without peer-to-peer copies; `far` assumes the network of a usual server.
GPUS = {
    "a10": GPUSpec("A10", 22, 125, 600, 16, 3, 31.2, 62.5, SM86),
    "a100": GPUSpec("A100 80 GB", 79.2, 312, 2039, 300, 25, 19.5, 156),
    "a100-40g": GPUSpec("A100 40 GB", 39.4, 312, 1555, 300, 25, 19.5, 156),
    "a40": GPUSpec("A40", 44.4, 149.7, 696, 16, 12, 37.4, 74.8, SM86),
    "a6000": GPUSpec("RTX A6000", 47.5, 154.8, 768, 16, 3, 38.7, 77.4, SM86),
    "b200": GPUSpec("B200", 178, 2250, 8000, 900, 50, 75, 1125, BLACKWELL),
    "b300": GPUSpec("B300", 268, 2250, 8000, 900, 100, 75, 1125, BLACKWELL),
    "gh200": GPUSpec("GH200 96 GB", 94.5, 989, 4000, 450, 50, 67, 494, HOPPER),
    "h100": GPUSpec("H100", 79.2, 989, 3350, 450, 50, 67, 494, HOPPER),
    "h20": GPUSpec("H20", 95.1, 148, 4000, 450, 50, 44, 74, HOPPER),
    "h200": GPUSpec("H200", 139.8, 989, 4800, 450, 50, 67, 494, HOPPER),
    "l4": GPUSpec("L4", 22, 121, 300, 16, 3, 30.3, 60, ADA),
    "l40": GPUSpec("L40", 44.4, 181, 864, 32, 25, 90.5, 90.5, ADA),
    "l40s": GPUSpec("L40S", 44.4, 362, 864, 32, 25, 91.6, 183, ADA),
    "mi300x": GPUSpec("MI300X", 191.5, 1307, 5300, 448, 50, 163.4, None, GFX942),
    "rtx3060": GPUSpec("RTX 3060 12 GB", 11.6, 25.5, 360, 16, 3, 12.7, 12.7, SM86),
    "rtx3090": GPUSpec("RTX 3090", 23.6, 71, 936, 16, 3, 35.6, 35.6, SM86),
    "rtx4080": GPUSpec("RTX 4080", 15.6, 97.5, 717, 16, 3, 48.7, 48.7, ADA),
    "rtx4090": GPUSpec("RTX 4090", 23.6, 165, 1008, 16, 3, 82.6, 82.6, ADA),
    "rtx5080": GPUSpec("RTX 5080", 15.5, 112.6, 960, 32, 3, 56.3, 56.3, SM120),
    "rtx5090": GPUSpec("RTX 5090", 31.4, 209, 1792, 32, 3, 104.8, 104.8, SM120),
    "rtx6000-ada": GPUSpec("RTX 6000 Ada", 47.5, 364, 960, 16, 3, 91.1, 182, ADA),
    "rtxpro6000": GPUSpec("RTX PRO 6000", 95, 504, 1792, 32, 3, 126, 252, SM120),
    "t4": GPUSpec("T4", 14.6, 65, 320, 8, 3, 8.1, None, TURING),
    "v100": GPUSpec("V100 32 GB", 31.7, 125, 900, 150, 12, 15.7, None, VOLTA),
    "v100-16g": GPUSpec("V100 16 GB", 15.8, 125, 900, 150, 12, 15.7, None, VOLTA),
}
DEFAULT_GPU = "h100"
HOST_BANDWIDTH = 25.0  # GB/s between a GPU and host memory
MEMORY_TOLERANCE = 0.08  # relative difference in memory up to which a kind of GPU matches
# Seconds of the CPU, assumed; too low on the one machine measured (0.30 s for a step of 0.38 s): per launch, with
# its share of autograd, and more for an operation of tunekit, which runs Python (13 to 39 microseconds on a CPU).
LAUNCH_SECONDS, CALL_SECONDS = 6e-6, 25e-6
DEFAULT_MFU = 0.45  # model FLOPs utilization of large models


@dataclass(frozen=True)
class ClusterSpec:
    """Devices and nodes of a run. The speed of CPUs is unknown."""

    devices: int = 1
    num_nodes: int = 1
    gpu: GPUSpec | None = None  # None: the CPU
    memory: int | None = None  # bytes of a device; None: unknown
    is_assumed: bool = False  # whether `gpu` was not specified
    price: float | None = None  # per device and hour
    mfu: float = DEFAULT_MFU

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.num_nodes

    @property
    def label(self) -> str:
        """`64 x H100 (80 GiB) on 8 nodes`."""
        if self.gpu is None:
            return "the CPU" if self.devices == 1 else f"the CPU, {self.devices} processes"
        size = "" if self.memory is None else f" ({self.memory / GIB:.0f} GiB)"
        nodes = "" if self.num_nodes == 1 else f" on {self.num_nodes} nodes"
        return f"{self.devices} x {self.gpu.label}{size}{nodes}"

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second between `ranks` processes whose ranks differ by `stride`."""
        if self.gpu is None:
            return float("inf")
        is_intra_node = ranks * stride <= self.devices_per_node
        return 1e9 * (self.gpu.intra_node_bandwidth if is_intra_node else self.gpu.inter_node_bandwidth)


def make_cluster(
    gpus: int | None = None,
    gpu_type: str | None = None,
    gpu_memory: str | None = None,
    nodes: int = 1,
    gpu_tflops: float | None = None,
    price: float | None = None,
    mfu: float = DEFAULT_MFU,
) -> ClusterSpec:
    """Cluster of the options of `tune plan`; without any of them, the CPU of this machine."""
    memory = None if gpu_memory is None else parse_memory_size(gpu_memory)
    if (gpus, gpu_type, memory, gpu_tflops) == (None, None, None, None) and nodes == 1:
        return ClusterSpec(price=price)
    gpu = gpu_by_memory(memory or 80 * GIB) if gpu_type is None else gpu_by_name(gpu_type)
    if gpu_tflops is not None:
        gpu = gpu.scaled(gpu_tflops)
    is_assumed = gpu_type is None and gpu_tflops is None
    return ClusterSpec((gpus or 1) * nodes, nodes, gpu, memory or int(gpu.memory_gib * GIB), is_assumed, price, mfu)


def current_cluster(device: torch.device, num_devices: int, num_nodes: int = 1) -> ClusterSpec:
    """Cluster with nodes like this one."""
    info = devices.memory_info(device)
    if info is None:
        return ClusterSpec(num_devices, num_nodes)
    total = info[1]
    gpu = replace(gpu_by_memory(round(total / GIB) * GIB), device=devices.describe_device(device))
    return ClusterSpec(num_devices, num_nodes, gpu, total, is_assumed=True)


def this_machine(num_devices: int | None = None) -> ClusterSpec:
    """Some or all GPUs of this machine; without any, its CPU with the memory that is available."""
    device = devices.select_device("auto")
    if device.type == "cpu":
        return ClusterSpec(memory=env_info.available_memory())
    has_several = devices.device_capabilities(device).backend is not None
    return current_cluster(
        device, num_devices or (torch.get_device_module(device).device_count() if has_several else 1)
    )


def parse_memory_size(text: str) -> int:
    """Parse a size such as `80G`, `80GiB` or `24000M` into bytes. Units are powers of two."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GMT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise UserError(f"--gpu-memory {text}: write a number and G, such as 80G")
    return int(float(match[1]) * {"M": 2**20, "G": GIB, "T": 2**40}[match[2].upper()])


def gpu_by_name(text: str) -> GPUSpec:
    """Return the GPU with a name. Raise UserError if it is unknown."""
    name = text.lower().replace(" ", "").replace("_", "-")
    if name not in GPUS:
        hint = did_you_mean(name, GPUS, f"Known are {', '.join(GPUS)}.")
        raise UserError(f"--gpu-type {text}: unknown.{hint} For others, pass --gpu-memory.")
    return GPUS[name]


def gpu_by_memory(memory: int) -> GPUSpec:
    """Return the fastest GPU with about that much memory, or an unknown GPU as fast as the default one."""
    default = GPUS[DEFAULT_GPU]
    gpus = [gpu for gpu in GPUS.values() if abs(gpu.memory_gib * GIB / memory - 1) < MEMORY_TOLERANCE]
    return max(gpus, key=lambda gpu: gpu.tflops, default=replace(default, label=f"GPU with {default.label} speed"))
