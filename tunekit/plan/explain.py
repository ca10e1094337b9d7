"""Why a run had too little memory, and what to change: its plan, once torch has found none to give."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tunekit.devices import describe, memory_info
from tunekit.errors import UserError
from tunekit.plan import advice, machine, outcome, report
from tunekit.plan.machine import GIB, Machine
from tunekit.plan.task import task

MOST = 3  # changes that are told
CPU_FULL = "can't allocate memory"  # of torch's DefaultCPUAllocator, which has no class of its own


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_FULL in str(error)


def explain(cfg: Any, device: torch.device, devices: int = 1, hosts: int = 1) -> str:
    """What the config needs on each of `devices`, the largest part of it, and what the best changes would save."""
    try:
        where = found(device, devices, hosts)
        plan = outcome.plan(task(cfg, where), where)
        changes = advice.changes(plan)[:MOST]
    except UserError as error:
        return f"out of memory; what would need less cannot be told ({error})"
    peak, part = plan.peak, report.largest(plan.room)
    there = "" if where.memory is None else f", of {report.gib(where.memory)} that there are"
    lines = [
        f"out of memory: a step needs about {report.gib(peak.total)} GiB{there}; "
        f"{report.NAMES[part]} {report.gib(peak.parts[part])} GiB of it, in the {report.ABOUT[plan.room.phase]}",
        *(["to need less:", *report.offers(plan, changes)] if changes else ["nothing that is known would need less"]),
        "`tune plan` tells more, and with --fit finds what fits; --debug shows where memory ended",
    ]
    return "\n".join(lines)


def found(device: torch.device, devices: int, hosts: int) -> Machine:
    """The machine at hand."""
    info = memory_info(device)
    if info is None:
        return Machine(devices, hosts)
    total = info[1]
    kind = replace(machine.fitting(round(total / GIB) * GIB), device=describe(device))
    return Machine(devices, hosts, kind, total, taken=True)


@contextmanager
def told(cfg: Any, device: torch.device, devices: int = 1, hosts: int = 1) -> Iterator[None]:
    """Around a run: where memory ends, people are told why. Started again it would end in the same place."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_full(error):
            raise UserError(explain(cfg, device, devices, hosts)) from error
        raise
