"""Any decoded JSON value as bytes to hash, however deeply it is nested.

Must always hold: equal values give equal bytes (keys are sorted), and no value that a JSON reader accepted
raises. orjson writes what it can, which is nearly everything; beyond its depth of 254 the value is written
without recursion, in a form that no JSON text has, so that the two can't be mistaken for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

_OPEN, _CLOSE, _KEY, _LEAF = b"\x00[", b"\x00]", b"\x00:", b"\x00="


def plain_json(value: Any) -> bytes:
    """`value` in bytes, keys sorted; JSON unless it is nested too deeply for that."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (TypeError, RecursionError):
        return _flat(value)


def _flat(value: Any) -> bytes:
    pieces: list[bytes] = []
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, bytes):
            pieces.append(item)
        elif isinstance(item, Mapping):
            waiting.append(_CLOSE)
            for key in sorted(item, key=str, reverse=True):
                waiting += (item[key], _KEY + repr(key).encode())
            pieces.append(_OPEN)
        elif isinstance(item, Sequence) and not isinstance(item, str):
            waiting.append(_CLOSE)
            waiting += reversed(item)
            pieces.append(_OPEN)
        else:
            pieces.append(_LEAF + repr(item).encode())
    return b"".join(pieces)
