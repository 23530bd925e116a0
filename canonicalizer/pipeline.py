"""`canonicalize`: one request in, the same with a stable system text out, and a record of every change.

Pure: no clock, no randomness, no I/O; equal inputs give equal results, and a second pass changes nothing.
Values leave the system text only under a rule, a constant placeholder stays, and `label: value` lines stand
at the end of the last user turn. Whenever something is unsure (no user turn, an open fence or quote, the
fence key in foreign text, one label with two values) nothing moves and `Canonical.reason` says why. Replay
itself is in replay.py; what to add to the memory is returned, never written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canonicalizer.context_block import context_block
from canonicalizer.edits import Edit, edited_body, edited_text
from canonicalizer.json_spans import Path
from canonicalizer.memory import Entry, ReplayMemory, Stated
from canonicalizer.prompt import Prompt
from canonicalizer.regions import ends_open
from canonicalizer.replay import Appended, replay
from canonicalizer.rules import Hit, Ruleset, find_hits
from canonicalizer.shapes import PLACEHOLDER
from canonicalizer.stages import stage_edits


@dataclass(frozen=True, slots=True)
class Context:
    """Who asks: the tenant, its fence key (see `fence_key`) and the gateway's secret, which keys the
    memory."""

    tenant: str
    fence_key: str
    secret: bytes


@dataclass(frozen=True, slots=True)
class Canonical:
    """`body` is the same object when there is no edit. `values` are (label, kind) of what moved, `rules`
    the names of the rules that hit; neither holds a value. `reason` tells why hits were left in place, or
    is None."""

    body: Mapping[str, Any]
    edits: tuple[Edit, ...] = ()
    remember: tuple[tuple[bytes, Entry], ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    rules: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def messages(self) -> Sequence[Any]:
        """The messages of the canonical body."""
        messages = self.body.get("messages")
        return messages if isinstance(messages, Sequence) and not isinstance(messages, str) else ()


def canonicalize(
    body: Mapping[str, Any],
    ruleset: Ruleset,
    memory: ReplayMemory,
    context: Context,
    *,
    include_observed: bool = False,
) -> Canonical:
    """The canonical form of a decoded chat body.

    Rules in mode `observe` count only with `include_observed`. The result's edits fit the body's original
    JSON bytes (`apply_edits`), and its `remember` items are for `memory.store`."""
    matchers = ruleset.matchers(include_observed)
    if not matchers and not ruleset.stages:
        return Canonical(body)
    prompt = Prompt.read(body)
    hits = find_hits(matchers, prompt.system) if matchers else []
    edits = stage_edits(ruleset.stages, body, prompt, hits) if ruleset.stages else []
    if not hits:
        return _result(body, edits, (), (), None)
    turn = prompt.last_turn()
    reason = _refusal(body, prompt, turn, context)
    if reason is not None or turn is None:
        return _result(body, edits, (), (), reason or "no_user_turn")
    placeholders = [
        Edit(hit.rule.name, prompt.system[hit.text].path, hit.start, hit.end, hit.value, PLACEHOLDER)
        for hit in hits
    ]
    values = _values(hits)
    if ruleset.replay:
        system = _edited_system(prompt, [*edits, *placeholders])
        appended, remember = replay(
            prompt, turn, values, system, memory, context.secret, context.tenant, context.fence_key
        )
    else:
        text = prompt.turn_text(turn)
        block = context_block(context.fence_key, ((value.label, value.value) for value in values))
        appended, remember = [Appended(text, block)] if text else [], ()
    edits = [*edits, *placeholders]
    edits += [
        Edit("context", item.text.path, len(item.text.value), len(item.text.value), "", item.block)
        for item in appended
    ]
    return _result(body, edits, remember, hits, None)


def _result(
    body: Mapping[str, Any],
    edits: Sequence[Edit],
    remember: tuple[tuple[bytes, Entry], ...],
    hits: Sequence[Hit],
    reason: str | None,
) -> Canonical:
    return Canonical(
        edited_body(body, edits),
        tuple(edits),
        remember,
        tuple(dict.fromkeys((hit.label, hit.rule.kind) for hit in hits)),
        tuple(dict.fromkeys(edit.rule for edit in edits if edit.rule != "context")),
        reason,
    )


def _refusal(body: Mapping[str, Any], prompt: Prompt, turn: int | None, context: Context) -> str | None:
    if turn is None:
        return "no_user_turn"
    text = prompt.turn_text(turn)
    if text is not None and ends_open(text.value):
        return "open_quote"
    if _occurs(context.fence_key, body):
        return "fence_key"
    return None


def _occurs(key: str, value: Any) -> bool:
    """True when a string in `value` holds the key; without recursion, as a body may be nested deeply."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if key in item:
                return True
        elif item is None or isinstance(item, int | float):
            continue
        elif isinstance(item, dict | Mapping):  # `dict` first: it settles most without asking the class
            waiting += item.values()
        elif isinstance(item, list | Sequence):
            waiting += item
    return False


def _values(hits: Sequence[Hit]) -> tuple[Stated, ...]:
    stated: dict[tuple[str, str], Stated] = {}
    for hit in hits:
        precision = (hit.rule.precision or "minute") if hit.rule.kind == "clock" else None
        stated.setdefault((hit.rule.name, hit.value), Stated(hit.label, hit.rule.kind, hit.value, precision))
    return tuple(stated.values())


def _edited_system(prompt: Prompt, edits: Sequence[Edit]) -> tuple[str, ...]:
    by_path: dict[Path, list[Edit]] = {}
    for edit in edits:
        by_path.setdefault(edit.path, []).append(edit)
    return tuple(
        edited_text(text.value, sorted(by_path.get(text.path, ()), key=lambda edit: (edit.start, edit.end)))
        for text in prompt.system
    )
