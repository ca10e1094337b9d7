"""Facts about a run that no other file has: `run_info.json` in the run directory, written before the first step."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunekit import env_info
from tunekit.checkpoint import atomic
from tunekit.checkpoint.run_dir import RUN_INFO
from tunekit.config.dump import changed_keys
from tunekit.config.secrets import hide_secrets, map_strings
from tunekit.data.check_target import Finding
from tunekit.data.dataloader.base import DataLoader
from tunekit.distributed.context import DistributedContext
from tunekit.models.decoder import TIED, Decoder


@dataclass(frozen=True)
class RunStart:
    """Facts that are known before the first step of a run, or before the first one after it was resumed at `step`."""

    config: Any
    model: Decoder
    loaders: Mapping[str, DataLoader | None]  # by config key
    findings: Sequence[Finding]
    num_steps: int
    step: int
    dist: DistributedContext

    def write(self, directory: Path) -> None:
        """Write the facts. Starts of an earlier process are kept if the run was resumed."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        starts = [*(read_starts(directory) if self.step else []), {"step": self.step, "time": now}]
        facts = map_strings(self.facts(), hide_secrets) | {"starts": starts}
        atomic.write_text_atomic(directory / RUN_INFO, json.dumps(facts, indent=2, default=str) + "\n")

    def facts(self) -> dict[str, Any]:
        dist = self.dist
        trained, total = count_parameters(self.model)
        return {
            "num_steps": self.num_steps,
            "num_parameters": total,
            "num_trained_parameters": trained,
            "device": str(dist.device),
            "hardware": env_info.describe_hardware(dist.device),
            "num_processes": dist.world_size,
            "num_nodes": dist.num_nodes,
            "compute_dtype": str(self.model.compute_dtype).removeprefix("torch."),
            "versions": env_info.package_versions(),
            "data": {key: describe_loader(loader) for key, loader in self.loaders.items() if loader is not None},
            "findings": [[finding.severity, str(finding)] for finding in self.findings],
            "changed_keys": [list(change) for change in changed_keys(self.config)],
        }


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Starts of the processes of a run so far; none if the file is missing or damaged."""
    try:
        return list(json.loads((directory / RUN_INFO).read_text("utf-8"))["starts"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def count_parameters(model: Decoder) -> tuple[int, int]:
    """Number of trained parameters, and of those of the model without an adapter. Tied weights count once."""
    total = sum(math.prod(shape) for shape in model.shapes.values())
    total -= math.prod(model.shapes[TIED]) if model.spec.tie_word_embeddings else 0
    return sum(p.numel() for p in model.parameters() if p.requires_grad), total


def describe_loader(loader: DataLoader) -> dict[str, Any]:
    """Rows and tokens of an epoch, in total and of each dataset."""
    summary = loader.summary
    datasets = [dataset._asdict() for dataset in summary.datasets]
    return {"summary": str(summary), "is_streaming": summary.is_streaming, "datasets": datasets}
