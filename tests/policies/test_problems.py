"""How complaints read."""

from __future__ import annotations

from policies.problems import PolicyError, Problem, child_path, did_you_mean, quoted


def test_a_problem_reads_file_line_path_message() -> None:
    problem = Problem("p.yaml", 7, "routes[0].class", "is wrong", 3)
    assert str(problem) == "p.yaml:7: routes[0].class: is wrong"
    assert str(Problem("p.yaml", 7, "$", "is odd", code="odd")) == "p.yaml:7: $: is odd [odd]"
    assert str(PolicyError([problem, problem])).count("\n") == 1


def test_paths_quote_what_is_no_plain_word() -> None:
    assert child_path("$", "routes") == "routes"
    assert child_path("routes", 3) == "routes[3]"
    assert child_path("models", "gpt-4.1") == 'models["gpt-4.1"]'
    assert child_path("$", "") == '$[""]'


def test_quotes_stay_on_one_short_line() -> None:
    assert quoted("a\nb") == '"a?b"'
    assert quoted("x" * 100) == '"' + "x" * 60 + '..."'


def test_hints_ignore_case_and_stay_silent_when_nothing_is_near() -> None:
    assert did_you_mean("Interactve", ["batch", "interactive"]) == " (did you mean interactive?)"
    assert did_you_mean("zzz", ["batch"]) == ""
