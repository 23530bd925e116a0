"""The learner: watches the prompts of each application and proposes what was seen to vary.

A proposal needs evidence: the same label and shape with two or more different values (the floor is policy)
in prompts that are otherwise alike, and a shape that may move. Values are kept as eight-byte digests only;
groups, sites and digests are bounded, the least recently seen go first. Off the hot path; proposals hold
labels and counts, never a value.
"""

from __future__ import annotations

import re
import unicodedata
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from canonicalizer.candidates import candidates
from canonicalizer.plain import plain_json
from canonicalizer.prompt import Prompt
from canonicalizer.rules import STAGES, Rule, Ruleset, make_rule
from canonicalizer.shapes import SHAPES
from canonicalizer.stages import tool_name

MAX_GROUPS = 256
MAX_SITES = 128
MAX_VALUES = 64
ALIKE = 0.6

_PIECE = re.compile(r"\n|(?<=[.!?]) ")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A rule, or a stage, with its evidence. `prefix_lost` is the mean number of characters that stand
    behind the value: what a change of it makes uncacheable. `grade` says who may accept it: `auto` a
    policy, `propose` a person."""

    tenant: str
    rule: Rule | None
    stage: str | None
    values: int
    requests: int
    prefix_lost: int
    grade: str


@dataclass(slots=True)
class _Site:
    values: set[bytes] = field(default_factory=set)
    requests: int = 0
    behind: int = 0
    lead: str = ""


@dataclass(slots=True)
class _Group:
    """Prompts of one application: `common` are the pieces of text that all of them hold."""

    labels: frozenset[tuple[str, str]]
    pieces: frozenset[str]
    common: frozenset[str]
    sites: dict[tuple[str, str], _Site] = field(default_factory=dict)
    forms: dict[bytes, set[tuple[str, str]]] = field(default_factory=dict)
    requests: int = 0


class Learner:
    """Collects evidence from requests; `proposals` may be asked at any time."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._groups: OrderedDict[tuple[str, int], _Group] = OrderedDict()
        self._max_groups = max_groups
        self._made = 0

    def observe(self, tenant: str, request: Mapping[str, Any] | Sequence[Any]) -> None:
        """Take in one request body (or its messages)."""
        body = request if isinstance(request, Mapping) else {"messages": request}
        prompt = Prompt.read(body)
        texts = [text.value for text in prompt.system]
        found = [candidates(text) for text in texts]
        skeletons = [_skeleton(text, spans) for text, spans in zip(texts, found, strict=True)]
        pieces = frozenset(
            unicodedata.normalize("NFC", piece.strip()) for text in skeletons for piece in _PIECE.split(text)
        ) - {""}
        labels = frozenset((item.label, item.shape) for spans in found for item in spans)
        group = self._group_of(tenant, labels, pieces)
        group.requests += 1
        group.common &= pieces
        for index, spans in enumerate(found):
            rest = sum(len(text) for text in texts[index + 1 :])
            for item in spans:
                if (item.label, item.shape) not in group.sites and len(group.sites) >= MAX_SITES:
                    continue
                site = group.sites.setdefault((item.label, item.shape), _Site())
                site.requests += 1
                site.lead = texts[index][texts[index].rfind(item.label, 0, item.start) : item.start]
                site.behind += len(texts[index]) - item.start + rest
                if len(site.values) < MAX_VALUES:
                    site.values.add(_digest(item.value))
        self._note_forms(group, skeletons, body.get("tools"))

    def proposals(self, *, values: int = 2, requests: int = 2) -> list[Proposal]:
        """What varied in at least `values` ways over at least `requests` requests, the costliest first."""
        made: dict[tuple[str, str, str], Proposal] = {}
        applications: dict[str, int] = {}
        for tenant, _ in self._groups:
            applications[tenant] = applications.get(tenant, 0) + 1
        for (tenant, _), group in self._groups.items():
            shared = applications[tenant] > 1
            own = self._own_piece(tenant, group) if shared else None
            for (label, shape), site in group.sites.items():
                if len(site.values) < values or site.requests < requests:
                    continue
                anchor = own or site.lead if shared else None
                rule = make_rule(label, shape, anchor=anchor)
                key = (tenant, label.lower(), shape)
                before = made.get(key)
                if before is not None and before.rule is not None and before.rule.anchor != anchor:
                    rule = replace(rule, anchor=None)
                lost = site.behind // site.requests
                made[key] = Proposal(
                    tenant, rule, None, len(site.values), site.requests, lost, SHAPES[shape].grade
                )
            for stage in _stages_seen(group):
                made[tenant, "", stage] = Proposal(tenant, None, stage, 2, group.requests, 0, "propose")
        return sorted(
            made.values(), key=lambda item: (-item.prefix_lost, item.rule.name if item.rule else "")
        )

    def _group_of(self, tenant: str, labels: frozenset[tuple[str, str]], pieces: frozenset[str]) -> _Group:
        total = sum(map(len, pieces))
        for key, group in reversed(self._groups.items()):
            if key[0] != tenant or group.labels != labels:
                continue
            shared = sum(len(piece) for piece in pieces if piece in group.pieces)
            if shared >= ALIKE * max(total, sum(map(len, group.pieces))):
                self._groups.move_to_end(key)
                return group
        group = _Group(labels, pieces, pieces)
        self._made += 1
        self._groups[tenant, self._made] = group
        if len(self._groups) > self._max_groups:
            self._groups.popitem(last=False)
        return group

    def _own_piece(self, tenant: str, group: _Group) -> str | None:
        """The longest piece of stable text that no other application of the tenant holds."""
        others = [
            other for (owner, _), other in self._groups.items() if owner == tenant and other is not group
        ]
        stable = [piece for piece in group.common if "\0" not in piece and len(piece) >= 12]
        own = [piece[:60] for piece in stable if not any(piece in other.pieces for other in others)]
        return max(own, key=lambda piece: (len(piece), piece), default=None)

    def _note_forms(self, group: _Group, skeletons: Sequence[str], tools: Any) -> None:
        """Remember in which forms (line ends, trailing blanks, composition, tool order) one content was
        written."""
        for index, text in enumerate(skeletons):
            plain = unicodedata.normalize("NFC", text.replace("\r\n", "\n")).rstrip()
            seen = _forms_of(group, f"{index}\0{plain}".encode("utf-8", "surrogatepass"))
            seen.add(("trailing", text.replace("\r\n", "\n")[len(text.replace("\r\n", "\n").rstrip()) :]))
            seen.add(("crlf", str(text.rstrip().count("\r\n"))))
            seen.add(("nfc", _digest(text.replace("\r\n", "\n").rstrip()).hex()))
        if isinstance(tools, list) and len(tools) > 1:
            names = [tool_name(tool) for tool in tools]
            content = sorted(map(plain_json, tools))
            _forms_of(group, b"tools" + b"\0".join(content)).add(("tool_order", "\0".join(names)))


