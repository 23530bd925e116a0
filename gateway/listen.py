"""Whether the ports of a gateway can be had, asked before anything slow begins or anything is written.

Always holds: nothing stays bound after a check; a port that is taken is answered with a command line that
works, made of ports that are free at that moment.
"""

from __future__ import annotations

import errno
import socket

ADMIN_HOST = "127.0.0.1"
_TRIES = 100


class PortUnavailable(Exception):
    """An address can't be bound; the message names the flag, the address and the way out."""


def check_ports(host: str, port: int, admin_port: int, *, admin_host: str = ADMIN_HOST) -> None:
    """Raises PortUnavailable when one of the two listeners can't be bound (0 always can)."""
    wanted = (("--admin-port", admin_host, admin_port), ("--port", host, port))
    for flag, address, number in wanted:
        try:
            _bind(address, number)
        except OSError as error:
            message = f"{flag} {number}: {address}:{number}: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                data = _free(host, port, taken=admin_port)
                admin = _free(admin_host, admin_port, taken=data)
                flags = f"--port {data} --admin-port {admin}"
                message += (
                    f"; is another gateway running? To start beside it: {flags}"
                    f" (with make: make serve SERVE_ARGS='{flags}')"
                )
            raise PortUnavailable(message) from error


def _free(host: str, port: int, *, taken: int) -> int:
    """`port`, or the next one that can be bound and is not `taken`; 0 (any) where none is found."""
    for candidate in range(port, min(port + _TRIES, 65536)):
        if candidate == taken and candidate:
            continue
        try:
            _bind(host, candidate)
        except OSError:
            continue
        return candidate
    return 0


def _bind(host: str, port: int) -> None:
    """Bind and let go. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
