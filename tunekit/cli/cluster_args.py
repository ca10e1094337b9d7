"""The cluster that command-line arguments describe."""

import argparse

from tunekit.plan import hardware
from tunekit.plan.hardware import GIB, ClusterSpec


def parse_cluster(args: argparse.Namespace) -> ClusterSpec:
    """Cluster described by the arguments; without any of them, the CPU of this machine."""
    memory = None if args.gpu_memory is None else hardware.parse_memory_size(args.gpu_memory)
    if (args.gpus, args.gpu_type, memory, args.gpu_tflops) == (None, None, None, None) and args.nodes == 1:
        return ClusterSpec(price=args.gpu_hour_price)
    has_gpu_type = args.gpu_type is not None
    kind = hardware.gpu_by_name(args.gpu_type) if has_gpu_type else hardware.gpu_by_memory(memory or 80 * GIB)
    if args.gpu_tflops is not None:
        kind = kind.scaled(args.gpu_tflops)
    devices = (args.gpus or 1) * args.nodes
    size = memory or int(kind.gib * GIB)
    return ClusterSpec(
        devices, args.nodes, kind, size, not has_gpu_type and args.gpu_tflops is None, args.gpu_hour_price, args.mfu
    )
