"""Requests to an OpenAI-compatible server over HTTP, with errors in words. Knows nothing of what is asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import httpx2

__all__ = ["BUSY", "Client", "Failed", "Received", "Refused", "Unreachable"]

BUSY = frozenset({429, 503})  # a full server asks clients to come back
_TRIES = 6
_LONGEST_WAIT = 30.0  # seconds before another try, whatever the server asks for
_EXCERPT = 300  # characters of a server's words in an error


class Unreachable(ConnectionError):
    """No OpenAI-compatible server answers at the address."""


class Refused(Exception):
    """The server refused a request (4xx), perhaps because it does not support a field."""


class Failed(Exception):
    """The server did not answer a request properly: 5xx, no JSON, a broken connection, or a timeout."""


@dataclass(frozen=True)
class Received:
    """The answer to one request: its document, the seconds of the try that was answered, and how many tries it took."""

    document: Mapping[str, Any]
    seconds: float
    tries: int


class Client:
    """A server's address. It may be used by several threads.

    Args:
        url: with or without ``/v1``.
        key: a bearer token. No error shows it.
        timeout: the most seconds for one answer.

    Raises ``Unreachable`` for a URL that is no address of a server, or that holds a name, a key or a query.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        if "://" not in url:
            raise Unreachable(f"{url!r} has no scheme: write 'http://{url}'")
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.root = url.rstrip("/").removesuffix("/v1")
        self.timeout, self._key = timeout, key
        try:
            address = httpx2.URL(self.root)
            self.http = httpx2.Client(base_url=self.root, headers=headers, timeout=timeout, limits=limits)
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise Unreachable(f"{url!r} is no address: {error}") from None
        if address.userinfo or address.query or address.fragment:
            raise Unreachable(f"the address of {address.host!r} holds more than host, port and path; a key goes apart")
        if address.scheme not in ("http", "https") or not address.host:
            raise Unreachable(f"{url!r} is no address of HTTP: write http://HOST:PORT")

    def close(self) -> None:
        self.http.close()

    def list_models(self, option: str) -> list[Mapping[str, Any]]:
        """Return what ``/v1/models`` lists, at least one model. Raises ``Unreachable`` with what it answers instead and
        the ``option`` that names a model."""
        try:
            answer = self.http.get("/v1/models")
        except httpx2.HTTPError as error:
            raise Unreachable(f"{self.root} does not answer: {type(error).__name__}: {error}") from None
        try:
            models = answer.json()["data"]
            str(models[0]["id"])
        except (ValueError, LookupError, TypeError):
            summary = f"{self.root}/v1/models answers {answer.status_code}"
            if answer.status_code == 404 and answer.url.path != "/v1/models":
                raise Unreachable(f"{summary}: is the path of the URL right?") from None
            text = self.excerpt(answer.text, 80)
            raise Unreachable(f"{summary} {text!r}, which names no model; name one with {option}") from None
        return list(models)

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Fetch another path of the server, as JSON or as text; None if there is no such path."""
        try:
            answer = self.http.get(path) if body is None else self.http.post(path, json=body)
            if answer.status_code != 200:
                return None
            return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
        except (httpx2.HTTPError, ValueError):
            return None

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        again: Collection[int] = BUSY,
        patient: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> Received:
        """Send a request. Statuses in ``again`` and, if ``patient``, broken connections are tried again a few times,
        after 1, 2, 4, … seconds or as many as the server asks for. ``before`` is called before each try.

        Raises ``Refused`` or ``Failed`` with the status and the server's own words.
        """
        for tries in itertools.count(1):
            before()
            start = monotonic()
            try:
                answer = self.http.post(path, json=body)
            except httpx2.TimeoutException as error:
                raise Failed(f"no answer within {self.timeout:g} s ({type(error).__name__})") from None
            except httpx2.HTTPError as error:
                if not patient or tries == _TRIES:
                    raise Failed(f"{type(error).__name__}: {error}{_after(tries)}") from None
                wait = None
            else:
                if answer.status_code not in again or tries == _TRIES:
                    break
                wait = answer.headers.get("retry-after")
            sleep(_seconds(wait, 2.0 ** (tries - 1)))
        seconds = monotonic() - start
        excerpt = self.excerpt(answer.text)
        if 400 <= answer.status_code < 500:
            raise Refused(f"{answer.status_code} {excerpt}{_after(tries)}")
        if answer.status_code != 200:
            raise Failed(f"{answer.status_code} {excerpt}{_after(tries)}")
        try:
            document = answer.json()
        except ValueError as error:
            raise Failed(f"the answer cannot be read ({type(error).__name__}: {error}): {excerpt}") from None
        if not isinstance(document, dict):
            raise Failed(f"the answer cannot be read (no object of JSON): {excerpt}")
        if document.get("error"):
            raise Refused(f"200 with an error: {excerpt}")
        return Received(document, seconds, tries)

    def excerpt(self, text: str, most: int = _EXCERPT) -> str:
        """Return the beginning of a server's words, without the key."""
        text = text if self._key is None else text.replace(self._key, "[key]")
        return text if len(text) <= most else f"{text[:most]}…"


def _after(tries: int) -> str:
    return f" (after {tries} tries)" if tries > 1 else ""


def _seconds(retry_after: str | None, usual: float) -> float:
    """Return how long to wait: as long as the server asked, if it named seconds."""
    return min(float(retry_after) if retry_after is not None and retry_after.isdecimal() else usual, _LONGEST_WAIT)
