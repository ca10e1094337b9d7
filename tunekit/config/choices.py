"""The schema is the dataclasses: which keys a choice has, and which choices a field has."""

from abc import ABC
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Generic, Protocol, Union, get_args, get_origin, get_type_hints

from tunekit.config.node import YamlNode

REQUIRED: Any = object()  # stands for the default of a key that has none
_NO_BASE = {object, ABC, Generic, Protocol}  # everybody's bases say nothing about what a class is for


@dataclass(frozen=True)
class FieldSlot:
    """A place for a value: what may stand there, and what stands there if nothing is written."""

    hint: Any
    default: Any = REQUIRED


def kind_name(cls: type) -> str:
    """Name of a choice in a config: its own `kind`, else its class name in lower case, without a final `Config`."""
    kind = vars(cls).get("kind")
    return kind if isinstance(kind, str) else cls.__name__.lower().removesuffix("config")


def union_members(hint: Any) -> tuple[Any, ...]:
    """The options of a union; of anything else, itself."""
    return get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)


def generic_args(hint: Any, origin: type) -> tuple[Any, ...] | None:
    """The arguments of the first option that is a `tuple[...]` or `dict[...]`."""
    return next((get_args(option) for option in union_members(hint) if get_origin(option) is origin), None)


def element_type(arguments: tuple[Any, ...], index: int) -> Any:
    """The type of an element of `tuple[X, ...]` or `tuple[X, Y]`."""
    return arguments[0] if arguments[-1] is Ellipsis else arguments[min(index, len(arguments) - 1)]


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _default(field: Field) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return REQUIRED if field.default is MISSING else field.default


def field_slots(cls: type, instance: Any = None) -> dict[str, FieldSlot]:
    """The keys of a choice. With an instance, its values are the defaults."""
    found = {}
    for field in fields(cls):
        if field.init:
            default = _default(field) if instance is None else getattr(instance, field.name)
            found[field.name] = FieldSlot(_hints(cls)[field.name], default)
    return found


def _known(slot: FieldSlot) -> list[type]:
    return [option for option in union_members(slot.hint) if isinstance(option, type) and is_dataclass(option)]


class ChoiceRegistry:
    """Which classes may stand in a slot: those in its type, and the person's own classes that fit there."""

    def __init__(self, own: tuple[type, ...] = ()) -> None:
        self.own = own

    def kinds(self, slot: FieldSlot) -> dict[str, type]:
        known = _known(slot)
        return {kind_name(cls): cls for cls in (*self.fitting(known), *known)}

    def fitting(self, known: list[type]) -> list[type]:
        """The person's classes that derive from a known one, or from what all of several known ones derive from."""
        bases = tuple(known)
        if len(known) > 1:
            shared = set.intersection(*(set(cls.__mro__) for cls in known)) - _NO_BASE
            bases += tuple(shared)
        return [cls for cls in self.own if issubclass(cls, bases)]

    def default_kind(self, slot: FieldSlot) -> str | None:
        """The kind that is meant when none is named: the slot's default, an only one, or the one with `is_default`."""
        kinds = self.kinds(slot)
        for kind, cls in kinds.items():
            if type(slot.default) is cls:
                return kind
        known = _known(slot)
        usual = known if len(known) == 1 else [cls for cls in known if vars(cls).get("is_default")]
        return kind_name(usual[0]) if usual else None

    def single(self, slot: FieldSlot) -> FieldSlot | None:
        """The slot of a choice that stands for a list of it, where lists of choices are wanted."""
        arguments = generic_args(slot.hint, tuple)
        if not arguments or arguments[-1] is not Ellipsis or self.kinds(slot):
            return None
        only = isinstance(slot.default, tuple) and len(slot.default) == 1
        element = FieldSlot(arguments[0], slot.default[0] if only else REQUIRED)
        return element if self.kinds(element) else None

    def kind_in(self, slot: FieldSlot, node: YamlNode) -> Any:
        """The kind that `node` names, as a bare word or under `kind`; else the default one."""
        if isinstance(node.value, dict):
            return node.value["kind"].value if "kind" in node.value else self.default_kind(slot)
        return node.value

    def kept(self, slot: FieldSlot, old: Any, new: Any) -> set[str]:
        """Keys that are kept if an override names another kind: none, or those that the new kind has if the old kind has
        `accepts_any_key`."""
        cls = self.kinds(slot).get(old)
        found = cls is not None and any(vars(base).get("accepts_any_key") for base in cls.__mro__)
        return set(self.inside(slot, new)) if found else set()

    def inside(self, slot: FieldSlot, kind: Any) -> dict[str, FieldSlot]:
        """The keys of a kind in this slot; none if there is no such kind."""
        cls = self.kinds(slot).get(kind) if isinstance(kind, str) else None
        if cls is None:
            return {}
        return field_slots(cls, slot.default if type(slot.default) is cls else None)


def iter_slots(cls: type, choices: ChoiceRegistry, depth: int = 4) -> Iterator[tuple[tuple[str, ...], FieldSlot]]:
    """The slots of a class and of what stands in them, nearest first, with their paths; `0` is a list's element."""
    level: list[tuple[tuple[str, ...], FieldSlot]] = [((name,), slot) for name, slot in field_slots(cls).items()]
    for _ in range(depth):
        elements = [
            ((*path, "0"), FieldSlot(item))
            for path, slot in level
            for item in set(generic_args(slot.hint, tuple) or ()) - {...}
        ]
        yield from level
        yield from elements
        level = [
            ((*path, name), inner)
            for path, slot in (*level, *elements)
            for kind in choices.kinds(slot).values()
            for name, inner in field_slots(kind).items()
        ]
