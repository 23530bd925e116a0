"""Changes one route's canonicalization mode in the text of a policy, and nothing else.

Owns the edit behind `warmfront policy enforce`: the position of every node is known, so that one value is
replaced or one key is inserted, and comments, quotes, order and line ends stay. Must always hold: the text
that comes out means what the text that went in meant, but for that one mode; this is checked by parsing both,
and where it can't be had (a mapping shared through an alias) a PolicyError says so and nothing is changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from policies.model import CANON_MODES
from policies.problems import PolicyError, Problem, did_you_mean, quoted
from policies.yaml_nodes import Entry, Mapping_, Node, Scalar, Sequence_, parse, plain

_BUILTIN_ROUTE = "default"


class _Splice(NamedTuple):
    """Replace the characters from start to end."""

    start: int
    end: int
    text: str


def set_canon_mode(text: str, route: str, mode: str, *, source: str = "policy.yaml") -> str:
    """The text with `canon.mode` of the route set to `mode`; the same text when it is so already.

    Raises PolicyError: broken YAML, unknown route or mode, or a place that is shared through an alias.
    """
    if mode not in CANON_MODES:
        message = f"mode must be one of {', '.join(CANON_MODES)}, not {quoted(mode)}"
        raise PolicyError([Problem(source, 1, "$", message + did_you_mean(mode, CANON_MODES))])
    bom = "\ufeff" if text.startswith("\ufeff") else ""
    body = text.removeprefix(bom)
    root = parse(body, source=source)
    edit = _Edit(body, source, route, mode)
    splice = edit.plan(root)
    if splice is None:
        return text
    result = body[: splice.start] + splice.text + body[splice.end :]
    if not edit.proved(root, result):
        raise edit.fail(
            root, "$", "can't be changed here without changing something else; edit the file by hand"
        )
    return bom + result


class _Edit:
    """One edit of one text."""

    def __init__(self, text: str, source: str, route: str, mode: str) -> None:
        self.text = text
        self.source = source
        self.route = route
        self.mode = mode
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.position: int | None = None  # of the route in `routes`; None: it is the built-in one

    def fail(self, node: Node, path: str, message: str) -> PolicyError:
        return PolicyError([Problem(self.source, node.line, path, message, node.column)])

    def plan(self, root: Node) -> _Splice | None:
        if not isinstance(root, Mapping_):
            raise self.fail(root, "$", "must be a mapping")
        routes = _entry(root, "routes")
        if routes is None or _is_null(routes.value):
            return self.add_routes(root, routes)
        found = self.find(routes)
        canon = _entry(found, "canon")
        if canon is None:
            return self.add_canon(found)
        self.refuse_alias(canon)
        if _is_null(canon.value):
            return self.fill_empty(canon)
        if not isinstance(canon.value, Mapping_):
            raise self.fail(canon.value, f"routes[{self.position}].canon", "must be a mapping")
        mode = _entry(canon.value, "mode")
        if mode is None:
            return self.add_mode(canon.value)
        self.refuse_alias(mode)
        return self.replace_mode(mode)

    def find(self, routes: Entry) -> Mapping_:
        """The route's mapping. Raises PolicyError when there is none, or it is shared."""
        self.refuse_alias(routes)
        items = routes.value.items if isinstance(routes.value, Sequence_) else ()
        names: list[str] = []
        for position, item in enumerate(items):
            name = item.get("name") if isinstance(item, Mapping_) else None
            if not isinstance(item, Mapping_) or not isinstance(name, Scalar):
                continue
            names.append(name.text)
            if name.text == self.route:
                self.position = position
                if isinstance(routes.value, Sequence_) and position in routes.value.aliased:
                    raise self.fail(
                        item, f"routes[{position}]", "is shared through an alias; write it out first"
                    )
                return item
        known = f"; known routes: {', '.join(names[:20])}" if names else ""
        hint = did_you_mean(self.route, names) or known
        raise self.fail(routes.value, "routes", f"there is no route {quoted(self.route)}{hint}")

    def refuse_alias(self, entry: Entry) -> None:
        if entry.aliased:
            message = f"{entry.key.text} of route {self.route} is shared through an alias; write it out first"
            raise self.fail(entry.key, "routes", message)

    # -- the edits --

    def replace_mode(self, mode: Entry) -> _Splice | None:
        value = mode.value
        if isinstance(value, Scalar) and value.style in ("", "'", '"'):
            if value.text == self.mode:
                return None
            if _is_null(value):
                return self.fill_empty(mode, self.mode)
            return _Splice(value.start, value.end, f"{value.style}{self.mode}{value.style}")
        raise self.fail(
            value, f"routes[{self.position}].canon.mode", "must be one word on the line of its key"
        )

    def fill_empty(self, entry: Entry, value: str = "") -> _Splice:
        """Give a key without a value (or with null) one."""
        new = value or f"{{mode: {self.mode}}}"
        if entry.value.end > entry.value.start:
            return _Splice(entry.value.start, entry.value.end, new)
        colon = self.text.index(":", entry.key.end) + 1
        return _Splice(colon, colon, f" {new}")

    def add_mode(self, canon: Mapping_) -> _Splice:
        if canon.flow:
            return self.into_flow(canon, f"mode: {self.mode}")
        start = canon.entries[0].key.start
        return _Splice(start, start, f"mode: {self.mode}{self.newline}{' ' * (canon.column - 1)}")

    def add_canon(self, route: Mapping_) -> _Splice:
        new = f"canon: {{mode: {self.mode}}}"
        if route.flow:
            name = next(entry.value for entry in route.entries if entry.key.text == "name")
            return _Splice(name.end, name.end, f", {new}")
        indent = " " * (route.column - 1)
        name = next(entry.value for entry in route.entries if entry.key.text == "name")
        lines = f"{indent}canon:{self.newline}{indent}  mode: {self.mode}"
        return self.below_line(name.end, lines)

    def add_routes(self, root: Mapping_, routes: Entry | None) -> _Splice:
        """The file has no routes, so the built-in one is in force: write it down."""
        if self.route != _BUILTIN_ROUTE:
            message = (
                f"there is no route {quoted(self.route)}; the file has no routes, so the only one is default"
            )
            raise self.fail(root, "$", message)
        new = f"{{name: {_BUILTIN_ROUTE}, canon: {{mode: {self.mode}}}}}"
        if routes is not None:
            return self.fill_empty(routes, f"[{new}]")
        if root.flow:
            return self.into_flow(root, f"routes: [{new}]")
        block = (
            f"routes:{self.newline}  - name: {_BUILTIN_ROUTE}{self.newline}    canon: {{mode: {self.mode}}}"
        )
        end = root.entries[-1].value.end
        return self.below_line(end, block)

    def into_flow(self, mapping: Mapping_, new: str) -> _Splice:
        at = mapping.start + 1
        return _Splice(at, at, f"{new}, " if mapping.entries else new)

    def below_line(self, offset: int, lines: str) -> _Splice:
        """Insert whole lines below the line that holds `offset`."""
        if offset > 0 and self.text[offset - 1] == "\n":  # the value ended with its line
            return _Splice(offset, offset, lines + self.newline)
        end = self.text.find("\n", offset)
        if end < 0:
            return _Splice(len(self.text), len(self.text), self.newline + lines + self.newline)
        return _Splice(end + 1, end + 1, lines + self.newline)

    # -- the proof --

    def proved(self, root: Node, result: str) -> bool:
        """True when the result means the same as before, but for the one mode."""
        try:
            after = plain(parse(result, source=self.source))
        except PolicyError:
            return False
        wanted: dict[str, Any] = plain(root)
        if self.position is None:
            wanted["routes"] = [{"name": _BUILTIN_ROUTE, "canon": {"mode": self.mode}}]
        else:
            route = wanted["routes"][self.position]
            route["canon"] = {**(route.get("canon") or {}), "mode": self.mode}
        return bool(after == wanted)


def _entry(mapping: Mapping_, key: str) -> Entry | None:
    return next((entry for entry in mapping.entries if entry.key.text == key), None)


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.kind == "null"
