"""`warmfront canon`: diff, learn and apply on files, with clear messages for files that can't be used."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from canonicalizer import Ruleset
from gateway.cli import canon


@pytest.fixture(autouse=True)
def no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy in the environment or in the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WARMFRONT_POLICY", raising=False)


BODY = "You help customers of a bicycle workshop. Answer in two sentences at most."


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="warmfront")
    canon.register(parser.add_subparsers())
    args = parser.parse_args(["canon", *arguments])
    code: int = args.handler(args)
    return code


def request(clock: str, **more: Any) -> dict[str, Any]:
    system = {"role": "system", "content": f"Current time: {clock}\nRole: clerk\n{BODY}"}
    return {"model": "m", "messages": [system, {"role": "user", "content": "hi\x1b[2J"}], **more}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    rows = [request("2027-04-05T08:01:02Z", temperature=1.50), request("2027-04-05T08:02:02Z", é="\u2028")]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", "utf-8")
    return path


def test_learn_then_apply(log: Path, tmp_path: Path, capfdbinary: Any) -> None:
    rules = tmp_path / "rules.yaml"
    assert run("learn", str(log), "-o", str(rules), "--accept", "--floor", "2") == 0
    assert b"1 rules and 0 stages written" in capfdbinary.readouterr().out
    text = rules.read_text()
    assert "label: Current time" in text and "mode: enforce" in text and "2027" not in text

    assert run("apply", "-r", str(rules), str(log)) == 0
    captured = capfdbinary.readouterr()
    bodies = captured.out.splitlines()
    notes = [json.loads(line) for line in captured.err.splitlines()]
    originals = log.read_bytes().splitlines()
    for original, body, note in zip(originals[:2], bodies, notes, strict=True):
        assert note["reason"] is None
        assert [edit["rule"] for edit in note["edits"]] == ["clock:current-time", "context"]
        assert json.loads(body)["messages"][0]["content"].startswith(
            "Current time: [see context]\nRole: clerk"
        )
        start = original.index(b'"role": "user"')
        assert original[:30] == body[:30]
        assert original[start : start + 30] in body
    assert b'"temperature": 1.5' in bodies[0]


def test_learn_writes_observe_by_default_and_prints_json(log: Path, tmp_path: Path, capsys: Any) -> None:
    rules = tmp_path / "rules.yaml"
    assert run("learn", str(log), "-o", str(rules), "--json") == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["label"], row["shape"], row["values"], row["grade"]) == ("Current time", "clock", 2, "auto")
    assert "mode: observe" in rules.read_text()


def test_diff_of_a_log_learns_from_it(log: Path, capsys: Any) -> None:
    assert run("diff", str(log), "--color", "always") == 0
    shown = capsys.readouterr().out
    assert "Rules learned from these 2 requests" in shown
    assert "\x1b[31m  - Current time: 2027-04-05T08:01:02Z" in shown
    assert "\x1b[32m  + Current time: [see context]" in shown
    assert "</context>" in shown
    assert "\x1b[2J" not in shown


def test_diff_of_one_pretty_body_shows_candidates(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request("08:01"), indent=2))
    assert run("diff", str(path), "--color", "never") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("One request holds no evidence")
    assert "request 1: 2 edits" in shown and "\x1b" not in shown


def test_diff_with_rules_and_json(tmp_path: Path, log: Path, capsys: Any) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n- {label: Current time, shape: clock}\nstages: [tool_order]\n")
    assert run("diff", str(log), "-r", str(rules), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert Ruleset.from_dict(shown["ruleset"]).rules[0].label == "Current time"
    assert [row["line"] for row in shown["requests"]] == [1, 2]
    assert shown["requests"][0]["edits"][0]["after"] == "[see context]"


ROUTES = """\
version: 1
routes:
  - name: plain
    canon: {rules: [{label: Current time, shape: clock}, {label: Ticket, shape: line, mode: observe}]}
  - {name: usual, match: {paths: [/v1/x]}}
  - {name: still, match: {paths: [/v1/y]}, canon: {mode: enforce, rules: [], share: 25%}}
