"""The operator's settings of a server, apart from the model. Knows nothing of HTTP or engines."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["Settings", "wrong_with_key"]

_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def wrong_with_key(key: str) -> str | None:
    """Say what is wrong with an API key, without showing the key; None if nothing is."""
    if not key.strip():
        return "is empty, which would let everybody in"
    if any(character.isspace() for character in key):
        return "has a blank in it: a key is one word"
    if not (key.isascii() and key.isprintable()):
        return "has characters in it that a header cannot carry: a key is printable ASCII"
    return None


def _set(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


class Settings(BaseModel):
    """Limits and permissions of a server. Unknown fields and values out of range are errors. The descriptions are the
    help of ``fly serve``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = _set("127.0.0.1", "The address to listen on; 0.0.0.0 is reachable from other machines.")
    port: int = _set(8000, "The port; 0 takes a free one.", ge=0, le=65535)
    name: str | None = _set(
        None, "The model's name for clients, who then see 'draft' for its draft. Default: their paths.", min_length=1
    )
    policies: tuple[str, ...] | None = _set(
        None,
        "What requests may name: rules ('fly', with any parameters) or whole policies ('fly & after(2)'); repeatable. "
        "Default: all installed rules.",
    )
    require_lossless: bool = _set(False, "Refuse every policy that is not lossless.")
    api_keys: tuple[str, ...] = _set(
        (),
        "A key that requests must bear; repeatable. Other users of the machine can see it: better use --api-keys-file. "
        "Default: $FLY_API_KEY.",
    )
    api_keys_file: Path | None = _set(
        None, "A file with one key a line; requests must bear one of them. It is read again on SIGHUP."
    )
    trusted_proxies: tuple[str, ...] = _set(
        (),
        "Addresses and networks of proxies whose X-Forwarded-For is believed ('10.0.0.1,192.168.0.0/16'); repeatable. "
        "Default: none.",
    )
    allowed_hosts: tuple[str, ...] = _set(
        (), "A host name to answer to besides its own ('*.example.org', '*'); repeatable."
    )
    cors_origins: tuple[str, ...] = _set((), "A page that may send requests ('https://example.org', '*'); repeatable.")
    access_log: bool = _set(False, "Log a line for every request, with its key hashed.")
    max_connections: int = _set(1000, "The most connections open at a time; fewer if file descriptors are few.", ge=16)
    max_waiting: int = _set(256, "The most completions that wait; more get a 429.", ge=0)
    max_open: int | None = _set(
        None, "The most completions that a client (a key; without keys an address) has at a time.", ge=1
    )
    max_tokens: int | None = _set(None, "The most tokens of a completion. Default: the model's context.", ge=1)
    max_k: int | None = _set(
        None, "The most tokens that a request may have drafted in a round. Default: 64, or --k.", ge=0
    )
    max_n: int = _set(32, "The most completions of one request, over all of its prompts.", ge=1)
    share_prefixes: Literal["key", "all"] = _set(
        "key", "Which requests share cached beginnings: requests with one API key ('key'), or all."
    )
    stream_interval: _Finite = _set(
        0.01, "Seconds for which tokens may be held back, to send several rounds at once.", ge=0, le=1
    )
    max_body: int = _set(4 * 2**20, "The most bytes of a request.", ge=1)
    timeout: _Finite = _set(600.0, "The most seconds for a request, waiting included.", gt=0)
    read_timeout: _Finite = _set(30.0, "The most seconds to receive a request.", gt=0)
    write_timeout: _Finite = _set(60.0, "The most seconds for a client to take data.", gt=0)
    drain_timeout: _Finite = _set(600.0, "Seconds to finish running requests when the server is stopped.", ge=0)

    @field_validator("api_keys")
    @classmethod
    def _keys_are_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for number, key in enumerate(value):
            if problem := wrong_with_key(key):
                raise ValueError(f"api_keys {number} {problem}")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        networks = tuple(network for each in value for network in each.split(","))
        for network in networks:
            try:
                ip_network(network)
            except ValueError as error:
                raise ValueError(f"trusted_proxies {error}; give an address or a network, as 10.0.0.0/8") from None
        return networks

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
