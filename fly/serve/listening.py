"""Checks that a server can listen at an address, before its model is loaded. Knows nothing of the server."""

from __future__ import annotations

import errno
import os
import socket

__all__ = ["require_free"]

_REASONS = {
    errno.EADDRINUSE: "it is in use; take another by --port, or stop the server that has it",
    errno.EACCES: "this user may not take it; take one from 1024 on by --port",
    errno.EADDRNOTAVAIL: "this machine does not have this address; --host takes 127.0.0.1, 0.0.0.0 or one of its own",
}


def require_free(host: str, port: int) -> None:
    """Raise ``ValueError``, which says what to do, if no server can listen on ``port`` of ``host``. Nothing stays
    open, so that clients are refused until the server is there. Port 0 takes any that is free."""
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ValueError(f"--host {host!r} is not an address of this machine: {error.strerror}") from None
    for family, kind, protocol, _, address in addresses:
        if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
            continue
        with socket.socket(family, kind, protocol) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, for a port just left
            if family == socket.AF_INET6:
                attempt.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                attempt.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and len(addresses) > 1:
                    continue  # such as ::1 of localhost where there is no IPv6
                code = error.errno or 0
                raise ValueError(f"port {port} of {host!r}: {_REASONS.get(code, os.strerror(code))}") from None
