"""Loading: a whole policy comes out right, and every fault of a file is reported at once, at its line."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from policies import Bundled, Policy, PolicyError, Upstream, default_policy, lint, load_policy

POOL = "pools: {main: {model: m, upstreams: [{url: 'http://10.0.0.1:8000'}]}}\n"
EXAMPLE = Path(__file__).parents[2] / "deploy" / "policies" / "example.yaml"


def load(text: str, **env: str) -> Policy:
    return load_policy("version: 1\n" + text, source="p.yaml", env=env)


def faults(text: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        load_policy(text, source="p.yaml", env={})
    return [str(problem) for problem in caught.value.problems]


def fault(text: str) -> str:
    (found,) = faults("version: 1\n" + text)
    return found


def test_the_default_policy() -> None:
    policy = default_policy()
    assert not policy.tenants and not policy.requires_key and not policy.pins
    assert policy.pools["default"].bundled == Bundled(replicas=2, model="smollm2-135m-instruct")
    (route,) = policy.routes
    assert (route.name, route.class_, route.pool, route.canon.mode) == (
        "default",
        "interactive",
        "default",
        "observe",
    )
    assert route.canon.replay and route.canon.ruleset.replay and route.canon.learn.accept == "propose"
    labels = {rule.label for rule in route.canon.ruleset.rules}
    assert {"Current time", "Date", "Time", "Request id", "Session id", "Trace id", "User"} <= labels
    assert policy.model_for("smollm2-135m-instruct", "default") == "smollm2-135m-instruct"
    assert policy.model_for("any-name", "default") is None
    assert lint(policy) == []


def test_the_least_policy_is_the_default_one() -> None:
    policy = load("")
    assert (policy.pools, policy.routes, policy.models) == (
        default_policy().pools,
        default_policy().routes,
        default_policy().models,
    )


def test_the_example_loads_and_lint_finds_nothing() -> None:
    policy = load_policy(EXAMPLE.read_text(), source="example.yaml", env={})
    assert lint(policy, env={"VLLM_API_KEY": "k"}) == []
    assert [route.name for route in policy.routes] == [
        "nightly-import",
        "large-models",
        "acme-assistant",
        "default",
    ]
    assert policy.pins[0].ttl_s == 86400 and policy.pins[0].replicas == "all"
    assert policy.classes["batch"].queue_timeout_s == 900 and policy.classes["batch"].rank == 3
    assert policy.route("acme-assistant").canon.share == 0.25


def test_everything_that_can_be_said() -> None:
    policy = load(
        """
tenants:
  acme:
    keys: [{plain: k-1}, {env: ACME_KEY}]
    cache_scope: group:nova
    max_class: standard
    allow_metrics_label: true
classes:
  urgent: {rank: 9, share: 0%, queue_limit: 1, queue_timeout: 5s}
pools:
  ours:
    bundled:
      {replicas: 3, model: small, dtype: bf16, mode: exact, threads: 2,
       kv_tokens: 8192, max_seqs: 8, pin_budget: 25%}
  theirs:
    model: big
    routing: least-load
    upstreams:
      - url: https://h:8443/api/v1/
        dialect: vllm
        api_key_env: KEY
        events: tcp://h:5557
        events_replay: ipc:///r
models: {alias: small, gpt: big}
routes:
  - name: one
    match: {tenants: acme, models: [alias, 'sm*'], paths: '/v1/*', headers: {X-App: [a, 'b*'], x-env: prod}}
    class: urgent
    pool: ours
    canon:
      mode: off
      replay: false
      share: 0.5
      stages: [crlf]
      rules: [builtin, {label: Current time, shape: clock, precision: day, name: mine}]
      learn: {accept: auto, floor: {values: 3, requests: 4, conversations: 5, age: 1h}, never: [User]}
  - {name: two, pool: theirs}
pins:
  - {name: p, tenant: acme, route: one, system: hello, ttl: 90s, replicas: 2}
  - {name: q, tenant: acme, pool: theirs, system: hi}
