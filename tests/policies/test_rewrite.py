"""Changing a mode in the text: one value changes, every other character stays, nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import DEFAULT_POLICY_TEXT, PolicyError, load_policy, set_canon_mode

HEAD = "version: 1  # keep\n\n"


def changed(body: str, route: str = "a", mode: str = "enforce") -> str:
    result = set_canon_mode(HEAD + body, route, mode)
    assert load_policy(result, env={}).route(route).canon.mode == mode
    assert set_canon_mode(result, route, mode) == result
    assert result.startswith(HEAD)
    return result[len(HEAD) :]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (  # a value
            "routes:\n  - name: a  # x\n    canon:\n      mode: observe   # why\n      replay: true\n",
            "routes:\n  - name: a  # x\n    canon:\n      mode: enforce   # why\n      replay: true\n",
        ),
        ("routes: [{name: a, canon: {mode: 'off'}}]\n", "routes: [{name: a, canon: {mode: 'enforce'}}]\n"),
        ('routes: [{name: a, canon: {mode: "off"}}]', 'routes: [{name: a, canon: {mode: "enforce"}}]'),
        (  # no mode
            "routes:\n- name: a\n  canon:\n    # rules of a\n    replay: true\n",
            "routes:\n- name: a\n  canon:\n    # rules of a\n    mode: enforce\n    replay: true\n",
        ),
        (
            "routes: [{name: a, canon: {replay: true}}]\n",
            "routes: [{name: a, canon: {mode: enforce, replay: true}}]\n",
        ),
        ("routes: [{name: a, canon: {}}]\n", "routes: [{name: a, canon: {mode: enforce}}]\n"),
        (  # an empty mode
            "routes:\n  - name: a\n    canon:\n      mode:   # later\n      replay: true\n",
            "routes:\n  - name: a\n    canon:\n      mode: enforce   # later\n      replay: true\n",
        ),
        ("routes: [{name: a, canon: {mode: ~}}]\n", "routes: [{name: a, canon: {mode: enforce}}]\n"),
        (  # an empty canon
            "routes:\n  - name: a\n    canon:\n    pool: default\n",
            "routes:\n  - name: a\n    canon: {mode: enforce}\n    pool: default\n",
        ),
        ("routes: [{name: a, canon: null}]\n", "routes: [{name: a, canon: {mode: enforce}}]\n"),
        (  # no canon
            "routes:\n  - name: a  # 1st\n    pool: default\n  - name: b\n",
            "routes:\n  - name: a  # 1st\n    canon:\n      mode: enforce\n    pool: default\n  - name: b\n",
        ),
        ("routes:\n  - name: a", "routes:\n  - name: a\n    canon:\n      mode: enforce\n"),
        (
            "routes:\n  - pool: default\n    name: a\n",
            "routes:\n  - pool: default\n    name: a\n    canon:\n      mode: enforce\n",
        ),
        (
            "routes: [{name: a, pool: default}]\n",
            "routes: [{name: a, canon: {mode: enforce}, pool: default}]\n",
        ),
        (  # a name in a block of its own
            "routes:\n  - name: |-\n      a\n    pool: default\n",
            "routes:\n  - name: |-\n      a\n    canon:\n      mode: enforce\n    pool: default\n",
        ),
        (  # Windows line ends
            "routes:\r\n  - name: a\r\n    pool: default\r\n",
            "routes:\r\n  - name: a\r\n    canon:\r\n      mode: enforce\r\n    pool: default\r\n",
        ),
        (  # letters of more than one byte before the place
            "# ü 漢字 🙂\nroutes:\n  - {name: a, canon: {mode: off}}\n",
            "# ü 漢字 🙂\nroutes:\n  - {name: a, canon: {mode: enforce}}\n",
        ),
    ],
)
def test_edits(before: str, after: str) -> None:
    assert changed(before) == after


def test_the_built_in_route_is_written_down() -> None:
    route = "routes:\n  - name: default\n    canon: {mode: enforce}\n"
    assert (
        set_canon_mode("version: 1  # v\n# end\n", "default", "enforce") == f"version: 1  # v\n{route}# end\n"
    )
    assert set_canon_mode("version: 1", "default", "enforce") == f"version: 1\n{route}"
    assert changed("limits:\n  body_bytes: 1MiB\n", "default").endswith(
        "body_bytes: 1MiB\nroutes:\n  - name: default\n    canon: {mode: enforce}\n"
    )
    assert (
        changed("routes:  # none yet\n", "default")
        == "routes: [{name: default, canon: {mode: enforce}}]  # none yet\n"
    )
    assert (
        set_canon_mode("{version: 1}", "default", "off")
        == "{routes: [{name: default, canon: {mode: off}}], version: 1}"
    )


def test_the_default_policy_can_be_edited_like_a_file() -> None:
    new = set_canon_mode(DEFAULT_POLICY_TEXT, "default", "enforce")
    assert new == DEFAULT_POLICY_TEXT.replace("mode: observe", "mode: enforce")


def test_a_byte_order_mark_stays() -> None:
    text = "\ufeffversion: 1\nroutes: [{name: a, canon: {mode: off}}]\n"
    assert set_canon_mode(text, "a", "observe") == text.replace("off", "observe")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("routes: [{name: chat}, {name: b}]\n", "did you mean chat"),
        ("routes: [{name: x}, {name: b}]\n", "known routes: x, b"),
        ("routes: [3, {nam: a}]\n", 'no route "chatt"'),
        ("pools: {}\n", "the only one is default"),
        ("routes: [\n", "not valid YAML"),
    ],
)
def test_unknown_routes_and_broken_text(body: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        set_canon_mode(HEAD + body, "chatt", "enforce")


@pytest.mark.parametrize(
    "body",
    [
        "routes:\n  - {name: b, canon: &c {mode: off}}\n  - {name: a, canon: *c}\n",
        "routes:\n  - {name: a, canon: &c {mode: off}}\n  - {name: b, canon: *c}\n",
        "routes:\n  - {name: b, canon: {mode: &m off}}\n  - {name: a, canon: {mode: *m}}\n",
        "x: &r {name: a}\nroutes: [*r]\n",
        "x: &r [{name: a}]\nroutes: *r\n",
        "routes: [{name: a, canon: [1]}]\n",
        "routes: [{name: a, canon: {mode: [off]}}]\n",
        "routes:\n  - name: a\n    canon:\n      mode: |\n        off\n",
        "routes:\n  - name: a\n    canon: &c\n  - name: b\n    canon: *c\n",
    ],
)
def test_what_would_change_something_else_is_refused(body: str) -> None:
    with pytest.raises(PolicyError):
        set_canon_mode(HEAD + body, "a", "enforce")


def test_wrong_modes_and_documents() -> None:
    with pytest.raises(PolicyError, match="mode must be one of off, observe, enforce"):
        set_canon_mode(HEAD, "default", "enforced")
    with pytest.raises(PolicyError, match="must be a mapping"):
        set_canon_mode("[1]", "a", "off")


comments = st.sampled_from(["", "  # note", " #x"])
canons: st.SearchStrategy[Any] = st.sampled_from(
    [
        "",
        "\n    canon:",
        "\n    canon: {}",
        "\n    canon: {mode: off, replay: true}",
        "\n    canon:\n      replay: true",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(comments, canons, comments), min_size=1, max_size=4), st.data())
def test_only_the_one_mode_changes(parts: list[tuple[str, str, str]], data: st.DataObject) -> None:
    routes = "".join(f"  - name: r{i}{a}{canon}{b}\n" for i, (a, canon, b) in enumerate(parts))
    text = f"version: 1\nroutes:\n{routes}"
    target = f"r{data.draw(st.integers(0, len(parts) - 1))}"
    mode = data.draw(st.sampled_from(["off", "observe", "enforce"]))
    old, new = load_policy(text), load_policy(set_canon_mode(text, target, mode))
    assert [(r.name, mode if r.name == target else r.canon.mode) for r in old.routes] == [
        (r.name, r.canon.mode) for r in new.routes
    ]
    assert [r.canon.ruleset for r in old.routes] == [r.canon.ruleset for r in new.routes]
    kept = iter(set_canon_mode(text, target, mode).splitlines())
    assert all(
        "#" not in line or any(line.split("#")[1] in other for other in kept) for line in text.splitlines()
    )
