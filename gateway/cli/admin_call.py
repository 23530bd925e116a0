"""One call of a running gateway's admin plane, from the command line.

Always holds: no proxy is asked (the admin plane is on loopback), and silence is told apart from a refusal.
"""

from __future__ import annotations

import json
from typing import Any

USUAL_ADMIN = "http://127.0.0.1:9090"
_TIMEOUT_S = 10.0
_MAX_BYTES = 8_000_000


class NoAnswer(Exception):
    """Nothing answers there; the message says where and why."""


class Refusal(Exception):
    """The gateway refused; the message is its own, behind the URL; `reason` is the message alone."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.reason = reason


class BadUrl(Exception):
    """What was given for a URL is none."""


def ask(admin: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET `path`, or POST `body` to it, and return the JSON answer. Raises BadUrl, NoAnswer, Refusal."""
    import http.client
    import urllib.error
    import urllib.request

    url = admin.rstrip("/") + path
    if not url.startswith(("http://", "https://")):
        raise BadUrl(f"--admin wants a URL like {USUAL_ADMIN}, not {admin}")
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            raise Refusal(url, _message(error.read(_MAX_BYTES)) or f"HTTP {error.code}") from None
    except (http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NoAnswer(f"no answer from {url}: {getattr(reason, 'strerror', None) or reason}") from None
    if not isinstance(answer, dict):
        raise NoAnswer(f"no answer from {url}: not a gateway's admin plane")
    return answer


def _message(raw: bytes) -> str:
    try:
        error = json.loads(raw)["error"]
        return error if isinstance(error, str) else str(error["message"])
    except (ValueError, KeyError, TypeError):
        return ""
