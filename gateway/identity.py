"""API key -> tenant.

Owns where a key may stand in a request. The table of keys is the policy's (`Policy.tenant_for_key`: SHA-256
digests, compared in constant time). Always holds: a missing, malformed, unknown or retired key is refused
in the same words, and no key is echoed, logged or kept; as soon as a policy names tenants, nobody is
anonymous.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from gateway import errors
from policies import Policy, Tenant

ANONYMOUS_SCOPE = "tenant:"
"""Cache scope of requests without a tenant; no tenant's own scope can equal it, as names are not empty."""


def identify(policy: Policy, headers: Mapping[str, str]) -> Tenant | None:
    """The tenant of `Authorization: Bearer KEY` or `x-api-key: KEY`; None where the policy has no tenants.

    Raises ApiError 401.
    """
    if not policy.requires_key:
        return None
    key = presented_key(headers)
    tenant = policy.tenant_for_key(key) if key is not None else None
    if tenant is None:
        raise errors.invalid_api_key()
    return tenant


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key in the request's headers, or None when there is none in a form that is understood."""
    authorization = headers.get("Authorization")
    if authorization:
        scheme, _, value = authorization.strip().partition(" ")
        value = value.strip()
        return value if scheme.lower() == "bearer" and value else None
    return headers.get("x-api-key") or None


def cache_scope(tenant: Tenant | None, salt: str | None = None) -> str:
    """What the block-hash seed is salted with for this tenant.

    A client's own `cache_salt` narrows it: it parts the tenant's cache, and can't reach another scope, as a
    digest of it is appended.
    """
    scope = ANONYMOUS_SCOPE if tenant is None else tenant.scope_key
    return scope if salt is None else f"{scope}\0{hashlib.sha256(salt.encode()).hexdigest()}"
