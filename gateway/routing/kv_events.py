"""KV events on the wire: the msgpack batches that vLLM publishes and the bundled engine speaks too.

Pure decoding, no sockets. A batch is [timestamp, [event, ...], rank] or a map with the same names; an
event is ["BlockStored", hashes, parent, token ids, block size, lora id, medium, lora name, extra keys]
(trailing fields may be missing), or a map tagged by `type`. Hashes are bytes or integers. Source:
vllm/distributed/kv_events.py (0.10-0.32). Unknown event kinds are skipped; a malformed batch raises
EventError and the subscriber treats it as lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

ExternalHash = bytes | int
_MAX_PAYLOAD = 64 * 1024 * 1024
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED = ("block_hashes", "medium")


class EventError(ValueError):
    """A batch that is not in the known format."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks were filled. `parent` is the block before the first (None: the prompt's start)."""

    hashes: tuple[ExternalHash, ...]
    parent: ExternalHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks were evicted."""

    hashes: tuple[ExternalHash, ...]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was emptied."""


Event = Stored | Removed | Cleared


def decode_batch(payload: bytes) -> list[Event]:
    """The events of one batch, in order. Raises EventError."""
    if len(payload) > _MAX_PAYLOAD:
        raise EventError(f"batch of {len(payload)} bytes")
    try:
        batch = msgpack.unpackb(payload, raw=False, strict_map_key=False, unicode_errors="replace")
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a map keyed by a list
        raise EventError(f"not msgpack: {error}") from error
    if isinstance(batch, Mapping):
        events = batch.get("events")
    elif isinstance(batch, list) and len(batch) >= 2:
        events = batch[1]
    else:
        raise EventError(f"a batch is a list or a map, not {type(batch).__name__}")
    if not isinstance(events, list):
        raise EventError("a batch without a list of events")
    decoded = [_decode_event(event) for event in events]
    return [event for event in decoded if event is not None]


def _decode_event(event: object) -> Event | None:
    if isinstance(event, Mapping):
        kind, fields = event.get("type"), event
    elif isinstance(event, list) and event:
        kind = event[0]
        names = _STORED if kind == "BlockStored" else _REMOVED
        fields = dict(zip(names, event[1:], strict=False))
    else:
        raise EventError(f"an event is a list or a map, not {type(event).__name__}")
    try:
        if kind == "BlockStored":
            return Stored(
                hashes=_hashes(fields["block_hashes"]),
                parent=_hash(fields["parent_block_hash"])
                if fields.get("parent_block_hash") is not None
                else None,
                token_ids=tuple(int(token) for token in fields.get("token_ids") or ()),
                block_size=int(fields["block_size"]),
                medium=fields.get("medium"),
                salt=_salt(fields.get("extra_keys")),
            )
        if kind == "BlockRemoved":
            return Removed(_hashes(fields["block_hashes"]), fields.get("medium"))
    except (KeyError, TypeError) as error:
        raise EventError(f"{kind}: {error!r}") from error
    return Cleared() if kind == "AllBlocksCleared" else None


def _hashes(values: Any) -> tuple[ExternalHash, ...]:
    return tuple(_hash(value) for value in values)


def _hash(value: Any) -> ExternalHash:
    if isinstance(value, bytes | int) and not isinstance(value, bool):
        return value
    raise TypeError(f"a block hash is bytes or an integer, not {type(value).__name__}")


def _salt(extra_keys: Any) -> str | None:
    """The cache salt: the only string among the first block's extra keys (images and LoRA come as other
    types).
    """
    if isinstance(extra_keys, Sequence) and extra_keys and isinstance(extra_keys[0], Sequence):
        return next((key for key in extra_keys[0] if isinstance(key, str)), None)
    return None
