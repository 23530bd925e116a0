"""What is wrong with a policy, and where.

This file owns the two types through which every complaint about a policy reaches a person: `Problem`
(one complaint with its file, line and JSON path) and `PolicyError` (all complaints of one load at once).
A problem never quotes a key or any other value that may be a secret; names and choices it may quote.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One complaint: `line` and `column` count from 1 (0 = unknown), `path` is a JSON path such as
    `routes[0].canon.mode` (`$` is the document), `code` names the lint check that found it ("" = not
    valid).
    """

    file: str
    line: int
    path: str
    message: str
    column: int = 0
    code: str = ""

    def __str__(self) -> str:
        tail = f" [{self.code}]" if self.code else ""
        return f"{self.file}:{self.line}: {self.path}: {self.message}{tail}"


class PolicyError(ValueError):
    """A policy that can't be used. `problems` holds every complaint, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: list[Problem] = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def quoted(text: str) -> str:
    """The text in double quotes, shortened to one line of at most 60 characters."""
    flat = "".join(c if c.isprintable() else "?" for c in text)
    return f'"{flat[:_SHOWN_CHARS]}..."' if len(flat) > _SHOWN_CHARS else f'"{flat}"'


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" (did you mean x?)"` when one of the known words is close to `word`, else `""`."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower()[:_SHOWN_CHARS], by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""


def child_path(path: str, step: str | int) -> str:
    """The JSON path of one entry below `path`; keys that are no plain words are quoted."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    if not _BARE_KEY.match(step):
        return f"{path}[{quoted(step)}]"
    return step if path == "$" else f"{path}.{step}"
