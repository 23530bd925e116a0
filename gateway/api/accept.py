"""Takes a request in: its body, its id and the few headers that travel on.

Owns the limits of acceptance. Always holds: a body that announces more than the limit is refused before a
byte of it is asked for (`Expect: 100-continue` is answered only then), one that turns out longer is refused
before it is held whole; a body that does not arrive in time ends its request; nothing a client writes in a
header reaches an upstream or a log unless its form was checked here; a body of a type that a page may send to
any site unasked is refused.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping

from aiohttp import web

from gateway import errors
from gateway.loopback import host_name, is_loopback, is_loopback_origin

_ENCODINGS = frozenset(("identity", "gzip", "deflate"))
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


async def read_body(request: web.BaseRequest, limit: int, timeout_s: float) -> bytes:
    """The body's bytes, read once; raises ApiError 408, 413 or 415."""
    headers = request.headers
    _check_media_type(headers)
    if headers.get("Content-Encoding", "identity").strip().lower() not in _ENCODINGS:
        raise errors.unsupported_encoding()
    announced = request.content_length
    if announced is not None and announced > limit:
        raise errors.body_too_large(limit)
    if headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():  # all of it is here already
            body = await request.read()
        else:
            async with asyncio.timeout(timeout_s):
                body = await request.read()
    except TimeoutError:
        raise errors.body_timeout() from None
    except web.HTTPRequestEntityTooLarge:
        raise errors.body_too_large(limit) from None
    except web.RequestPayloadError:
        raise errors.invalid(
            "The request body could not be read: it is cut short or badly encoded."
        ) from None
    if len(body) > limit:
        raise errors.body_too_large(limit)
    return body


def _check_media_type(headers: Mapping[str, str]) -> None:
    content_type = headers.get("Content-Type", "").strip()
    essence = content_type.partition(";")[0].strip().lower()
    if essence == "application/json" or ("/" in essence and essence.endswith("+json")):
        return
    if content_type or "Origin" in headers:  # a page can send a body without a type to any site
        raise errors.unsupported_media(essence or "a body without a type")


def check_site(headers: Mapping[str, str], own_host: str) -> None:
    """Refuse, where nobody needs a key, what a page of another site may have sent; raises ApiError 403.

    The Host must be a loopback name or `own_host` (else a name was rebound to this machine), the Origin, if
    any, that of a page of this machine.
    """
    host = host_name(headers.get("Host", ""))
    if not is_loopback(host) and host.strip("[]") != own_host.lower():
        raise errors.foreign_site()
    origin = headers.get("Origin")
    if origin is not None and not is_loopback_origin(origin):
        raise errors.foreign_site()


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's `x-request-id` where its form is safe, else a fresh one."""
    given = headers.get("x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return "req-" + os.urandom(12).hex()


def traceparent_of(headers: Mapping[str, str]) -> str | None:
    """A well-formed W3C `traceparent`, or None."""
    given = headers.get("traceparent")
    return given if given is not None and _TRACEPARENT.fullmatch(given) else None
