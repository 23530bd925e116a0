"""Dates and times: matched whole in the forms applications write, and coarsened by precision."""

import re

import pytest

from canonicalizer.clocks import CLOCK, PERIOD, ZONE, coarse


@pytest.mark.parametrize(
    "value",
    [
        "2027-04-05T08:01:02Z",
        "2027-04-05T08:01:02.123456+02:00",
        "2027-04-05 08:01",
        "2027/04/05 08:01",
        "20270405T080102Z",
        "Mon, 05 Apr 2027 08:01:02 +0200",
        "Mon Apr  5 08:01:02 UTC 2027",
        "Mon Apr 05 2027 08:01:02 GMT+0200 (Central European Summer Time)",
        "Monday, April 5, 2027 at 1:17:44 PM +08",
        "08:01 PM EDT on Monday, April 5, 2027",
        "April 5, 2027 08:01 AM GMT",
        "2027-04-05 (Apr 5, 2027)",
        "April 5, 2027, 6:18 GMT",
        "the 5th of April 2027",
        "4/5/2027, 8:01:02 AM",
        "05.04.2027 08:01:02",
        "5. April 2027, 08:01 Uhr",
        "lundi 5 avril 2027",
        "5 de abril de 2027, 08:01",
        "2027年4月5日 08:01",
        "2027-04-05 08:01:02 Europe/Lisbon",
        "1806912062",
        "1806912062123",
        "1806912062.5",
        "Thursday",
        "8:01 AM",
    ],
)
def test_written_forms_are_matched_whole(value: str) -> None:
    match = re.match(CLOCK, value)
    assert match is not None
    assert match.group() == value


@pytest.mark.parametrize("value", ["half", "v2.1.0", "12", "16:9", "2027-04-a", "4006381333931"])
def test_other_text_is_not(value: str) -> None:
    assert re.fullmatch(CLOCK, value) is None


@pytest.mark.parametrize("value", ["Z", "UTC+2", "+02:00", "CEST", "America/Argentina/Buenos_Aires"])
def test_zones(value: str) -> None:
    assert re.fullmatch(ZONE, value)


def test_periods() -> None:
    assert re.fullmatch(PERIOD, "April 2027")
    assert re.fullmatch(PERIOD, "2027")


@pytest.mark.parametrize(
    ("one", "other", "equal_at", "differ_at"),
    [
        ("2027-04-05T08:01:02.1Z", "2027-04-05T08:01:02.9Z", "second", None),
        ("2027-04-05T08:01:02Z", "2027-04-05T08:01:44Z", "minute", "second"),
        ("2027-04-05T08:01:02+02:00", "2027-04-05T08:59:02+02:00", "hour", "minute"),
        ("Mon, 05 Apr 2027 08:01:02 +0200", "Mon, 05 Apr 2027 23:01:02 +0200", "day", "hour"),
        ("4/5/2027, 8:01:02 AM", "4/5/2027, 8:01:59 AM", "minute", "second"),
        ("4/5/2027, 8:01:02 AM", "4/5/2027, 8:01:02 PM", "day", "hour"),
        ("20270405T080102Z", "20270405T080159Z", "minute", "second"),
        ("20270405T080102Z", "20270405T085959Z", "hour", "minute"),
        ("1806912062", "1806912065", "minute", "second"),
        ("1806912062123", "1806912062999", "second", None),
        ("April 5, 2027", "April 5, 2027", "second", None),
    ],
)
def test_precision(one: str, other: str, equal_at: str, differ_at: str | None) -> None:
    assert coarse(one, equal_at) == coarse(other, equal_at)
    assert differ_at is None or coarse(one, differ_at) != coarse(other, differ_at)


def test_another_day_differs_at_day_precision() -> None:
    assert coarse("2027-04-05T08:01:02Z", "day") != coarse("2027-04-06T08:01:02Z", "day")
