"""The requests of checks, and their answers as plain values. Knows nothing of what is checked."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2

from fly.extras.client import BUSY, Client, Failed, Refused, Unreachable

__all__ = ["Answer", "Budget", "Failed", "OutOfBudget", "Place", "Refused", "Reply", "Server", "Unreachable"]

_NONE: Mapping[str, Any] = {}


class OutOfBudget(Exception):
    """The audit has spent its time or its requests."""


@dataclass(frozen=True)
class Place:
    """One generated token: its text, its log-probability, and the most likely tokens there, in order."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Answer:
    """One choice. ``places`` is empty if the server gave no log-probabilities; ``ids`` is None if it gave no ids."""

    text: str
    places: tuple[Place, ...] = ()
    finish: str | None = None
    ids: tuple[int, ...] | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(place.token for place in self.places)


@dataclass(frozen=True)
class Reply:
    """The reply to one request: its choices, the whole body, and the seconds that it took."""

    answers: tuple[Answer, ...]
    body: Mapping[str, Any]
    seconds: float

    @property
    def answer(self) -> Answer:
        return self.answers[0]

    @property
    def generated(self) -> int | None:
        """The number of generated tokens by the server's own count."""
        count = (self.body.get("usage") or {}).get("completion_tokens")
        return count if isinstance(count, int) else None


@dataclass
class Budget:
    """How many seconds and requests may be spent; None is no limit."""

    seconds: float | None = None
    requests: int | None = None
    spent: int = 0
    started: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def take(self) -> None:
        """Count one request. Raises ``OutOfBudget`` if none is left."""
        with self._lock:
            if self.seconds is not None and self.elapsed > self.seconds:
                raise OutOfBudget(f"the {self.seconds:g} seconds are spent")
            if self.requests is not None and self.spent >= self.requests:
                raise OutOfBudget(f"the {self.requests} requests are spent")
            self.spent += 1


