"""Every lint check finds what it is for, at its line, and nothing in a policy that is right."""

from __future__ import annotations

import pytest

from policies import lint, load_policy

HEAD = "version: 1\n"
KEY = "keys: [{sha256: " + "a" * 64 + "}]"
OTHER = "keys: [{sha256: " + "b" * 64 + "}]"


def found(text: str) -> list[str]:
    return [
        f"{problem.line} {problem.code}"
        for problem in lint(load_policy(HEAD + text, source="p.yaml", env={}), env={"K": "x"})
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tenants:\n  a: {}\n", ["3 tenant-without-keys"]),
        ("tenants:\n  a:\n    keys: [{env: NOPE}]\n", ["4 unset-env"]),
        ("tenants:\n  a:\n    keys: [{plain: x}]\n", ["4 plain-key"]),
        (f"tenants:\n  a: {{{KEY}, cache_scope: group:x}}\n", ["3 group-of-one"]),
        (f"tenants:\n  a: {{{KEY}, cache_scope: group:x}}\n  b: {{{OTHER}, cache_scope: group:x}}\n", []),
        (
            f"tenants:\n  a: {{{KEY}}}\n  b: {{{OTHER}}}\nroutes: [{{name: r, match: {{tenants: [a]}}}}]\n",
            ["4 tenant-without-route"],
        ),
        ("pools:\n  default: {bundled: {model: m}}\n  idle: {bundled: {model: n}}\n", ["4 unused-pool"]),
        (
            "pools:\n  p:\n    model: m\n    upstreams:\n      - url: http://far:1\n        api_key_env: K\n",
            ["6 key-over-http"],
        ),
        ("pools: {p: {model: m, upstreams: [{url: 'http://127.0.0.1:1', api_key_env: K}]}}\n", []),
        ("routes:\n  - {name: a}\n  - {name: b, match: {paths: [/v1/x]}}\n", ["4 unreachable-route"]),
        ("routes:\n  - {name: a, match: {paths: [/v1/x]}}\n  - {name: b}\n", []),
        (
            "routes:\n  - name: a\n    match:\n      models: [gpt-4, smollm2-135m-instruct]\n",
            ["5 model-never-served"],
        ),
        ("models: {'*': smollm2-135m-instruct}\nroutes: [{name: a, match: {models: [gpt-4]}}]\n", []),
        ("models: {gpt-4: smollm2-135m-instruct}\nroutes: [{name: a, match: {models: ['gpt*', '*']}}]\n", []),
        (
            "routes:\n  - name: a\n    canon:\n      mode: enforce\n      replay: false\n",
            ["6 enforce-without-replay"],
        ),
        ("routes:\n  - name: a\n    canon:\n      mode: enforce\n      share: 0%\n", ["6 enforces-nothing"]),
        ("routes:\n  - name: a\n    canon:\n      mode: enforce\n      rules: []\n", ["6 enforces-nothing"]),
        ("routes: [{name: a, canon: {mode: enforce, rules: [], learn: {accept: auto}}}]\n", []),
        ("routes:\n  - name: a\n    canon:\n      share: 10%\n", ["5 share-without-enforce"]),
    ],
)
def test_checks(text: str, expected: list[str]) -> None:
    assert found(text) == expected


def test_rules_that_never_match_are_found_at_their_lines() -> None:
    rules = """\
routes:
  - name: a
    canon:
      rules:
        - {label: Now, shape: clock}
        - {label: now, shape: clock, name: again}
        - {label: Now, shape: zone}
        - {label: "User:", shape: name}
        - {label: Id, shape: uuid, mode: off}
        - {label: Tab, shape: counter, anchor: Editor}
        - {label: Tab, shape: counter, anchor: Editor, name: twice}
        - {label: Tab, shape: counter, anchor: Other, name: elsewhere}
"""
    assert found(rules) == [f"{line} rule-never-matches" for line in (7, 9, 10, 12)]


def test_beside_builtin_rules_a_finding_stands_at_the_list() -> None:
    rules = "rules:\n        - builtin\n        - {label: 'X:', shape: line}\n"
    assert found("routes:\n  - name: a\n    canon:\n      " + rules) == ["5 rule-never-matches"]


