"""Why a request takes the route that it takes.

Owns `Explanation`: the route that matched, what follows from it, and for every earlier route the first
condition that failed. Must always hold: the route named here is the one that `Policy.route_for` gives for the
same request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.match import mismatch
from policies.model import CanonMode, Policy, PriorityClass, Route


@dataclass(frozen=True, slots=True)
class Rejection:
    """One route that did not match: the field of its `match` that failed first, and why, in words."""

    route: str
    line: int
    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer; `route` None means that no route takes the request, `model` None that the pool does not
    serve it, or that no model was asked about (`any_model`).
    """

    source: str
    route: Route | None
    line: int
    class_: PriorityClass | None
    model: str | None
    rejected: tuple[Rejection, ...]
    any_model: bool = False

    @property
    def mode(self) -> CanonMode | None:
        """The canonicalization mode of the route."""
        return None if self.route is None else self.route.canon.mode

    def to_dict(self) -> dict[str, Any]:
        """For JSON output."""
        route = self.route
        return {
            "route": None if route is None else route.name,
            "line": self.line,
            "class": None if self.class_ is None else self.class_.name,
            "pool": None if route is None else route.pool,
            "model": self.model,
            "canon": None if route is None else canon_summary(route),
            "rejected": [
                {"route": each.route, "line": each.line, "field": each.field, "reason": each.reason}
                for each in self.rejected
            ],
        }

    def __str__(self) -> str:
        lines = [f"not {each.route} ({self.source}:{each.line}): {each.reason}" for each in self.rejected]
        if self.route is None or self.class_ is None:
            return "\n".join([*lines, "no route matches: the request is refused"])
        canon = canon_summary(self.route)
        lines.append(f"route {self.route.name} ({self.source}:{self.line})")
        lines.append(f"  class  {self.class_.name} (rank {self.class_.rank})")
        lines.append(f"  pool   {self.route.pool}")
        refused = "not served by this pool: the request is refused (model_not_found)"
        lines.append(f"  model  {self.model or ('no --model given: any' if self.any_model else refused)}")
        lines.append(
            f"  canon  {canon['mode']}, {canon['rules']} rules, replay {'on' if canon['replay'] else 'off'}"
        )
        return "\n".join(lines)


def canon_summary(route: Route) -> dict[str, Any]:
    """Mode, number of rules, replay, share and learning of one route."""
    canon = route.canon
    return {
        "mode": canon.mode,
        "rules": len(canon.ruleset.rules),
        "ruleset": canon.ruleset.version,
        "replay": canon.replay,
        "share": canon.share,
        "learn": canon.learn.accept,
    }


def explain(
    policy: Policy, *, tenant: str | None, path: str, model: str | None, headers: Mapping[str, str]
) -> Explanation:
    """Which route takes this request and why none of the earlier ones does; `model` None asks about no model
    in particular.
    """
    rejected: list[Rejection] = []
    for position, route in enumerate(policy.routes):
        line = policy.lines.get(f"routes[{position}]", 0)
        failed = mismatch(route.match, tenant, path, model, headers)
        if failed is not None:
            rejected.append(Rejection(route.name, line, *failed))
            continue
        asked = next((value for name, value in headers.items() if name.lower() == "x-warmfront-class"), None)
        class_ = policy.class_for(policy.tenants.get(tenant or ""), route, asked)
        served = None if model is None else policy.model_for(model, route.pool)
        return Explanation(policy.source, route, line, class_, served, tuple(rejected), model is None)
    return Explanation(policy.source, None, 0, None, None, tuple(rejected), model is None)
