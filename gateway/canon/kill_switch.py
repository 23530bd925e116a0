"""The kill switch of canonicalization: a small file that every gateway of a machine watches.

Owns `canon-off.json` in the runtime directory: `{"all": true}` or `{"routes": ["chat"]}`. Always holds: a
change of the file is in force within one poll (1 s); it survives restarts; a file that cannot be read
switches everything off, because someone meant to switch something off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import orjson

FILE_NAME = "canon-off.json"


class KillSwitch:
    """What is switched off. `poll` reads the file when it changed; `set_off` and `set_on` write it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._stamp: tuple[int, int] | None = None
        self._all = False
        self._routes: frozenset[str] = frozenset()
        self.poll()

    def engaged(self, route: str) -> bool:
        """True when this route must not canonicalize."""
        return self._all or route in self._routes

    @property
    def everything(self) -> bool:
        """True when no route may canonicalize."""
        return self._all

    def poll(self) -> None:
        """Take over the file's content when it changed."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            content = orjson.loads(self._path.read_bytes())
            routes = frozenset(str(name) for name in content.get("routes", ()))
            everything = bool(content.get("all"))
        except FileNotFoundError:
            self._stamp, self._all, self._routes = None, False, frozenset()
            return
        except (OSError, ValueError, AttributeError, TypeError):
            self._all = True
            return
        self._stamp, self._all, self._routes = stamp, everything, routes

    def set_off(self, route: str | None) -> None:
        """Switch one route off, or all of them."""
        if route is None:
            self._write(True, self._routes)
        else:
            self._write(self._all, self._routes | {route})

    def set_on(self, route: str | None) -> None:
        """Lift the switch for one route, or entirely."""
        if route is None:
            self._write(False, frozenset())
        else:
            self._write(self._all, self._routes - {route})

    def _write(self, everything: bool, routes: Iterable[str]) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        try:
            draft.write_bytes(orjson.dumps({"all": everything, "routes": sorted(routes)}))
            os.replace(draft, self._path)
        except OSError as error:  # the file that a person knows, not the draft beside it
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._stamp = None
        self.poll()
