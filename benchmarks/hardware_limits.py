"""Hardware limits of this machine: copy bandwidth and bf16 matmul rate.

python benchmarks/hardware_limits.py
"""

import argparse
import json

import torch

from tunekit.selftest.hardware_limits import measure_copy_bandwidth, measure_matmul_rates, measure_seconds

MATMUL_SIZES = (1024, 2048, 4096)
COPY_BYTES = 2**28  # larger than all caches
READ_BYTES = 2**29


def measure_read_bandwidth() -> float:
    """Bytes read per second by a sum on the CPU."""
    tensor = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(measure_seconds(tensor.sum, 4, tensor.device))


def measure_limits(device: torch.device) -> dict[str, float]:
    rates = measure_matmul_rates(device, MATMUL_SIZES)
    size = max(rates, key=lambda size: rates[size])
    return {"copy": measure_copy_bandwidth(device, COPY_BYTES), "matmul": rates[size], "matmul_size": size}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(measure_limits(torch.device("cpu"))))
