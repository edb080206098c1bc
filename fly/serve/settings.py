"""What an operator decides about a server, the model aside. Knows nothing of HTTP or engines."""

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
    """What is wrong with an API key, which the answer does not show; None if nothing is."""
    if not key.strip():
        return "is empty: that is no key, and would let everybody in"
    if any(character.isspace() for character in key):
        return "has a blank in it: a key is one word"
    if not (key.isascii() and key.isprintable()):
        return "has characters in it that a header cannot carry: a key is printable ASCII"
    return None


class Settings(BaseModel):
    """Limits and permissions of a server. Unknown fields and values out of range are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0 is any that is free
    name: str | None = Field(default=None, min_length=1)  # what clients call the model; None is its path
    policies: tuple[str, ...] | None = None  # rules that requests may name (see ``Rules``); None is all installed ones
    require_lossless: bool = False  # whether a policy without that guarantee is refused
    api_keys: tuple[str, ...] = ()  # one of which requests must bear; none asks for none
    api_keys_file: Path | None = None  # of further keys, one a line; read again when the server is told to
    # Addresses and networks of proxies: who asks through them is who they say (X-Forwarded-For).
    trusted_proxies: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names to answer to besides its own: see ``Origins``
    cors_origins: tuple[str, ...] = ()  # pages from elsewhere that may send requests
    access_log: bool = False  # a line for every request
    max_connections: int = Field(default=1000, ge=16)  # open at the same time; fewer where there are few descriptors
    max_waiting: int = Field(default=256, ge=0)  # completions that wait for their turn; more are refused (429)
    max_open: int | None = Field(default=None, ge=1)  # completions that a client may have at once, waiting ones too
    max_tokens: int | None = Field(default=None, ge=1)  # of one completion; None is the model's context
    max_k: int | None = Field(default=None, ge=0)  # most tokens that may be drafted a round; None: see ``Rules``
    max_n: int = Field(default=32, ge=1)  # completions of one request, over all of its prompts
    # Whose prompts share what is cached of their beginnings: those of one key (without keys, everybody's), or of all.
    share_prefixes: Literal["key", "all"] = "key"
    # Seconds for which tokens of rounds that are taken in one call are held back while a stream is open.
    stream_interval: float = Field(default=0.01, ge=0, le=1, allow_inf_nan=False)
    max_body: int = Field(default=4 * 2**20, ge=1)  # bytes of a request
    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)  # seconds for one request, its wait included
    read_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)  # seconds for a request to come in
    write_timeout: float = Field(default=60.0, gt=0, allow_inf_nan=False)  # for a reader to take what was written
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
                raise ValueError(f"allowed_hosts {name!r} is no name without a port, such as fly.example.org")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_whole(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins {origin!r} is no origin such as https://example.org:8080, nor '*'")
        return value
