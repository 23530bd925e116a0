"""Typed reading of one YAML mapping, with every fault collected.

Owns the conversion of nodes to Python values (text, numbers, shares, durations, sizes, lists) and the checks
that are the same everywhere: unknown keys, missing keys, wrong types, bounds. Must always hold: reading never
raises; a value that could not be read comes back as the default given (or None) and its fault is in the
`Complaints`, so that one load reports all faults of a file. Values are quoted in messages only where they are
names or choices, never where a secret could stand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from policies.problems import Problem, child_path, did_you_mean, quoted
from policies.yaml_nodes import Mapping_, Node, Scalar, Sequence_, kind_name

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_DURATION = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(ms|s|m|h|d)\Z")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s?(B|kB|KB|MB|GB|KiB|MiB|GiB)\Z")
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_PERCENT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s?%\Z")


class Item(NamedTuple):
    """A node with its JSON path."""

    node: Node
    path: str


class Complaints:
    """All faults of one load, each once, and the line of every path that was read."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[str, int] = {}
        self._found: dict[tuple[int, int, str], Problem] = {}

    def add(self, node: Node, path: str, message: str) -> None:
        """Report a fault. An aliased value is read more than once; its fault is kept once."""
        problem = Problem(self.source, node.line, path, message, node.column)
        self._found.setdefault((node.line, node.column, message), problem)

    @property
    def problems(self) -> list[Problem]:
        """In the order of the text."""
        return sorted(self._found.values(), key=lambda problem: (problem.line, problem.column))


