"""Modules that a config selects by group, name, or regular expression.

Patterns may come from downloaded adapters: only those that match in polynomial time are allowed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from re import _constants, _parser  # type: ignore[attr-defined]  # the parsed form of a pattern has no public name
from typing import Any, TypeVar

from torch import nn

from tunekit.errors import FieldError, UserError
from tunekit.models.weight_map import as_tuple

Number = TypeVar("Number", int, float)

NOUNS = {  # what a key selects; other keys select modules
    "adapter.target_modules": "layer",
    "adapter.rank_pattern": "adapted layer",
    "adapter.alpha_pattern": "adapted layer",
    "optimizer.lr_pattern": "trained module",
}

MODULE_GROUPS = {  # patterns of complete module names
    "attn": r"layers\.\d+\.attn\..+",
    "mlp": r"layers\.\d+\.mlp\.(?!(.+\.)?experts\.).+",
    "all-linear": r"layers\.\d+\.(attn|mlp)\.(?!(.+\.)?experts\.).+",
    "experts": r"layers\.\d+\.mlp\.(.+\.)?experts\..+",
    "lm_head": "head",
    "embed_tokens": "embed",
    "norm": "norm",
    "norms": r"(.+\.)?\w*norm",
}

MAX_REPETITIONS = 3
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
GROUPS = (_constants.SUBPATTERN, _constants.BRANCH, _constants.ATOMIC_GROUP, _constants.ASSERT, _constants.ASSERT_NOT)


def last_component(name: str) -> str:
    return name.rpartition(".")[2]


def display_name(name: str) -> str:
    """Name of a module as users write it: that of Hugging Face for the head and the embedding."""
    return next((group for group in ("lm_head", "embed_tokens") if MODULE_GROUPS[group] == name), name)


def is_inside(name: str, modules: set[str]) -> bool:
    """Whether a name is below one of these modules."""
    return any(name[:i] in modules for i, char in enumerate(name) if char == ".")


def match_modules(key: str, target: str, names: Iterable[str]) -> list[str]:
    """Names that belong to a module group, or that match a pattern in full or in their last component.

    For example, `q_proj` matches every q_proj. The complete name of a module matches no other: `embed` does not match
    `per_layer.embed`. Raises UserError if there is no match.
    """
    names = [*names]
    pattern, is_complete = re.compile(MODULE_GROUPS.get(target, target)), target in MODULE_GROUPS or target in names
    hits = [n for n in names if pattern.fullmatch(n) or (not is_complete and pattern.fullmatch(last_component(n)))]
    if not hits:
        groups = [group for group, regex in MODULE_GROUPS.items() if any(re.fullmatch(regex, n) for n in names)]
        others = [name for name in names if name not in MODULE_GROUPS.values()]
        components = [name if last_component(name) in names else last_component(name) for name in others]
        listed = ", ".join(name for name in dict.fromkeys([*groups, *components]) if not re.search(r"\b\d", name))
        raise UserError(f"{key}: no {NOUNS.get(key, 'module')} matches {target!r}. Available: {listed}.")
    return hits


def values_by_module(key: str, values: Mapping[str, Number], names: Iterable[str]) -> dict[str, Number]:
    """Convert values by pattern to values by name; the first match wins."""
    by_name: dict[str, Number] = {}
    for pattern, value in values.items():
        by_name = dict.fromkeys(match_modules(key, pattern, names), value) | by_name
    return by_name


def check_patterns(key: str, patterns: Iterable[str]) -> None:
    """Raise FieldError for an invalid regular expression."""
    for pattern in patterns:
        if "," in pattern and "{" not in pattern:  # names contain no comma
            alternatives = pattern.replace(" ", "").replace(",", "|")
            remedy = alternatives if key.endswith("_pattern") else f"a list: [{pattern}]"
            raise FieldError(key, f"{pattern!r} contains a comma. Write {remedy}")
        try:
            compile_pattern(pattern)
        except ValueError as error:
            raise FieldError(key, f"{pattern!r} is not a valid regular expression: {error}") from error


def module_params(model: nn.Module, key: str, patterns: str | tuple[str, ...]) -> set[nn.Parameter]:
    """Parameters of the modules that match any pattern, with those of their submodules."""
    modules = {name: module for name, module in model.named_modules() if name and [*module.parameters()]}
    names = {name for pattern in as_tuple(patterns) for name in match_modules(key, pattern, modules)}
    return {parameter for name in names for parameter in modules[name].parameters()}


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of module names.

    Backtracking takes exponential time if a repeated group contains alternatives or repetitions. Only single characters
    may be repeated, such as `.*` and `\\d+`, at most three times. Raises ValueError for other patterns.
    """
    try:
        compiled = re.compile(pattern)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except re.error as error:
        raise ValueError(str(error)) from error
    if (count := sum(repetitions(_parser.parse(pattern)))) > MAX_REPETITIONS:
        raise ValueError(f"has {count} repetitions, but more than {MAX_REPETITIONS} can take very long to match")
    return compiled


def repetitions(items: Any) -> Iterator[int]:
    """Yield 1 for each repeated character of a parsed pattern. Raises ValueError for a repeated group."""
    for kind, value in items:
        if kind in REPEATS:
            low, high, repeated = value
            if high > 1 and any(inner in (*REPEATS, *GROUPS) for inner, _ in repeated):
                raise ValueError("repeats a group, which can take exponential time to match")
            yield int(high > 1 and low != high)
            yield from repetitions(repeated)
        elif kind in GROUPS:
            for part in value if isinstance(value, tuple) else (value,):
                for sequence in part if isinstance(part, list) else (part,):
                    if isinstance(sequence, _parser.SubPattern):
                        yield from repetitions(sequence)
