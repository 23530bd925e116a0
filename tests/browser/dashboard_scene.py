"""What the browser tests look at: a policy with two tenants and a pin, and what stands behind the page."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from gateway.app import Gateway

POLICY = """
version: 1
tenants:
  acme: {{keys: [{{plain: acme-key}}]}}
  globex: {{keys: [{{plain: globex-key}}]}}
pools:
  default:
    model: tiny
    upstreams: [{upstreams}]
routes:
  - name: support
    match: {{tenants: [acme]}}
    pool: default
    canon: {{mode: enforce, rules: builtin}}
  - name: tutor
    match: {{tenants: [globex]}}
    pool: default
    canon: {{mode: observe, rules: builtin}}
pins:
  - {{name: acme-support, tenant: acme, pool: default, route: support, replicas: all, system: "{system}"}}
"""
SYSTEM = "You answer for Acme, briefly and politely, and only from the handbook that follows. " * 3


@dataclass
class Scene:
    """What a page is looked at with: the admin plane's URL, the data plane's, and the gateway behind them."""

    admin: str
    base: str
    gateway: Gateway
    session: aiohttp.ClientSession
