"""YAML parsing: YAML 1.2 meaning, positions, and every bound that keeps hostile input harmless."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import PolicyError
from policies.yaml_nodes import MAX_CHARS, MAX_DEPTH, Mapping_, Scalar, Sequence_, kind_name, parse, plain


def faults(text: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse(text, source="p.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("off", "off"),
        ("no", "no"),
        ("yes", "yes"),
        ("22:00-06:00", "22:00-06:00"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("12", 12),
        ("-7", -7),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ('"12"', "12"),
        ("'true'", "true"),
        ("9" * 31, 1e31),
    ],
)
def test_scalars_mean_what_the_core_schema_says(written: str, meant: object) -> None:
    value = plain(parse(f"a: {written}"))["a"]
    assert value == meant and type(value) is type(meant)


def test_not_a_number_is_a_float() -> None:
    value = plain(parse("a: .nan"))["a"]
    assert value != value


def test_nodes_know_where_they_stand() -> None:
    text = "é: 1\nlist:\n  - {a: 'x'}  # comment\n"
    root = parse(text)
    assert isinstance(root, Mapping_) and not root.flow
    items = root.get("list")
    assert isinstance(items, Sequence_)
    (inner,) = items.items
    assert isinstance(inner, Mapping_) and inner.flow and (inner.line, inner.column) == (3, 5)
    value = inner.get("a")
    assert isinstance(value, Scalar) and text[value.start : value.end] == "'x'"
    assert root.get("absent") is None
    assert [kind_name(node) for node in (root, items, value)] == ["a mapping", "a list", "text"]


def test_an_alias_stands_for_the_whole_value_and_says_so() -> None:
    root = parse("a: &x {b: 1}\nc: *x\nd: [*x, 2]\n")
    assert plain(root) == {"a": {"b": 1}, "c": {"b": 1}, "d": [{"b": 1}, 2]}
    assert isinstance(root, Mapping_)
    assert [entry.aliased for entry in root.entries] == [False, True, False]
    listed = root.get("d")
    assert isinstance(listed, Sequence_) and listed.aliased == {0}


def test_everything_that_does_not_stop_the_parse_is_reported_at_once() -> None:
    found = faults("a: 1\nb: {c: 1, c: 2}\na: 2\nd: !!int 3\n? [k]\n: 4\n<<: {}\n")
    assert found == [
        'p.yaml:2: b: key "c" is given twice; the first is on line 2',
        'p.yaml:3: $: key "a" is given twice; the first is on line 1',
        'p.yaml:4: d: tags are not supported; remove "tag:yaml.org,2002:int"',
        "p.yaml:5: $: a key must be text, found a list",
        "p.yaml:7: $: merge keys (<<) are not supported; alias the whole value",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("a: [1,\n", "is not valid YAML"),
        ("a: b: c\n", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "one YAML document"),
        ("a: *nowhere\n", "has no anchor &nowhere"),
        ("a: &x [1, *x]\n", "a cycle"),
        ("a: \x01\n", "does not allow"),
        ("a: \ud800\n", "does not allow"),
        ("\tx: 1\n", "is not valid YAML"),
        ("x" * (MAX_CHARS + 1), "may have"),
    ],
)
def test_unusable_text_is_refused_with_a_reason(text: str, says: str) -> None:
    (found,) = faults(text)
    assert says in found and found.startswith("p.yaml:")


def test_a_syntax_error_names_its_line_and_path() -> None:
    (found,) = faults("routes:\n  - name: x\n    canon: {mode: }}\n")
    assert found.startswith("p.yaml:3: routes[0]")


def test_an_alias_bomb_is_refused_before_it_is_expanded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    started = time.perf_counter()
    (found,) = faults("\n".join(lines))
    assert "more than 1,000,000 nodes" in found
    assert time.perf_counter() - started < 1.0


def test_depth_is_bounded_however_it_is_written() -> None:
    assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    for text in (
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "[" * 200_000,
        "- " * 5000 + "x",
        "{a: " * 5000,
    ):
        assert len(faults(text)) == 1
    chain = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 60)]
    assert "nested more than 32 levels" in faults("\n".join(chain))[0]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab:-[]{}&*!|>'\"#\n \t,?1", max_size=60))
def test_any_text_gives_a_tree_or_a_policy_error(text: str) -> None:
    try:
        plain(parse(text))
    except PolicyError as error:
        assert error.problems and all(problem.line >= 1 for problem in error.problems)
