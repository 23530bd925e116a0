"""The learner: proposes what was seen to vary in like prompts, holds no values, stays bounded."""

from typing import Any

from canonicalizer import Learner, ruleset_from

BODY = "You help customers of a bicycle workshop. Answer in two sentences at most. Quote the part number."


def chat(system: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}], **more}


def learner_of(*systems: str, tenant: str = "t") -> Learner:
    learner = Learner()
    for system in systems:
        learner.observe(tenant, chat(system))
    return learner


def labels(learner: Learner, **floor: int) -> list[str]:
    return [item.rule.label for item in learner.proposals(**floor) if item.rule]


def test_one_value_is_no_evidence() -> None:
    once = f"Current time: 08:01\n{BODY}"
    assert labels(learner_of(once)) == []
    assert labels(learner_of(once, once, once)) == []
    assert labels(learner_of(once, f"Current time: 08:02\n{BODY}")) == ["Current time"]


def test_floors() -> None:
    learner = learner_of(*(f"Current time: 08:0{n % 2}\n{BODY}" for n in range(5)))
    assert labels(learner, values=2, requests=5) == ["Current time"]
    assert labels(learner, values=3) == []
    assert labels(learner, values=2, requests=6) == []


def test_prompts_of_other_tenants_or_applications_are_no_evidence() -> None:
    learner = Learner()
    learner.observe("a", chat(f"Current time: 08:01\n{BODY}"))
    learner.observe("b", chat(f"Current time: 08:02\n{BODY}"))
    learner.observe(
        "a", chat("Current time: 08:03\nSomething else entirely, a prompt about gardens and trees.")
    )
    assert learner.proposals() == []


def test_proposals_carry_counts_and_grades_but_no_values() -> None:
    learner = learner_of(
        *(f"User: {name}\nCurrent time: {at}\n{BODY}" for name, at in (("Ana", "08:01"), ("Bo", "08:02")))
    )
    found = learner.proposals()
    assert [(item.rule.label, item.grade) for item in found if item.rule] == [
        ("User", "propose"),
        ("Current time", "auto"),
    ]
    assert found[0].values == 2 and found[0].requests == 2
    assert found[0].prefix_lost > found[1].prefix_lost > len(BODY)
    assert "Ana" not in repr(learner._groups) and "08:01" not in repr(learner._groups)
    assert [rule.label for rule in ruleset_from(found, grades=("auto",)).rules] == ["Current time"]
    assert ruleset_from(found, mode="observe").rules[0].mode == "observe"


def test_several_applications_get_anchors() -> None:
    learner = Learner()
    for n in range(2):
        learner.observe("t", chat(f"Timezone: {('UTC', 'CET')[n]}\n{BODY}"))
        learner.observe(
            "t", chat(f"Request id: 0c3f7c1{n}\nSort incoming mail into the folders named below, by sender.")
        )
        learner.observe(
            "t", chat(f"timezone:   UTC\nWater the plants at noon, and count the leaves once a week.{n}")
        )
    anchors = {item.rule.label: item.rule.anchor for item in learner.proposals() if item.rule}
    assert anchors["Request id"] == "Sort incoming mail into the folders named below, by sender."
    assert anchors["Timezone"] == "You help customers of a bicycle workshop."
    assert set(anchors) == {"Request id", "Timezone"}


def test_one_label_in_two_applications_needs_no_anchor() -> None:
    learner = Learner()
    other = "Sort incoming mail into the folders named below, by sender. Never open attachments."
    for n in range(2):
        learner.observe("t", chat(f"Current time: 08:0{n}\n{BODY}"))
        learner.observe("t", chat(f"Current time: 09:0{n}\n{other}"))
    found = [item.rule for item in learner.proposals() if item.rule]
    assert [rule.anchor for rule in found] == [None]
    assert ruleset_from(learner.proposals()).rules == tuple(found)


def test_rules_of_two_tenants_merge_without_an_anchor() -> None:
    learner = Learner()
    for n in range(2):
        learner.observe("a", chat(f"Current time: 08:0{n}\n{BODY}"))
        learner.observe("b", chat(f"Current time: 09:0{n}\n{BODY}"))
        learner.observe("b", chat("A second application with another text altogether."))
    rules = ruleset_from(learner.proposals()).rules
    assert [(rule.label, rule.anchor) for rule in rules] == [("Current time", None)]


def test_stages_from_evidence() -> None:
    def stages(*systems: str) -> tuple[str, ...]:
        return ruleset_from(learner_of(*systems).proposals()).stages

    assert stages(BODY, BODY + "\n") == ("trailing",)
    assert stages(f"a\r\n{BODY}", f"a\n{BODY}") == ("crlf",)
    assert stages(f"cafe\u0301 {BODY}", f"caf\u00e9 {BODY}") == ("nfc",)
    assert stages(BODY, BODY) == ()
    learner = Learner()
    tools = [{"name": "a"}, {"name": "b"}]
    learner.observe("t", chat(BODY, tools=tools))
    learner.observe("t", chat(BODY, tools=tools[::-1]))
    assert ruleset_from(learner.proposals()).stages == ("tool_order",)


def test_messages_alone_are_taken_too() -> None:
    learner = Learner()
    for n in range(2):
        learner.observe("t", chat(f"Current time: 08:0{n}\n{BODY}")["messages"])
    assert labels(learner) == ["Current time"]


def test_bounded() -> None:
    learner = Learner(max_groups=3)
    for n in range(10):
        learner.observe("t", chat(f"{'abcdefghij'[n] * 50}. Current time: 08:00"))
    assert len(learner._groups) == 3
    busy = learner_of(*(f"Current time: {n // 60:02}:{n % 60:02}\n{BODY}{' ' * n}" for n in range(200)))
    group = next(iter(busy._groups.values()))
    assert all(len(site.values) <= 64 for site in group.sites.values())
    many = Learner()
    many.observe("t", chat("\n".join(f"step {chr(97 + n // 26)}{chr(97 + n % 26)}: {n}" for n in range(300))))
    assert all(len(group.sites) <= 128 for group in many._groups.values())
