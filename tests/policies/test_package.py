"""The package's public names, and what importing it must not pull in."""

from __future__ import annotations

import subprocess
import sys

import policies


def test_the_public_names() -> None:
    assert policies.__all__ == [
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
    assert all(hasattr(policies, name) for name in policies.__all__)


def test_importing_it_stays_light() -> None:
    heavy = ("torch", "transformers", "aiohttp", "gateway", "engine")
    script = f"import sys, policies; print(*(name for name in {heavy} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
