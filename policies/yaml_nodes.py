"""YAML text -> a tree of nodes that know where they stand.

Owns parsing and its bounds. The tree is built from parser events, one at a time and without recursion, so
that size, depth and the number of nodes *after* aliases are expanded are checked before anything is built on
them: an alias bomb, a cycle or 100,000 nested brackets end in a `PolicyError`, never in a hang or a crash.
Scalars mean what the YAML 1.2 core schema says (`mode: off` is the text "off"). Tags and merge keys are
refused. Offsets are characters of the text that was given; lines and columns count from 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import yaml

from policies.problems import PolicyError, Problem, child_path, quoted

MAX_CHARS = 8 * 1024 * 1024
MAX_DEPTH = 32
MAX_NODES = 1_000_000

ScalarKind = Literal["null", "bool", "int", "float", "text"]

_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
_MAX_DIGITS = 30

# libyaml where PyYAML was built with it (20 times faster), else the same parser in Python.
_Parser: Any = yaml.CLoader if yaml.__with_libyaml__ else yaml.Loader


@dataclass(frozen=True, slots=True)
class Scalar:
    """One scalar; `style` is the quote or block character, "" for a plain one."""

    text: str
    style: str
    start: int
    end: int
    line: int
    column: int

    @property
    def kind(self) -> ScalarKind:
        """The type that the core schema gives to it."""
        if self.style:
            return "text"
        if _NULL.match(self.text):
            return "null"
        if _BOOL.match(self.text):
            return "bool"
        if _INT.match(self.text) and len(self.text) <= _MAX_DIGITS:
            return "int"
        return "float" if _FLOAT.match(self.text) else "text"

    @property
    def value(self) -> None | bool | int | float | str:
        """The scalar as a Python value of its kind."""
        kind = self.kind
        if kind == "text":
            return self.text
        if kind == "null":
            return None
        if kind == "bool":
            return self.text[0] in "tT"
        if kind == "int":
            return int(self.text, 0) if self.text[:2] in ("0x", "0o") else int(self.text)
        return float(self.text.lower().replace(".inf", "inf").replace(".nan", "nan"))


class Entry(NamedTuple):
    """One key of a mapping; `aliased` says that the value stands elsewhere and is only referred to here."""

    key: Scalar
    value: Node
    aliased: bool


@dataclass(frozen=True, slots=True)
class Mapping_:
    """A mapping, in the order of the text. `flow` is true for `{...}`."""

    entries: tuple[Entry, ...]
    flow: bool
    start: int
    end: int
    line: int
    column: int

    def get(self, key: str) -> Node | None:
        """The value under `key`, or None."""
        return next((entry.value for entry in self.entries if entry.key.text == key), None)


@dataclass(frozen=True, slots=True)
class Sequence_:
    """A list; `aliased` holds the indexes of the items that are aliases."""

    items: tuple[Node, ...]
    aliased: frozenset[int]
    flow: bool
    start: int
    end: int
    line: int
    column: int


Node = Scalar | Mapping_ | Sequence_


def kind_name(node: Node) -> str:
    """The node's type in words, without its value (which may be a secret)."""
    if isinstance(node, Mapping_):
        return "a mapping"
    if isinstance(node, Sequence_):
        return "a list"
    names = {
        "null": "nothing",
        "bool": "true or false",
        "int": "a number",
        "float": "a number",
        "text": "text",
    }
    return names[node.kind]


def plain(node: Node) -> Any:
    """The tree as plain Python values (dict, list, str, int, float, bool, None)."""
    if isinstance(node, Mapping_):
        return {entry.key.text: plain(entry.value) for entry in node.entries}
    if isinstance(node, Sequence_):
        return [plain(item) for item in node.items]
    return node.value


