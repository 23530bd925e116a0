"""Reads the section `routes`: matches, classes, pools and canonicalization.

Owns the way from a route's `canon` mapping to a checked `Ruleset`: every rule is given to the canonicalizer
alone first, so that each fault is reported at its own line, then all together. Must always hold: route names
are unique, every name that a match refers to exists, at most 16 header names are matched on, and no match can
read a credential.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from canonicalizer.rules import Rule, Ruleset
from policies.defaults import builtin_rules
from policies.fields import Complaints, Fields, Item
from policies.match import MAX_HEADER_NAMES, MAX_PATTERN_CHARS, Patterns, RouteMatch, pattern_matches
from policies.model import CanonMode, CanonPolicy, LearnPolicy, Pool, PriorityClass, Route, Tenant
from policies.problems import child_path, did_you_mean, quoted
from policies.yaml_nodes import Mapping_, Node, Scalar, Sequence_, plain

_ROUTE_KEYS = ("name", "match", "class", "pool", "canon")
_MATCH_KEYS = ("tenants", "models", "paths", "headers")
_CANON_KEYS = ("mode", "replay", "rules", "learn", "share", "stages")
_LEARN_KEYS = ("accept", "floor", "never")
_FLOOR_KEYS = ("values", "requests", "conversations", "age")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}\Z")
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
_STEP = re.compile(r"\.?([A-Za-z_][A-Za-z0-9_-]*)|\[([0-9]+)\]")
BUILTIN = "builtin"


class RouteReader:
    """Reads all routes of one policy; keeps rule sets that were already checked, so that 10,000 routes with
    the same rules cost one check.
    """

    def __init__(
        self,
        complaints: Complaints,
        tenants: Mapping[str, Tenant],
        classes: Mapping[str, PriorityClass],
        pools: Mapping[str, Pool],
    ) -> None:
        self.complaints = complaints
        self.tenants = tenants
        self.classes = classes
        self.pools = pools
        self._rulesets: dict[str, Ruleset] = {}
        self._header_names: set[str] = set()

    def read(self, top: Fields) -> tuple[Route, ...]:
        """All routes, or the one built-in route when the section is missing."""
        if not top.has("routes"):
            return (self._builtin_route(top),)
        routes: list[Route] = []
        lines: dict[str, int] = {}
        for item in top.items("routes"):
            route = self._route(item)
            if route.name in lines:
                message = (
                    f"route {quoted(route.name)} is defined twice; the first is on line {lines[route.name]}"
                )
                self.complaints.add(item.node, item.path, message)
            lines.setdefault(route.name, item.node.line)
            routes.append(route)
        if not routes:
            top.fault("routes", "lists no route; leave the section away to get the built-in one")
        return tuple(routes)

    def _builtin_route(self, top: Fields) -> Route:
        top_item = Item(top.node, top.path)
        ruleset = self._ruleset({"rules": builtin_rules(), "replay": True}, top_item, [])
        return Route(
            name="default",
            match=RouteMatch(),
            class_="interactive" if "interactive" in self.classes else next(iter(self.classes)),
            pool=self._only_pool() or next(iter(self.pools), ""),
            canon=CanonPolicy("observe", ruleset),
        )

    def _only_pool(self) -> str | None:
        if len(self.pools) == 1:
            return next(iter(self.pools))
        return "default" if "default" in self.pools else None

    def _route(self, item: Item) -> Route:
        fields = Fields(self.complaints, item, _ROUTE_KEYS)
        fields.required("name")
        pool = self._only_pool()
        if pool is None:
            fields.required("pool")
        default_class = "interactive" if "interactive" in self.classes else next(iter(self.classes))
        match_item = fields.item("match")
        return Route(
            name=fields.name("name"),
            match=RouteMatch() if match_item is None else self._match(match_item),
            class_=fields.reference("class", self.classes, "class") or default_class,
            pool=fields.reference("pool", self.pools, "pool") or pool or next(iter(self.pools), ""),
            canon=self._canon(fields.item("canon") or Item(_nothing(item.node), f"{item.path}.canon")),
        )

    # -- match --

    def _match(self, item: Item) -> RouteMatch:
        fields = Fields(self.complaints, item, _MATCH_KEYS)
        return RouteMatch(
            tenants=self._tenant_patterns(fields),
            models=self._patterns(fields, "models"),
            paths=self._path_patterns(fields),
            headers=self._headers(fields.item("headers")),
        )

    def _patterns(self, fields: Fields, key: str) -> Patterns:
        found = []
        for text, item in fields.texts(key):
            if "*" in text[:-1]:
                self.complaints.add(item.node, item.path, "may hold one *, and only as its last character")
            elif len(text) > MAX_PATTERN_CHARS:
                self.complaints.add(item.node, item.path, f"may have {MAX_PATTERN_CHARS} characters at most")
            found.append(text)
        if fields.has(key) and not found:
            fields.fault(key, "lists nothing, so nothing would match; leave it away to match everything")
        return tuple(found)

    def _tenant_patterns(self, fields: Fields) -> Patterns:
        patterns = self._patterns(fields, "tenants")
        for pattern in patterns:
            if pattern != "*" and not any(pattern_matches(pattern, name) for name in self.tenants):
                hint = did_you_mean(pattern, self.tenants)
                fields.fault("tenants", f"there is no tenant {quoted(pattern)}{hint}")
        return patterns

    def _path_patterns(self, fields: Fields) -> Patterns:
        patterns = self._patterns(fields, "paths")
        for pattern in patterns:
            if pattern != "*" and not pattern.startswith("/"):
                fields.fault(
                    "paths", f"{quoted(pattern)} must begin with /, like /v1/chat/completions or /v1/*"
                )
        return patterns

    def _headers(self, item: Item | None) -> tuple[tuple[str, Patterns], ...]:
        if item is None:
            return ()
        fields = Fields(self.complaints, item, None)
        found: dict[str, Patterns] = {}
        entries = item.node.entries if isinstance(item.node, Mapping_) else ()
        for entry in entries:
            name = entry.key.text.lower()
            if not _HEADER_NAME.match(name):
                self.complaints.add(entry.key, fields.path, f"{quoted(name)} is no header name")
            elif name in _CREDENTIALS:
                message = f"header {name} carries a credential; match on tenants instead"
                self.complaints.add(entry.key, fields.path, message)
            elif name in found:
                self.complaints.add(
                    entry.key, fields.path, f"header {name} is given twice; names ignore case"
                )
            else:
                fields.required(entry.key.text)
                found[name] = self._patterns(fields, entry.key.text)
        self._header_names.update(found)
        if len(self._header_names) > MAX_HEADER_NAMES:
            message = f"the routes match on more than {MAX_HEADER_NAMES} different headers"
            self.complaints.add(item.node, item.path, message)
        return tuple(sorted((name, patterns) for name, patterns in found.items() if patterns))

    # -- canonicalization --

    def _canon(self, item: Item) -> CanonPolicy:
        fields = Fields(self.complaints, item, _CANON_KEYS)
        learn_item = fields.item("learn")
        replay = fields.boolean("replay", True)
        rules = self._rules(fields)
        body: dict[str, Any] = {"rules": [rule for rule, _ in rules], "replay": replay}
        stages = fields.texts("stages")
        if stages:
            body["stages"] = [text for text, _ in stages]
        return CanonPolicy(
            mode=cast(CanonMode, fields.choice("mode", get_args(CanonMode), "observe")),
            ruleset=self._ruleset(body, item, [origin for _, origin in rules]),
            replay=replay,
            learn=LearnPolicy() if learn_item is None else self._learn(learn_item),
            share=fields.share("share", 1.0),
        )

    def _rules(self, fields: Fields) -> list[tuple[dict[str, Any], Item]]:
        """The rules that passed, each with the node that it comes from. `builtin` stands for the built-in
        ones, which also hold when the key is missing; a rule that names a built-in one's label replaces
        it.
        """
        if not fields.has("rules"):
            return [(rule, Item(fields.node, fields.path)) for rule in builtin_rules()]
        found: list[tuple[dict[str, Any], Item]] = []
        own_labels: set[str] = set()
        known = tuple(each.name for each in dataclasses.fields(Rule))
        for item in fields.items("rules"):
            if isinstance(item.node, Scalar) and item.node.text == BUILTIN:
                found += [(rule, item) for rule in builtin_rules()]
                continue
            if isinstance(item.node, Scalar):
                message = f'must be {BUILTIN} or a mapping such as {{label: "Current time", shape: clock}}'
                self.complaints.add(item.node, item.path, message)
                continue
            Fields(self.complaints, item, known)
            rule = plain(item.node)
            if isinstance(rule, dict) and set(rule) <= set(known) and self._rule_passes(rule, item):
                own_labels.add(str(rule["label"]).casefold())
                found.append((rule, item))
        return [
            (rule, item)
            for rule, item in found
            if not isinstance(item.node, Scalar) or rule["label"].casefold() not in own_labels
        ]

    def _rule_passes(self, rule: dict[str, Any], item: Item) -> bool:
        key = json.dumps(rule, sort_keys=True)
        if key in self._rulesets:
            return True
        try:
            self._rulesets[key] = Ruleset.from_dict({"rules": [rule]})
        except ValueError as error:
            self._rule_fault(error, item, [item])
            return False
        return True

    def _ruleset(self, body: dict[str, Any], item: Item, origins: list[Item]) -> Ruleset:
        text = json.dumps(body, sort_keys=True)
        if text not in self._rulesets:
            version = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
            try:
                self._rulesets[text] = Ruleset.from_dict({"version": version, **body})
            except ValueError as error:
                self._rule_fault(error, item, origins)
                return Ruleset.from_dict({"version": version, "rules": []})
        return self._rulesets[text]

    def _rule_fault(self, error: ValueError, item: Item, origins: list[Item]) -> None:
        """Report a fault that the canonicalizer found at the node that its path leads to: below `origins[i]`
        for `rules[i]`, else below `item`.
        """
        given = str(getattr(error, "path", ""))
        steps = _steps(given)
        node, path = item
        if len(steps) > 1 and steps[0] == "rules" and isinstance(steps[1], int):
            (node, path), steps = origins[steps[1]], steps[2:]
        for step in steps:
            below = _below(node, step)
            if below is None:
                break
            node, path = below, child_path(path, step)
        self.complaints.add(node, path, str(error).removeprefix(f"{given}: "))

    def _learn(self, item: Item) -> LearnPolicy:
        fields = Fields(self.complaints, item, _LEARN_KEYS)
        accept = fields.choice("accept", ("off", "propose", "auto"), "propose")
        never = tuple(text for text, _ in fields.texts("never"))
        floor_item = fields.item("floor")
        floor = None if floor_item is None else Fields(self.complaints, floor_item, _FLOOR_KEYS)
        return LearnPolicy(
            accept=cast(Literal["off", "propose", "auto"], accept),
            floor_values=2 if floor is None else floor.integer("values", 2, 2, 1_000_000),
            floor_requests=0 if floor is None else floor.integer("requests", 0, 0, 1_000_000_000),
            floor_conversations=0 if floor is None else floor.integer("conversations", 0, 0, 1_000_000_000),
            floor_age_s=0.0 if floor is None else floor.duration("age", 0.0),
            never=never,
        )


def _nothing(node: Node) -> Mapping_:
    """An empty mapping that stands where `node` stands."""
    return Mapping_((), True, node.start, node.start, node.line, node.column)


def _steps(path: str) -> tuple[str | int, ...]:
    """`rules[0].shape` as steps."""
    return tuple(name or int(index) for name, index in _STEP.findall(path))


def _below(node: Node, step: str | int) -> Node | None:
    if isinstance(node, Mapping_):
        return node.get(str(step))
    if isinstance(node, Sequence_) and isinstance(step, int) and step < len(node.items):
        return node.items[step]
    return None
