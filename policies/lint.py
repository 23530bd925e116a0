"""Finds what a valid policy says but can't mean.

Owns the checks that need the whole policy: routes that nothing reaches, keys and pins that open nothing,
rules that never match. Every finding has a code, a line and one sentence that says what to do, and holds no
key. Must always hold: a policy that `default_policy()` gives has no findings, nor has the example under
`deploy/policies/` where the variables that it names are set; linting 10,000 routes takes seconds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from policies.defaults import builtin_rules
from policies.match import admits, pattern_matches
from policies.model import Policy, Pool, Route
from policies.problems import Problem, child_path, quoted

_LOOPBACK = ("localhost", "127.", "::1")
_SHOWN_TENANTS = 5
_BUILTIN_LABELS = frozenset(rule["label"].casefold() for rule in builtin_rules())


def lint(policy: Policy, env: Mapping[str, str] | None = None) -> list[Problem]:
    """All findings, in the order of the file. `env` is where the engines' keys are looked up (default: the
    process's environment).
    """
    found = [
        *_tenants(policy),
        *_pools(policy, os.environ if env is None else env),
        *_routes(policy),
        *_pins(policy),
    ]
    return sorted(found, key=lambda problem: problem.line)


def _finding(policy: Policy, path: str, code: str, message: str) -> Problem:
    """A finding at the line of `path` (1 where the file does not say it)."""
    return Problem(policy.source, policy.lines.get(path, 1), path, message, code=code)


def _tenants(policy: Policy) -> Iterator[Problem]:
    groups = Counter(t.cache_scope for t in policy.tenants.values() if t.cache_scope.startswith("group:"))
    for tenant in policy.tenants.values():
        path = child_path("tenants", tenant.name)
        for variable in tenant.unset_env:
            message = f"environment variable {variable} is not set here, so this key opens nothing"
            yield _finding(policy, f"{path}.keys", "unset-env", message)
        if not tenant.key_hashes and not tenant.unset_env:
            message = f"tenant {tenant.name} has no key, so nobody can be it; add one under `keys`"
            yield _finding(policy, path, "tenant-without-keys", message)
        if "plain" in tenant.key_kinds:
            message = "a key stands here in plain text; write its {sha256: ...} or {env: ...}"
            yield _finding(policy, f"{path}.keys", "plain-key", message)
        if groups.get(tenant.cache_scope) == 1:
            message = f"{tenant.cache_scope} has one tenant and so shares with nobody; write `tenant`"
            yield _finding(policy, f"{path}.cache_scope", "group-of-one", message)
        if not any(admits(route.match.tenants, tenant.name) for route in policy.routes):
            message = f"no route takes tenant {tenant.name}, so all its requests are refused"
            yield _finding(policy, path, "tenant-without-route", message)


def _pools(policy: Policy, env: Mapping[str, str]) -> Iterator[Problem]:
    used = {route.pool for route in policy.routes}
    for pool in policy.pools.values():
        path = child_path("pools", pool.name)
        if pool.name not in used:
            message = f"no route leads to pool {pool.name}; its replicas would stand idle"
            yield _finding(policy, path, "unused-pool", message)
        for position, upstream in enumerate(pool.upstreams):
            address = urlsplit(upstream.url)
            variable = upstream.api_key_env
            if variable and not env.get(variable):
                message = f"environment variable {variable} is not set here, so this engine is sent no key"
                yield _finding(policy, f"{path}.upstreams[{position}].api_key_env", "unset-env", message)
            if upstream.api_key_env and address.scheme == "http" and not _is_local(address.hostname):
                message = "the key in api_key_env would cross the network in clear; use https"
                yield _finding(policy, f"{path}.upstreams[{position}].url", "key-over-http", message)
        yield from _scopes(policy, pool, path)


def _scopes(policy: Policy, pool: Pool, path: str) -> Iterator[Problem]:
    """Tenants that ask for a cache of their own of engines that keep one for all. A group alone on its pool
    has nobody to be kept apart from.
    """
    foreign = next((i for i, each in enumerate(pool.upstreams) if each.dialect == "openai"), None)
    if foreign is None:
        return
    wanted = [route.match.tenants for route in policy.routes if route.pool == pool.name]
    here = [each for each in policy.tenants.values() if any(admits(names, each.name) for names in wanted)]
    several = len({tenant.scope_key for tenant in here}) > 1
    apart = [
        tenant.name
        for tenant in here
        if tenant.cache_scope == "tenant" or (several and tenant.cache_scope != "all")
    ]
    if apart:
        more = len(apart) - _SHOWN_TENANTS
        names = ", ".join(apart[:_SHOWN_TENANTS]) + (f" and {more} more" if more > 0 else "")
        dialect = pool.upstreams[foreign].dialect
        message = (
            f"cache_scope of {names} is not enforced by engines of dialect {dialect}: keeping their cached "
            "prompts apart is up to that engine; use bundled replicas, or say `cache_scope: all`"
        )
        yield _finding(policy, f"{path}.upstreams[{foreign}]", "scope-not-enforced", message)


def _is_local(host: str | None) -> bool:
    return (host or "").startswith(_LOOPBACK)


def _routes(policy: Policy) -> Iterator[Problem]:
    for position, route in enumerate(policy.routes):
        path = f"routes[{position}]"
        earlier = policy.index.covering(position)
        if earlier is not None:
            first = policy.routes[earlier].name
            message = f"route {route.name} is never reached: the earlier route {first} takes all its requests"
            yield _finding(policy, path, "unreachable-route", message)
        yield from _models(policy, route, path)
        yield from _canon(policy, route, f"{path}.canon")


def _models(policy: Policy, route: Route, path: str) -> Iterator[Problem]:
    served = policy.pools[route.pool].model
    names = {served, *(alias for alias, target in policy.models.items() if target == served)}
    for pattern in route.match.models:
        if "*" in names or pattern == "*" or any(pattern_matches(pattern, name) for name in names):
            continue
        message = f"pool {route.pool} serves no model named {quoted(pattern)}; add an alias under `models`"
        yield _finding(policy, f"{path}.match.models", "model-never-served", message)


def _canon(policy: Policy, route: Route, path: str) -> Iterator[Problem]:
    canon = route.canon
    if canon.mode == "enforce":
        if not canon.replay:
            message = (
                "enforce without replay: appended context is lost from histories, so turns are computed anew"
            )
            yield _finding(policy, f"{path}.replay", "enforce-without-replay", message)
        if canon.share == 0.0:
            yield _finding(
                policy, f"{path}.share", "enforces-nothing", "a share of 0% enforces nothing; use observe"
            )
        if not canon.ruleset.rules and canon.learn.accept != "auto":
            message = "enforce without rules changes nothing; add rules or set learn.accept to auto"
            yield _finding(policy, f"{path}.rules", "enforces-nothing", message)
    elif canon.share < 1.0:
        yield _finding(
            policy, f"{path}.share", "share-without-enforce", "share has a meaning only under enforce"
        )
    yield from _rules(policy, route, path)


def _rules(policy: Policy, route: Route, path: str) -> Iterator[Problem]:
    """Rules that can't match, whatever the prompt. A rule's own line is not known where the list holds
    `builtin`.
    """
    seen: set[tuple[str, str, str | None]] = set()
    rules = route.canon.ruleset.rules
    listed = (
        f"{path}.rules[{len(rules) - 1}]" in policy.lines
        and f"{path}.rules[{len(rules)}]" not in policy.lines
    )
    for position, rule in enumerate(rules):
        place = f"{path}.rules[{position}]" if listed else f"{path}.rules"
        label = rule.label.casefold()
        if rule.mode == "off" and not listed and label in _BUILTIN_LABELS:
            pass  # it takes the place of a built-in rule, which is how one of those is switched off
        elif rule.mode == "off":
            yield _finding(policy, place, "rule-never-matches", f"rule {quoted(rule.name)} is off; remove it")
        elif label.rstrip().endswith((":", "=", ">", "\uff1a")):
            message = (
                f"label {quoted(rule.label)} ends with the sign that is looked for after it; leave it away"
            )
            yield _finding(policy, place, "rule-never-matches", message)
        elif (label, rule.shape, None) in seen or (label, rule.shape, rule.anchor) in seen:
            message = (
                f"an earlier rule has label {quoted(rule.label)} and this shape, so this one never matches"
            )
            yield _finding(policy, place, "rule-never-matches", message)
        seen.add((label, rule.shape, rule.anchor))


def _pins(policy: Policy) -> Iterator[Problem]:
    for position, pin in enumerate(policy.pins):
        path = f"pins[{position}]"
        route = policy.route(pin.route)
        if not admits(route.match.tenants, pin.tenant):
            who = "requests without a tenant" if pin.tenant is None else f"tenant {pin.tenant}"
            message = f"route {route.name} does not take {who}, so pin {pin.name} would never be hit"
            yield _finding(policy, path, "pin-without-route", message)
        pool = policy.pools[pin.pool]
        bundled = pool.bundled
        if bundled is None and all(upstream.dialect != "bundled" for upstream in pool.upstreams):
            message = f"pool {pin.pool} has no bundled replicas, the only ones that hold pins: it never warms"
            yield _finding(policy, path, "pin-without-bundled", message)
        if bundled is not None and bundled.pin_budget == 0.0:
            message = f"pool {pin.pool} has a pin_budget of 0%, so pin {pin.name} can't be held"
            yield _finding(policy, path, "pin-without-budget", message)
