"""Values as bytes to hash: equal ones alike, different ones apart, deep ones too."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from canonicalizer.plain import plain_json


def deep(leaf: Any, levels: int = 900) -> Any:
    for _ in range(levels):
        leaf = {"a": [leaf]}
    return leaf


def test_what_orjson_can_write_is_json() -> None:
    assert plain_json({"b": 1, "a": [None, "é"]}) == orjson.dumps({"a": [None, "é"], "b": 1})


@pytest.mark.parametrize("value", [1, 1.0, True, None, "1", [], {}, [1], {"x": 1}, "\x00]"], ids=repr)
def test_deep_values_are_told_apart_by_their_leaves(value: Any) -> None:
    made = plain_json(deep(value))
    assert made == plain_json(deep(value))
    assert all(made != plain_json(deep(other)) for other in (2, False, "x", [2], {"x": 2}))


def test_keys_are_sorted_in_deep_values_too() -> None:
    assert plain_json(deep({"b": 1, "a": 2})) == plain_json(deep({"a": 2, "b": 1}))
