"""The built-in classes and rules are sound by themselves."""

from __future__ import annotations

from canonicalizer.rules import Ruleset
from policies.defaults import CLASSES, builtin_rules


def test_classes_have_ranks_in_order_and_shares_that_fit() -> None:
    assert [each.rank for each in CLASSES] == [0, 1, 2, 3]
    assert [each.name for each in CLASSES] == ["system", "interactive", "standard", "batch"]
    assert sum(each.share for each in CLASSES) == 1.0


def test_the_built_in_rules_make_one_ruleset_and_each_call_gives_new_ones() -> None:
    ruleset = Ruleset.from_dict({"rules": builtin_rules()})
    assert len(ruleset.rules) == len(builtin_rules())
    builtin_rules()[0]["label"] = "changed"
    assert builtin_rules()[0]["label"] != "changed"
