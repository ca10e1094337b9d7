"""Estimate of memory, communication and time of a config on a cluster."""

from dataclasses import dataclass

from tunekit.distributed.parallel_dims import ParallelDims
from tunekit.plan.hardware import ClusterSpec
from tunekit.plan.memory import MemoryEstimate, MemoryPeak, RankMemoryModel, build_memory_model, estimate_memory
from tunekit.plan.num_steps import StepCount
from tunekit.plan.step_time import StepTime, estimate_step_time
from tunekit.plan.workload import Workload, get_rank_model


@dataclass(frozen=True)
class Estimate:
    """Estimated memory, communication and time of one config."""

    workload: Workload
    cluster: ClusterSpec
    dims: ParallelDims
    memory_model: RankMemoryModel
    memory: MemoryEstimate
    step_time: StepTime
    step_count: StepCount | None = None

    @property
    def peak(self) -> MemoryPeak:
        return self.memory.peak

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into the memory of a device; None if its memory is unknown."""
        return None if self.cluster.memory is None else self.peak.total <= self.cluster.memory

    @property
    def tokens(self) -> int:
        """Number of tokens in a step over all ranks."""
        return self.workload.global_batch_size * self.workload.docs_per_row * self.workload.max_length

    @property
    def hours(self) -> float | None:
        seconds = self.step_time.seconds
        return None if seconds is None or self.step_count is None else seconds * self.step_count.steps / 3600

    @property
    def cost(self) -> float | None:
        """Cost of all steps, or of one step if the number of steps is unknown."""
        if self.step_time.seconds is None or self.cluster.price is None:
            return None
        hours = self.step_time.seconds / 3600 if self.hours is None else self.hours
        return hours * self.cluster.devices * self.cluster.price


def estimate(workload: Workload, cluster: ClusterSpec) -> Estimate:
    """Estimate a workload on a cluster. Reads no weights."""
    dims = resolve_dims(workload, cluster)
    memory_model = build_memory_model(workload, dims)
    return Estimate(
        workload,
        cluster,
        dims,
        memory_model,
        estimate_memory(memory_model, cluster),
        estimate_step_time(memory_model, get_rank_model(workload, dims), cluster),
    )


def resolve_dims(workload: Workload, cluster: ClusterSpec) -> ParallelDims:
    """Resolve the parallel dimensions. Raise UserError if the options do not fit the cluster."""
    dims = workload.parallel.resolve_dims(cluster.devices)
    workload.parallel.check("cpu" if cluster.gpu is None else "cuda", cluster.devices)
    workload.memory.check_num_micro_batches(workload.rows(dims), workload.micro_batch_size)
    return dims
