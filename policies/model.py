"""The policy as the gateway uses it: frozen values, checked once when they were loaded.

Owns the nouns `Policy`, `Tenant`, `PriorityClass`, `Pool`, `Route`, `Pin` and the questions that a request
asks of them: whose key is this, which route, which class, which model. Must always hold: nothing here changes
after it was made (a new mode is a new `Policy`), every name that one part uses for another exists, and no
method does I/O. Times are seconds, sizes are bytes, shares are fractions of 1.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from canonicalizer.rules import Ruleset
from policies.match import RouteIndex, RouteMatch

CanonMode = Literal["off", "observe", "enforce"]
Routing = Literal["cost", "round-robin", "least-load", "random"]
DialectName = Literal["bundled", "vllm", "openai"]
KeyKind = Literal["sha256", "env", "plain"]

CANON_MODES: tuple[CanonMode, ...] = ("off", "observe", "enforce")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever shares API keys, limits and a cache. `key_hashes` are SHA-256 hex digests; `key_kinds` says how
    each was written; `unset_env` names the variables that were not set (such a key opens nothing).
    `max_class` is the highest class its requests may run in; None: the client may lower the route's class but
    not raise it.
    """

    name: str
    key_hashes: tuple[str, ...] = ()
    cache_scope: str = "tenant"
    max_class: str | None = None
    allow_metrics_label: bool = False
    key_kinds: tuple[KeyKind, ...] = ()
    unset_env: tuple[str, ...] = ()

    @property
    def scope_key(self) -> str:
        """What the block-hash seed is salted with: equal for tenants that share cached blocks, else
        different.
        """
        return f"tenant:{self.name}" if self.cache_scope == "tenant" else self.cache_scope


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """One priority class: `rank` 0 is served first; `share` is the reserved part of the slots."""

    name: str
    rank: int
    share: float
    queue_limit: int
    queue_timeout_s: float


@dataclass(frozen=True, slots=True)
class Upstream:
    """One engine that runs elsewhere. `url` has no path `/v1` and no final slash; `events` and
    `events_replay` are ZeroMQ endpoints; `api_key_env` names the variable that holds its key.
    """

    url: str
    dialect: DialectName = "openai"
    api_key_env: str | None = None
    events: str | None = None
    events_replay: str | None = None


@dataclass(frozen=True, slots=True)
class Bundled:
    """Replicas that the gateway starts itself. None lets the engine choose; `pin_budget` is a share of the
    blocks.
    """

    replicas: int
    model: str
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    mode: Literal["fast", "exact"] = "fast"
    threads: int | None = None
    kv_tokens: int | None = None
    max_seqs: int | None = None
    pin_budget: float = 0.5


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas that serve one model and may stand in for each other."""

    name: str
    model: str
    routing: Routing = "cost"
    upstreams: tuple[Upstream, ...] = ()
    bundled: Bundled | None = None


@dataclass(frozen=True, slots=True)
class LearnPolicy:
    """What happens to rules that the learner finds: `floor_*` is the evidence that it needs first, `never`
    are labels that it must leave alone.
    """

    accept: Literal["off", "propose", "auto"] = "propose"
    floor_values: int = 2
    floor_requests: int = 0
    floor_conversations: int = 0
    floor_age_s: float = 0.0
    never: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CanonPolicy:
    """Canonicalization of one route; `share` is the part of conversations that `enforce` applies to."""

    mode: CanonMode
    ruleset: Ruleset
    replay: bool = True
    learn: LearnPolicy = field(default_factory=LearnPolicy)
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Route:
    """One rule of the policy: requests that `match` run in `class_` on `pool`, canonicalized as `canon`
    says.
    """

    name: str
    match: RouteMatch
    class_: str
    pool: str
    canon: CanonPolicy


@dataclass(frozen=True, slots=True)
class Pin:
    """A system prompt kept resident. `system` goes through the canonicalization of `route`; `ttl_s` None: for
    good.
    """

    name: str
    tenant: str | None
    pool: str
    route: str
    system: str
    ttl_s: float | None = None
    replicas: int | Literal["all"] = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one request."""

    body_bytes: int = 32 * 1024 * 1024
    default_max_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything a platform team decided. `version` is a hash of the content (comments and layout left out).

    `lines` maps JSON paths to lines of `source`; it takes no part in equality.
    """

    version: str
    tenants: Mapping[str, Tenant]
    classes: Mapping[str, PriorityClass]
    pools: Mapping[str, Pool]
    routes: tuple[Route, ...]
    pins: tuple[Pin, ...]
    models: Mapping[str, str]
    limits: Limits = field(default_factory=Limits)
    source: str = field(default="policy.yaml", compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    index: RouteIndex = field(init=False, compare=False, repr=False)
    keys: Mapping[str, Tenant] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("tenants", "classes", "pools", "models", "lines"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "index", RouteIndex([route.match for route in self.routes]))
        owners = {digest: tenant for tenant in self.tenants.values() for digest in tenant.key_hashes}
        object.__setattr__(self, "keys", MappingProxyType(owners))

    @property
    def requires_key(self) -> bool:
        """True as soon as tenants are configured, even if none of their keys can be used."""
        return bool(self.tenants)

    def tenant_for_key(self, key: str) -> Tenant | None:
        """The tenant whose API key this is, or None. Only a digest is looked up, so the time that it takes
        says nothing about how much of a key was right.
        """
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        tenant = self.keys.get(digest)
        if tenant is None:
            return None
        known = any(hmac.compare_digest(digest, stored) for stored in tenant.key_hashes)
        return tenant if known else None

    def route_for(
        self, tenant: Tenant | str | None, path: str, model: str, headers: Mapping[str, str]
    ) -> Route | None:
        """The first route that admits the request, or None. `model` is the name that the client sent; header
        names may be in any case.
        """
        name = tenant.name if isinstance(tenant, Tenant) else tenant
        position = self.index.first(name, path, model, headers)
        return None if position is None else self.routes[position]

    def route(self, name: str) -> Route:
        """The route of that name. Raises KeyError."""
        for route in self.routes:
            if route.name == name:
                return route
        raise KeyError(name)

    def model_for(self, name: str, pool: str) -> str | None:
        """The model that `pool` serves a request for `name` with, or None when it serves none under that
        name: the pool's own model, an alias of it, or any name at all when the alias `*` leads to it.
        """
        served = self.pools[pool].model
        target = name if name == served else self.models.get(name, self.models.get("*"))
        return served if target == served else None

    def class_for(self, tenant: Tenant | None, route: Route, asked: str | None = None) -> PriorityClass:
        """The class that a request runs in: the route's, or the one that the client asked for, but never
        above the tenant's `max_class` (above the route's own class where the tenant has none). An unknown
        name is ignored.
        """
        own = self.classes[route.class_]
        limit = tenant.max_class if tenant is not None else None
        ceiling = own if limit is None else self.classes[limit]
        wanted = self.classes.get(asked, own) if asked is not None else own
        return wanted if wanted.rank >= ceiling.rank else ceiling

    def with_canon_mode(self, route: str, mode: CanonMode) -> Policy:
        """This policy with one route's mode changed and a version of its own. Raises KeyError, ValueError."""
        if mode not in CANON_MODES:
            raise ValueError(f"mode must be one of {', '.join(CANON_MODES)}")
        old = self.route(route)
        if old.canon.mode == mode:
            return self
        new = replace(old, canon=replace(old.canon, mode=mode))
        routes = tuple(new if each is old else each for each in self.routes)
        mark = f"{self.version}\0{route}\0{mode}"
        return replace(self, version=hashlib.sha256(mark.encode()).hexdigest()[:12], routes=routes)