class Server:
    """A server that is asked for one of its models.

    Args:
        url: its address, with or without ``/v1``.
        name: the model's name; None takes the first that ``/v1/models`` lists.
        key: a bearer token.
        endpoint: ``completions`` or ``chat``; ``auto`` takes completions if the server has them, otherwise chat.
        parallel: the most requests at the same time.
        timeout: the most seconds for one answer.

    Raises ``Unreachable`` if nothing answers a first small request, and ``ValueError`` for any other ``endpoint``.
    """

    def __init__(
        self,
        url: str,
        name: str | None = None,
        key: str | None = None,
        endpoint: str = "auto",
        parallel: int = 8,
        timeout: float = 600.0,
        budget: Budget | None = None,
    ) -> None:
        if endpoint not in (choices := ("auto", "completions", "chat")):
            raise ValueError(f"endpoint {endpoint!r}; choices: {list(choices)}")
        self._client = Client(url, key, timeout)
        self.root = self._client.root
        self.parallel, self.budget = parallel, budget or Budget()
        self.name = name or str(self._client.list_models("--name")[0]["id"])
        self.chat = endpoint == "chat"
        self.partly = ""  # how many tokens of a first answer have no log-probabilities, if some have them
        self.top = self._first_answer(endpoint == "auto")

    def close(self) -> None:
        self._client.close()

    def ask(
        self, prompt: str, fields: Mapping[str, Any] = _NONE, *, top: bool = True, chat: bool | None = None
    ) -> Reply:
        """Ask one prompt with these fields. ``top`` asks for log-probabilities, if the server has them. ``chat`` says
        whether to use the chat endpoint; None takes the endpoint that was found at the start.

        Raises ``Refused``, ``Failed`` or ``OutOfBudget``.
        """
        chat = self.chat if chat is None else chat
        body: dict[str, Any] = {"model": self.name, **fields}
        if chat:
            body["messages"] = [{"role": "user", "content": prompt}]
            if top and self.top:
                body |= {"logprobs": True, "top_logprobs": self.top}
        else:
            body["prompt"] = prompt
            if top and self.top:
                body["logprobs"] = self.top
        return self._send("/v1/chat/completions" if chat else "/v1/completions", body)

    def ask_all(
        self,
        questions: Sequence[tuple[str, Mapping[str, Any]]],
        parallel: int | None = None,
        *,
        top: bool = True,
        chat: bool | None = None,
    ) -> list[Reply]:
        """Ask several prompts, each with its fields, ``parallel`` of them at the same time."""
        with ThreadPoolExecutor(parallel or self.parallel) as pool:
            return list(pool.map(lambda each: self.ask(*each, top=top, chat=chat), questions))

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Fetch another path of the server, as JSON or as text; None if there is no such path."""
        return self._client.fetch(path, body)

    def alive(self) -> bool:
        """Whether the server still answers a request for one token. (It may list its models even without an engine.)"""
        question = {"messages": [{"role": "user", "content": "Hello"}]} if self.chat else {"prompt": "Hello"}
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        try:
            answer = self._client.http.post(path, json={"model": self.name, "max_tokens": 1, **question}, timeout=60)
        except httpx2.HTTPError:
            return False
        return answer.status_code < 500 or answer.status_code in BUSY

    def _first_answer(self, either: bool) -> int:
        """Find out the endpoint, and how many of the most likely tokens the server lists (0: no log-probabilities, or
        not for every token, so that most checks have nothing to compare with)."""
        problem = ""
        for chat in (False, True) if either else (self.chat,):
            self.chat = chat
            for self.top in (20, 5, 0):
                try:
                    answer = self.ask("Hello", {"max_tokens": 8, "temperature": 0}).answer
                except (Refused, Failed) as error:
                    problem = str(error)
                    continue
                n_listed = sum(bool(place.top) for place in answer.places)
                if self.top and 0 < n_listed < len(answer.places):
                    self.partly = f"{len(answer.places) - n_listed} of {len(answer.places)} tokens have none"
                    return 0
                if not self.top or n_listed:
                    return self.top
        raise Unreachable(f"{self.root} does not answer a first request: {problem}")

    def _send(self, path: str, body: Mapping[str, Any]) -> Reply:
        # Only a full server is asked again, so that no fault is hidden.
        received = self._client.post(path, body, before=self.budget.take)
        document = received.document
        try:
            answers = tuple(_answer(choice) for choice in document["choices"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            excerpt = self._client.excerpt(str(document))
            raise Failed(f"the answer cannot be read ({type(error).__name__}: {error}): {excerpt}") from None
        if not answers:
            raise Failed(f"the answer has no choices: {self._client.excerpt(str(document))}")
        return Reply(answers, document, received.seconds)


def _answer(choice: Mapping[str, Any]) -> Answer:
    """Read one choice, from either endpoint."""
    text = choice["message"].get("content") if "message" in choice else choice["text"]
    ids = choice.get("token_ids")
    places = tuple(_places(choice.get("logprobs") or {}))
    return Answer(text or "", places, choice.get("finish_reason"), None if ids is None else tuple(ids))


def _places(listed: Mapping[str, Any]) -> list[Place]:
    if "content" in listed:  # from the chat endpoint
        return [
            _place(each["token"], each["logprob"], [(top["token"], top["logprob"]) for top in each["top_logprobs"]])
            for each in listed["content"] or ()
        ]
    tokens, logprobs = listed.get("tokens") or (), listed.get("token_logprobs") or ()
    tops = listed.get("top_logprobs") or [{}] * len(tokens)
    return [_place(*each) for each in zip(tokens, logprobs, (list((top or {}).items()) for top in tops), strict=True)]


def _place(token: str, logprob: float | None, top: list[tuple[str, float]]) -> Place:
    number = -math.inf if logprob is None else float(logprob)
    finite = [(name, float(value)) for name, value in top if value is not None]
    return Place(token, number, tuple(sorted(finite, key=lambda each: -each[1])))
