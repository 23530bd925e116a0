"""What a request asks of a policy: tenant, route, model, class; and that nothing changes under it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from policies import Policy, load_policy

TEXT = """
version: 1
tenants:
  acme: {keys: [{plain: key-acme}], max_class: interactive}
  nova: {keys: [{plain: key-nova}, {plain: key-nova-2}], cache_scope: group:n}
pools:
  small: {bundled: {model: s}}
  big: {bundled: {model: b}}
models: {gpt: b, "*": s}
routes:
  - {name: chat, match: {tenants: [acme], paths: [/v1/chat/completions]}, class: standard, pool: small}
  - {name: rest, class: batch, pool: big}
"""


@pytest.fixture
def policy() -> Policy:
    return load_policy(TEXT)


def test_keys_lead_to_tenants(policy: Policy) -> None:
    assert policy.tenant_for_key("key-acme") is policy.tenants["acme"]
    assert policy.tenant_for_key("key-nova-2") is policy.tenants["nova"]
    for wrong in ("", "key-acm", "key-acme ", "acme", "\ud800", "ключ"):
        assert policy.tenant_for_key(wrong) is None


def test_routes_take_a_tenant_or_its_name(policy: Policy) -> None:
    acme = policy.tenants["acme"]
    for who in (acme, "acme"):
        found = policy.route_for(who, "/v1/chat/completions", "any", {})
        assert found is policy.routes[0]
    assert policy.route_for(None, "/v1/chat/completions", "any", {}) is policy.routes[1]
    assert policy.route("rest") is policy.routes[1]
    with pytest.raises(KeyError):
        policy.route("nope")
    assert (
        load_policy("version: 1\nroutes: [{name: a, match: {models: [x]}}]").route_for(None, "/", "y", {})
        is None
    )


def test_models_and_aliases(policy: Policy) -> None:
    assert policy.model_for("s", "small") == "s"
    assert policy.model_for("anything", "small") == "s"
    assert policy.model_for("gpt", "big") == "b"
    assert policy.model_for("b", "big") == "b"
    assert policy.model_for("gpt", "small") is None
    assert policy.model_for("anything", "big") is None


def test_a_client_may_lower_its_class_and_raise_it_only_as_far_as_allowed(policy: Policy) -> None:
    chat, rest = policy.routes
    acme, nova = policy.tenants["acme"], policy.tenants["nova"]
    assert policy.class_for(acme, chat).name == "standard"
    assert policy.class_for(acme, chat, "interactive").name == "interactive"
    assert policy.class_for(acme, chat, "system").name == "interactive"
    assert policy.class_for(acme, chat, "batch").name == "batch"
    assert policy.class_for(acme, chat, "nonsense").name == "standard"
    assert policy.class_for(nova, rest, "system").name == "batch"
    assert policy.class_for(None, chat, "system").name == "standard"


def test_cache_scopes_of_tenants_never_meet_by_accident(policy: Policy) -> None:
    assert policy.tenants["acme"].scope_key == "tenant:acme"
    assert policy.tenants["nova"].scope_key == "group:n"


def test_a_new_mode_is_a_new_policy(policy: Policy) -> None:
    new = policy.with_canon_mode("chat", "enforce")
    assert new.route("chat").canon.mode == "enforce" and policy.route("chat").canon.mode == "observe"
    assert new.route_for("acme", "/v1/chat/completions", "", {}) is new.routes[0]
    assert new.version != policy.version and new.routes[1] is policy.routes[1]
    assert policy.with_canon_mode("chat", "observe") is policy
    bad: Any = "on"
    with pytest.raises(ValueError, match="mode must be one of"):
        policy.with_canon_mode("chat", bad)
    with pytest.raises(KeyError):
        policy.with_canon_mode("nope", "off")


def test_nothing_can_be_changed(policy: Policy) -> None:
    for name in ("version", "routes", "tenants"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, name, None)
    tenants: Any = policy.tenants
    with pytest.raises(TypeError):
        tenants["x"] = policy.tenants["acme"]
    assert "key" not in repr(policy).replace("key_hashes", "").replace("key_kinds", "").replace(
        "api_key_env", ""
    )
