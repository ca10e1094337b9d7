"""What a run is planned for: devices, their memory, how fast they are and how fast they speak with each other."""

import difflib
import re
from dataclasses import dataclass

from tunekit.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Kind:
    """A device as its maker tells it: dense products in bf16, and bytes a second one way."""

    label: str
    gib: float  # memory that torch finds: less than what is on the label
    tflops: float  # 10^12 products and sums a second
    memory: float  # GB/s of its memory
    near: float  # GB/s to another device of the host
    far: float  # GB/s to another host, for each device


KINDS = {
    "a10": Kind("A10", 22, 125, 600, 16, 3),
    "a100": Kind("A100 80 GB", 79.2, 312, 2039, 300, 25),
    "a100-40g": Kind("A100 40 GB", 39.4, 312, 1555, 300, 25),
    "b200": Kind("B200", 178, 2250, 8000, 900, 50),
    "h100": Kind("H100", 79.2, 989, 3350, 450, 50),
    "h200": Kind("H200", 139.8, 989, 4800, 450, 50),
    "l4": Kind("L4", 22, 121, 300, 16, 3),
    "l40s": Kind("L40S", 44.4, 362, 864, 32, 25),
    "rtx3090": Kind("RTX 3090", 23.6, 71, 936, 16, 3),
    "rtx4090": Kind("RTX 4090", 23.6, 165, 1008, 16, 3),
    "rtx5090": Kind("RTX 5090", 31.4, 209, 1792, 32, 3),
}
USUAL = "h100"
HOST = 25.0  # GB/s between a GPU and the memory of its host
NEAR = 0.08  # by which memory may differ from that of a kind of GPU that is taken for it
REACHED = 0.45  # of what the maker tells, in products of large models


@dataclass(frozen=True)
class Machine:
    """Where a run is to go. On a CPU nothing is known of speed."""

    devices: int = 1
    hosts: int = 1
    kind: Kind | None = None  # None: the CPU
    memory: int | None = None  # bytes of a device; None: nobody said
    taken: bool = False  # whether the kind is a guess
    price: float | None = None  # of a device, an hour
    reached: float = REACHED

    @property
    def per_host(self) -> int:
        return self.devices // self.hosts

    @property
    def label(self) -> str:
        """`64 x H100 (80 GiB) on 8 hosts`."""
        if self.kind is None:
            return "the CPU" if self.devices == 1 else f"the CPU, {self.devices} processes"
        size = "" if self.memory is None else f" ({self.memory / GIB:.0f} GiB)"
        hosts = "" if self.hosts == 1 else f" on {self.hosts} hosts"
        return f"{self.devices} x {self.kind.label}{size}{hosts}"

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes a second between `ranks` processes, so many places apart."""
        if self.kind is None:
            return float("inf")
        return 1e9 * (self.kind.near if ranks * stride <= self.per_host else self.kind.far)


def size(word: str) -> int:
    """Bytes of `80G`, `80GiB` or `24000M`: of the powers of two that makers of memory mean."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GMT])(?:i?B)?", word.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise UserError(f"--gpu-memory {word}: write a number and G, such as 80G")
    return int(float(found[1]) * {"M": 2**20, "G": GIB, "T": 2**40}[found[2].upper()])


def kind_of(word: str) -> Kind:
    """A kind of GPU by name."""
    name = word.lower().replace(" ", "").replace("_", "-")
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, 1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(KINDS)}."
        raise UserError(f"--gpu {word}: {meant} For others say --gpu-memory and --tflops")
    return KINDS[name]


def fitting(memory: int) -> Kind:
    """The kind of GPU that is taken where only its memory is told: the fastest with about as much."""
    near = [kind for kind in KINDS.values() if abs(kind.gib * GIB / memory - 1) < NEAR]
    return max(near, key=lambda kind: kind.tflops, default=KINDS[USUAL])
