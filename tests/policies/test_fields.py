"""Typed reading: every unit, every bound, and no exception whatever stands there."""

from __future__ import annotations

import pytest

from policies.fields import Complaints, Fields, Item
from policies.yaml_nodes import parse


def fields(text: str, known: tuple[str, ...] | None = None) -> Fields:
    return Fields(Complaints("p.yaml"), Item(parse(text), "$"), known)


def messages(read: Fields) -> list[str]:
    return [f"{problem.path}: {problem.message}" for problem in read.complaints.problems]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("24h", 86400),
        ("2d", 172800),
        ("1.5h", 5400),
        ("45", 45),
        ("0.5", 0.5),
    ],
)
def test_durations(written: str, seconds: float) -> None:
    assert fields(f"a: {written}").duration("a", 1.0) == seconds


@pytest.mark.parametrize(
    "written", ["5x", "0", "-3s", "99999d", "[1]", "true", ".inf", ".nan", "9" * 40 + "s", "h"]
)
def test_no_durations(written: str) -> None:
    read = fields(f"a: {written}")
    assert read.duration("a", 7.0) == 7.0 and len(messages(read)) == 1


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("512", 512),
        ("1kB", 1000),
        ("2 MB", 2_000_000),
        ("32MiB", 33_554_432),
        ("1.5KiB", 1536),
        ("800B", 800),
    ],
)
def test_sizes(written: str, size: int) -> None:
    assert fields(f"a: {written}").size("a", 1, 1, 10**9) == size


@pytest.mark.parametrize("written", ["32MiBs", "1.5", "true", "5TB", "2GB", "[1]", "9" * 400 + "MB"])
def test_no_sizes(written: str) -> None:
    read = fields(f"a: {written}")
    assert read.size("a", 3, 1, 10**9) == 3 and len(messages(read)) == 1


@pytest.mark.parametrize(
    ("written", "share"), [("25%", 0.25), ("0.4", 0.4), ("1", 1.0), ("0", 0.0), ("12.5 %", 0.125)]
)
def test_shares(written: str, share: float) -> None:
    assert fields(f"a: {written}").share("a", 0.9) == share


@pytest.mark.parametrize("written", ["40", "101%", "-1", "half", "true", "{}", ".nan"])
def test_no_shares(written: str) -> None:
    read = fields(f"a: {written}")
    assert read.share("a", 0.9) == 0.9 and len(messages(read)) == 1


def test_missing_values_and_null_give_the_default() -> None:
    read = fields("a:\nb: ~\n")
    assert not read.has("a")
    assert read.text("a", "x") == "x" and read.integer("b", 5, 0, 9) == 5 and read.share("c", 0.5) == 0.5
    assert read.size("a", 9, 0, 9) == 9 and read.boolean("a", True) and read.duration("b", 2.0) == 2.0
    assert read.items("a") == [] and read.named("b") == [] and read.choice("a", ("x",), "x") == "x"
    assert messages(read) == []


def test_wrong_types_are_named_and_values_stay_unsaid() -> None:
    read = fields("a: secret\nb: [1]\nc: {d: 1}\nd: 12\ne: ' '\nf: true\n")
    assert read.integer("a", 1, 0, 9) == 1
    assert read.boolean("a", False) is False
    assert read.text("b") == "" and read.text("d") == "" and read.text("e") == "" and read.text("f") == ""
    assert read.items("c") == [] and read.named("b") == []
    assert messages(read) == [
        "a: must be a whole number, found text",
        "a: must be true or false, found text",
        "b: must be text, found a list",
        "b: must be a mapping from names to values, found a list",
        "c: must be a list, found a mapping",
        "d: must be text, found a number; put it in quotes if it is meant as text",
        "e: must not be empty",
        "f: must be text, found true or false; put it in quotes if it is meant as text",
    ]


def test_keys_are_strict_with_a_hint_or_the_list() -> None:
    read = fields("rooting: x\nzzz: y\n", ("routing", "model"))
    assert messages(read) == [
        '$: unknown key "rooting" (did you mean routing?)',
        '$: unknown key "zzz"; known here: routing, model',
    ]
    assert not read.has("rooting")


def test_names_choices_and_references() -> None:
    read = fields("a: has blank\nb: fats\nc: acm\n1st name: {}\n")
    assert read.name("a") == "has blank"
    assert read.choice("b", ("fast", "exact"), "fast") == "fast"
    assert read.reference("c", ["acme"], "tenant") is None
    assert len(messages(read)) == 3
    assert any("did you mean acme?" in each for each in messages(read))
    named = fields("m: {good: 1, 'not good': 2}")
    assert [name for name, _ in named.named("m")] == ["good", "not good"]
    assert messages(named) == [
        "m[\"not good\"]: \"not good\" is no name: use letters, digits, '.', '_', '-' (at most 64)"
    ]


def test_one_text_counts_as_a_list_and_repetitions_are_reported() -> None:
    assert [text for text, _ in fields("a: x").texts("a")] == ["x"]
    read = fields("a: [x, y, x, 3]")
    assert [text for text, _ in read.texts("a")] == ["x", "y", "x"]
    assert messages(read)[0] == 'a[2]: "x" is listed twice' and len(messages(read)) == 2


def test_integers_have_bounds_and_auto() -> None:
    read = fields("a: auto\nb: 10\nc: 1.0\n")
    assert read.integer_or_none("a", 1, 5) is None and messages(read) == []
    assert read.integer_or_none("b", 1, 5) is None and read.integer_or_none("c", 1, 5) is None
    assert messages(read) == [
        "b: must be between 1 and 5, found 10",
        "c: must be a whole number, found a number",
    ]


def test_a_fault_of_an_aliased_value_is_reported_once() -> None:
    read = fields("x: &x [1]\ny: *x\n")
    assert read.text("x") == "" and read.text("y") == ""
    assert len(messages(read)) == 1


def test_something_else_than_a_mapping() -> None:
    read = fields("[1]")
    read.required("a")
    assert read.text("a") == "" and messages(read) == ["$: must be a mapping, found a list"]


@pytest.mark.parametrize(
    "value",
    ["{}", "[]", "[[1]]", "{a: 1}", "x", "''", "1", "-1", "1e400", "true", "~", "0x", "5m", "'%'", "[{}, x]"],
)
def test_reading_never_raises(value: str) -> None:
    read = fields(f"k: {value}")
    found: list[object] = [
        read.text("k"),
        read.name("k"),
        read.choice("k", ("x",), "x"),
        read.boolean("k", True),
    ]
    found += [
        read.integer("k", 1, 0, 2),
        read.share("k", 0.1),
        read.duration("k", 1.0),
        read.size("k", 1, 0, 9),
    ]
    found += [read.texts("k"), read.items("k"), read.named("k"), read.reference("k", ["x"], "thing")]
    assert len(found) == 12
    assert bool(messages(read)) is (value != "~")
