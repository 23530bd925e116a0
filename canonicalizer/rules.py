"""Rules and rulesets: which labelled values leave the system text; compiled once, matched cheaply.

A `Rule` holds a label, a shape and never a value, so a `Ruleset` can live in Git. Matching starts from the
literal label (`str.find` over one lower-cased copy of the text); regular expressions only run where a label
stands at the start of a line or a sentence. A rule whose label stands before two different values is
ambiguous and moves nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from canonicalizer.prompt import Text
from canonicalizer.regions import Regions
from canonicalizer.shapes import (
    MAX_VALUE_BYTES,
    PLACEHOLDER,
    SHAPES,
    Kind,
    is_authority,
    is_hiding,
    is_printable,
    is_rank,
    value_pattern,
    words,
)

Mode = Literal["off", "observe", "enforce"]
Precision = Literal["second", "minute", "hour", "day"]
STAGES = ("crlf", "trailing", "nfc", "tool_order")

_RULE_KEYS = ("name", "label", "shape", "precision", "mode", "kind", "anchor")
_RULESET_KEYS = ("version", "replay", "stages", "rules")

MAX_HITS = 16
MAX_SYSTEM_CHARS = 1_000_000
_FUEL = 2_000
_WINDOW = 4_096
_MARGIN = 64
"""Bounds on the work that one request can ask for: values per rule, characters of system text, places
where a label stands, and characters behind a label that are read (a match close to their end is none)."""

_VERB = r"(?:is|are|was|reads|ist|lautet|est|es|è|now)(?![\w])"
_BOLD = r"(?:\*\*|__)?"
_GAP = rf"(?![\w]){_BOLD}[ \t]*+(?:{_VERB}[ \t]*+){{0,2}}[:=：>]?{_BOLD}[ \t]*+"
_SAYS = rf"(?![\w])[ \t]++(?:{_VERB}[ \t]++){{0,2}}"
_MARK = rf"(?![\w]){_BOLD}[ \t]*+[:=：>]{_BOLD}[ \t]*+"
_NEXT_LINE = rf"(?![\w]){_BOLD}[ \t]*+[:：>]?{_BOLD}[ \t]*+\r?\n[ \t]*+"
_BELOW = rf"(?![\w]){_BOLD}[ \t]*+:{_BOLD}[ \t]*+\r?\n"
_AFTER = r"(?<![.,;:])(?![\w])(?![-/:@][\w])(?!\.\w)(?!,\d)"
_BREAK = r"[\r\n\v\f\x85\u2028\u2029]"
_LINE_END = rf"(?=[ \t]*+(?:{_BREAK}|\Z|</[A-Za-z_][\w.:-]*[ \t]*>|\]))"
_SENTENCE_END = rf"(?=[.,;!](?:\s|\Z)|[ \t]*+(?:{_BREAK}|\Z))"
_PROPER = r"(?=[^\W\d_a-z]|[a-z]{2}[-_][A-Z]{2}|@)"
_LEAD = re.compile(
    r"(?:\n[ \t>]*(?:(?:[-*+•]|\d{1,3}[.)]|#{1,6})[ \t]+)*(?:\*\*|__|\[|<|\()?|[.!?:]['\")]?[ \t]+(?:\*\*)?"
    r"|[。！？；，、：]|(?:<!--|[;|,\[(<>])[ \t]?|[:=]\S+[ \t])(?:[Tt]he |THE )?$"
)
_TIME_RANGE = re.compile(r"\d{1,2}:\d{2} ?[-–] ?\d{1,2}:\d{2}")
_BILLING_LINE = re.compile(r"x-[\w-]*billing[\w-]*:", re.I)
_SENTENCE_SHAPES = frozenset({"name", "location", "locale"})


class RulesetError(ValueError):
    """A ruleset field is wrong; `path` names it, e.g. `rules[1].shape`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


@dataclass(frozen=True, slots=True)
class Rule:
    """`label` is literal and matched case-insensitively at the start of a line or sentence; `anchor`, if
    given, is text that must stand in the system text for the rule to apply."""

    name: str
    label: str
    shape: str
    precision: Precision | None = None
    mode: Mode = "enforce"
    kind: Kind = "free"
    anchor: str | None = None


