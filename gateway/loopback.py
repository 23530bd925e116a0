"""What counts as this machine: addresses, Host headers and origins.

Owns the one answer to "is that loopback". Always holds: a name is judged by what it is, never by how it
begins (`127.evil.org` is somebody else's); what cannot be read is not loopback.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """True for `localhost` and the loopback addresses; an IPv6 address may stand in brackets."""
    name = host.lower().removesuffix(".")
    if name == "localhost":
        return True
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, in lower case and without the port."""
    name, colon, port = header.strip().lower().rpartition(":")
    return name if colon and port.isdigit() else header.strip().lower()


def is_loopback_origin(origin: str) -> bool:
    """True for the origin of a page that this machine served over http(s), at any port."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and host is not None and is_loopback(host)
