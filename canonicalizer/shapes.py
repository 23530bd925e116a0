"""Shapes: the alphabets that a moved value must fit, and the labels that may stand before it.

`auto` shapes may be accepted by a policy on evidence, `propose` shapes need a person, `named` ones only
move under a rule that names them. Labels of authority (role, plan, limit, price ...) never move: facts
move, authority does not. The table is data; a shape that can't be told from content by its label and its
alphabet does not belong here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from canonicalizer.clocks import CLOCK, PERIOD, ZONE

Kind = Literal["clock", "id", "counter", "state", "identity", "free"]
Grade = Literal["auto", "propose", "named"]

PLACEHOLDER = "[see context]"
MAX_VALUE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """`pattern` matches a whole value; `whole_line` shapes end at the line's end; `block` ones may span
    lines."""

    name: str
    kind: Kind
    grade: Grade
    pattern: str
    labels: str
    refuses: str = r"(?!)"
    whole_line: bool = False
    block: bool = False


_NEVER = re.compile(
    r"\b(roles?|permissions?|permitted|plans?|tiers?|limits?|prices?|pricing|quotas?|rights?|clearance"
    r"|scopes?|polic(y|ies)"
    r"|privileges?|access|authori[sz]\w*|entitle\w*|discounts?|refunds?|thresholds?|max(imum)?|min(imum)?"
    r"|rates?|rules?"
    r"|modes?|admins?|approv\w*|allow\w*|deny|denied|password|secret|api key|rolle|recht\w*|preis\w*|rol"
    r"|rôle)\b"
)
_CONTENT = (
    r"\b(due|deadlines?|expir\w*|births?|birthday|born|dob|valid|start\w*|begins?|ends?|ending|deliver\w*"
    r"|invoice\w*|orders?"
    r"|launch\w*|releas\w*|since|until|till|creat\w*|updat\w*|modif\w*|publish\w*|cut ?off|knowledge"
    r"|training|effective"
    r"|contract|sign\w*|appointment|meeting|events?|depart\w*|arriv\w*|check in|check out|holiday|hired?"
    r"|join\w*"
    r"|purchase\w*|examples?|samples?|such as|e\.g|last|next|previous|first|founded|opens?|opening"
    r"|clos\w*|office|shop"
    r"|warranty|renew\w*|windows?|schedul\w*|book\w*|reserv\w*|travel|matur\w*|pay\w*|paid|review|build"
    r"|built|filing"
    r"|shifts?|response|lead|wait\w*|cook\w*|process\w*|resolution|estimated|kick ?off|hearing|treaty|war"
    r"|history|historical|after|before|between|if|when|unless|whether|from|by|for|what|which)\b"
)
_NOW = (
    r"current\w*|today\w*|now|nowadays|clock|heute\w*|jetzt|aktuell\w*|actual\w*|hoy|ahora|aujourd\w*"
    r"|maintenant|oggi|adesso"
    r"|attual\w*|hoje|agora|vandaag|nu|huidige|сегодня|сейчас|текущ\w*|as of|server|system|local|wall|real"
)
_TIME_WORD = (
    r"date|dates|time|datetime|timestamp|ts|clock|now|epoch|unix|utc|gmt|day|year|month|week|weekday"
    r"|quarter|hour|today\w*"
    r"|uhrzeit|datum|heute\w*|zeit|zeitpunkt|jahr|monat|fecha|hora|hoy|año|mes|heure|aujourd\w*|année"
    r"|mois|data|ora|oggi"
    r"|hoje|tijd|vandaag|дата|время|сегодня"
)
_FILLER = (
    r"the|a|and|is|it|of|in|s|user|users|your|their|here|this|at|on|iso|rfc|format|formatted|timezone"
    r"|zone|time zone|reads"
    r"|und|et|y|e|der|das|die|des|la|el|le|ist|es|est|\d+"
)
_CLOCK_LABEL = (
    rf"^(?=.*\b(?:{_NOW})\b)(?=.*\b(?:{_TIME_WORD})\b)|^(?:(?:{_TIME_WORD}"
    rf"|{_FILLER})\b ?)*\b(?:{_TIME_WORD})\b(?: ?\b(?:{_TIME_WORD}|{_FILLER})\b)*$"
    r"|^(it is|it is (now|currently)|as of|utc)$|日期|时间|時間|時刻|日時|現在|现在|今日|今天|当前|目前"
    r"|시간|날짜|현재|오늘"
)
_ID_LABEL = (
    r"\b(requests?|req|sessions?|sess|traces?|traceparent|conversations?|conv|correlation|threads?"
    r"|anfrage|sitzung|nonce"
    r"|(run|runs|span|invocation|call|chat|message|msg|interaction|transaction|txn|dialog\w*|turn"
    r"|execution|query|event)"
    r" (id|uuid|ulid|guid|key|ref|token))\b"
)
_NOT_ID = (
    r"\b(left|remaining|used|count|number|length|duration|age|costs?|tokens?|time|date|so far|name|title"
    r"|type|status"
    r"|topic|subject|language|per|if|when)\b"
)
_CASED = r"(?:[^\W\d_a-z](?:[\w'’.-]*\w)?|[A-Z]\.)"
_NAME = (
    rf"(?:{_CASED}|[^\W\d_](?:[\w'’.-]*\w)?(?= ?(?:\r?\n|\Z|<|\])))"
    rf"(?: (?:de|da|do|dos|du|di|la|le|van|von|der|den|ter|bin|ibn|al|el|y|e|{_CASED})){{0,5}}"
)
_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
_LINE = rf"[^\s<>{_CONTROL}](?:[^<>{_CONTROL}]*[^\s<>{_CONTROL}])?"
_GIT_FILE = (
    rf"(?:[ MADRCUT?!]{{2}} [^\s<>{_CONTROL}][^<>{_CONTROL}]*|\((?:clean|none|empty)[^)<>{_CONTROL}]*\)|clean"
    rf"|nothing to commit[^<>{_CONTROL}]*)"
)
_GIT_COMMIT = rf"(?:[*-] )?[0-9a-f]{{7,40}} [^\s<>{_CONTROL}][^<>{_CONTROL}]*"
_GIT_BLOCK = rf"(?:{_GIT_FILE}|{_GIT_COMMIT})(?:\r?\n(?:{_GIT_FILE}|{_GIT_COMMIT})){{0,40}}"
_HEX = r"(?=[\w-]*\d)(?:[A-Za-z][A-Za-z0-9]{0,15}[-_])*(?:[0-9a-fA-F]{6,64}|[A-Za-z0-9]{8,64})"
_PATH_CHAR = rf"[^\s<>\"|?*{_CONTROL}"
_PATH_WORD = rf"(?:{_PATH_CHAR}.,;:)\]]++|[.,;:)\]](?={_PATH_CHAR}]))"
_PATH_REST = rf"{_PATH_WORD}*+(?: {_PATH_CHAR}.,;:)\]/\\]++[/\\]{_PATH_WORD}*+)*+"
_DURATION = r"\d+(?:\.\d+)?[ ]?(?:ms|s|sec|secs|seconds?|m|min|mins|minutes?|h|hrs?|hours?|d|days?|w|weeks?)"

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("clock", "clock", "auto", CLOCK, _CLOCK_LABEL, _CONTENT),
        Shape("zone", "clock", "auto", ZONE, r"\b(zone|offset|utc|gmt)\b", r"\btime ?zone\b"),
        Shape(
            "uuid", "id", "auto", r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", _ID_LABEL, _NOT_ID
        ),
        Shape("ulid", "id", "auto", r"[0-7][0-9A-HJKMNP-TV-Z]{25}", _ID_LABEL, _NOT_ID),
        Shape("nanoid", "id", "auto", r"(?=[\w-]*[A-Z0-9_-])(?=[\w-]*[a-z])[\w-]{21}", _ID_LABEL, _NOT_ID),
        Shape("hex", "id", "auto", rf"(?:00-[0-9a-f]{{32}}-[0-9a-f]{{16}}-0[01]|{_HEX})", _ID_LABEL, _NOT_ID),
        Shape(
            "nonce",
            "id",
            "auto",
            r"0\.\d{3,20}|[A-Za-z0-9+/_-]{4,64}={0,2}",
            r"\b(nonce|cache ?bust\w*|bust\w*|random\w*|salt|entropy|jitter)\b",
        ),
        Shape("billing", "id", "auto", r"[\w.-]{1,40}", r"."),
        Shape(
            "counter",
            "counter",
            "auto",
            r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,12}(?:[ ]?(?:/|of)[ ]?\d{1,12})?(?:[ ]?(?:%|tokens?|messages?"
            r"|turns?)(?!\w))?",
            r"\b(turn|attempt|step|iteration|counter|tab ?id|retry|so far|remaining|used)\b"
            r"|\b(tokens?|turns?|messages?|requests?|calls?|budget|context|credits)\b.* (left|remaining"
            r"|used|so far|number|count)\b"
            r"|\b(left|remaining|used|number of) (tokens?|turns|messages|requests|calls|context|credits)\b"
            r"|^(message|request|seq|sequence)( number| no| count)?$|\b(message|request|turn|token"
            r"|call) (number|no|count)\b",
            r"\b(per|each|every|example|between|after|before|if|when|stock|price|order|orders|items?"
            r"|within|than|answer)\b",
        ),
        Shape(
            "cost",
            "counter",
            "auto",
            r"(?:[$€£¥][ ]?\d[\d.,]*\d|[$€£¥][ ]?\d|\d[\d.,]*[ ]?(?:USD|EUR|GBP|\$|€|£|cents?|ct)(?!\w))",
            r"\b(spent|spend so far|(cost|costs|spend|usage|bill|charges?|kosten)\b.*\b(so far|to date"
            r"|total|meter|session|today|run))\b"
            r"|\b(session|current|total|conversation|accumulated|api|llm|token|run|chat|task"
            r"|running) (costs?|spend|usage)\b"
            r"|\bbudget (used|left|spent|remaining)\b",
            r"\b(per|each|unit|items?|shipping|delivery|fees?|over|above|below|under|than|if|when|product)\b",
        ),
        Shape(
            "uptime",
            "counter",
            "auto",
            r"(?:\d+ days?,? (?:and )?)?\d+:\d{2}(?::\d{2}(?:\.\d+)?)?(?: hours?)?"
            rf"|{_DURATION}(?:(?:,? (?:and )?|)(?:{_DURATION})){{0,4}}(?: ago)?|\d+(?:\.\d+)?",
            r"\b(uptime|up ?time|elapsed|running for|up for|idle|laufzeit|session (age|length|duration)"
            r"|since start)\b",
            r"\b(if|when|after|over|than|guarantee\w*|target|sla)\b",
        ),
        Shape(
            "load",
            "counter",
            "auto",
            r"\d+(?:\.\d+)?[ ]?%|\d+(?:\.\d+)?(?:,? \d+(?:\.\d+)?){0,3}(?:[ ]?(?:[KMGT]i?B|MB/s|ms)(?!\w))?"
            r"(?:[ ]?(?:/|of)[ ]?\d+(?:\.\d+)?[ ]?[KMGT]i?B)?(?: (?:free|used))?(?![ ]?[A-Za-z°])",
            r"\b(load|load average|cpu|ram|memory|mem|gpu|disk|queue (depth|length)|in flight|battery)\b",
            r"\b(if|when|after|over|than|above|below|per|requires?|needs?)\b",
        ),
        Shape(
            "email",
            "identity",
            "propose",
            r"[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+",
            r"\b(e ?mail|mail address|user|account|login|email address|benutzer|usuario)\b",
            r"\b(support|contact|escalat\w*|sales|send|write|forward|help)\b",
        ),
        Shape(
            "handle",
            "identity",
            "propose",
            r"@?[A-Za-z0-9_][\w.-]{0,38}",
            r"\b(handle|user ?name|user id|userid|uid|login|account id|nick|nickname|member id"
            r"|customer id|screen name)\b",
            whole_line=True,
        ),
        Shape(
            "locale",
            "identity",
            "propose",
            r"[a-z]{2,3}(?:[-_][A-Z][a-z]{3})?(?:[-_](?:[A-Z]{2}"
            r"|\d{3}))?(?:\.UTF-8)?(?:[ ]?,[ ]?[a-z]{2,3}(?:[-_][A-Z]{2})?)*"
            r"|[A-Z][a-zà-ÿ]{2,20}(?: \([A-Z][\w .-]{1,30}\))?",
            r"\b(locale|language|lang|sprache|idioma|langue|accept language)\b",
            r"\b(programming|target|source|respond|reply|answer|output|code)\b",
            whole_line=True,
        ),
        Shape(
            "timezone",
            "identity",
            "propose",
            rf"{ZONE}(?:,? {ZONE})?",
            r"\b(time ?zone|tz|zeitzone|zona horaria|fuseau)\b",
        ),
        Shape(
            "location",
            "identity",
            "propose",
            r"[^\W\d_](?:[\w '’-]{0,40}\w)?(?:, ?[^\W_](?:[\w '’-]{0,40}\w)?){0,3}"
            r"|-?\d{1,3}\.\d+, ?-?\d{1,3}\.\d+",
            r"\b(location|standort|ubicación|located in|based in|coordinates|geo|(user|users|my|current"
            r"|home) (city|country|town|region))\b",
            r"\b(office|store|warehouse|head ?quarters|server|meeting|delivery|shipping)\b",
            whole_line=True,
        ),
        Shape(
            "path",
            "identity",
            "propose",
            rf"(?:/|~(?=[/\s]|$)|\.{{1,2}}/|[A-Za-z]:[\\/]|file://){_PATH_REST}",
            r"\b(cwd|pwd|directory|dir|folder|workspace|work ?space|root|path|home|working|repo"
            r"|repository|project|file|verzeichnis)\b",
            r"\b(endpoint|api|url|route|config\w*|logs?|output|if|when|example|install\w*|docs?|under)\b",
        ),
        Shape(
            "git",
            "state",
            "propose",
            rf"{_GIT_BLOCK}|[\w./@+#-]{{1,100}}",
            r"\b(branch|commits?|git|head|status|revision|sha|dirty|staged|stash|changes)\b",
            r"\b(main branch|default branch|order|ticket|http|exit|response|payment|is directory|bad"
            r"|office|price)\b",
            whole_line=True,
            block=True,
        ),
        Shape(
            "os",
            "state",
            "propose",
            r"[\w/][\w ./\\()+:,~#=_-]{0,118}[\w)]|\w",
            r"\b(os|os version|operating system|platform|shell|kernel|arch|architecture|terminal|ide"
            r"|editor|betriebssystem"
            r"|python|node|hostname|host name|machine)\b",
            r"\b(support\w*|require\w*|target|if|when)\b",
            whole_line=True,
        ),
        Shape(
            "editor",
            "state",
            "propose",
            r"[\w./\\@~-][\w ./\\@~,:;()+-]{0,250}",
            r"\b(open (tabs?|files?|editors?)|active (file|tab|editor)|current file|visible files?"
            r"|cursor( position)?|selection)\b",
            whole_line=True,
        ),
        Shape(
            "name",
            "identity",
            "propose",
            _NAME,
            r"\b(user|users?|name|full name|display name|customer|client|caller|speaking with|talking to"
            r"|talking with|"
            r"account holder|member|benutzer|kunde|nutzer|usuario|utilisateur|cliente|nom)\b",
            r"\b(product|company|brand|file|model|tool|function|host|bot|agent|assistant|your|project|app"
            r"|class|variable|team"
            r"|location|city|country|region|directory|path|workspace|zone|language|locale)\b",
            whole_line=True,
        ),
        Shape("line", "free", "named", _LINE, r"(?!)", whole_line=True),
    )
}

_RANK = re.compile(
    r"\b(admin\w*|guest|root|owner|editor|viewer|moderator|manager|supervisor|vip|regular|premium|free"
    r"|basic|pro|gold|silver"
    r"|platinum|staff|employee|anonymous|internal|external|standard|enterprise|trial|customer|member"
    r"|user|none|unknown)\b",
    re.I,
)
_UNPRINTABLE = re.compile(rf"(?![\t\n]|\r\n)[{_CONTROL}]")
_HIDING = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069]")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS = re.compile(r"[_\-.\s/]+")
_IDENTITY_ID = re.compile(r"\b(session|sess|conversation|conv|thread|chat|dialog\w*|user|sitzung)\b")


def words(label: str) -> str:
    """The label in lower-case words: `currentDate` and `current_date` both give `current date`."""
    flat = _SEPARATORS.sub(" ", _CAMEL.sub(" ", label)).strip().lower()
    return flat.replace("'s ", "s ").replace("’s ", "s ")


@lru_cache(maxsize=4096)
def is_authority(label: str) -> bool:
    """True for labels that state a right, a plan, a limit or a price: their values never leave the system
    text."""
    return _NEVER.search(words(label)) is not None


def is_printable(value: str) -> bool:
    """False for a value that could show as something else: control characters, separators of lines and
    paragraphs, marks that turn the direction of writing. Line feeds (with or without CR) and tabs may be."""
    return value.isprintable() or _UNPRINTABLE.search(value) is None


def is_hiding(char: str) -> bool:
    """True for a character that ends no line and can't be seen: a value that stops before it is not whole."""
    return not char.isprintable() and _HIDING.match(char) is not None


