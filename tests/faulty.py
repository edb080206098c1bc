"""An OpenAI-compatible server of a toy model that speculates, right or with a chosen fault. Imported by the tests of
the audit.

The model has no weights: its logits are a table by the last two tokens. Speculative sampling is written out here once
more, token by token, so that each fault is a line of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import socket
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.serving import eventually

__all__ = ["FAULTS", "Toy", "serving"]

VOCABULARY = ["<eos>", *(f" {a}{b}{c}" for a, b, c in itertools.product("bdfgk", "aeiou", "lmnr"))]
IDS = {word: at for at, word in enumerate(VOCABULARY)}
SIZE, COMMON, K = len(VOCABULARY), 24, 4
FAULTS = {
    "bonus": "the bonus is drawn from the distribution of the place before",
    "inverted": "a token is accepted with q / p instead of p / q",
    "residual": "the correction is drawn from the target's distribution, not from the residual",
    "lenient": "a token is accepted with 1.5 p / q",
    "verify temperature": "drafted tokens are verified at temperature 1",
    "unprocessed": "the draft's unprocessed probabilities are divided by",
    "unprocessed target": "top_p is left out where drafted tokens are verified",
    "stale penalties": "penalties count what stood before the block only",
    "min_p": "min_p is ignored",
    "top_k": "top_k is ignored",
    "repetition_penalty": "repetition_penalty is ignored",
    "logit_bias": "logit_bias is ignored",
    "drafted logit_bias": "logit_bias is left out where drafted tokens are verified",
    "seed": "the seed is ignored",
    "seed of bonus": "the bonus does not follow the seed",
    "greedy": "greedy decoding keeps a drafted token that is the target's second",
    "batch": "greedy decoding among other requests takes the second token now and then",
    "stop": "a stop string is looked for at the end of a block only",
    "max_tokens": "max_tokens is looked at at the end of a block only",
    "copies": "the choices of a request are copies",
    "schema": "response_format is ignored",
    "unknown": "unknown fields are ignored",
    "log-probabilities": "all log-probabilities are 0",
    "some log-probabilities": "tokens have none after the first one",
    "counts": "more accepted tokens are reported than were drafted",
}
_KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop", "logprobs"),
    *(
        "messages",
        "top_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "response_format",
    ),
}


@functools.cache
def table(context: tuple[int, ...], draft: bool, rounding: float = 0.0) -> np.ndarray:
    """The logits [V] after two tokens. The draft's are the target's with some noise. ``rounding`` moves them a bit."""
    rng = np.random.default_rng([*context, 7])
    logits = rng.normal(2.0, 0.7, SIZE)
    logits[rng.choice(np.arange(1, COMMON), 6, replace=False)] += rng.uniform(4, 6.5, 6)
    logits[0] = 1.0
    noise = rng.normal(0, 1.0, SIZE)
    logits += rng.normal(0, rounding, SIZE)
    return logits + noise if draft else logits


_SHAPING = ("temperature", "top_k", "top_p", "min_p", "logit_bias")
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_LEFT_OUT = {"verify temperature": "temperature", "unprocessed target": "top_p", "drafted logit_bias": "logit_bias"}


class Asked:
    """One choice of a request: what is asked for, and the random numbers that it gets."""

    def __init__(self, prompt: list[int], fields: dict[str, Any], rng: np.random.Generator) -> None:
        self.prompt, self.fields, self.rng = prompt, fields, rng
        self.greedy = fields.get("temperature", 1.0) == 0
        self.most, self.stops = fields.get("max_tokens", 16), fields.get("stop", ())
        self.penalised = any(fields.get(name, plain) != plain for name, plain in _PENALTIES.items())
        shaping = {name: value for name, value in fields.items() if name in _SHAPING}
        self.shape = json.dumps(shaping, sort_keys=True)

    def draw(self, probs: np.ndarray, rng: np.random.Generator | None = None) -> int:
        return min(int(np.searchsorted(probs.cumsum(), (rng or self.rng).random(), side="right")), SIZE - 1)


class Toy:
    """The model and its speculation, with any of the ``FAULTS``."""

    def __init__(self, *faults: str, rounding: float = 0.0) -> None:
        assert FAULTS.keys() >= {*faults}
        self.faults, self.rounding = {*faults}, rounding
        self.open = 0  # requests that are being answered
        self._made: dict[Any, np.ndarray] = {}

    def probs(
        self, asked: Asked, text: list[int], draft: bool = False, without: str = "", stale: int = 0
    ) -> np.ndarray:
        """The distribution [V] after the prompt and ``text``; without one field, or with the last ``stale`` tokens not
        counted by penalties."""
        last = tuple((asked.prompt + text)[-2:])
        key = (last, draft, without, asked.shape)
        if not asked.penalised and key in self._made:
            return self._made[key]
        fields = {name: value for name, value in asked.fields.items() if name != without}
        counted = text[: len(text) - stale]
        made = self._probs(table(last, draft, self.rounding).copy(), asked.prompt, counted, fields)
        if not asked.penalised:
            self._made[key] = made
        return made

    def _probs(self, logits: np.ndarray, prompt: list[int], counted: list[int], fields: dict[str, Any]) -> np.ndarray:
        if "repetition_penalty" not in self.faults:
            seen, penalty = sorted({*prompt, *counted}), fields.get("repetition_penalty", 1.0)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        counts = np.bincount(np.array(counted, dtype=int), minlength=SIZE)
        logits -= fields.get("presence_penalty", 0.0) * (counts > 0) + fields.get("frequency_penalty", 0.0) * counts
        if "logit_bias" not in self.faults:
            for token, bias in fields.get("logit_bias", {}).items():
                logits[int(token)] += bias
        if (temperature := fields.get("temperature", 1.0)) == 0:
            return np.eye(SIZE)[logits.argmax()]
        order = np.argsort(-logits)
        probs = np.exp((logits - logits.max()) / temperature)[order]
        probs /= probs.sum()
        kept = np.cumsum(probs) - probs < fields.get("top_p", 1.0)
        if (top_k := fields.get("top_k", 0)) and "top_k" not in self.faults:
            kept &= np.arange(SIZE) < top_k
        if "min_p" not in self.faults:
            kept &= probs >= probs[0] * fields.get("min_p", 0.0)
        made = np.zeros(SIZE)
        made[order] = probs * kept
        return made / made.sum()

    def generate(self, asked: Asked) -> tuple[list[int], str]:
        """Tokens, and why they ended."""
        text: list[int] = []
        block = [asked.draw(self.probs(asked, text))]
        while True:
            for at, token in enumerate(block):
                if asked.greedy and "batch" in self.faults and self.open > 4 and len(text) % 7 == 6:
                    token = second(asked, text)
                text.append(token)
                if (reason := ended(asked, text)) and (reason not in self.faults or at == len(block) - 1):
                    return text, "length" if reason == "max_tokens" else "stop"
            block = self.round(asked, text)

    def round(self, asked: Asked, text: list[int]) -> list[int]:
        """The tokens of one round: those of the draft that stand, and one of the target's own."""
        block: list[int] = []
        drafts: list[np.ndarray] = []
        for _ in range(K):
            drafts.append(self.probs(asked, text + block, draft=True))
            block.append(asked.draw(drafts[-1]))
        without = "" if asked.greedy else next((_LEFT_OUT[fault] for fault in self.faults & _LEFT_OUT.keys()), "")
        for at, (token, draft) in enumerate(zip(block, drafts)):
            before = block[:at]
            stale = len(before) if "stale penalties" in self.faults else 0
            target = self.probs(asked, text + before, without=without, stale=stale)
            if "unprocessed" in self.faults and not asked.greedy:
                draft = np.exp(table(tuple((asked.prompt + text + before)[-2:]), True))
                draft = draft / draft.sum()
            chance = target[token] / max(draft[token], 1e-12)
            if "inverted" in self.faults:
                chance = 1 / max(chance, 1e-12)
            if "lenient" in self.faults:
                chance *= 1.5
            kept = asked.rng.random() < chance
            if "greedy" in self.faults and asked.greedy:
                kept = kept or token == second(asked, text + before)
            if not kept:
                rest = np.maximum(target - draft, 0)
                if "residual" in self.faults or rest.sum() < 1e-9:
                    rest = target
                return [*before, asked.draw(rest / rest.sum())]
        bonus = self.probs(asked, text + (block[:-1] if "bonus" in self.faults else block))
        return [*block, asked.draw(bonus, np.random.default_rng() if "seed of bonus" in self.faults else None)]


