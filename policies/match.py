"""Which route a request takes: the first whose every condition holds.

Owns `RouteMatch` (what one route asks for), the pattern language (exact text, or a prefix that ends in `*`;
nothing that could take long to match) and `RouteIndex`, which answers for 10,000 routes in a few
microseconds: per value it keeps the set of routes that admit it as the bits of one integer, and a lookup ANDs
one such set per dimension. Must always hold: `RouteIndex.first` gives what trying the routes one by one with
`mismatch` would give, and `RouteIndex.covering(j)` only names routes that admit every request that route j
admits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_HEADER_NAMES = 16
MAX_PATTERN_CHARS = 256

Patterns = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """What a route asks of a request. An empty tuple asks nothing. `headers` holds (lower-case name,
    patterns).
    """

    tenants: Patterns = ()
    models: Patterns = ()
    paths: Patterns = ()
    headers: tuple[tuple[str, Patterns], ...] = ()


def pattern_matches(pattern: str, value: str) -> bool:
    """True when `value` is the pattern, or begins with what stands before its final `*`."""
    return value.startswith(pattern[:-1]) if pattern.endswith("*") else value == pattern


def first_values(headers: Mapping[str, str]) -> dict[str, str]:
    """Lower-case name -> first value, whatever the mapping's own spelling and repetition."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        found.setdefault(name.lower(), value)
    return found


def mismatch(
    match: RouteMatch, tenant: str | None, path: str, model: str | None, headers: Mapping[str, str]
) -> tuple[str, str] | None:
    """The first condition that fails, as (field, reason in words), or None when all hold. `model` None: no
    model is named, so only what takes any model holds.
    """
    if not admits(match.tenants, tenant):
        who = "the request has no tenant" if tenant is None else f"tenant is {tenant}"
        return "tenants", f"{who}, not {_or(match.tenants)}"
    if not admits(match.models, model):
        what = "no model is named" if model is None else f"model is {model or 'empty'}"
        return "models", f"{what}, not {_or(match.models)}"
    if not admits(match.paths, path):
        return "paths", f"path is {path}, not {_or(match.paths)}"
    if match.headers:
        values = first_values(headers)
        for name, patterns in match.headers:
            value = values.get(name)
            if value is None:
                return f"headers.{name}", f"header {name} is missing"
            if not admits(patterns, value):
                return f"headers.{name}", f"header {name} is not {_or(patterns)}"
    return None


def admits(patterns: Patterns, value: str | None) -> bool:
    """True when one of the patterns matches, or there are none. None (no tenant) is matched by `*` alone."""
    if not patterns or "*" in patterns:
        return True
    return value is not None and any(pattern_matches(pattern, value) for pattern in patterns)


def _headers_hold(match: RouteMatch, values: Mapping[str, str]) -> bool:
    return all(name in values and admits(patterns, values[name]) for name, patterns in match.headers)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _or(patterns: Patterns) -> str:
    shown = list(patterns[:5]) + ([f"one of {len(patterns) - 5} more"] if len(patterns) > 5 else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


class _Dimension:
    """One field of the match: pattern -> the routes (bits) that list it. Routes given as None have no bit."""

    def __init__(self, patterns_of: Iterable[Patterns | None]) -> None:
        self.open = 0  # routes that ask nothing, or "*"
        self.exact: dict[str, int] = {}
        listed: dict[str, int] = {}
        for position, patterns in enumerate(patterns_of):
            if patterns is None:
                continue
            bit = 1 << position
            if not patterns or "*" in patterns:
                self.open |= bit
                continue
            for pattern in patterns:
                table = listed if pattern.endswith("*") else self.exact
                text = pattern.removesuffix("*")
                table[text] = table.get(text, 0) | bit
        self._prefixes = sorted(listed)
        self._parents: list[int] = []  # the longest other prefix that each prefix begins with; -1: none
        self._bits: list[int] = []  # each prefix's routes with those of all its parents
        for position, prefix in enumerate(self._prefixes):
            parent = position - 1
            while parent >= 0 and not prefix.startswith(self._prefixes[parent]):
                parent = self._parents[parent]
            self._parents.append(parent)
            self._bits.append(listed[prefix] | (self._bits[parent] if parent >= 0 else 0))

    def admitting(self, value: str | None) -> int:
        """The routes that admit `value`; None is admitted by those that ask nothing."""
        if value is None:
            return self.open
        return self.open | self.exact.get(value, 0) | self._by_prefix(value)

    def covering(self, patterns: Patterns) -> int:
        """The routes that admit every value that `patterns` admits."""
        if not patterns or "*" in patterns:
            return self.open
        found = -1
        for pattern in patterns:
            if pattern.endswith("*"):
                found &= self.open | self._by_prefix(pattern[:-1])
            else:
                found &= self.admitting(pattern)
        return found

    def _by_prefix(self, value: str) -> int:
        """The routes with a prefix that `value` begins with. All such prefixes are the last one that sorts
        before `value`, or parents of it."""
        position = bisect_right(self._prefixes, value) - 1
        while position >= 0:
            if value.startswith(self._prefixes[position]):
                return self._bits[position]
            position = self._parents[position]
        return 0


class _HeaderDimension:
    """One header name: the routes that don't ask for it, and what the others ask ("*": that it be there)."""

    def __init__(self, patterns_of: Sequence[Patterns | None]) -> None:
        self.silent = sum(1 << i for i, patterns in enumerate(patterns_of) if patterns is None)
        self.values = _Dimension(patterns_of)

    def admitting(self, value: str) -> int:
        return self.silent | self.values.admitting(value)

    def covering(self, patterns: Patterns | None) -> int:
        return self.silent if patterns is None else self.silent | self.values.covering(patterns)


class RouteIndex:
    """The compiled form of all routes' matches, in order. Immutable; lookups share no state."""

    def __init__(self, matches: Sequence[RouteMatch]) -> None:
        self._matches = tuple(matches)
        self._tenants = _Dimension(match.tenants for match in matches)
        self._models = _Dimension(match.models for match in matches)
        self._paths = _Dimension(match.paths for match in matches)
        asked: dict[str, list[Patterns | None]] = {}
        for position, match in enumerate(matches):
            for name, patterns in match.headers:
                asked.setdefault(name, [None] * len(matches))[position] = patterns
        self._headers = {name: _HeaderDimension(patterns) for name, patterns in asked.items()}

    def first(self, tenant: str | None, path: str, model: str, headers: Mapping[str, str]) -> int | None:
        """The position of the first route that admits the request, or None."""
        bits = self._tenants.admitting(tenant) & self._models.admitting(model) & self._paths.admitting(path)
        if bits and self._headers:
            values = first_values(headers)
            if _headers_hold(self._matches[_lowest(bits)], values):  # so it is nearly always
                return _lowest(bits)
            for name, dimension in self._headers.items():
                value = values.get(name)
                bits &= dimension.silent if value is None else dimension.admitting(value)
        return _lowest(bits) if bits else None

    def covering(self, position: int) -> int | None:
        """The first earlier route that takes every request which route `position` asks for, or None."""
        match = self._matches[position]
        bits = (1 << position) - 1
        bits &= self._tenants.covering(match.tenants)
        bits &= self._models.covering(match.models)
        bits &= self._paths.covering(match.paths)
        asked = dict(match.headers)
        for name, dimension in self._headers.items():
            bits &= dimension.covering(asked.get(name))
        return _lowest(bits) if bits else None
