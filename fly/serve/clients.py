"""Identifies the client of a request, once for limits, turns, caches and the log. Knows nothing of endpoints."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path

from fly.errors import shorten
from fly.serve.settings import Settings, wrong_with_key

__all__ = ["Client", "Clients", "Shares", "read_keys", "wrong_with_headers"]

# Headers that may appear only once: with two, server and proxy might use different ones.
_ONCE = (
    *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"forwarded", b"host"),
    *(b"origin", b"transfer-encoding", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"),
)
_BODILESS = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Client:
    """The sender of a request. ``name`` is the same for all requests of one client: the digest of its API key or, if
    there are no keys, its address (for IPv6 its first 64 bits, since every customer gets a network of that size).
    ``key`` is the digest of the key; None without a valid key."""

    name: str
    address: str
    key: str | None = None


class Clients:
    """Identifies clients by the API keys in the settings and in their file.

    Raises:
        ValueError: the file has no keys, or a bad one.
        OSError: the file cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.keyed = bool(settings.api_keys or settings.api_keys_file)
        self._digests: frozenset[str] = frozenset()
        self.reload()

    def reload(self) -> int:
        """Read the file of keys again, and return how many keys there are. After an error the old keys stay."""
        file = self._settings.api_keys_file
        keys = [*self._settings.api_keys, *(() if file is None else read_keys(file))]
        self._digests = frozenset(hashlib.sha256(key.encode()).hexdigest() for key in keys)
        return len(self._digests)

    def identify(self, address: str, headers: dict[bytes, bytes]) -> Client:
        """Return the client of a request. Keys are compared by their digests, so timing reveals nothing about them.

        Raises ``ValueError`` if a trusted proxy names an address that is invalid."""
        try:
            ip = ip_address(address)
        except ValueError:
            if self._settings.trusted_proxies:
                raise ValueError(f"x-forwarded-for: {address[:60]!r} is not an address") from None
            network = address  # a Unix socket has no address
        else:
            if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
                ip = ip.ipv4_mapped
            network = str(ip_network((ip, 64), strict=False) if isinstance(ip, IPv6Address) else ip)
            address = str(ip)
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).hexdigest()
        if scheme.lower() == b"bearer" and digest in self._digests:
            return Client(digest, address, digest)
        return Client(network, address)


def read_keys(path: Path) -> list[str]:
    """Read a file of keys: one per line; empty lines and lines that begin with # are skipped. Raises ``ValueError`` and
    ``OSError``."""
    keys = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if not (key := line.strip()) or key.startswith("#"):
            continue
        if problem := wrong_with_key(key):
            raise ValueError(f"{path}, line {number}: the key {problem}")
        keys.append(key)
    if not keys:
        raise ValueError(f"{path}: has no keys, so nobody could connect")
    return keys


def wrong_with_headers(method: str, version: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Say why the headers are ambiguous, so that the request is not read; None if they are clear."""
    headers = list(headers)
    names = Counter(name for name, _ in headers)
    if twice := [name.decode() for name in _ONCE if names[name] > 1]:
        return f"the header {twice[0]} is given {names[twice[0].encode()]} times"
    header_values = dict(headers)
    if version not in ("1.0", "1.1", "2"):
        return f"HTTP/{version} is not supported"
    if version == "1.1" and b"host" not in header_values:
        return "the header host is missing"
    if b"content-length" in header_values and b"transfer-encoding" in header_values:
        return "content-length and transfer-encoding are both given"
    if header_values.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
        return "transfer-encoding: only chunked is read"
    encoding = header_values.get(b"content-encoding", b"identity").strip().lower()
    if encoding != b"identity":
        return f"content-encoding {shorten(encoding.decode('latin-1'))} is not read; send the body as it is"
    if method in _BODILESS and (
        header_values.get(b"content-length", b"0").strip() != b"0" or b"transfer-encoding" in header_values
    ):
        return f"{method} requests have no body"
    return None


class Shares:
    """Divides a ``total`` among clients. One client alone may use three quarters. The rest is kept for clients that use
    less than an equal part."""

    def __init__(self, total: int) -> None:
        self.total, self.sum = total, 0  # all that may be used, and what the clients use together
        self.held: Counter[str] = Counter()

    def limit(self, total: int) -> None:
        """Let the clients use at most ``total`` from now on."""
        self.total = total

    def has_room(self, client: str, amount: int) -> bool:
        """Whether a client may use ``amount`` more."""
        part = self.total // (len(self.held) + 1 + (client not in self.held))
        client_sum = self.held[client] + amount
        return self.sum + amount <= (self.total if client_sum <= part else 3 * self.total // 4)

    def take(self, client: str, amount: int) -> None:
        """Record that a client uses ``amount`` more, or less if it is negative."""
        self.sum += amount
        self.held[client] += amount
        if not self.held[client]:
            del self.held[client]
