"""Route matching: first match wins, the index agrees with trying one by one, and it stays quick."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.match import RouteIndex, RouteMatch, admits, mismatch

VALUES = ["", "a", "ab", "abc", "b", "x*y"]
PATTERNS = ["*", "a", "a*", "ab", "ab*", "b", "b*"]
HEADERS = ["x-app", "x-env"]

patterns = st.lists(st.sampled_from(PATTERNS), max_size=3).map(tuple)
some_patterns = st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3).map(tuple)
header_conditions = st.dictionaries(st.sampled_from(HEADERS), some_patterns).map(
    lambda d: tuple(sorted(d.items()))
)
matches = st.builds(RouteMatch, patterns, patterns, patterns, header_conditions)
requests = st.tuples(
    st.none() | st.sampled_from(VALUES[1:]),
    st.sampled_from(VALUES),
    st.sampled_from(VALUES),
    st.dictionaries(st.sampled_from(["X-App", "x-env", "other"]), st.sampled_from(VALUES)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(matches, max_size=8), requests)
def test_the_index_finds_what_trying_one_by_one_finds(
    routes: list[RouteMatch], request: tuple[str | None, str, str, dict[str, str]]
) -> None:
    tenant, path, model, headers = request
    tried = (i for i, route in enumerate(routes) if mismatch(route, tenant, path, model, headers) is None)
    assert RouteIndex(routes).first(tenant, path, model, headers) == next(tried, None)


@settings(max_examples=100, deadline=None)
@given(st.lists(matches, min_size=1, max_size=6), requests)
def test_a_covered_route_is_never_first(
    routes: list[RouteMatch], request: tuple[str | None, str, str, dict[str, str]]
) -> None:
    index = RouteIndex(routes)
    first = index.first(*request)
    if first is not None:
        assert index.covering(first) is None


@pytest.mark.parametrize(
    ("earlier", "later", "covered"),
    [
        (RouteMatch(), RouteMatch(tenants=("a",)), True),
        (RouteMatch(tenants=("a",)), RouteMatch(), False),
        (RouteMatch(models=("gpt-*",)), RouteMatch(models=("gpt-4", "gpt-5*")), True),
        (RouteMatch(models=("gpt-4",)), RouteMatch(models=("gpt-4*",)), False),
        (RouteMatch(tenants=("a", "b")), RouteMatch(tenants=("b",), paths=("/v1/x",)), True),
        (RouteMatch(headers=(("x", ("*",)),)), RouteMatch(headers=(("x", ("1",)),)), True),
        (RouteMatch(headers=(("x", ("1",)),)), RouteMatch(headers=(("x", ("*",)),)), False),
        (RouteMatch(headers=(("x", ("1",)),)), RouteMatch(), False),
        (RouteMatch(), RouteMatch(headers=(("x", ("1",)),)), True),
    ],
)
def test_covering(earlier: RouteMatch, later: RouteMatch, covered: bool) -> None:
    index = RouteIndex([earlier, later])
    assert index.covering(1) == (0 if covered else None)
    assert index.covering(0) is None


def test_reasons_name_the_field_and_never_the_header_value() -> None:
    route = RouteMatch(("acme",), ("gpt-4",), ("/v1/chat*",), (("x-app", ("chat",)), ("x-env", ("prod",))))
    asked: list[tuple[str | None, str, str, dict[str, str]]] = [
        (None, "/v1/chat", "gpt-4", {}),
        ("nova", "/v1/chat", "gpt-4", {}),
        ("acme", "/v1/chat", "", {}),
        ("acme", "/v2", "gpt-4", {}),
        ("acme", "/v1/chat", "gpt-4", {}),
        ("acme", "/v1/chat", "gpt-4", {"X-APP": "secret"}),
    ]
    assert [mismatch(route, *request) for request in asked] == [
        ("tenants", "the request has no tenant, not acme"),
        ("tenants", "tenant is nova, not acme"),
        ("models", "model is empty, not gpt-4"),
        ("paths", "path is /v2, not /v1/chat*"),
        ("headers.x-app", "header x-app is missing"),
        ("headers.x-app", "header x-app is not chat"),
    ]
    assert (
        mismatch(route, "acme", "/v1/chat/completions", "gpt-4", {"X-App": "chat", "x-env": "prod"}) is None
    )
    many = RouteMatch(models=tuple("abcdefg"))
    assert mismatch(many, None, "/", "z", {}) == ("models", "model is z, not a, b, c, d, e or one of 2 more")


def test_the_first_of_two_equal_headers_counts() -> None:
    index = RouteIndex([RouteMatch(headers=(("x-app", ("one",)),))])
    assert index.first(None, "/", "", {"X-App": "one", "x-app": "two"}) == 0
    assert index.first(None, "/", "", {"X-App": "two", "x-app": "one"}) is None


def test_no_tenant_is_admitted_only_where_any_is() -> None:
    assert admits((), None) and admits(("*",), None) and not admits(("a*",), None)


def test_ten_thousand_routes_are_searched_in_fifty_microseconds() -> None:
    routes = [
        RouteMatch(
            tenants=(f"t{i % 100}",),
            models=(f"m{i}", f"gpt-{i % 50}*"),
            paths=("/v1/chat/completions",),
            headers=((f"x-h{i % 16}", (f"v{i}",)),),
        )
        for i in range(10_000)
    ]
    index = RouteIndex(routes)
    headers = {f"Header-{i}": "value" for i in range(16)} | {"X-H15": "v9999"}
    assert index.first("t99", "/v1/chat/completions", "m9999", headers) == 9999
    best = float("inf")
    for _ in range(9):
        started = time.perf_counter()
        for _ in range(100):
            index.first("t99", "/v1/chat/completions", "m9999", headers)
        best = min(best, (time.perf_counter() - started) / 100)
    assert best <= 50e-6
