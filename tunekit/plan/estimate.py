"""Estimate of memory, communication and time of a config on a machine."""

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

    task: Workload
    machine: ClusterSpec
    sizes: ParallelDims
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
        return None if self.machine.memory is None else self.peak.total <= self.machine.memory

    @property
    def tokens(self) -> int:
        """Number of tokens in a step over all ranks."""
        return self.task.global_batch_size * self.task.docs_per_row * self.task.max_length

    @property
    def hours(self) -> float | None:
        seconds = self.step_time.seconds
        return None if seconds is None or self.step_count is None else seconds * self.step_count.steps / 3600

    @property
    def cost(self) -> float | None:
        """Cost of all steps, or of one step if the number of steps is unknown."""
        if self.step_time.seconds is None or self.machine.price is None:
            return None
        hours = self.step_time.seconds / 3600 if self.hours is None else self.hours
        return hours * self.machine.devices * self.machine.price


def estimate(task: Workload, machine: ClusterSpec) -> Estimate:
    """Estimate a workload on a machine. Reads no weights."""
    sizes = resolve_dims(task, machine)
    memory_model = build_memory_model(task, sizes)
    return Estimate(
        task,
        machine,
        sizes,
        memory_model,
        estimate_memory(memory_model, machine),
        estimate_step_time(memory_model, get_rank_model(task, sizes), machine),
    )


def resolve_dims(task: Workload, machine: ClusterSpec) -> ParallelDims:
    """Resolve the parallel dimensions. Raise UserError if the options do not fit the machine."""
    sizes = task.parallel.resolve_dims(machine.devices)
    task.parallel.check("cpu" if machine.kind is None else "cuda", machine.devices)
    task.memory.check_num_micro_batches(task.rows(sizes), task.micro_batch_size)
    return sizes