class Hit(NamedTuple):
    """A value that a rule found: characters `[start, end)` of system text number `text`."""

    rule: Rule
    text: int
    start: int
    end: int
    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Matcher:
    """A compiled rule."""

    rule: Rule
    needle: str
    pattern: re.Pattern[str]
    lead: re.Pattern[str]
    max_bytes: int

    def hits(self, regions: Regions, lowered: str, index: int, fuel: list[int]) -> list[Hit] | None:
        """Every place where the label leads a value of the rule's shape; `lowered` aligns with the text.

        None where there are more than can be judged: `fuel` is how many places may still be looked at, over
        all rules of one request, and a rule that finds more than MAX_HITS values is taken for a mistake.
        """
        text = regions.text
        found: list[Hit] = []
        at = lowered.find(self.needle)
        while at >= 0:
            fuel[0] -= 1
            if fuel[0] < 0 or len(found) >= MAX_HITS:
                return None
            end = at + len(self.needle)
            limit = end + _WINDOW
            match = self.pattern.match(text, end, limit)
            if match is not None and match.end() < limit - _MARGIN and self._leads(text, at):
                start, stop = match.span(match.lastgroup or "value")
                if self._may_move(regions, at, start, stop):
                    found.append(Hit(self.rule, index, start, stop, text[at:end], text[start:stop]))
                    end = stop
            at = lowered.find(self.needle, end)
        return found

    def _leads(self, text: str, at: int) -> bool:
        """True when a label may start at `at`: at the start of a line, as most do, or of a sentence."""
        if at == 0 or text[at - 1] == "\n":
            return True
        return self.lead.search("\n" + text[:at] if at < 40 else text[at - 40 : at]) is not None

    def _may_move(self, regions: Regions, label_start: int, start: int, end: int) -> bool:
        text = regions.text
        value = text[start:end]
        if not value or PLACEHOLDER in value or len(value.encode()) > self.max_bytes:
            return False
        if self.rule.shape == "name" and is_rank(value):
            return False
        if self.rule.shape == "clock" and _TIME_RANGE.fullmatch(value):
            return False
        if not is_printable(value) or is_hiding(text[end : end + 1]):
            return False
        if "\n" in value and not SHAPES[self.rule.shape].block:
            return False
        if self.rule.shape == "billing":
            line_start = text.rfind("\n", 0, label_start) + 1
            if not _BILLING_LINE.match(text, line_start):
                return False
        return not regions.is_protected(label_start, end)


