"""What an operator decides about a server, the model aside. Knows nothing of HTTP or engines."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["Settings"]


class Settings(BaseModel):
    """Limits and permissions of a server. Unknown fields and values out of range are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0 is any that is free
    name: str | None = Field(default=None, min_length=1)  # what clients call the model; None is its path
    policies: tuple[str, ...] | None = None  # rules that requests may name (see ``Rules``); None is all installed ones
    require_lossless: bool = False  # whether a policy without that guarantee is refused
    api_keys: tuple[str, ...] = ()  # one of which requests must bear; none asks for none
    max_waiting: int = Field(default=256, ge=0)  # completions that wait for their turn; more are refused (429)
    max_open: int | None = Field(default=None, ge=1)  # completions that a client may have at once, waiting ones too
    max_tokens: int | None = Field(default=None, ge=1)  # of one completion; None is the model's context
    max_k: int = Field(default=64, ge=0)  # most tokens a request may have drafted a round
    max_n: int = Field(default=32, ge=1)  # completions of one request, over all of its prompts
    # Whose prompts share what is cached of their beginnings: those of one key (without keys, everybody's), or of all.
    share_prefixes: Literal["key", "all"] = "key"
    # Seconds for which tokens of rounds that are taken in one call are held back while somebody reads a stream.
    stream_interval: float = Field(default=0.01, ge=0, le=1, allow_inf_nan=False)
    max_body: int = Field(default=4 * 2**20, ge=1)  # bytes of a request
    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)  # seconds for one request, its wait included
    read_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)  # seconds for a request's body to come in
    write_timeout: float = Field(default=60.0, gt=0, allow_inf_nan=False)  # for a reader to take what was written
    drain_timeout: float = Field(default=600.0, ge=0, allow_inf_nan=False)  # for what runs to finish when told to end

    @field_validator("api_keys")
    @classmethod
    def _keys_say_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not key.strip() for key in value):
            raise ValueError("an empty API key would let everybody in")
        return value
