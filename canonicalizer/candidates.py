"""Candidates: values in a system text that *could* move, by their label and their shape.

A candidate is no reason to move anything. The learner keeps those that are seen to vary; miss attribution
uses them to name what broke a prefix. Every candidate is one that its own rule finds again at the same
place, so what is proposed is what will be done. Off the hot path: several regular expressions run over the
whole text here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from canonicalizer.clocks import PERIOD
from canonicalizer.prompt import Text
from canonicalizer.rules import Matcher, compiled, find_hits, make_rule
from canonicalizer.shapes import SHAPES, admits

MAX_LABEL = 80
MAX_CANDIDATES = 128
MAX_LEAD = 240

_BULLET = re.compile(r"[ \t>]*(?:(?:[-*+•]|\d{1,3}[.)]|#{1,6})[ \t]+)*")
_CUT = re.compile(
    r"[.!?:]['\")]?[ \t]+(?=\S)|[。！？；，、：]|<!--[ \t]*|[;|,\[(<>][ \t]?"
    r"|[:=][^\s:=]+[ \t](?=[\w.-]+[ \t]*(?:[:=]|\Z))"
)
_TAIL = re.compile(r"[ \t:=：>*_]+$")
_LABELLED = re.compile(
    r"(?m)^[ \t>]*(?:(?:[-*+•]|\d{1,3}[.)]|#{1,6})[ \t]+)*(?:\*\*|__|\["
    r"|<)?([^\s:=：<>\[\]\n][^:=：<>\n]{0,79}?)[ \t]*[:=：>]"
)
_BILLING = re.compile(r"(?mi)^x-[\w-]*billing[\w-]*:[^\n]*$")
_PAIR = re.compile(r"([\w-]+)=([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A labelled value of a known shape at characters `[start, end)` of one text."""

    label: str
    shape: str
    start: int
    end: int
    value: str


def candidates(text: str) -> list[Candidate]:
    """Candidates of one system text, in order, not overlapping, at most MAX_CANDIDATES."""
    found: list[Candidate] = []
    for label, shape in dict.fromkeys(_named_pairs(text)):
        hits = find_hits((_matcher(label, shape),), (Text((), text),))
        found += [Candidate(hit.label, shape, hit.start, hit.end, hit.value) for hit in hits]
    rank = {name: place for place, name in enumerate(SHAPES)}
    found.sort(key=lambda item: (item.start, rank[item.shape], -item.end))
    chosen: list[Candidate] = []
    for item in found:
        if not chosen or item.start >= chosen[-1].end:
            chosen.append(item)
    return chosen[:MAX_CANDIDATES]


def _named_pairs(text: str) -> Iterator[tuple[str, str]]:
    """(label, shape) pairs worth trying: what stands before each strict value, and each `label:` line."""
    for name, pattern in _strict():
        for match in pattern.finditer(text):
            label = label_before(text, match.start())
            if label and admits(name, label):
                yield label, name
    for line in _LABELLED.finditer(text):
        label = line[1].strip().strip("*_").strip()
        for name, shape in SHAPES.items():
            if label and name not in ("line", "billing") and shape.whole_line and admits(name, label):
                yield label, name
    for line in _BILLING.finditer(text):
        for pair in _PAIR.finditer(line.group()):
            yield pair[1], "billing"


def label_before(text: str, at: int) -> str | None:
    """The label that leads the value at `at`: the sentence so far, or the heading, tag or label line above
    it."""
    line_start = text.rfind("\n", 0, at) + 1
    label = _label_in(text[max(line_start, at - MAX_LEAD) : at])
    if label or text[line_start:at].strip() or line_start == 0:
        return label
    previous = text.rfind("\n", 0, line_start - 1) + 1
    return _label_in(text[previous : line_start - 1][-MAX_LEAD:].rstrip())


def _label_in(lead: str) -> str | None:
    bare = _TAIL.sub("", lead)
    cut = 0
    for boundary in _CUT.finditer(bare):
        cut = boundary.end()
    bullet = _BULLET.match(bare, cut)
    label = bare[bullet.end() if bullet else cut :].strip().strip("*_").strip()
    return label if 2 <= len(label) <= MAX_LABEL and not re.search(r"[:=\"`{}]", label) else None


@lru_cache(maxsize=1)
def _strict() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return (
        tuple(
            (name, re.compile(rf"(?<![\w/-])(?:{shape.pattern})"))
            for name, shape in SHAPES.items()
            if not shape.whole_line and name != "billing"
        )
        + (("clock", re.compile(rf"(?<![\w/-])(?:{PERIOD})")),)
        + tuple(
            (
                name,
                re.compile(rf"(?<=[a-z] )(?=[^\W\d_a-z]|[a-z]{{2}}[-_][A-Z]{{2}})(?:{SHAPES[name].pattern})"),
            )
            for name in ("name", "location", "locale")
        )
    )


@lru_cache(maxsize=2048)
def _matcher(label: str, shape: str) -> Matcher:
    return compiled(make_rule(label, shape))