limits: {body_bytes: 1MiB, default_max_tokens: 77}
""",
        ACME_KEY="k-2",
    )
    acme = policy.tenants["acme"]
    assert acme.key_hashes == tuple(hashlib.sha256(key.encode()).hexdigest() for key in ("k-1", "k-2"))
    assert (acme.cache_scope, acme.max_class, acme.allow_metrics_label) == ("group:nova", "standard", True)
    assert list(policy.classes) == ["system", "interactive", "standard", "batch", "urgent"]
    ours = policy.pools["ours"]
    assert ours.model == "small" and ours.bundled == Bundled(3, "small", "bf16", "exact", 2, 8192, 8, 0.25)
    assert policy.pools["theirs"].upstreams == (
        Upstream("https://h:8443/api", "vllm", "KEY", "tcp://h:5557", "ipc:///r"),
    )
    one, two = policy.routes
    assert one.match.tenants == ("acme",) and one.match.paths == ("/v1/*",)
    assert one.match.headers == (("x-app", ("a", "b*")), ("x-env", ("prod",)))
    canon = one.canon
    assert (canon.mode, canon.replay, canon.share, canon.ruleset.stages) == ("off", False, 0.5, ("crlf",))
    assert canon.learn == dataclasses.replace(
        canon.learn,
        accept="auto",
        floor_values=3,
        floor_requests=4,
        floor_conversations=5,
        floor_age_s=3600.0,
        never=("User",),
    )
    clocks = [rule for rule in canon.ruleset.rules if rule.label == "Current time"]
    assert [(rule.name, rule.precision) for rule in clocks] == [("mine", "day")]  # the built-in one gave way
    assert two.class_ == "interactive" and two.canon.mode == "observe"
    assert [(pin.name, pin.pool, pin.route, pin.ttl_s, pin.replicas) for pin in policy.pins] == [
        ("p", "ours", "one", 90.0, 2),
        ("q", "theirs", "two", None, 1),
    ]
    assert (policy.limits.body_bytes, policy.limits.default_max_tokens) == (2**20, 77)
    assert policy.lines["routes[0].canon.mode"] == 32


def test_all_faults_are_reported_at_once_in_the_order_of_the_file() -> None:
    found = faults(
        """\
version: 2
tenats: {}
tenants:
  acme: {keys: [sk-secret], max_class: interactiv}
pools:
  a: {model: 3, routing: costs}
routes:
  - name: x
    class: interactve
    canon: {mode: on, rules: [{label: T, shape: klock}, {lable: x}]}
  - {name: x, pool: b}
