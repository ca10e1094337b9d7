"""Regular expressions of module names, also from downloaded adapters: only those that match in polynomial time."""

import re
from collections.abc import Iterator
from functools import cache
from re import _constants, _parser  # type: ignore[attr-defined]  # the parsed form of a pattern has no public name
from typing import Any

MAX_REPETITIONS = 3
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
GROUPS = (_constants.SUBPATTERN, _constants.BRANCH, _constants.ATOMIC_GROUP, _constants.ASSERT, _constants.ASSERT_NOT)


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
