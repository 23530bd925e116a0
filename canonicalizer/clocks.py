"""The written forms of dates and times, and how a value is coarsened to a precision.

`CLOCK` matches one whole date, time or date with time and zone, in ISO, RFC 2822, `date(1)`, JavaScript,
locale and spoken forms; `coarse` cuts a matched value to what is equal within a second, minute, hour or
day. A pattern alone never moves anything: labels, evidence or a policy rule do (see rules.py and learn.py).
"""

from __future__ import annotations

import re

_WEEKDAYS = (
    "monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thur thurs fri sat sun "
    "montag dienstag mittwoch donnerstag freitag samstag sonnabend sonntag mo di mi do fr sa so "
    "lundi mardi mercredi jeudi vendredi samedi dimanche lunes martes miércoles jueves viernes sábado "
    "domingo lunedì martedì mercoledì giovedì venerdì sabato domenica "
    "maandag dinsdag woensdag donderdag vrijdag zaterdag zondag "
    "segunda-feira terça-feira quarta-feira quinta-feira sexta-feira"
)
_MONTHS = (
    "january february march april may june july august september october november december "
    "jan feb mar apr jun jul aug sep sept oct nov dec "
    "januar jänner februar märz mai juni juli oktober dezember mär okt dez "
    "janvier février mars avril juin juillet août septembre octobre novembre décembre "
    "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre "
    "gennaio febbraio aprile maggio giugno luglio settembre ottobre dicembre "
    "januari februari maart mei augustus "
    "janeiro fevereiro março maio junho julho setembro outubro novembro dezembro"
)


def _names(words: str) -> str:
    return (
        "(?i:"
        + "|".join(sorted(map(re.escape, set(words.split())), key=lambda name: (-len(name), name)))
        + r")(?!\w)"
    )


_DAY_NAME = (
    rf"(?:(?:{_names(_WEEKDAYS)})\.?|(?:星期|周|週)[一二三四五六日天]|[月火水木金土日]曜日?"
    rf"|[월화수목금토일]요일)"
)
_MONTH = rf"(?:{_names(_MONTHS)})\.?"
_TIME = (
    r"(?:(?:[01]?\d|2[0-4])[:h][0-5]\d(?::[0-5]\d(?:[.,]\d{1,9})?)?(?:[ \u00a0\u202f]?(?i:[ap]\.?m\b\.?))?"
    r"|(?:0?\d|1[0-2])[ \u00a0\u202f]?(?i:[ap]\.?m\b\.?)"
    r"|(?:上午|下午|午前|午後|오전"
    r"|오후)?[ ]?\d{1,2}[:点點時时시][ ]?\d{2}[分분]?(?:[ ]?\d{2}[秒초])?)(?:[ \u00a0]Uhr\b)?(?!\d)"
)
_DATE = (
    r"(?:\d{4}-[01]?\d-[0-3]?\d|\d{4}/[01]?\d/[0-3]?\d|\d{4}\.[01]?\d\.[0-3]?\d\.?(?!\d)"
    r"|\d{1,2}\.[ ]?\d{1,2}\.[ ]?\d{4}|\d{1,2}\.\d{1,2}\.\d{2}(?!\d)|\d{1,2}/\d{1,2}/\d{4}"
    r"|\d{1,2}/\d{1,2}/\d{2}(?!\d)"
    rf"|\d{{1,2}}-\d{{1,2}}-\d{{4}}|\d{{1,2}}[-/]{_MONTH}[-/]\d{{4}}|\d{{4}}-W\d{{2}}(?:-\d)?"
    rf"|{_MONTH}[ \u00a0]+\d{{1,2}}(?:st|nd|rd|th)?(?!\d)(?:,?[ \u00a0]+\d{{4}})?"
    rf"|(?:the[ ])?\d{{1,2}}(?:st|nd|rd|th|er|\.|º)?[ \u00a0]+(?:of[ ]"
    rf"|de[ ])?{_MONTH},?(?:[ \u00a0]+(?:de[ ])?\d{{4}})?"
    r"|\d{4}[年년][ ]?\d{1,2}[月월][ ]?\d{1,2}[日일]|20\d{6}(?=T\d))"
)
_ZONE = (
    r"(?:Z\b|(?:UTC|GMT)(?:[ ]?[+-]\d{1,2}(?::?\d{2})?)?(?![\w])|[+-]\d{2}(?::?\d{2})?(?!\d)"
    r"|(?:E[SD]T|C[SD]T|M[SD]T|P[SD]T|CET|CEST|WET|WEST|EET|EEST|BST|IST|JST|KST|SGT|HKT|MSK|A[CEW][SD]T"
    r"|NZ[SD]T|AK[SD]T|HST|BRT|ART|PKT|WIB)\b"
    r"|(?:Africa|America|Antarctica|Asia|Atlantic|Australia|Europe|Indian|Pacific"
    r"|Etc)/[A-Za-z_+\-0-9]+(?:/[A-Za-z_]+)?)"
)
_ASIDE = rf"\((?:{_DAY_NAME}|{_ZONE}|{_DATE}|[A-Z][a-z]+(?: [A-Z][a-z]+){{1,4}})\)"
_JOIN = (
    r"(?:,?[ \t\u00a0\u202f]+(?:(?:at|on|um|à|à las|a las|alle|às|the|den|the time is)[ \t]+)?|,|T"
    r"|[ \t]*[-–|·/][ \t]+)?"
)
_PART = rf"(?:{_DATE}|{_TIME}|{_DAY_NAME})"
_COMPACT = r"20\d{6}T\d{6}Z?"
_EPOCH = r"1\d{9}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?(?!\d)"

