"""Replay: earlier turns get the blocks they carried before, the last turn only what changed.

A turn's key is a keyed BLAKE2b over tenant, identity-like values (user, session, directory, locale), the
canonical system text and everything the client sent up to that turn: O(turns) per request, one hash of the
history.

    turn 1: How do I ...?  + block {clock 09:14, request id, user}
    turn 2: And then?                                  (same minute: nothing to say)
    turn 3: Thanks.        + block {clock 09:16}

While the last message is a tool result, the turn keeps the clocks, ids and counters it began with; changed
state is stated behind the last plain tool result, or else anew at the turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from canonicalizer.clocks import coarse
from canonicalizer.context_block import context_block
from canonicalizer.memory import Entry, ReplayMemory, Stated, replayable
from canonicalizer.plain import plain_json
from canonicalizer.prompt import Prompt, Text
from canonicalizer.shapes import is_identity

_HELD_IN_LOOPS = ("clock", "id", "counter")
Remember = tuple[tuple[bytes, Entry], ...]


class Appended(NamedTuple):
    """A block to append to one text of the request."""

    text: Text
    block: str


@dataclass(frozen=True, slots=True)
class _Place:
    """A text that can carry a block, and the memory's key for it."""

    index: int
    text: Text
    key: bytes


def replay(
    prompt: Prompt,
    turn: int,
    values: Sequence[Stated],
    system: Sequence[str],
    memory: ReplayMemory,
    secret: bytes,
    tenant: str,
    fence_key: str,
) -> tuple[list[Appended], Remember]:
    """Blocks for all turns of this request, and what to store; `system` is the canonical system text."""
    places = _places(prompt, values, system, secret, tenant)
    appended: list[Appended] = []
    remember: list[tuple[bytes, Entry]] = []
    known: dict[str, Stated] = {}

    def append(place: _Place, entry: Entry) -> None:
        appended.append(Appended(place.text, entry.block))
        remember.append((place.key, entry))
        known.update((value.label, value) for value in entry.values)

    def entry_of(stated: Sequence[Stated]) -> Entry:
        return Entry(
            context_block(fence_key, ((value.label, value.value) for value in stated)), tuple(stated)
        )

    for place in places:
        if place.index < turn and (entry := replayable(memory.get(place.key))):
            append(place, entry)
    here = next(place for place in places if place.index == turn)
    held = replayable(memory.get(here.key))
    if not prompt.is_loop(turn):
        needed = [value for value in values if _is_news(value, known)]
        if needed:
            same = held is not None and _states(held, needed)
            append(here, held if same and held is not None else entry_of(needed))
        return appended, tuple(remember)

    before = dict(known)
    if held is not None:
        append(here, held)
    tools = [place for place in places if place.index > turn]
    for place in tools[:-1]:
        if entry := replayable(memory.get(place.key)):
            append(place, entry)
    news = [
        v for v in values if v.label not in known or (v.kind not in _HELD_IN_LOOPS and _is_news(v, known))
    ]
    if not news:
        return appended, tuple(remember)
    if held is not None and tools and tools[-1].index == len(prompt.messages) - 1:
        append(tools[-1], entry_of(news))
        return appended, tuple(remember)
    stated = [value for value in values if _is_news(value, before)]
    kept = [(item, note) for item, note in zip(appended, remember, strict=True) if note[0] != here.key]
    entry = entry_of(stated or news)
    appended, remember = [item for item, _ in kept], [note for _, note in kept]
    appended.append(Appended(here.text, entry.block))
    remember.append((here.key, entry))
    return appended, tuple(remember)


def _is_news(value: Stated, known: Mapping[str, Stated]) -> bool:
    """True when the value is not stated yet, or changed at its precision; ids are stated once."""
    stated = known.get(value.label)
    if stated is None:
        return True
    return value.kind != "id" and not _equal(stated, value)


def _equal(one: Stated, other: Stated) -> bool:
    if one.value == other.value:
        return True
    return other.kind == "clock" and coarse(one.value, other.precision or "minute") == coarse(
        other.value, other.precision or "minute"
    )


def _states(entry: Entry, needed: Sequence[Stated]) -> bool:
    """True when a block sent before for this very turn still says all that is needed, and nothing else."""
    return len(entry.values) == len(needed) and all(
        old.label == new.label and _equal(old, new) for old, new in zip(entry.values, needed, strict=True)
    )


def _places(
    prompt: Prompt, values: Iterable[Stated], system: Sequence[str], secret: bytes, tenant: str
) -> list[_Place]:
    identity = [f"{value.label}\0{value.value}" for value in values if is_identity(value.kind, value.label)]
    digest = hashlib.blake2b(key=_key_of(secret), digest_size=16)
    for part in (tenant, *identity, "\1", *system):
        _feed(digest, part.encode("utf-8", "surrogatepass"))
    places: list[_Place] = []
    for index in range(prompt.head, len(prompt.messages)):
        _feed_message(digest, prompt.messages[index])
        text = prompt.turn_text(index) or prompt.tool_text(index)
        if text is not None:
            places.append(_Place(index, text, digest.copy().digest()))
    return places


@lru_cache(maxsize=16)
def _key_of(secret: bytes) -> bytes:
    return hashlib.sha256(b"replay\0" + secret).digest()


def _feed(digest: Any, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _feed_message(digest: Any, message: Any) -> None:
    """Everything of a message but its cache markers, which clients move from turn to turn."""
    if isinstance(message, Mapping) and isinstance(message.get("content"), list):
        content = [_unmarked(part) for part in message["content"]]
        message = {**message, "content": content}
    _feed(digest, plain_json(_unmarked(message)))


def _unmarked(value: Any) -> Any:
    if isinstance(value, Mapping) and "cache_control" in value:
        return {key: item for key, item in value.items() if key != "cache_control"}
    return value
