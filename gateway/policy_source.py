"""Where the running policy comes from: a file that can be read again and edited in place, or a text sent to
the admin plane.

Always holds: a change is made in two steps, a checked `Draft` first and then `take`, so that a text that
does not load changes nothing; an edit of the file is atomic (draft, fsync, rename) and keeps its mode and its
comments; what is in force is `policy`, and `text` is what it was made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.policy_file import read_beside, read_text, replace_text
from policies import Policy, load_policy, set_canon_mode


@dataclass(frozen=True, slots=True)
class Draft:
    """A policy that loads and is not in force yet. `write` is what to do with the file: the text that must
    be there, and the one that takes its place; None leaves the file alone.
    """

    policy: Policy
    text: str
    name: str
    write: tuple[str, str] | None = None


class PolicySource:
    """The policy in force and its text. `path` is None while the policy came from no file."""

    def __init__(self, path: Path | None, text: str, *, name: str | None = None) -> None:
        """Raises `policies.PolicyError` when `text` is not a valid policy."""
        self.path = path.absolute() if path is not None else None
        self._shown = str(path) if path is not None else None
        self._current = self._draft(text, name or self._shown or "default policy")

    @classmethod
    def from_file(cls, path: Path) -> PolicySource:
        """Read and check a policy file. Raises OSError, UnicodeDecodeError, `policies.PolicyError`."""
        return cls(path, read_text(path))

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._current.policy

    @property
    def text(self) -> str:
        """What the policy in force was made from."""
        return self._current.text

    @property
    def name(self) -> str:
        """Where the policy in force came from, as messages name it."""
        return self._current.name

    @property
    def in_file(self) -> bool:
        """Whether the policy in force is the file's, and changes of it are written there."""
        return self.path is not None and self.name == self._shown

    def reloaded(self) -> Draft:
        """The file as it is now; without a file, what is in force. Raises as `from_file`."""
        if self.path is None or self._shown is None:
            return self._current
        return self._draft(read_text(self.path), self._shown)

    def replaced(self, text: str, name: str) -> Draft:
        """A text that is in no file; the file, if there is one, is left alone. Raises PolicyError."""
        return self._draft(text, name)

    def with_mode(self, route: str, mode: str) -> Draft:
        """One route in another canonicalization mode, in the file too where the policy came from one (with
        whatever else was changed there meanwhile). Raises as `from_file`.
        """
        if not self.in_file or self.path is None:
            return self._draft(set_canon_mode(self.text, route, mode, source=self.name), self.name)
        before = read_text(self.path)
        text = set_canon_mode(before, route, mode, source=self.name)
        return self._draft(text, self.name, None if text == before else (before, text))

    def take(self, draft: Draft) -> Draft:
        """Put a draft in force and return what undoes it (to be taken in turn).

        Raises OSError, with nothing changed, when the file can't be written or changed since the draft.
        """
        if draft.write is not None and self.path is not None:
            replace_text(self.path, *draft.write)
        undo = Draft(self.policy, self.text, self.name, draft.write and draft.write[::-1])
        self._current = draft
        return undo

    def _draft(self, text: str, name: str, write: tuple[str, str] | None = None) -> Draft:
        read_file = read_beside(self.path) if self.path is not None else None
        return Draft(load_policy(text, source=name, read_file=read_file), text, name, write)
