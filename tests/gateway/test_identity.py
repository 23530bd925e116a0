"""API key -> tenant."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.identity import ANONYMOUS_SCOPE, cache_scope, identify, presented_key
from policies import Policy, Tenant, default_policy, load_policy

TENANTS = """
version: 1
tenants:
  acme: {keys: [{plain: key-a}, {plain: key-a2}], cache_scope: "group:shared"}
  blue: {keys: [{plain: key-b}]}
pools:
  p: {model: m, upstreams: [{url: "http://127.0.0.1:1"}]}
routes:
  - {name: r, pool: p}
"""


@pytest.fixture
def policy() -> Policy:
    return load_policy(TENANTS)


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"Authorization": "Bearer key-a"}, "acme"),
        ({"Authorization": "bearer   key-a2 "}, "acme"),
        ({"x-api-key": "key-b"}, "blue"),
    ],
)
def test_known_keys(policy: Policy, headers: dict[str, str], name: str) -> None:
    tenant = identify(policy, headers)
    assert tenant is not None and tenant.name == name


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic key-a"},
        {"Authorization": "Bearer key-x"},
        {"Authorization": "Bearer key-a\udc80"},
        {"Authorization": "key-a"},
        {"x-api-key": ""},
        {"Authorization": "Basic x", "x-api-key": "key-b"},
    ],
)
def test_everything_else_is_refused_in_the_same_words(policy: Policy, headers: dict[str, str]) -> None:
    with pytest.raises(ApiError) as refused:
        identify(policy, headers)
    assert refused.value.status == 401
    assert refused.value.code == "invalid_api_key"
    assert "key-" not in refused.value.message


def test_without_tenants_everyone_is_anonymous() -> None:
    assert identify(default_policy(), {"Authorization": "Bearer whatever"}) is None


def test_presented_key() -> None:
    assert presented_key({"Authorization": "Bearer a b"}) == "a b"
    assert presented_key({}) is None


def test_cache_scopes_keep_tenants_apart(policy: Policy) -> None:
    scopes = {cache_scope(policy.tenants["acme"]), cache_scope(policy.tenants["blue"]), cache_scope(None)}
    assert scopes == {"group:shared", "tenant:blue", ANONYMOUS_SCOPE}


def test_a_salt_narrows_a_scope_and_reaches_no_other() -> None:
    one, other = Tenant("a"), Tenant("b")
    scopes = [cache_scope(who, salt) for who in (None, one, other) for salt in (None, "", "x", "tenant:b")]
    assert len(set(scopes)) == len(scopes)
    assert cache_scope(one, "x") == cache_scope(one, "x")
    assert cache_scope(one, "x").startswith("tenant:a\0")