"""


def test_diff_previews_what_enforce_on_a_route_would_do(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request("08:01\nTicket: A-5")))
    policy = tmp_path / "p.yaml"
    policy.write_text(ROUTES)
    assert run("diff", str(path), "--policy", str(policy), "--route", "plain") == 0
    shown = capsys.readouterr().out
    assert f"route plain of {policy} (is in observe: this is what `enforce` would send)" in shown
    assert "+ Current time: [see context]" in shown
    assert "Ticket: [see context]" not in shown, "a rule in observe moves nothing under enforce"
    assert run("diff", str(path), "--policy", str(policy), "--route", "usual", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["route"], report["mode"]) == ("usual", "observe")
    assert "Request id" in [rule["label"] for rule in report["ruleset"]["rules"]], "the built-in rules"
    assert report["requests"][0]["edits"][0]["after"] == "[see context]"
    assert run("diff", str(path), "--policy", str(policy), "--route", "still") == 0
    shown = capsys.readouterr().out
    assert "(enforced, on 25% of the conversations)" in shown
    assert "0 edits" in shown and "Nothing would change" in shown and "could move" not in shown


def test_diff_takes_the_policy_that_lies_here_where_it_has_one_route(tmp_path: Path, capsys: Any) -> None:
    Path("request.json").write_text(json.dumps(request("08:01")))
    Path("warmfront.yaml").write_text("version: 1\nroutes: [{name: only}]\n")
    assert run("diff", "request.json") == 0
    shown = capsys.readouterr().out
    assert "route only of warmfront.yaml" in shown and "see context" in shown and "no evidence" not in shown
    Path("warmfront.yaml").write_text(ROUTES)
    assert run("diff", "request.json") == 0
    shown = capsys.readouterr().out
    assert "warmfront.yaml has 3 routes; choose one with --route: plain, usual, still" in shown
    assert "One request holds no evidence" in shown


def test_a_preview_of_a_log_replays_as_the_gateway_does(tmp_path: Path, capsys: Any) -> None:
    first, second = request("2027-04-05T08:01:02Z"), request("2027-04-05T09:30:00Z")
    second["messages"] += [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "more"}]
    Path("log").write_text("\n".join(map(json.dumps, (first, second))))
    for replay, again in (("true", True), ("false", False)):
        Path("p.yaml").write_text(f"version: 1\nroutes: [{{name: r, canon: {{replay: {replay}}}}}]\n")
        assert run("diff", "log", "--policy", "p.yaml", "--json") == 0
        rows = json.loads(capsys.readouterr().out)["requests"]
        blocks = [[e for e in row["edits"] if e["rule"] == "context" and e["path"][1] == 1] for row in rows]
        assert len(blocks[0]) == 1
        assert (len(blocks[1]) == 1 and blocks[1][0]["after"] == blocks[0][0]["after"]) is again


def test_nothing_to_show_is_not_called_evidence(tmp_path: Path, capsys: Any) -> None:
    Path("request.json").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    assert run("diff", "request.json") == 0
    shown = capsys.readouterr().out
    assert "Nothing in this request looks as if it varied" in shown and "this could move" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--route", "r"], "--route needs a policy"),
        (["--policy", "p.yaml"], "p.yaml has 3 routes; choose one with --route: plain, usual, still"),
        (["--policy", "p.yaml", "--route", "plan"], "p.yaml: there is no route plan (did you mean plain?)"),
        (["--policy", "none.yaml"], "none.yaml: No such file"),
        (["--policy", "bad.yaml"], "bad.yaml:2: "),
        (["--policy", "binary.yaml"], "binary.yaml:1: is not UTF-8 text"),
        (["-r", "rules", "--route", "plain"], "use one of them"),
    ],
)
def test_a_policy_that_can_not_be_previewed(words: list[str], message: str, capsys: Any) -> None:
    Path("request.json").write_text(json.dumps(request("08:01")))
    Path("p.yaml").write_text(ROUTES)
    Path("bad.yaml").write_text("version: 1\nroutes: 3\n")
    Path("binary.yaml").write_bytes(b"\xff\xff")
    assert run("diff", "request.json", *words) == 2
    assert message in capsys.readouterr().err


def test_reasons_and_orders_are_shown(tmp_path: Path, capsys: Any) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n- {label: Current time, shape: clock}\nstages: [tool_order]\n")
    body = request("08:01", tools=[{"name": "b"}, {"name": "a"}])
    body["messages"].pop()
    path = tmp_path / "request.json"
    path.write_text(json.dumps(body))
    assert run("diff", str(path), "-r", str(rules)) == 0
    shown = capsys.readouterr().out
    assert "request 1: 1 edit, nothing moved (no_user_turn)" in shown
    assert "$.tools  tool_order" in shown and "+ 1 0" in shown


def test_wrapped_bodies_and_pretty_apply(tmp_path: Path, capfdbinary: Any) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n- {label: Current time, shape: clock}\n")
    wrapped = tmp_path / "wrapped.jsonl"
    wrapped.write_text(json.dumps({"id": 1, "body": request("08:01")}))
    assert run("apply", "-r", str(rules), str(wrapped)) == 0
    assert b"[see context]" in capfdbinary.readouterr().out
    pretty = tmp_path / "pretty.json"
    pretty.write_text(json.dumps(request("08:01"), indent=1))
    assert run("apply", "-r", str(rules), str(pretty)) == 0
    assert len(capfdbinary.readouterr().out.splitlines()) == 1


def test_bodies_that_can_not_be_restored_exactly_come_out_as_they_were(
    tmp_path: Path, capfdbinary: Any
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n- {label: Current time, shape: clock}\n")
    raw = json.dumps(request("04/05/2027")).replace("4/", "4\\/")
    path = tmp_path / "log.jsonl"
    path.write_text(raw)
    assert run("apply", "-r", str(rules), str(path)) == 0
    captured = capfdbinary.readouterr()
    assert captured.out == raw.encode() + b"\n"
    assert json.loads(captured.err)["reason"] == "not_exact"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log", None, "log: cannot be read: No such file"),
        ("log", "", "log:1: the file holds no request"),
        ("log", '{"messages": []}\n{oops}\n', "log:2: not JSON"),
        ("log", '{"prompt": "x"}', "log:1: not a chat request: it has no `messages` list"),
        ("log", "[1]", "log:1: not a chat request"),
        ("rules", None, "rules: cannot be read"),
        ("rules", "rules: [\n", "rules:2: not YAML"),
        ("rules", "rules:\n- label: A\n  shape: clok\n", "rules:3: rules[0].shape: unknown shape 'clok'"),
        ("rules", "rules:\n- label: A\n", "rules:2: rules[0].shape: must be given"),
        ("rules", "- a\n", "rules:1: ruleset: must be a mapping"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: Any, capsys: Any, name: str, content: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log").write_text(json.dumps(request("08:01")))
    Path("rules").write_text("rules: []\n")
    Path(name).unlink()
    if content is not None:
        Path(name).write_text(content)
    assert run("apply", "-r", "rules", "log") == 2
    assert f"warmfront canon: {message}" in capsys.readouterr().err


def test_output_that_can_not_be_written(log: Path, tmp_path: Path, capsys: Any) -> None:
    assert run("learn", str(log), "-o", str(tmp_path / "no" / "rules.yaml")) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_wrong_arguments(capsys: Any) -> None:
    for arguments in (["learn", "log", "-o", "x", "--floor", "0"], ["diff"], ["apply", "log"]):
        with pytest.raises(SystemExit) as caught:
            run(*arguments)
        assert caught.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_help_shows_an_example_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, argparse; from gateway.cli import canon\n"
        "p = argparse.ArgumentParser(); canon.register(p.add_subparsers())\n"
        "try: p.parse_args(['canon', 'diff', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'aiohttp'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "example: warmfront canon diff" in done.stdout
