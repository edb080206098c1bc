"""Checks the host name in a request, and the page that a browser sent it from. Knows nothing of keys or endpoints.

Any web page can make a browser send requests to any address. With DNS rebinding, where a page's own name resolves to
that address, it can even read the answers. So the host name must be known (``Host``), and requests that change anything
must not come from another page (``Origin``). Clients other than browsers send no ``Origin``.
"""

from __future__ import annotations

import ipaddress
import re
import socket

__all__ = ["Origins", "is_loopback"]

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:/@\s]+)(:\d*)?")
_READS = ("GET", "HEAD", "OPTIONS")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether only this machine can reach a server that is bound to ``name``."""
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


class Origins:
    """Checks host name and origin of every request, before anything else.

    Args:
        bound: the address that the server listens on.
        allowed_hosts: further host names; ``*.example.org`` allows any name below it, ``*`` any name.
        cors_origins: pages that may send requests, besides the server's own; ``*`` allows any page.
        keys: whether requests need an API key, which pages of strangers do not have.
    """

    def __init__(self, bound: str, allowed_hosts: tuple[str, ...], cors_origins: tuple[str, ...], keys: bool) -> None:
        self._local = is_loopback(bound)
        self._any = "*" in allowed_hosts or (not self._local and keys and not allowed_hosts)
        local_names = {"localhost", bound} if self._local else {"localhost", bound, socket.gethostname()}
        self._names = {name.lower() for name in (*local_names, *allowed_hosts)}
        self._cors = {origin.lower() for origin in cors_origins}

    def refuse(self, method: str, headers: dict[bytes, bytes]) -> str | None:
        """Say why a request with these headers is refused; None if it is not."""
        host = headers.get(b"host")
        if host is not None and not self._any and not self._known(host.decode("latin-1").lower()):
            return f"this server does not answer to the name {_short(host)}; the operator may allow it (--allowed-host)"
        origin = headers.get(b"origin")
        if origin is None or method in _READS or "*" in self._cors:
            return None
        text = origin.decode("latin-1").lower()
        if text in self._cors or (host is not None and text.partition("://")[2] == host.decode("latin-1").lower()):
            return None
        return f"pages of {_short(origin)} may not send requests here; the operator may allow them (--cors-origin)"

    def _known(self, host: str) -> bool:
        if (match := _HOST.fullmatch(host)) is None:
            return False
        name = match["name"].rstrip(".")
        if (address := _address(name)) is not None:
            return not self._local or address.is_loopback or name in self._names  # DNS rebinding needs a name
        parents = (f"*.{name.split('.', n)[-1]}" for n in range(1, name.count(".") + 1))
        return name in self._names or any(parent in self._names for parent in parents)


def _short(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
