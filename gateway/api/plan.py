"""What is decided about a request before a replica is chosen.

A frozen record, made once by `gateway.api.exchange`; every attempt of the request reads the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.body import ParsedBody
from gateway.canon.service import CanonOutcome
from gateway.canon.text import PoolText, PromptChain
from policies import PriorityClass, Route, Tenant


@dataclass(frozen=True, slots=True)
class Plan:
    """Who asks, by which route and class, and the prompt as it will be sent."""

    tenant: Tenant | None
    route: Route
    class_: PriorityClass
    parsed: ParsedBody
    canon: CanonOutcome
    text: PoolText
    chain: PromptChain
