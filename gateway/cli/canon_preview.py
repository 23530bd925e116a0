"""Which rules `warmfront canon diff` shows at work: those of a route of a policy, or none of these.

Owns finding the policy and its route. Must always hold: the ruleset is the one that the gateway would use for
the route, built-in rules, stages and replay included; a policy that was named and can't be used is an error,
never a silent change to something else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from canonicalizer import Ruleset
from gateway import policy_file

if TYPE_CHECKING:
    from policies import Policy, Route


class NoPreview(Exception):
    """The policy or the route can't be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Preview:
    """One route's canonicalization, as `enforce` would do it, and where it stands."""

    policy: str
    route: str
    mode: str
    ruleset: Ruleset
    share: float

    def __str__(self) -> str:
        part = "" if self.share == 1.0 else f", on {self.share:.0%} of the conversations"
        now = (
            "enforced" if self.mode == "enforce" else f"is in {self.mode}: this is what `enforce` would send"
        )
        return f"route {self.route} of {self.policy} ({now}{part})"


def preview_of(policy: str | None, route: str | None) -> tuple[Preview | None, str]:
    """The preview, or None and why there is none. Without `policy` the usual file is taken, if there is one;
    without `route` the policy's only one. Raises NoPreview when what was named can't be used.
    """
    from policies import PolicyError

    path = policy_file.find_policy_file(policy, os.environ)
    if path is None:
        if route is not None:
            raise NoPreview("--route needs a policy: name one with --policy, or go where warmfront.yaml is")
        return None, ""
    try:
        loaded = policy_file.load_policy_file(path)
    except PolicyError as error:
        raise NoPreview(str(error)) from None
    except policy_file.NotText as error:
        raise NoPreview(str(error)) from None
    except OSError as error:
        raise NoPreview(f"{path}: {error.strerror or error}") from None
    return _chosen(loaded, path, route, asked=policy is not None)


def _chosen(policy: Policy, path: Path, route: str | None, *, asked: bool) -> tuple[Preview | None, str]:
    names = [each.name for each in policy.routes]
    if route is None and len(names) > 1:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        which = f"{path} has {len(names)} routes; choose one with --route: {shown}"
        if asked:
            raise NoPreview(which)
        return None, which
    found: Route | None = next((each for each in policy.routes if route in (None, each.name)), None)
    if found is None:
        from policies.problems import did_you_mean

        raise NoPreview(f"{path}: there is no route {route}{did_you_mean(route or '', names)}")
    canon = found.canon
    return Preview(str(path), found.name, canon.mode, canon.ruleset, canon.share), ""
