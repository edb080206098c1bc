"""The operator's settings of a server, apart from the model. Knows nothing of HTTP or engines."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["Settings", "wrong_with_key"]

_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+")


def wrong_with_key(key: str) -> str | None:
    """Say what is wrong with an API key, without showing the key; None if nothing is."""
    if not key.strip():
        return "is empty, which would let everybody in"
    if any(character.isspace() for character in key):
        return "has a blank in it: a key is one word"
    if not (key.isascii() and key.isprintable()):
        return "has characters in it that a header cannot carry: a key is printable ASCII"
    return None


class Settings(BaseModel):
    """Limits and permissions of a server. Unknown fields and values out of range are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0 is any free port
    name: str | None = Field(default=None, min_length=1)  # what clients call the model; None is its path
    policies: tuple[str, ...] | None = None  # rules that requests may name (see ``Rules``); None is all installed ones
    require_lossless: bool = False  # whether to refuse policies that are not lossless
    api_keys: tuple[str, ...] = ()  # requests must have one of them; empty: no key is needed
    api_keys_file: Path | None = None  # further keys, one per line; SIGHUP reads it again
    # Addresses and networks of proxies whose X-Forwarded-For is believed.
    trusted_proxies: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # host names besides its own: see ``Origins``
    cors_origins: tuple[str, ...] = ()  # other pages that may send requests
    access_log: bool = False  # a line for every request
    max_connections: int = Field(default=1000, ge=16)  # fewer if file descriptors are few
    max_waiting: int = Field(default=256, ge=0)  # completions in the queue; more are refused (429)
    max_open: int | None = Field(default=None, ge=1)  # completions of one client at once
    max_tokens: int | None = Field(default=None, ge=1)  # per completion; None is the model's context
    max_k: int | None = Field(default=None, ge=0)  # limit of drafted tokens per round; None: see ``Rules``
    max_n: int = Field(default=32, ge=1)  # completions of one request, over all of its prompts
    # Which requests share the cache of a common prompt prefix: those with the same key (without keys: all), or all.
    share_prefixes: Literal["key", "all"] = "key"
    # While a stream is open, tokens of several rounds in one engine call are held back for at most this many seconds.
    stream_interval: float = Field(default=0.01, ge=0, le=1, allow_inf_nan=False)
    max_body: int = Field(default=4 * 2**20, ge=1)  # bytes of a request
    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)  # seconds per request, including its wait
    read_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)  # seconds to receive a request
    write_timeout: float = Field(default=60.0, gt=0, allow_inf_nan=False)  # seconds for a client to take data
    drain_timeout: float = Field(
        default=600.0, ge=0, allow_inf_nan=False
    )  # for running requests to finish when the server is stopped

    @field_validator("api_keys")
    @classmethod
    def _keys_are_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for number, key in enumerate(value):
            if wrong := wrong_with_key(key):
                raise ValueError(f"api_keys {number} {wrong}")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            try:
                ip_network(network)
            except ValueError as error:
                raise ValueError(f"trusted_proxies: {error}; give an address or a network, as 10.0.0.0/8") from None
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(f"allowed_hosts {name!r} is not a host name without a port, such as fly.example.org")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_whole(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins {origin!r} must be '*' or an origin such as https://example.org:8080")
        return value