def test_pins() -> None:
    routes = "routes:\n  - {name: r, match: {tenants: [a]}}\n  - {name: s}\n"
    head = f"tenants:\n  a: {{{KEY}}}\n  b: {{{OTHER}}}\n{routes}"
    assert found(head + "pins:\n  - {name: p, tenant: b, route: r, system: x}\n") == ["9 pin-without-route"]
    alone = "pools: {default: {bundled: {model: m, pin_budget: 0%}}}\npins:\n  - {name: p, system: x}\n"
    assert found(alone) == ["4 pin-without-budget"]
    text = f"tenants: {{a: {{{KEY}}}}}\nroutes: [{{name: r, match: {{tenants: [a]}}}}]\n"
    assert found(text + "pins: [{name: p, tenant: a, route: r, system: x}]\n") == []


def test_a_builtin_rule_may_be_switched_off_beside_the_others() -> None:
    rules = "rules:\n        - builtin\n        - {label: 'user', shape: name, mode: 'off'}\n"
    assert found("routes:\n  - name: a\n    canon:\n      " + rules) == []


def test_an_engines_key_that_is_not_set() -> None:
    head = "pools:\n  p:\n    model: m\n    upstreams:\n"
    upstream = "      - url: https://far:1\n        api_key_env: OTHER\n"
    assert found(head + upstream) == ["7 unset-env"]
    assert found(head + upstream.replace("OTHER", "K")) == []


def test_pins_need_replicas_that_hold_them() -> None:
    def pinned(dialect: str) -> list[str]:
        pool = f"pools: {{p: {{model: m, upstreams: [{{url: 'http://127.0.0.1:1', dialect: {dialect}}}]}}}}\n"
        return found(pool + "pins:\n  - {name: a, system: x}\n")

    assert pinned("vllm") == pinned("openai") == ["4 pin-without-bundled"]
    assert pinned("bundled") == []


@pytest.mark.parametrize(
    ("scopes", "dialect", "apart"),
    [
        (["tenant"], "openai", "a"),
        (["tenant", "all"], "openai", "a"),
        (["tenant"], "bundled", None),
        (["tenant"], "vllm", None),
        (["all", "all"], "openai", None),
        (["group:x", "group:x"], "openai", None),
        (["group:x", "group:x", "tenant"], "openai", "a, b, c"),
        (["tenant"] * 7, "openai", "a, b, c, d, e and 2 more"),
    ],
)
def test_engines_that_do_not_know_scopes(scopes: list[str], dialect: str, apart: str | None) -> None:
    tenants = "\n".join(
        f"  {name}: {{keys: [{{plain: key-{name}}}], cache_scope: {scope}}}"
        for name, scope in zip("abcdefg", scopes, strict=False)
    )
    upstream = f"{{url: 'https://far:1', dialect: {dialect}}}"
    text = (
        f"version: 1\ntenants:\n{tenants}\npools:\n  p:\n    model: m\n    upstreams:\n      - {upstream}\n"
    )
    findings = [
        each
        for each in lint(load_policy(text, source="p.yaml", env={}), env={})
        if each.code not in ("plain-key", "group-of-one")
    ]
    if apart is None:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.code, finding.line) == ("scope-not-enforced", text.count("\n"))
    assert finding.message.startswith(
        f"cache_scope of {apart} is not enforced by engines of dialect {dialect}"
    )


def test_tenants_that_do_not_reach_the_pool_are_no_matter() -> None:
    text = f"""\
tenants: {{a: {{{KEY}}}, b: {{{OTHER}, cache_scope: all}}}}
pools:
  far: {{model: m, upstreams: [{{url: 'https://far:1'}}]}}
  near: {{bundled: {{model: m}}}}
routes: [{{name: r, match: {{tenants: [b]}}, pool: far}}, {{name: s, pool: near}}]
"""
    assert found(text) == []


def test_a_finding_reads_like_any_problem() -> None:
    (problem,) = lint(load_policy(HEAD + "routes:\n  - {name: a}\n  - {name: b}\n", source="p.yaml"))
    assert str(problem) == (
        "p.yaml:4: routes[1]: route b is never reached: "
        "the earlier route a takes all its requests [unreachable-route]"
    )
