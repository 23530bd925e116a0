"""What is this machine, and what only looks like it."""

from __future__ import annotations

import pytest

from gateway.config import GatewayConfig
from gateway.loopback import host_name, is_loopback, is_loopback_origin


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "127.0.0.1", "127.9.9.9", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert GatewayConfig(host=host).loopback


@pytest.mark.parametrize(
    "host", ["", "127.evil.org", "127.1", "127.0.0.1.nip.io", "0.0.0.0", "::", "10.0.0.1"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
    assert not GatewayConfig(host=host).headers_exposed


@pytest.mark.parametrize(
    ("header", "name"),
    [("LocalHost:80", "localhost"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("h", "h"), ("h:x", "h:x")],
)
def test_host_names(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("origin", "ours"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:9", True),
        ("null", False),
        ("", False),
        ("file://", False),
        ("http://[::1", False),
        ("http://localhost.evil.org", False),
        ("http://127.evil.org", False),
        ("http://localhost@evil.org", False),
        ("ftp://localhost", False),
    ],
)
def test_origins(origin: str, ours: bool) -> None:
    assert is_loopback_origin(origin) is ours
