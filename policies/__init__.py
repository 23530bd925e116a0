"""Policies: YAML written by platform teams -> frozen, validated policy objects."""

from policies.defaults import DEFAULT_POLICY_TEXT
from policies.explain import Explanation, Rejection, explain
from policies.lint import lint
from policies.loader import default_policy, load_policy
from policies.match import RouteMatch
from policies.model import (
    Bundled,
    CanonPolicy,
    LearnPolicy,
    Limits,
    Pin,
    Policy,
    Pool,
    PriorityClass,
    Route,
    Tenant,
    Upstream,
)
from policies.problems import PolicyError, Problem
from policies.rewrite import set_canon_mode

__all__ = [
    "DEFAULT_POLICY_TEXT",
    "Bundled",
    "CanonPolicy",
    "Explanation",
    "LearnPolicy",
    "Limits",
    "Pin",
    "Policy",
    "PolicyError",
    "Pool",
    "PriorityClass",
    "Problem",
    "Rejection",
    "Route",
    "RouteMatch",
    "Tenant",
    "Upstream",
    "default_policy",
    "explain",
    "lint",
    "load_policy",
    "set_canon_mode",
]