def second(asked: Asked, text: list[int]) -> int:
    return int(np.argsort(table(tuple((asked.prompt + text)[-2:]), False))[-2])


def ended(asked: Asked, text: list[int]) -> str:
    if text[-1] == 0:
        return "eos"
    if any(word in said(text) for word in asked.stops):
        return "stop"
    return "max_tokens" if len(text) >= asked.most else ""


def said(ids: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in ids if token)


def read(text: str) -> list[int]:
    """Token ids of a text; a word that is none gets one by a hash."""
    words = re.findall(r"\s?\S+|\s+", text) or [" "]
    return [IDS.get(word, 1 + zlib.crc32(word.encode()) % (SIZE - 1)) for word in words]


@functools.cache
def listed(context: tuple[int, ...], rounding: float) -> tuple[np.ndarray, list[int]]:
    logits = table(context, False, rounding)
    logprobs = logits - np.logaddexp.reduce(logits)
    return logprobs, np.argsort(-logprobs)[:20].tolist()


class Application:
    """The HTTP side: completions or ``chat``, with log-probabilities of the unprocessed distribution or without any.
    ``refuses`` are fields that it does not support; ``breaks`` are fields that end in an error of its own; after one of
    ``ends`` there are only errors, though the list of models is still served. ``tokenizes`` is the field of the text to
    tokenize; without it there are no tokens."""

    def __init__(
        self,
        toy: Toy,
        log_probabilities: bool = True,
        chat: bool = False,
        refuses: tuple[str, ...] = (),
        breaks: tuple[str, ...] = (),
        ends: tuple[str, ...] = (),
        tokenizes: str = "prompt",
    ) -> None:
        self.toy, self.log_probabilities, self.chat = toy, log_probabilities, chat
        self.refuses, self.breaks, self.ends, self.ended = {*refuses}, {*breaks}, {*ends}, False
        self.tokenizes = tokenizes
        path = "/v1/chat/completions" if chat else "/v1/completions"
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route(path, self.complete, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "toy", "object": "model"}]})

    async def tokenize(self, request: Request) -> JSONResponse:
        text = (await request.json()).get(self.tokenizes)
        return JSONResponse({"tokens": [] if text is None else read(text)})

    async def complete(self, request: Request) -> JSONResponse:
        body = await request.json()
        bad = [
            name for name in body if name in self.refuses or (name not in _KNOWN and "unknown" not in self.toy.faults)
        ]
        if not self.log_probabilities and "logprobs" in body:
            bad.append("logprobs")
        bad += [token for token in body.get("logit_bias", {}) if int(token) >= SIZE]
        self.ended = self.ended or bool(self.ends & {*body})
        if self.ended or self.breaks & {*body}:
            return JSONResponse({"error": {"message": "out of order"}}, 500)
        if bad:
            return JSONResponse({"error": {"message": f"{bad[0]} is not supported", "param": bad[0]}}, 400)
        self.toy.open += 1
        try:
            return JSONResponse(await run_in_threadpool(self.answer, body))
        finally:
            self.toy.open -= 1

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, faults = read(body["messages"][0]["content"] if self.chat else body["prompt"]), self.toy.faults
        fields = {name: value for name, value in body.items() if value is not None}
        stream = np.random.SeedSequence(fields.get("seed") if "seed" not in faults else None)
        choices, total, accepted = [], 0, 0
        for index, seeds in enumerate(stream.spawn(fields.get("n", 1))):
            if "copies" in faults:
                seeds = stream
            rng = np.random.default_rng(seeds)
            if fields.get("response_format") and "schema" not in faults:
                thing = {"colour": rng.choice(["red", "blue"]), "large": bool(rng.random() < 0.5), "shape": "circle"}
                choices.append({"index": index, "text": json.dumps(thing), "finish_reason": "stop", "logprobs": None})
                continue
            ids, reason = self.toy.generate(Asked(prompt, fields, rng))
            text = said(ids)
            if "stop" not in faults:
                cuts = [text.find(word) for word in fields.get("stop", ()) if word in text]
                text = text[: min(cuts)] if cuts else text
            choices.append({"index": index, "text": text, "finish_reason": reason, "logprobs": None})
            if "logprobs" in fields:
                choices[-1]["logprobs"] = self.places(prompt, ids)
            total += len(ids)
            accepted += len(ids) // 2
        if self.chat:
            choices = [as_chat(choice) for choice in choices]
        drafted = 2 * accepted if "counts" not in faults else accepted - 1
        counts = {"num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}
        return {
            "object": "text_completion",
            "choices": choices,
            "usage": {"completion_tokens": total},
            "metrics": {"speculative_decoding": counts},
        }

    def places(self, prompt: list[int], ids: list[int]) -> dict[str, Any]:
        values, tops = [], []
        for at, token in enumerate(ids):
            logprobs, top = listed(tuple((prompt + ids[:at])[-2:]), self.toy.rounding)
            scale = 0.0 if "log-probabilities" in self.toy.faults else 1.0
            values.append(float(logprobs[token]) * scale)
            if at and "some log-probabilities" in self.toy.faults:
                values[-1], top = 0.0, []
            tops.append({VOCABULARY[other]: float(logprobs[other]) * scale for other in [*top, token] if top})
        return {"tokens": [VOCABULARY[token] for token in ids], "token_logprobs": values, "top_logprobs": tops}


def as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice in the form of chats."""
    listed = choice["logprobs"]
    if listed is not None:
        content = [
            {"token": token, "logprob": value, "top_logprobs": [{"token": t, "logprob": v} for t, v in top.items()]}
            for token, value, top in zip(listed["tokens"], listed["token_logprobs"], listed["top_logprobs"])
        ]
        listed = {"content": content}
    message = {"role": "assistant", "content": choice["text"]}
    return {"index": choice["index"], "message": message, "finish_reason": choice["finish_reason"], "logprobs": listed}


@contextlib.contextmanager
def serving(*faults: str, rounding: float = 0.0, **options: Any) -> Iterator[str]:
    """The address of a server with these faults, while this lasts."""
    config = uvicorn.Config(
        Application(Toy(*faults, rounding=rounding), **options).app, log_level="error", access_log=False
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as where uvicorn listens itself: else 40 ms late
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert eventually(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()
