"""Which system prompt a request began with, as a block hash and a token count, never as text.

Owns a bounded cache from system text to its length in tokens. Always holds: nothing is rendered for a
system text that was seen before, and at most `per_s` new ones are rendered a second, so that prompts
whose head changes on every request can't load the event loop; a request that was passed over keeps an
empty prefix.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import xxhash

from canonicalizer.messages import TemplateError
from gateway.canon.text import PoolText, PromptChain
from gateway.telemetry.ledger import LedgerEntry


class SystemPrefixes:
    """Fills in `prefix` and `prefix_tokens` of ledger entries."""

    def __init__(self, *, entries: int = 4096, per_s: float = 20.0) -> None:
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._entries = entries
        self._per_s = per_s
        self._budget = per_s
        self._refilled = time.monotonic()

    def note(
        self,
        entry: LedgerEntry,
        text: PoolText,
        chain: PromptChain,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
    ) -> None:
        """Name the system prefix of a chat request whose prompt is known as tokens; else leave the entry
        alone.
        """
        if text.model is None or chain.tokens is None:
            return
        head = _leading_system(messages)
        if not head:
            return
        key = xxhash.xxh3_128_digest(orjson.dumps([text.fingerprint, head, tools]))
        length = self._lengths.get(key)
        if length is None:
            length = self._measure(key, text, head, tools)
        else:
            self._lengths.move_to_end(key)
        blocks = min(length // chain.block_size, len(chain.hashes))
        if blocks:
            entry.prefix = chain.hashes[blocks - 1].hex()
            entry.prefix_tokens = length

    def _measure(self, key: bytes, text: PoolText, head: list[dict[str, Any]], tools: Any) -> int:
        now = time.monotonic()
        self._budget = min(self._per_s, self._budget + (now - self._refilled) * self._per_s)
        self._refilled = now
        if self._budget < 1.0 or text.model is None:
            return 0
        self._budget -= 1.0
        try:
            length = len(text.model.system_prefix(head, tools=tools)) // 4
        except TemplateError:
            length = 0
        self._lengths[key] = length
        if len(self._lengths) > self._entries:
            self._lengths.popitem(last=False)
        return length


def _leading_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    head: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        head.append(dict(message))
    return head
