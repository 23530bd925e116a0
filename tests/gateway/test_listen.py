"""Ports that are taken: named, with a way out that works; nothing stays bound."""

from __future__ import annotations

import re
import socket

import pytest

from gateway.listen import PortUnavailable, check_ports

HOST = "127.0.0.1"


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_taken_port_is_named_with_ports_that_are_free(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        data, admin = (port, 0) if flag == "--port" else (0, port)
        with pytest.raises(PortUnavailable) as caught:
            check_ports(HOST, data, admin)
        message = str(caught.value)
        assert message.startswith(f"{flag} {port}: {HOST}:{port}: Address already in use; is another gateway")
        found = re.search(
            r"--port (\d+) --admin-port (\d+) \(with make: make serve SERVE_ARGS='(.*)'\)", message
        )
        assert found is not None
        assert found[3] == f"--port {found[1]} --admin-port {found[2]}"
        assert str(port) not in (found[1], found[2])
        check_ports(HOST, int(found[1]), int(found[2]))
    check_ports(HOST, data, admin)


def test_both_proposed_ports_differ() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(PortUnavailable) as caught:
            check_ports(HOST, port, port + 1 if port < 65000 else port - 1)
        found = re.search(r"--port (\d+) --admin-port (\d+)", str(caught.value))
        assert found is not None and found[1] != found[2]


def test_an_address_of_another_machine_gets_no_other_ports() -> None:
    with pytest.raises(PortUnavailable) as caught:
        check_ports("192.0.2.1", 0, 0)
    assert str(caught.value).startswith("--port 0: 192.0.2.1:0: ")
    assert "make serve" not in str(caught.value)