class Fields:
    """One mapping being read; `known` are the keys that it may have (None: any key)."""

    def __init__(self, complaints: Complaints, item: Item, known: Sequence[str] | None) -> None:
        self.complaints = complaints
        self.node, self.path = item
        self._values: dict[str, Node] = {}
        complaints.lines[self.path] = self.node.line
        if not isinstance(self.node, Mapping_):
            self.wrong_type(item, "a mapping")
            return
        for key, value, _ in self.node.entries:
            complaints.lines[child_path(self.path, key.text)] = key.line
            if known is not None and key.text not in known:
                hint = did_you_mean(key.text, known) or f"; known here: {', '.join(known)}"
                complaints.add(key, self.path, f"unknown key {quoted(key.text)}{hint}")
            elif not (isinstance(value, Scalar) and value.kind == "null"):
                self._values[key.text] = value

    def fault(self, key: str, message: str) -> None:
        """Report a fault of the value under `key`."""
        self.complaints.add(self._values.get(key, self.node), child_path(self.path, key), message)

    def wrong_type(self, item: Item, wanted: str) -> None:
        self.complaints.add(item.node, item.path, f"must be {wanted}, found {kind_name(item.node)}")

    def has(self, key: str) -> bool:
        """True when the key has a value other than null."""
        return key in self._values

    def item(self, key: str) -> Item | None:
        """The raw node under `key`."""
        node = self._values.get(key)
        return None if node is None else Item(node, child_path(self.path, key))

    def required(self, key: str) -> None:
        """Report the key if it is missing."""
        if isinstance(self.node, Mapping_) and key not in self._values:
            self.complaints.add(self.node, self.path, f"needs the key {quoted(key)}")

    def text(self, key: str, default: str = "") -> str:
        item = self.item(key)
        value = None if item is None else self.as_text(item)
        return default if value is None else value

    def text_or_none(self, key: str) -> str | None:
        item = self.item(key)
        return None if item is None else self.as_text(item)

    def as_text(self, item: Item) -> str | None:
        """A scalar that is text (a number or boolean must be quoted) and not empty."""
        if not isinstance(item.node, Scalar):
            self.wrong_type(item, "text")
        elif item.node.kind != "text":
            message = f"must be text, found {kind_name(item.node)}; put it in quotes if it is meant as text"
            self.complaints.add(item.node, item.path, message)
        elif not item.node.text.strip():
            self.complaints.add(item.node, item.path, "must not be empty")
        else:
            return item.node.text
        return None

    def name(self, key: str, default: str = "") -> str:
        """A name: letters, digits, `.`, `_`, `-`; at most 64 characters."""
        value = self.text_or_none(key)
        if value is not None and not NAME.match(value):
            self.fault(key, f"{quoted(value)} is no name: use letters, digits, '.', '_', '-' (at most 64)")
        return default if value is None else value

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.text_or_none(key)
        if value is None:
            return default
        if value not in choices:
            hint = did_you_mean(value, choices)
            self.fault(key, f"must be one of {', '.join(choices)}; found {quoted(value)}{hint}")
            return default
        return value

    def reference(self, key: str, known: Iterable[str], what: str) -> str | None:
        """A name that must be among `known`; the name is returned even when it is not."""
        value = self.text_or_none(key)
        if value is not None and value not in (names := list(known)):
            self.fault(key, f"there is no {what} {quoted(value)}{did_you_mean(value, names)}")
            return None
        return value

    def boolean(self, key: str, default: bool) -> bool:
        item = self.item(key)
        if item is None:
            return default
        if isinstance(item.node, Scalar) and item.node.kind == "bool":
            return item.node.value is True
        self.wrong_type(item, "true or false")
        return default

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        value = self.integer_or_none(key, low, high)
        return default if value is None else value

    def integer_or_none(self, key: str, low: int, high: int) -> int | None:
        """A whole number within bounds; None when missing or the text `auto`."""
        item = self.item(key)
        if item is None or (isinstance(item.node, Scalar) and item.node.text == "auto"):
            return None
        if not (
            isinstance(item.node, Scalar) and item.node.kind == "int" and isinstance(item.node.value, int)
        ):
            self.wrong_type(item, "a whole number")
        elif not low <= item.node.value <= high:
            self.fault(key, f"must be between {low:,} and {high:,}, found {item.node.value:,}")
        else:
            return item.node.value
        return None

    def share(self, key: str, default: float) -> float:
        """A share as a fraction of 1: `25%`, or a number from 0 to 1."""
        item = self.item(key)
        if item is None:
            return default
        if isinstance(item.node, Scalar):
            percent, value = _PERCENT.match(item.node.text), item.node.value
            if percent is not None:
                value = float(percent[1]) / 100
            if isinstance(value, int | float) and not isinstance(value, bool):
                if 0 <= value <= 1:
                    return float(value)
                self.fault(key, "must be from 0% to 100%; write it like 25% or 0.25")
                return default
        self.wrong_type(item, "a share like 25% or 0.25")
        return default

    def duration(self, key: str, default: float) -> float:
        value = self.duration_or_none(key)
        return default if value is None else value

    def duration_or_none(self, key: str) -> float | None:
        """Seconds: a number, or a number with ms, s, m, h or d. More than zero, at most ten years."""
        item = self.item(key)
        if item is None:
            return None
        if isinstance(item.node, Scalar):
            unit, value = _DURATION.match(item.node.text), item.node.value
            if unit is not None:
                value = float(unit[1]) * _SECONDS[unit[2]]
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                if 0 < value <= 10 * 365 * 86400:
                    return float(value)
                self.fault(key, "must be more than 0 and at most ten years")
                return None
        self.wrong_type(item, "a time like 500ms, 30s, 5m or 24h")
        return None

    def size(self, key: str, default: int, low: int, high: int) -> int:
        """Bytes: a whole number, or a number with B, kB, MB, GB, KiB, MiB or GiB."""
        item = self.item(key)
        if item is None:
            return default
        value: object = None
        if isinstance(item.node, Scalar):
            unit, value = _SIZE.match(item.node.text), item.node.value
            if unit is not None:
                value = int(float(unit[1]) * _BYTES[unit[2]])
        if not isinstance(value, int) or isinstance(value, bool):
            self.wrong_type(item, "a size like 512KiB or 32MiB")
        elif not low <= value <= high:
            self.fault(key, f"must be between {low:,} and {high:,} bytes, found {value:,}")
        else:
            return value
        return default

    def texts(self, key: str) -> list[tuple[str, Item]]:
        """A list of texts; one text alone counts as a list of one. Repetitions are reported."""
        found: list[tuple[str, Item]] = []
        seen: set[str] = set()
        for item in self.items(key):
            value = self.as_text(item)
            if value is None:
                continue
            if value in seen:
                self.complaints.add(item.node, item.path, f"{quoted(value)} is listed twice")
            seen.add(value)
            found.append((value, item))
        return found

    def items(self, key: str) -> list[Item]:
        """The items of a list; a scalar counts as a list of one."""
        item = self.item(key)
        if item is None:
            return []
        if isinstance(item.node, Scalar):
            return [item]
        if isinstance(item.node, Sequence_):
            found = [Item(node, child_path(item.path, i)) for i, node in enumerate(item.node.items)]
            for each in found:
                self.complaints.lines[each.path] = each.node.line
            return found
        self.wrong_type(item, "a list")
        return []

    def named(self, key: str) -> list[tuple[str, Item]]:
        """The entries of a mapping from names to values, each key checked to be a name."""
        item = self.item(key)
        if item is None:
            return []
        if not isinstance(item.node, Mapping_):
            self.wrong_type(item, "a mapping from names to values")
            return []
        found = []
        for entry in item.node.entries:
            path = child_path(item.path, entry.key.text)
            self.complaints.lines[path] = entry.key.line
            if not NAME.match(entry.key.text):
                message = (
                    f"{quoted(entry.key.text)} is no name: use letters, digits, '.', '_', '-' (at most 64)"
                )
                self.complaints.add(entry.key, path, message)
            found.append((entry.key.text, Item(entry.value, path)))
        return found