def is_rank(value: str) -> bool:
    """True for a "name" that says what someone may do (admin, guest, premium ...), not who they are."""
    return _RANK.search(value) is not None


@lru_cache(maxsize=4096)
def admits(name: str, label: str) -> bool:
    """True when evidence alone may propose moving a value of this shape from behind this label."""
    shape = SHAPES[name]
    flat = words(label)
    if _NEVER.search(flat) or re.search(shape.refuses, flat):
        return False
    return re.search(shape.labels, flat) is not None


@lru_cache(maxsize=4096)
def is_identity(kind: str, label: str) -> bool:
    """True for values that say who or where: two conversations that differ in one never share a context
    block."""
    return kind in ("identity", "free") or (kind == "id" and _IDENTITY_ID.search(words(label)) is not None)


@lru_cache(maxsize=1024)
def value_pattern(name: str, label: str) -> str:
    """The regular expression of the shape's values behind `label` (years and months only where the label
    asks)."""
    pattern = SHAPES[name].pattern
    if name == "git" and not re.search(r"\b(branch|commit|git|revision|sha)\b", words(label)):
        return rf"(?:{_GIT_BLOCK}|[0-9a-f]{{7,40}})"
    if name == "clock" and re.search(r"\b(year|month|quarter|jahr|monat|año|mes|année|mois)\b", words(label)):
        return rf"(?:{CLOCK}|{PERIOD})"
    return rf"(?:{pattern})"