@dataclass(frozen=True, slots=True)
class Ruleset:
    """An immutable, versioned set of rules and stages; compiled when it is made."""

    version: str
    rules: tuple[Rule, ...] = ()
    replay: bool = False
    stages: tuple[str, ...] = ()
    _matchers: tuple[Matcher, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_matchers", tuple(compiled(rule) for rule in self.rules if rule.mode != "off")
        )

    def matchers(self, include_observed: bool) -> tuple[Matcher, ...]:
        """Compiled rules in force; those in `observe` only when asked for."""
        if include_observed:
            return self._matchers
        return tuple(matcher for matcher in self._matchers if matcher.rule.mode == "enforce")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ruleset:
        """A ruleset from plain data, as YAML gives it. Raises RulesetError, which names the field."""
        if not isinstance(data, Mapping):
            raise RulesetError("ruleset", f"must be a mapping, not {_kind(data)}")
        _known_keys(data, _RULESET_KEYS, "")
        listed = data.get("rules") or []
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise RulesetError("rules", f"must be a list, not {_kind(listed)}")
        rules = tuple(_rule_from(item, f"rules[{index}]") for index, item in enumerate(listed))
        names: dict[str, int] = {}
        for index, rule in enumerate(rules):
            if rule.name in names:
                raise RulesetError(
                    f"rules[{index}].name", f"{rule.name!r} is taken by rules[{names[rule.name]}]"
                )
            names[rule.name] = index
        replay = data.get("replay", False)
        if not isinstance(replay, bool):
            raise RulesetError("replay", f"must be true or false, not {replay!r}")
        stages = data.get("stages") or ()
        if not isinstance(stages, Sequence) or isinstance(stages, str):
            raise RulesetError("stages", f"must be a list, not {_kind(stages)}")
        for index, stage in enumerate(stages):
            if stage not in STAGES:
                raise RulesetError(f"stages[{index}]", f"unknown stage {stage!r}; known: {', '.join(STAGES)}")
        made = cls("", rules, replay, tuple(stages))
        version = data.get("version")
        if version is not None and not isinstance(version, str | int | float):
            raise RulesetError("version", f"must be text, not {_kind(version)}")
        return replace(made, version=str(version) if version is not None else made.content_version())

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back as an equal ruleset."""
        rules = []
        for rule in self.rules:
            item = {key: getattr(rule, key) for key in _RULE_KEYS if getattr(rule, key) is not None}
            if rule.kind == SHAPES[rule.shape].kind:
                del item["kind"]
            rules.append(item)
        return {"version": self.version, "replay": self.replay, "stages": list(self.stages), "rules": rules}

    def content_version(self) -> str:
        """Twelve hex digits that depend on everything but the version itself."""
        content = {**self.to_dict(), "version": ""}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def find_hits(matchers: Sequence[Matcher], texts: Sequence[Text]) -> list[Hit]:
    """Values to move, in text order: ambiguous rules dropped, overlaps decided for the earlier rule."""
    if sum(len(text.value) for text in texts) > MAX_SYSTEM_CHARS:
        return []
    lowered = [_lower(text.value) for text in texts]
    regions = [Regions(text.value) for text in texts]
    fuel = [_FUEL]
    chosen: list[Hit] = []
    for matcher in matchers:
        anchor = matcher.rule.anchor
        if anchor is not None and not any(anchor in text.value for text in texts):
            continue
        hits: list[Hit] | None = []
        for index, low in enumerate(lowered):
            more = matcher.hits(regions[index], low, index, fuel)
            hits = None if more is None or hits is None else hits + more
        if hits is None or len({hit.value for hit in hits}) > 1:
            continue
        chosen += [hit for hit in hits if not any(_overlap(hit, other) for other in chosen)]
    chosen.sort(key=lambda hit: (hit.text, hit.start))
    return chosen


def make_rule(label: str, shape: str, mode: Mode = "enforce", anchor: str | None = None) -> Rule:
    """A rule with the name, kind and precision that its shape implies."""
    kind = SHAPES[shape].kind
    slug = re.sub(r"[^\w]+", "-", words(label)).strip("-") or "value"
    return Rule(f"{shape}:{slug}", label, shape, "minute" if kind == "clock" else None, mode, kind, anchor)


def _lower(text: str) -> str:
    lowered = text.lower()
    return (
        lowered
        if len(lowered) == len(text)
        else "".join(c if len(c.lower()) != 1 else c.lower() for c in text)
    )


def _overlap(one: Hit, other: Hit) -> bool:
    return one.text == other.text and one.start < other.end and other.start < one.end


def compiled(rule: Rule) -> Matcher:
    """The matcher of one rule."""
    shape = SHAPES[rule.shape]
    value = value_pattern(rule.shape, rule.label)
    below = rf"{_BELOW}(?P<below>{value}){_LINE_END}"
    if shape.whole_line:
        forms = [rf"{_MARK}(?P<value>{value}){_LINE_END}"]
        if shape.name in _SENTENCE_SHAPES:
            forms.append(rf"{_SAYS}{_PROPER}(?P<sentence>{value}){_SENTENCE_END}")
        if shape.block:
            forms.insert(0, below)
    else:
        after = _AFTER if shape.name not in ("email",) else r"(?![\w])"
        forms = [rf"{_GAP}(?P<value>{value}){after}", rf"{_NEXT_LINE}(?P<below>{value}){_AFTER}{_LINE_END}"]
    pattern = re.compile("|".join(f"(?:{form})" for form in forms))
    return Matcher(rule, _lower(rule.label), pattern, _LEAD, MAX_VALUE_BYTES * (8 if shape.block else 1))


def _rule_from(item: Any, path: str) -> Rule:
    if not isinstance(item, Mapping):
        raise RulesetError(path, f"must be a mapping, not {_kind(item)}")
    _known_keys(item, _RULE_KEYS, f"{path}.")
    for key in ("label", "shape"):
        if not isinstance(item.get(key), str) or not item[key].strip():
            raise RulesetError(f"{path}.{key}", "must be given, as text")
    label, shape = item["label"].strip(), item["shape"]
    if shape not in SHAPES:
        raise RulesetError(f"{path}.shape", f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    if "\n" in label or len(label) > 120:
        raise RulesetError(f"{path}.label", "must be one line of at most 120 characters")
    if is_authority(label):
        raise RulesetError(
            f"{path}.label", f"{label!r} names a right, a plan, a limit or a price: those never move"
        )
    rule = make_rule(label, shape)
    changes: dict[str, Any] = {}
    for key, allowed in (
        ("precision", get_args(Precision)),
        ("mode", get_args(Mode)),
        ("kind", get_args(Kind)),
    ):
        value = item.get(key)
        if value is False and key == "mode":
            value = "off"
        if value is not None:
            if value not in allowed:
                raise RulesetError(f"{path}.{key}", f"unknown {key} {value!r}; known: {', '.join(allowed)}")
            changes[key] = value
    for key in ("name", "anchor"):
        value = item.get(key)
        if value is not None:
            if not isinstance(value, str) or not value:
                raise RulesetError(f"{path}.{key}", f"must be text, not {_kind(value)}")
            changes[key] = value
    if "precision" in changes and changes.get("kind", rule.kind) != "clock":
        raise RulesetError(f"{path}.precision", f"only clocks have a precision, {shape!r} has none")
    return replace(rule, **changes)


def _known_keys(data: Mapping[str, Any], known: Sequence[str], prefix: str) -> None:
    for key in data:
        if key not in known:
            raise RulesetError(f"{prefix}{key}", f"unknown key; known: {', '.join(known)}")


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