"""
    )
    assert [each.split(": ")[0] for each in found] == [
        f"p.yaml:{n}" for n in (1, 2, 4, 4, 6, 6, 6, 9, 10, 10, 10, 11, 11)
    ]
    assert not any("sk-secret" in each for each in found)
    assert any("routes[0].canon.rules[0].shape: unknown shape" in each for each in found)
    assert any('unknown key "tenats" (did you mean tenants?)' in each for each in found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version2: 1\n", "unknown key"),
        ("tenants: [a]\n", "a mapping from names"),
        ("tenants: {'a b': {}}\n", "is no name"),
        ("tenants: {a: {keys: [{plain: x, env: Y}]}}\n", "exactly one of"),
        ("tenants: {a: {keys: [{sha256: abc}]}}\n", "64 hex digits"),
        ("tenants: {a: {keys: [{env: 'not a variable'}]}}\n", "name of an environment variable"),
        ("tenants: {a: {keys: [{plain: x}, {plain: x}]}}\n", "the same key as one of tenant a"),
        ("tenants: {a: {keys: [{plain: x}]}, b: {keys: [{plain: x}]}}\n", "the same key as one of tenant a"),
        ("tenants: {a: {cache_scope: group}}\n", "tenant, group:NAME or all"),
        ("tenants: {a: {max_class: hi}}\n", 'no class "hi"'),
        ("classes: {fast: {share: 0%}}\n", 'needs the key "rank"'),
        ("classes: {batch: {rank: 0}}\n", "same rank 0"),
        ("classes: {batch: {share: 90%}}\n", "add up to 175%"),
        ("pools: {}\n", "names no pool"),
        ("pools: {a: {model: m}}\n", "nothing serves this pool"),
        ("pools: {a: {bundled: {replicas: 1}}}\n", 'needs the key "model"'),
        ("pools: {a: {model: m, upstreams: ['http://h']}}\n", "must be a mapping such as"),
        ("pools: {a: {model: m, upstreams: [{dialect: vllm}]}}\n", 'needs the key "url"'),
        ("pools: {a: {model: m, upstreams: [{url: 'http://h:1'}, {url: 'http://h:1/v1'}]}}\n", "same url"),
        ("pools: {a: {bundled: {model: m, pin_budget: 95%}}}\n", "90% at most"),
        ("models: {x: nope}\n", 'no pool serves a model "nope"'),
        ("models: {'gpt-*': smollm2-135m-instruct}\n", "is no alias"),
        ("routes: []\n", "lists no route"),
        ("routes: hello\n", "must be a mapping, found text"),
        ("routes: [{name: a, match: {tenants: [t]}}]\n", 'no tenant "t"'),
        ("routes: [{name: a, match: {models: []}}]\n", "lists nothing"),
        ("routes: [{name: a, match: {models: ['a*b']}}]\n", "only as its last character"),
        ("routes: [{name: a, match: {models: [" + "x" * 300 + "]}}]\n", "256 characters"),
        ("routes: [{name: a, match: {paths: [v1]}}]\n", "must begin with /"),
        ("routes: [{name: a, match: {headers: {'a b': x}}}]\n", "is no header name"),
        ("routes: [{name: a, match: {headers: {cookie: x}}}]\n", "carries a credential"),
        ("routes: [{name: a, match: {headers: {X-A: x, x-a: y}}}]\n", "is given twice"),
        ("routes: [{name: a, match: {headers: {x-a: }}}]\n", 'needs the key "x-a"'),
        ("routes: [{name: a, pool: b}]\n", 'no pool "b"'),
        ("routes: [{name: a, canon: {rules: [x]}}]\n", "must be builtin or a mapping"),
        ("routes: [{name: a, canon: {stages: [nope]}}]\n", "unknown stage"),
        ("routes: [{name: a, canon: {rules: [{label: role, shape: line}]}}]\n", "never move"),
        ("pins: [{name: p}]\n", "exactly one of system and system_file"),
        ("pins: [{name: p, system: a, system_file: b}]\n", "exactly one of system and system_file"),
        ("pins: [{name: p, system: a}, {name: p, system: b}]\n", "defined twice"),
        ("pins: [{name: p, system: a, replicas: 0}]\n", "between 1 and"),
        ("pins: [{name: p, system: a, tenant: t}]\n", 'no tenant "t"'),
        ("pins: [{name: p, system_file: a.txt}]\n", "can't be read here"),
        ("tenants: {t: {}}\npins: [{name: p, system: a}]\n", 'needs the key "tenant"'),
        ("limits: {body_bytes: 12}\n", "between 1,024 and"),
    ],
)
def test_one_fault(text: str, says: str) -> None:
    found = fault(text)
    assert says in found and found.startswith("p.yaml:")


def test_faults_across_rules_stand_at_the_rule() -> None:
    same = "{label: Now, shape: clock}"
    found = fault(f"routes:\n  - name: a\n    canon:\n      rules:\n        - {same}\n        - {same}\n")
    assert found.startswith("p.yaml:7: routes[0].canon.rules[1]") and "is taken by" in found


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://h:0",
        "http://h:x",
        "http://u:p@h",
        "http://h/?a=1",
        "http://h/#",
        "http://h h",
        "http://ü",
        "http://[::1",
        "h:8000",
        "http://a,b",
    ],
)
def test_addresses_that_are_refused(url: str) -> None:
    found = faults(f"version: 1\npools: {{a: {{model: m, upstreams: [{{url: '{url}'}}]}}}}\n")
    assert len(found) == 1 and "upstreams[0].url" in found[0] and "u:p" not in found[0]


@pytest.mark.parametrize("endpoint", ["http://h:1", "tcp://h", "tcp://h:0", "tcp://h:70000", "ipc://", "x"])
def test_event_endpoints_that_are_refused(endpoint: str) -> None:
    text = f"pools: {{a: {{model: m, upstreams: [{{url: 'http://h', events: '{endpoint}'}}]}}}}\n"
    assert "ZeroMQ endpoint" in fault(text)


def test_ipv6_addresses_are_taken() -> None:
    policy = load(
        "pools: {a: {model: m, upstreams: [{url: 'http://[::1]:80', events: 'tcp://[::1]:5557'}]}}\n"
    )
    assert policy.pools["a"].upstreams[0].url == "http://[::1]:80"


def test_a_pin_that_its_pool_contradicts_or_no_route_takes() -> None:
    pools = "pools:\n  a: {bundled: {model: x}}\n  b: {bundled: {model: y}}\n"
    head = f"{pools}tenants: {{t: {{}}, u: {{}}}}\nroutes: [{{name: r, pool: a, match: {{tenants: [t]}}}}]\n"
    assert "would never be hit" in fault(
        head + "pins: [{name: p, tenant: t, route: r, pool: b, system: s}]\n"
    )
    assert "no route takes this tenant" in fault(head + "pins: [{name: p, tenant: u, system: s}]\n")
    assert "needs the key" in fault(pools + "routes: [{name: r}]\n")


def test_header_names_are_bounded() -> None:
    routes = "".join(f"  - {{name: r{i}, match: {{headers: {{x-{i}: v}}}}}}\n" for i in range(17))
    assert "more than 16 different headers" in fault("routes:\n" + routes)


def test_a_system_file_is_read_through_the_callable_only() -> None:
    files = {"prompts/a.txt": "You are A.\n", "empty.txt": " \n"}
    asked: list[str] = []

    def read_file(name: str) -> str:
        asked.append(name)
        if name == "binary":
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
        if name == "odd":
            raise OSError("the policy is in no file")
        if name not in files:
            raise FileNotFoundError(2, "No such file or directory", name)
        return files[name]

    def one(name: str) -> Policy:
        text = f"version: 1\npins: [{{name: p, system_file: '{name}'}}]\n"
        return load_policy(text, source="p.yaml", read_file=read_file, env={})

    first = one("prompts/a.txt")
    assert first.pins[0].system == "You are A.\n"
    files["prompts/a.txt"] = "You are B.\n"
    assert one("prompts/a.txt").version != first.version
    for name, says in [
        ("missing.txt", "No such file"),
        ("binary", "not UTF-8"),
        ("odd", "is in no file"),
        ("empty.txt", "must hold 1 to"),
        ("/etc/passwd", "below the folder"),
        ("../x", "below the folder"),
        ("a\\b", "below the folder"),
    ]:
        with pytest.raises(PolicyError, match=says):
            one(name)
    assert not {"/etc/passwd", "../x", "a\\b"} & set(asked)


def test_a_key_whose_variable_is_not_set_opens_nothing() -> None:
    text = "tenants: {a: {keys: [{env: KEY_A}]}}\n"
    for policy in (load(text), load(text, KEY_A=""), load(text, KEY_A="  ")):
        assert policy.requires_key and policy.tenants["a"].unset_env == ("KEY_A",)
        assert policy.tenant_for_key("") is None and policy.tenant_for_key("KEY_A") is None
    assert load(text, KEY_A="k\n").tenant_for_key("k") is not None


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFRONT_TEST_KEY", "k-9")
    policy = load_policy("version: 1\ntenants: {a: {keys: [{env: WARMFRONT_TEST_KEY}]}}\n")
    assert policy.tenant_for_key("k-9") is policy.tenants["a"]


def test_the_version_depends_on_content_alone() -> None:
    plain = load(POOL).version
    assert load("# a comment\n\n" + POOL).version == plain and len(plain) == 12
    assert load(POOL.replace("8000", "8001")).version != plain


def test_an_aliased_canon_serves_many_routes() -> None:
    routes = "".join(f"  - {{name: r{i}, match: {{models: [m{i}]}}, canon: *c}}\n" for i in range(500))
    text = (
        "routes:\n  - {name: first, match: {models: [x]}, canon: &c {mode: enforce, rules: builtin}}\n"
        + routes
    )
    policy = load(POOL + text)
    assert len(policy.routes) == 501 and len({id(route.canon.ruleset) for route in policy.routes}) == 1
