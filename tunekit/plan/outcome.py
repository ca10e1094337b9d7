"""A plan: memory, traffic and time of a config on a machine."""

from dataclasses import dataclass

from tunekit.models.decoder import Decoder
from tunekit.models.spec import DecoderSpec
from tunekit.parallel.choice import Sizes
from tunekit.plan.extent import Extent
from tunekit.plan.machine import Machine
from tunekit.plan.pace import Pace, pace
from tunekit.plan.room import Books, Moment, Room, books_of, room
from tunekit.plan.task import Task, shown

NETS: dict[tuple[DecoderSpec, str], Decoder] = {}


@dataclass(frozen=True)
class Plan:
    """What one config comes to."""

    task: Task
    machine: Machine
    sizes: Sizes
    books: Books
    room: Room
    pace: Pace
    extent: Extent | None = None

    @property
    def peak(self) -> Moment:
        return self.room.peak

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where nobody said how much there is."""
        return None if self.machine.memory is None else self.peak.total <= self.machine.memory

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.task.batch * self.task.each * self.task.length

    @property
    def hours(self) -> float | None:
        seconds = self.pace.seconds
        return None if seconds is None or self.extent is None else seconds * self.extent.steps / 3600

    @property
    def cost(self) -> float | None:
        """Of all steps, or of a step where nobody knows how many there are."""
        if self.pace.seconds is None or self.machine.price is None:
            return None
        hours = self.pace.seconds / 3600 if self.hours is None else self.hours
        return hours * self.machine.devices * self.machine.price


def plan(task: Task, machine: Machine) -> Plan:
    """Reads no weight, computes nothing."""
    sizes = divided(task, machine)
    books = books_of(task, sizes)
    return Plan(task, machine, sizes, books, room(books, machine), pace(books, net(task, sizes), machine))


def divided(task: Task, machine: Machine) -> Sizes:
    """How ranks share; UserError where they cannot."""
    sizes = task.parallel.sizes(machine.devices)
    task.parallel.check("cpu" if machine.kind is None else "cuda", machine.devices)
    task.memory.check_passes(task.rows(sizes), task.micro_batch)
    return sizes


def net(task: Task, sizes: Sizes) -> Decoder:
    """The model of a rank, made once."""
    how = sizes.tensor, sizes.expert, sizes.context, task.adapter, task.weights, task.precision
    key = task.source.spec, repr((str(task.source.path), *how))
    if key not in NETS:
        NETS[key] = shown(task, sizes)
    return NETS[key]