class _Measured(NamedTuple):
    """A finished node with its size (nodes, aliases expanded) and height (levels of collections)."""

    node: Node
    size: int
    height: int


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been read yet."""

    is_mapping: bool
    flow: bool
    mark: Any
    anchor: str | None
    size: int = 1
    height: int = 1
    key: Scalar | None = None
    entries: list[Entry] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)
    items: list[Node] = field(default_factory=list)
    aliased: set[int] = field(default_factory=set)


class _Builder:
    """Turns events into the tree; `problems` collects what does not stop the parse."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.stack: list[_Open] = []
        self.anchors: dict[str, _Measured | None] = {}  # None while the anchored node is still open
        self.root: Node | None = None
        self.documents = 0

    def path(self) -> str:
        path = "$"
        for level in self.stack:
            if not level.is_mapping:
                path = child_path(path, len(level.items))
            elif level.key is not None:
                path = child_path(path, level.key.text)
        return path

    def problem(self, mark: Any, message: str) -> Problem:
        return Problem(self.source, mark.line + 1, self.path(), message, mark.column + 1)

    def fail(self, mark: Any, message: str) -> PolicyError:
        return PolicyError([*self.problems, self.problem(mark, message)])

    def feed(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self.check_tag(event)
            style = "" if event.style in (None, "") else str(event.style)
            scalar = Scalar(event.value, style, *_span(event.start_mark, event.end_mark))
            self.finish(_Measured(scalar, 1, 0), event.anchor, event.start_mark)
        elif isinstance(event, yaml.AliasEvent):
            self.alias(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self.check_tag(event)
            if len(self.stack) >= MAX_DEPTH:
                raise self.fail(event.start_mark, f"is nested more than {MAX_DEPTH} levels deep")
            if event.anchor is not None:
                self.anchors[event.anchor] = None
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            self.stack.append(_Open(is_mapping, bool(event.flow_style), event.start_mark, event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            self.close(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise self.fail(
                    event.start_mark, "a policy is one YAML document; remove everything from this --- on"
                )

    def check_tag(self, event: Any) -> None:
        if event.tag is not None and event.tag != "!":
            self.problems.append(
                self.problem(event.start_mark, f"tags are not supported; remove {quoted(event.tag)}")
            )

    def finish(self, measured: _Measured, anchor: str | None, mark: Any) -> None:
        if anchor is not None:
            self.anchors[anchor] = measured
        self.place(measured, mark, aliased=False)

    def alias(self, event: Any) -> None:
        if event.anchor not in self.anchors:
            raise self.fail(
                event.start_mark, f"alias *{event.anchor} has no anchor &{event.anchor} before it"
            )
        known = self.anchors[event.anchor]
        if known is None:
            raise self.fail(event.start_mark, f"alias *{event.anchor} stands inside its own anchor: a cycle")
        if len(self.stack) + known.height > MAX_DEPTH:
            raise self.fail(event.start_mark, f"is nested more than {MAX_DEPTH} levels deep")
        self.place(known, event.start_mark, aliased=True)

    def close(self, event: Any) -> None:
        done = self.stack.pop()
        span = _span(done.mark, event.end_mark)
        node: Node
        if done.is_mapping:
            node = Mapping_(tuple(done.entries), done.flow, *span)
        else:
            node = Sequence_(tuple(done.items), frozenset(done.aliased), done.flow, *span)
        self.finish(_Measured(node, done.size, done.height), done.anchor, done.mark)

    def place(self, measured: _Measured, mark: Any, *, aliased: bool) -> None:
        """Put a finished node into the open collection around it, or make it the root."""
        node = measured.node
        if not self.stack:
            self.root = node
            return
        around = self.stack[-1]
        around.size += measured.size
        around.height = max(around.height, measured.height + 1)
        if around.size > MAX_NODES:
            raise self.fail(mark, f"has more than {MAX_NODES:,} nodes once its aliases are expanded")
        if not around.is_mapping:
            if aliased:
                around.aliased.add(len(around.items))
            around.items.append(node)
        elif around.key is None:
            around.key = self.as_key(node, mark, around)
        else:
            key, around.key = around.key, None
            around.entries.append(Entry(key, node, aliased))

    def as_key(self, node: Node, mark: Any, around: _Open) -> Scalar:
        if not isinstance(node, Scalar):
            self.problems.append(self.problem(mark, f"a key must be text, found {kind_name(node)}"))
            return Scalar(f"?{len(around.entries)}", '"', *_span(mark, mark))
        if node.text == "<<" and not node.style:
            self.problems.append(
                self.problem(mark, "merge keys (<<) are not supported; alias the whole value")
            )
        if node.text in around.keys:
            message = f"key {quoted(node.text)} is given twice; the first is on line {around.keys[node.text]}"
            self.problems.append(self.problem(mark, message))
        around.keys.setdefault(node.text, mark.line + 1)
        return node


def _span(start: Any, end: Any) -> tuple[int, int, int, int]:
    return start.index, end.index, start.line + 1, start.column + 1


def _feed_all(builder: _Builder, text: str) -> None:
    parser = _Parser(text)
    try:
        while parser.check_event():
            builder.feed(parser.get_event())
    finally:
        parser.dispose()


def parse(text: str, *, source: str = "policy.yaml") -> Node:
    """The one document in `text`. Raises PolicyError (syntax, bounds, duplicate keys, tags, merge keys)."""
    builder = _Builder(source)
    if len(text) > MAX_CHARS:
        message = f"is {len(text):,} characters long; a policy may have {MAX_CHARS:,}"
        raise PolicyError([Problem(source, 1, "$", message, 1)])
    try:
        _feed_all(builder, text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        message = f"is not valid YAML: {error.problem or error.context}"
        raise PolicyError(
            [*builder.problems, Problem(source, line, builder.path(), message, column)]
        ) from None
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        at = getattr(error, "position", None)
        line = text.count("\n", 0, at) + 1 if isinstance(at, int) else 1
        raise PolicyError(
            [Problem(source, line, "$", "holds a character that YAML does not allow", 0)]
        ) from None
    if builder.problems:
        raise PolicyError(builder.problems)
    if builder.root is None:
        raise PolicyError(
            [Problem(source, 1, "$", "is empty; the least that a policy holds is `version: 1`", 1)]
        )
    return builder.root
