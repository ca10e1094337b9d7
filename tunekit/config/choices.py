"""Schema of configs, derived from dataclasses: the keys of each kind and the kinds of each field."""

from abc import ABC
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Generic, Protocol, Union, get_args, get_origin, get_type_hints, runtime_checkable

from tunekit.config import session_code
from tunekit.config.node import YamlNode

REQUIRED: Any = object()  # marks a key without a default
_NO_BASE = {object, ABC, Generic, Protocol}  # bases of unrelated classes


@dataclass(frozen=True)
class FieldSlot:
    """Type and default of a config value."""

    hint: Any
    default: Any = REQUIRED


@runtime_checkable
class NamedKind(Protocol):
    """Class with a name in configs. Its subclasses need names of their own."""

    kind: ClassVar[str]


@runtime_checkable
class DefaultKind(Protocol):
    """Class that is used if a config names no kind. Its subclasses are not."""

    is_default: ClassVar[bool]


@runtime_checkable
class AnyKeyKind(Protocol):
    """Class whose keys are kept if an override selects another kind that has them."""

    accepts_any_key: ClassVar[bool]


@runtime_checkable
class SharedKeysKind(Protocol):
    """Class whose keys are kept if an override selects another such kind that has them."""

    keeps_shared_keys: ClassVar[bool]


@runtime_checkable
class CodeKind(Protocol):
    """Class that a function or class in a Python file selects: `FILE.py:name` is the value of this key."""

    reference_key: ClassVar[str]


@cache
def kind_name(cls: type) -> str:
    """Name of a choice in a config: its own `kind`, else its class name in lower case, without a final `Config`."""
    if isinstance(cls, NamedKind):
        bases = [base for base in cls.__bases__ if isinstance(base, NamedKind)]
        if not any(base.kind == cls.kind for base in bases):
            return cls.kind
    return cls.__name__.lower().removesuffix("config")


def union_members(hint: Any) -> tuple[Any, ...]:
    """Members of a union, or a tuple of the type itself."""
    return get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)


def generic_args(hint: Any, origin: type) -> tuple[Any, ...] | None:
    """Arguments of the first member that is a `tuple[...]` or `dict[...]`."""
    return next((get_args(option) for option in union_members(hint) if get_origin(option) is origin), None)


def element_type(arguments: tuple[Any, ...], index: int) -> Any:
    """Type of an element of `tuple[X, ...]` or `tuple[X, Y]`."""
    return arguments[0] if arguments[-1] is Ellipsis else arguments[min(index, len(arguments) - 1)]


_hints = cache(get_type_hints)


def _default(field: Field) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return REQUIRED if field.default is MISSING else field.default


def field_slots(cls: type, instance: Any = None) -> dict[str, FieldSlot]:
    """Keys of a dataclass. If an instance is passed, its values are the defaults."""
    slots = {}
    for field in fields(cls):
        if field.init:
            default = _default(field) if instance is None else getattr(instance, field.name)
            slots[field.name] = FieldSlot(_hints(cls)[field.name], default)
    return slots


def mapping_slots(slot: FieldSlot) -> dict[str, FieldSlot]:
    """Keys of a mapping that has defaults: these, and no others."""
    arguments = generic_args(slot.hint, dict)
    if arguments is None or not isinstance(slot.default, dict):
        return {}
    return {key: FieldSlot(arguments[1], value) for key, value in slot.default.items()}


def _dataclass_options(slot: FieldSlot) -> list[type]:
    return [option for option in union_members(slot.hint) if isinstance(option, type) and is_dataclass(option)]


class ChoiceRegistry:
    """Classes that each slot accepts: those in its type, and matching classes of the user."""

    def __init__(self, user_classes: tuple[type, ...] = ()) -> None:
        self.user_classes = user_classes

    def kinds(self, slot: FieldSlot) -> dict[str, type]:
        options = _dataclass_options(slot)
        return {kind_name(cls): cls for cls in (*self.matching_user_classes(options), *options)}

    def matching_user_classes(self, options: list[type]) -> list[type]:
        """Classes of the user that derive from one of `options`, or from a base that all of `options` share."""
        bases = tuple(options)
        if len(options) > 1:
            shared = set.intersection(*(set(cls.__mro__) for cls in options)) - _NO_BASE
            bases += tuple(shared)
        return [cls for cls in self.user_classes if issubclass(cls, bases)]

    def default_kind(self, slot: FieldSlot) -> str | None:
        """Kind if the config has none: the kind of the slot's default, the only kind, or the one with `is_default`."""
        kinds = self.kinds(slot)
        for kind, cls in kinds.items():
            if type(slot.default) is cls:
                return kind
        options = _dataclass_options(slot)
        if len(options) > 1:
            flagged = [cls for cls in options if isinstance(cls, DefaultKind)]
            options = [cls for cls in flagged if not any(base in flagged for base in cls.__mro__[1:])]
        return kind_name(options[0]) if options else None

    def single(self, slot: FieldSlot) -> FieldSlot | None:
        """Slot of one element, if the slot is a list of dataclasses, which also accepts a single one."""
        arguments = generic_args(slot.hint, tuple)
        if not arguments or arguments[-1] is not Ellipsis or self.kinds(slot):
            return None
        has_one_default = isinstance(slot.default, tuple) and len(slot.default) == 1
        element = FieldSlot(arguments[0], slot.default[0] if has_one_default else REQUIRED)
        return element if self.kinds(element) else None

    def code_kind(self, slot: FieldSlot, word: str) -> tuple[str, str] | None:
        """Kind and key for `FILE.py:name`, or a name of a Python session; None for another word."""
        path, _, name = word.rpartition(":")
        if session_code.find_object(word) is None and (not path.endswith(".py") or not name.isidentifier()):
            return None
        kinds = self.kinds(slot).items()
        return next(((kind, cls.reference_key) for kind, cls in kinds if isinstance(cls, CodeKind)), None)

    def kind_of_node(self, slot: FieldSlot, node: YamlNode) -> Any:
        """Kind that `node` names, as a bare word or under `kind`; otherwise the default kind."""
        if isinstance(node.value, dict):
            return node.value["kind"].value if "kind" in node.value else self.default_kind(slot)
        return node.value

    def keys_to_keep(self, slot: FieldSlot, old: Any, new: Any) -> set[str]:
        """Keys to keep if an override changes the kind: all keys of the new kind if the old kind has `accepts_any_key`,
        those that both kinds have if both have `keeps_shared_keys`, otherwise none."""
        old_class, new_class = self.kinds(slot).get(old), self.kinds(slot).get(new)
        if isinstance(old_class, AnyKeyKind):
            return set(self.kind_slots(slot, new))
        if isinstance(old_class, SharedKeysKind) and isinstance(new_class, SharedKeysKind):
            return set(self.kind_slots(slot, new)) & set(self.kind_slots(slot, old))
        return set()

    def kind_slots(self, slot: FieldSlot, kind: Any) -> dict[str, FieldSlot]:
        """Keys of a kind in this slot; empty if the kind does not exist."""
        cls = self.kinds(slot).get(kind) if isinstance(kind, str) else None
        if cls is None:
            return {}
        return field_slots(cls, slot.default if type(slot.default) is cls else None)


def iter_slots(cls: type, choices: ChoiceRegistry, depth: int = 4) -> Iterator[tuple[tuple[str, ...], FieldSlot]]:
    """Paths and slots of a class and its nested classes, breadth-first; `0` in a path is an element of a list."""
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
            for keys in (*map(field_slots, choices.kinds(slot).values()), mapping_slots(slot))
            for name, inner in keys.items()
        ]