CLOCK = (
    rf"(?:{_COMPACT}|{_PART}(?:{_JOIN}(?:{_PART}|{_ZONE}|{_ASIDE}|(?:19|20)\d{{2}}(?!\d))){{0,7}}|{_EPOCH})"
)
PERIOD = (
    rf"(?:{_MONTH}(?:[ ]+(?:19|20)\d{{2}})?|(?:19|20)\d{{2}}|Q[1-4](?:[ ]+20\d{{2}})?|\d{{4}}-[01]\d(?!\d))"
)
ZONE = rf"{_ZONE}(?:[ ]\([A-Z][\w /:+-]{{1,40}}\))?"

_CLOCK_TIME = re.compile(
    r"(?:(?<=\dT)|(?<![\w:+.\-]))(\d{1,2})([:h點点時时])(\d{2})[分]?((?::"
    r"|[ ]?)\d{2}(?:[.,]\d{1,9})?秒?(?![\d:]))?([ ]?[APap]\.?[Mm]\.?)?"
)
_COMPACT_TIME = re.compile(r"T(\d{2})(\d{2})(\d{2})(?!\d)")
_EPOCH_ONLY = re.compile(r"\d{10,19}(?:\.\d+)?")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


def coarse(value: str, precision: str) -> str:
    """The part of a clock value that must differ before it counts as changed at `precision`.

    `coarse("2026-03-02T09:14:07Z", "minute") == coarse("2026-03-02T09:14:55Z", "minute")`. Text without a
    time of day is returned as it is."""
    if _EPOCH_ONLY.fullmatch(value):
        whole = value.partition(".")[0]
        return str(int(whole) // (_SECONDS[precision] * int(10 ** (len(whole) - 10))))
    if precision == "second":
        return re.sub(r"(:\d{2}:\d{2})[.,]\d+", r"\1", value)
    if precision == "day":
        return _CLOCK_TIME.sub("", _COMPACT_TIME.sub("", value))
    keep = 1 if precision == "hour" else 2
    value = _COMPACT_TIME.sub(lambda found: "T" + "".join(found.groups()[:keep]), value)
    if keep == 1:
        return _CLOCK_TIME.sub(lambda found: f"{found[1]}{found[5] or ''}", value)
    return _CLOCK_TIME.sub(lambda found: f"{found[1]}:{found[3]}{found[5] or ''}", value)
