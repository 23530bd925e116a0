"""Explanations agree with matching and give the first reason for every earlier route."""

from __future__ import annotations

from policies import explain, load_policy

POLICY = load_policy(
    """\
version: 1
tenants: {acme: {keys: [{plain: k}]}}
pools: {main: {bundled: {model: m}}}
models: {gpt: m}
routes:
  - {name: a, match: {tenants: [acme], models: [x]}}
  - {name: b, match: {headers: {x-app: chat}}}
  - name: c
    class: batch
    match: {paths: [/v1/*]}
    canon: {mode: enforce, replay: false, rules: [{label: Now, shape: clock}]}
""",
    source="p.yaml",
)


def test_the_route_its_consequences_and_every_earlier_reason() -> None:
    found = explain(
        POLICY, tenant="acme", path="/v1/chat/completions", model="gpt", headers={"X-App": "other"}
    )
    assert found.route is POLICY.route_for("acme", "/v1/chat/completions", "gpt", {"X-App": "other"})
    assert str(found).splitlines() == [
        "not a (p.yaml:6): model is gpt, not x",
        "not b (p.yaml:7): header x-app is not chat",
        "route c (p.yaml:8)",
        "  class  batch (rank 3)",
        "  pool   main",
        "  model  m",
        "  canon  enforce, 1 rules, replay off",
    ]
    report = found.to_dict()
    assert (report["route"], report["class"], report["model"], report["canon"]["mode"]) == (
        "c",
        "batch",
        "m",
        "enforce",
    )
    assert [each["field"] for each in report["rejected"]] == ["models", "headers.x-app"]
    assert found.mode == "enforce"


def test_the_class_that_the_client_asked_for_is_bounded() -> None:
    found = explain(POLICY, tenant=None, path="/v1/x", model="m", headers={"X-Warmfront-Class": "system"})
    assert found.class_ is POLICY.classes["batch"]


def test_a_model_that_the_pool_does_not_serve_is_said() -> None:
    found = explain(POLICY, tenant=None, path="/v1/x", model="nope", headers={})
    assert found.model is None and "model_not_found" in str(found)


def test_without_a_model_any_is_meant() -> None:
    found = explain(POLICY, tenant="acme", path="/v1/x", model=None, headers={})
    assert found.route is not None and found.model is None
    text = str(found)
    assert "not a (p.yaml:6): no model is named, not x" in text
    assert "  model  no --model given: any" in text and "refused" not in text


def test_no_route() -> None:
    found = explain(POLICY, tenant=None, path="/other", model="m", headers={})
    assert found.route is None and found.mode is None
    assert str(found).splitlines()[-1] == "no route matches: the request is refused"
    assert found.to_dict()["route"] is None and len(found.rejected) == 3
