"""Workloads: what a load generator sends. Owns conversations and the generators that make them.

Always holds: a workload is a pure function of its arguments (same seed, same requests), so phases of one
run compare like with like. A conversation's next turn carries the live reply to the one before, as a
real chat client does.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: the system text as the client sends it now, and the user's new
    message.
    """

    user: str
    system: str | None = None
    max_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that share a history. `fields` are extra body fields; `headers` go with each request."""

    id: str
    turns: tuple[Turn, ...]
    tenant: str = ""
    api_key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


_TRADES = (
    ("Harbour Freight", "container bookings", "bill of lading", "port calls"),
    ("Northlight Energy", "electricity tariffs", "meter reading", "supply areas"),
    ("Orchard Books", "book orders", "order confirmation", "delivery zones"),
    ("Cobalt Telecom", "mobile contracts", "subscriber record", "coverage maps"),
    ("Meadow Clinics", "appointments", "referral letter", "opening hours"),
    ("Granite Tools", "machine rentals", "rental agreement", "depot locations"),
    ("Sundial Travel", "rail journeys", "ticket reference", "timetable periods"),
    ("Linden Insurance", "household cover", "policy schedule", "claim categories"),
)

_RULES = (
    "Answer questions about {topic} only; for anything else say so in one sentence and offer the help line.",
    "Quote the {paper} number exactly as the customer wrote it and never complete one from memory.",
    "When a question touches {areas}, name the source of the information and the date of the last check.",
    "Never promise a date, a refund or an exception; say what the next step is and who takes it.",
    "Keep a reply under one hundred and twenty words unless the customer asks for a list.",
    "Use the customer's language, plain words and short sentences, and do not use headings in a reply.",
    "If two rules conflict, the later one wins, and safety information always comes first.",
    "Amounts are in euros and include tax; convert only when the customer names another currency.",
    "A complaint is acknowledged in the first sentence, summarised in the second, and routed in the third.",
    "Personal data is never repeated back in full; show the last three characters and a row of stars.",
    "For {topic} changed within the last two days, say that the systems may still show the older state.",
    "Escalate to a person when the customer asks for one, mentions legal action, or writes in distress.",
)

_QUESTIONS = (
    "Could you tell me where my {paper} stands and what I should do next about it?",
    "Does the change I asked for on {topic} apply to the period that is already running?",
    "Which of the {areas} would be affected if I moved the whole thing by one week?",
    "I was told two different things about {topic} yesterday; which of them is right?",
    "What do you need from me so that the {paper} can be corrected without a new one?",
    "Please sum up in two sentences what happens to {topic} when I do nothing at all.",
)


def stable_system_text(index: int, sections: int = 4) -> str:
    """Return one tenant's constant instructions, about 250 tokens of English a section."""
    name, topic, paper, areas = _TRADES[index % len(_TRADES)]
    rng = random.Random(f"system-{index}")
    lines = [f"You are the support assistant of {name} and answer customers who write about {topic}."]
    for section in range(sections):
        lines.append(f"\n## Part {section + 1}: working rules for {topic}")
        rules = list(_RULES)
        rng.shuffle(rules)
        for number, rule in enumerate(rules[:10], 1):
            lines.append(f"{number}. {rule.format(topic=topic, paper=paper, areas=areas)}")
    return "\n".join(lines)


def volatile_header_lines(clock: str, request_id: str, user: str) -> str:
    """Return the three lines that make a prompt uncacheable when they stand first."""
    return f"Current time: {clock}\nRequest id: {request_id}\nUser: {user}\n"


def chat_tenants(
    *,
    tenants: int = 8,
    conversations_each: int = 2,
    turns: int = 3,
    max_tokens: int = 16,
    seed: int = 7,
    keys: Mapping[str, str] | None = None,
) -> list[Conversation]:
    """Return the demo's load: per tenant a long system prompt whose first lines hold a clock, a uuid and a
    user name.

    The list interleaves tenants, so that consecutive requests seldom share a prefix.
    """
    rng = random.Random(seed)
    now = datetime(2026, 3, 2, 9, 0, 0, tzinfo=UTC)
    users = (
        "Kim Berg",
        "Ines Duarte",
        "Tom Aalto",
        "Rhea Novak",
        "Ola Lind",
        "Mira Costa",
        "Jon Weiss",
        "Ada Brook",
    )
    result: list[Conversation] = []
    for round_number in range(conversations_each):
        for index in range(tenants):
            tenant = f"tenant-{index}"
            _, topic, paper, areas = _TRADES[index % len(_TRADES)]
            user = users[(index + 3 * round_number) % len(users)]
            questions = rng.sample(_QUESTIONS, turns)
            made = []
            for question in questions:
                now += timedelta(seconds=rng.randint(7, 41))
                request_id = str(uuid.UUID(int=rng.getrandbits(128), version=4))
                clock = now.strftime("%Y-%m-%dT%H:%M:%SZ")
                system = volatile_header_lines(clock, request_id, user) + stable_system_text(index)
                made.append(Turn(question.format(topic=topic, paper=paper, areas=areas), system, max_tokens))
            key = keys.get(tenant) if keys else None
            result.append(Conversation(f"{tenant}-{round_number}", tuple(made), tenant, key))
    return result


def shared_prefix(
    *, groups: int, each: int, prefix_words: int, max_tokens: int, seed: int = 7
) -> list[Conversation]:
    """Return single-turn conversations in `groups` groups that share a system prompt of about
    `prefix_words` words.
    """
    rng = random.Random(seed)
    words = " ".join(_RULES).replace("{", "").replace("}", "").split()
    result = []
    for group in range(groups):
        chooser = random.Random(f"{seed}-{group}")
        system = f"Group {group}. " + " ".join(chooser.choice(words) for _ in range(prefix_words))
        for number in range(each):
            question = " ".join(rng.choice(words) for _ in range(24))
            result.append(Conversation(f"g{group}-{number}", (Turn(question, system, max_tokens),)))
    rng.shuffle(result)
    return result


class WorkloadError(ValueError):
    """A workload file that can't be used; the message starts with file:line."""


def from_jsonl(lines: Iterable[str], source: str) -> list[Conversation]:
    """Return one single-request conversation a line of chat bodies (`{"messages": [...], ...}` or `{"body":
    {...}}`).
    """
    result = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise WorkloadError(f"{source}:{number}: not JSON: {error}") from None
        body = value.get("body", value) if isinstance(value, dict) else None
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise WorkloadError(f"{source}:{number}: expected an object with a `messages` list")
        fields = {key: item for key, item in body.items() if key != "stream"}
        result.append(
            Conversation(
                f"line-{number}", (Turn("", None, int(body.get("max_tokens") or 64)),), fields=fields
            )
        )
    if not result:
        raise WorkloadError(f"{source}: no requests in it")
    return result