def ruleset_from(
    proposals: Iterable[Proposal], *, grades: Sequence[str] = ("auto", "propose"), mode: str = "enforce"
) -> Ruleset:
    """A ruleset of the proposals whose grade is accepted, most costly value first."""
    taken = [item for item in proposals if item.grade in grades]
    rules: dict[str, Rule] = {}
    for item in taken:
        if item.rule is not None and item.rule.name not in rules:
            rules[item.rule.name] = item.rule
        elif item.rule is not None and rules[item.rule.name].anchor != item.rule.anchor:
            rules[item.rule.name] = replace(rules[item.rule.name], anchor=None)
    stages = [stage for stage in STAGES if any(item.stage == stage for item in taken)]
    listed = [{**rule, "mode": mode} for rule in Ruleset("", tuple(rules.values())).to_dict()["rules"]]
    return Ruleset.from_dict({"rules": listed, "stages": stages})


def _stages_seen(group: _Group) -> list[str]:
    return [
        stage
        for stage in STAGES
        if any(len({form for name, form in seen if name == stage}) > 1 for seen in group.forms.values())
    ]


def _forms_of(group: _Group, content: bytes) -> set[tuple[str, str]]:
    key = blake2b(content, digest_size=8).digest()
    if key not in group.forms and len(group.forms) >= MAX_VALUES:
        del group.forms[next(iter(group.forms))]
    return group.forms.setdefault(key, set())


def _skeleton(text: str, spans: Iterable[Any]) -> str:
    parts: list[str] = []
    at = 0
    for item in spans:
        parts += (text[at : item.start], "\0")
        at = item.end
    return "".join(parts) + text[at:]


def _digest(value: str) -> bytes:
    return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
