"""YAML text -> `Policy`, or every fault of the text at once.

Owns the document's top level, tenants, classes, limits and pins, the order in which sections are read (those
that are referred to first) and the version hash. Must always hold: a policy comes out only if nothing at all
was wrong, and nothing is read but the text, the environment variables that it names, and files through the
`read_file` given.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal, cast

from policies.defaults import CLASSES, DEFAULT_POLICY_TEXT, DEFAULT_SOURCE
from policies.fields import Complaints, Fields, Item
from policies.match import admits
from policies.model import KeyKind, Limits, Pin, Policy, Pool, PriorityClass, Route, Tenant
from policies.pools import environment_name, read_models, read_pools
from policies.problems import PolicyError, quoted
from policies.routes import RouteReader
from policies.yaml_nodes import Node, Scalar, parse, plain

ReadFile = Callable[[str], str]

_TOP_KEYS = ("version", "models", "tenants", "classes", "pools", "routes", "pins", "limits")
_TENANT_KEYS = ("keys", "cache_scope", "max_class", "allow_metrics_label")
_CLASS_KEYS = ("rank", "share", "queue_limit", "queue_timeout")
_PIN_KEYS = ("name", "tenant", "pool", "route", "system", "system_file", "ttl", "replicas")
_KEY_FORMS = ("sha256", "env", "plain")
_SCOPE = re.compile(r"(?:tenant|all|group:[A-Za-z0-9][A-Za-z0-9._-]{0,63})\Z")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
_MAX_SYSTEM_CHARS = 4 * 1024 * 1024


def load_policy(
    text: str,
    *,
    source: str = "policy.yaml",
    read_file: ReadFile | None = None,
    env: Mapping[str, str] | None = None,
) -> Policy:
    """The policy that `text` describes.

    `source` is the file's name in messages. `read_file` gives the text of a `system_file`, by its path
    relative to the policy (without it such pins are refused); it may raise OSError or UnicodeError. `env`
    holds the variables that keys refer to (None: the process's own). Raises PolicyError with all problems.
    """
    root = parse(text, source=source)
    reading = _Reading(source, read_file, os.environ if env is None else env)
    policy = reading.policy(root)
    problems = reading.complaints.problems
    if problems:
        raise PolicyError(problems)
    return policy


def default_policy() -> Policy:
    """The policy of a first start: no tenants, pool `default` with two bundled replicas, route `default` in
    observe.
    """
    return load_policy(DEFAULT_POLICY_TEXT, source=DEFAULT_SOURCE, env={})


class _Reading:
    """One load: what was complained about, and the files that were read."""

    def __init__(self, source: str, read_file: ReadFile | None, env: Mapping[str, str]) -> None:
        self.source = source
        self.read_file = read_file
        self.env = env
        self.complaints = Complaints(source)
        self.contents: list[str] = []
        self.key_owners: dict[str, str] = {}

    def policy(self, root: Node) -> Policy:
        top = Fields(self.complaints, Item(root, "$"), _TOP_KEYS)
        top.required("version")
        if top.integer("version", 1, 0, 1_000_000) != 1:
            top.fault("version", "must be 1, the only version of the policy language that this program reads")
        classes = self.classes(top)
        tenants = {name: self.tenant(name, item, classes) for name, item in top.named("tenants")}
        pools = read_pools(top)
        models = read_models(top, pools)
        routes = RouteReader(self.complaints, tenants, classes, pools).read(top)
        pins = self.pins(top, tenants, pools, routes)
        return Policy(
            version=self.version(root, tenants),
            tenants=tenants,
            classes=classes,
            pools=pools,
            routes=routes,
            pins=pins,
            models=models,
            limits=self.limits(top),
            source=self.source,
            lines=self.complaints.lines,
        )

    def version(self, root: Node, tenants: Mapping[str, Tenant]) -> str:
        keys = {name: tenant.key_hashes for name, tenant in tenants.items()}
        content = json.dumps([plain(root), self.contents, keys], sort_keys=True)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:12]

    # -- classes and limits --

    def classes(self, top: Fields) -> dict[str, PriorityClass]:
        found = {each.name: each for each in CLASSES}
        for name, item in top.named("classes"):
            fields = Fields(self.complaints, item, _CLASS_KEYS)
            base = found.get(
                name, PriorityClass(name, rank=-1, share=0.0, queue_limit=256, queue_timeout_s=60.0)
            )
            if name not in found:
                fields.required("rank")
            found[name] = PriorityClass(
                name=name,
                rank=fields.integer("rank", base.rank, 0, 100),
                share=fields.share("share", base.share),
                queue_limit=fields.integer("queue_limit", base.queue_limit, 0, 1_000_000),
                queue_timeout_s=fields.duration("queue_timeout", base.queue_timeout_s),
            )
        ranks: dict[int, str] = {}
        for each in found.values():
            if each.rank in ranks:
                top.fault("classes", f"{ranks[each.rank]} and {each.name} have the same rank {each.rank}")
            ranks.setdefault(each.rank, each.name)
        total = sum(each.share for each in found.values())
        if total > 1.0 + 1e-9:
            shares = ", ".join(f"{each.name} {each.share:.0%}" for each in found.values())
            top.fault(
                "classes", f"the reserved shares add up to {total:.0%} ({shares}); lower some to at most 100%"
            )
        return dict(sorted(found.items(), key=lambda pair: pair[1].rank))

    def limits(self, top: Fields) -> Limits:
        item = top.item("limits")
        if item is None:
            return Limits()
        fields = Fields(self.complaints, item, ("body_bytes", "default_max_tokens"))
        base = Limits()
        return Limits(
            body_bytes=fields.size("body_bytes", base.body_bytes, 1024, 1024**3),
            default_max_tokens=fields.integer("default_max_tokens", base.default_max_tokens, 1, 10_000_000),
        )

    # -- tenants --

    def tenant(self, name: str, item: Item, classes: Mapping[str, PriorityClass]) -> Tenant:
        fields = Fields(self.complaints, item, _TENANT_KEYS)
        scope = fields.text("cache_scope", "tenant")
        if not _SCOPE.match(scope):
            fields.fault("cache_scope", f"must be tenant, group:NAME or all; found {quoted(scope)}")
        hashes: list[str] = []
        kinds: list[KeyKind] = []
        unset: list[str] = []
        for each in fields.items("keys"):
            if isinstance(each.node, Scalar):
                message = "must be {sha256: HEX}, {env: VARIABLE} or {plain: TEXT}, not a bare value"
                self.complaints.add(each.node, each.path, message)
                continue
            key = Fields(self.complaints, each, _KEY_FORMS)
            given = [form for form in _KEY_FORMS if key.has(form)]
            if len(given) != 1:
                self.complaints.add(each.node, each.path, "must have exactly one of sha256, env and plain")
                continue
            digest = self.key_hash(key, given[0], unset)
            if digest is None:
                continue
            owner = self.key_owners.setdefault(digest, name)
            if owner != name or digest in hashes:
                self.complaints.add(each.node, each.path, f"is the same key as one of tenant {owner}")
            hashes.append(digest)
            kinds.append(cast(KeyKind, given[0]))
        return Tenant(
            name=name,
            key_hashes=tuple(hashes),
            cache_scope=scope,
            max_class=fields.reference("max_class", classes, "class"),
            allow_metrics_label=fields.boolean("allow_metrics_label", False),
            key_kinds=tuple(kinds),
            unset_env=tuple(unset),
        )

    def key_hash(self, key: Fields, form: str, unset: list[str]) -> str | None:
        """The SHA-256 of one key, or None after a fault or when its variable is not set (noted in
        `unset`).
        """
        if form == "sha256":
            digest = key.text_or_none("sha256")
            if digest is not None and not _SHA256.match(digest):
                key.fault("sha256", "must be 64 hex digits: printf %s KEY | sha256sum")
                return None
            return None if digest is None else digest.lower()
        if form == "plain":
            secret = key.text_or_none("plain")
        else:
            variable = environment_name(key, "env")
            if variable is None:
                return None
            secret = self.env.get(variable, "").strip()
            if not secret:
                unset.append(variable)
        return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest() if secret else None

    # -- pins --

    def pins(
        self, top: Fields, tenants: Mapping[str, Tenant], pools: Mapping[str, Pool], routes: Sequence[Route]
    ) -> tuple[Pin, ...]:
        found: list[Pin] = []
        by_name = {route.name: route for route in routes}
        names: set[str] = set()
        for item in top.items("pins"):
            fields = Fields(self.complaints, item, _PIN_KEYS)
            fields.required("name")
            name = fields.name("name")
            if name in names:
                fields.fault("name", f"pin {quoted(name)} is defined twice")
            names.add(name)
            if tenants:
                fields.required("tenant")
            tenant = fields.reference("tenant", tenants, "tenant")
            wanted_pool = fields.reference("pool", pools, "pool")
            route_name = fields.reference("route", by_name, "route")
            route = by_name.get(route_name or "") or _route_for_pin(routes, tenant, wanted_pool)
            if route is None:
                self.complaints.add(
                    item.node, item.path, "no route takes this tenant to this pool; name one in `route`"
                )
                continue
            if wanted_pool not in (None, route.pool):
                fields.fault(
                    "pool", f"route {route.name} leads to pool {route.pool}, so this pin would never be hit"
                )
            replicas: int | Literal["all"] = "all"
            replicas_item = fields.item("replicas")
            if replicas_item is None or getattr(replicas_item.node, "text", "") != "all":
                replicas = fields.integer("replicas", 1, 1, 1024)
            system = self.system_text(fields)
            ttl_s = fields.duration_or_none("ttl")
            found.append(Pin(name, tenant, route.pool, route.name, system, ttl_s, replicas))
        return tuple(found)

    def system_text(self, fields: Fields) -> str:
        if fields.has("system") == fields.has("system_file"):
            self.complaints.add(fields.node, fields.path, "must have exactly one of system and system_file")
            return ""
        if fields.has("system"):
            return fields.text("system")
        name = fields.text("system_file")
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
            fields.fault("system_file", "must be a path below the folder of the policy file")
        elif self.read_file is None:
            fields.fault("system_file", "files can't be read here; write the text under `system`")
        else:
            try:
                text = self.read_file(name)
            except (OSError, UnicodeError) as error:
                unreadable = isinstance(error, UnicodeError)
                reason = "is not UTF-8 text" if unreadable else getattr(error, "strerror", None) or str(error)
                fields.fault("system_file", f"{quoted(name)} can't be read: {reason}")
                return ""
            self.contents.append(text)
            if text.strip() and len(text) <= _MAX_SYSTEM_CHARS:
                return text
            fields.fault("system_file", f"{quoted(name)} must hold 1 to {_MAX_SYSTEM_CHARS:,} characters")
        return ""


def _route_for_pin(routes: Sequence[Route], tenant: str | None, pool: str | None) -> Route | None:
    """The first route that takes the tenant (to the pool, when one is named)."""
    for route in routes:
        if admits(route.match.tenants, tenant) and pool in (None, route.pool):
            return route
    return None
