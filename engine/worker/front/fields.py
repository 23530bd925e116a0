"""What every request field may hold: one table, field -> check -> default.

Owns the names, types, ranges and refusals of the request bodies. Always holds: null is the same as absent;
presence is what counts, never truthiness; a field that OpenAI or vLLM define and this engine can't honour is
refused by name; a field without effect here is listed as such; only names unknown to all of them pass unread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.worker.front.errors import ApiError, invalid, unsupported

Check = Callable[[str, Any, int], Any]
"""(field name, value that is not null, vocabulary rows) -> the value to use; raises ApiError."""
Endpoint = Literal["chat", "completions", "both"]

STOP_CHARS = 2000
MAX_CHOICES = 128
MAX_STOPS = 4
MAX_BIASES = 1024
INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request body and how it is treated."""

    name: str
    check: Check
    default: Any = None
    endpoint: Endpoint = "both"
    status: Literal["supported", "without effect", "refused"] = "supported"


def json_type(value: object) -> str:
    """The JSON name of a decoded value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def wrong_type(name: str, expected: str, value: object) -> ApiError:
    """400 that says what was expected and what came."""
    return invalid(name, f"expected {expected}, got {json_type(value)}.", "invalid_type")


def number(low: float, high: float) -> Check:
    """A finite number in [low, high]."""

    def check(name: str, value: Any, _rows: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, "a number", value)
        if not math.isfinite(value) or not low <= value <= high:
            raise invalid(name, f"must be a number from {low:g} to {high:g}.")
        return float(value)

    return check


def integer(low: int, high: int) -> Check:
    """A whole number in [low, high]; 16.0 counts as 16."""

    def check(name: str, value: Any, _rows: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, "an integer", value)
        if isinstance(value, float) and not value.is_integer():
            raise wrong_type(name, "an integer", value)
        if not low <= value <= high:
            raise invalid(name, f"must be an integer from {low} to {high}.")
        return int(value)

    return check


def boolean(name: str, value: Any, _rows: int) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean", value)
    return value


def text(name: str, value: Any, _rows: int) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    return value


def anything(_name: str, value: Any, _rows: int) -> Any:
    """Any JSON value."""
    return value


def token_id(name: str, value: Any, rows: int) -> int:
    """A row of the embedding table: the one bounds check of every field that holds ids."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "a token id", value)
    if not 0 <= value < rows:
        raise invalid(name, f"token id {value} is outside the vocabulary (0 to {rows - 1}).")
    return value


def token_ids(name: str, value: Any, rows: int) -> tuple[int, ...]:
    """A list of token ids. Bounds are checked with min and max first, so that long prompts stay cheap."""
    if not isinstance(value, list):
        raise wrong_type(name, "a list of token ids", value)
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= rows):
        for item in value:
            token_id(name, item, rows)
    return tuple(value)


def stop_strings(name: str, value: Any, _rows: int) -> tuple[str, ...]:
    """One string or a list of up to four, none of them empty."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise wrong_type(name, "a string or a list of strings", value)
    if len(items) > MAX_STOPS:
        raise invalid(name, f"at most {MAX_STOPS} stop strings, got {len(items)}.")
    for item in items:
        if not isinstance(item, str):
            raise wrong_type(name, "strings only", item)
        if not 0 < len(item) <= STOP_CHARS:
            raise invalid(name, f"a stop string must have 1 to {STOP_CHARS} characters.")
    return tuple(items)


def logit_bias(name: str, value: Any, rows: int) -> tuple[tuple[int, float], ...]:
    """{"token id": bias from -100 to 100}."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object of token id to bias", value)
    if len(value) > MAX_BIASES:
        raise invalid(name, f"at most {MAX_BIASES} entries.")
    biases = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 20 and int(key) < rows):
            raise invalid(name, f"'{key[:20]}' is not a token id from 0 to {rows - 1}.")
        biases.append((int(key), number(-100, 100)(name, bias, rows)))
    return tuple(biases)


def stream_options(name: str, value: Any, rows: int) -> tuple[bool, bool]:
    """(include_usage, continuous_usage_stats)."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    flags = []
    for key in ("include_usage", "continuous_usage_stats"):
        flag = value.get(key)
        flags.append(False if flag is None else boolean(f"{name}.{key}", flag, rows))
    return flags[0], flags[1]


def only(*allowed: Any, detail: str = "this engine does not support it.") -> Check:
    """A known field of which only `allowed` values can be honoured."""

    def check(name: str, value: Any, _rows: int) -> Any:
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise unsupported(name, detail)
        return value

    return check


def parse(
    body: Mapping[str, Any], table: Mapping[str, Field], rows: int, *, within: str = ""
) -> dict[str, Any]:
    """Values of every field of `table`, checked, with defaults; `within` is the path of a nested object."""
    values = {name: field.default for name, field in table.items()}
    for name, value in body.items():
        if value is not None and (field := table.get(name)) is not None:
            values[name] = field.check(within + name, value, rows)
    return values
