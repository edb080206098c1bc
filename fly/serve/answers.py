"""Builds the bodies of answers in OpenAI's form, with statistics of speculation. Knows nothing of HTTP or engines.

Lists with one entry per token are iterators; their entries are built when they are written (``fly.serve.jsons``).
"""

from __future__ import annotations

import itertools
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fly.engine.job import News, Request
from fly.models.lengths import byte_alphabet
from fly.models.thinking import Kind, Splitter
from fly.models.tokenizer import Tokenizer
from fly.runner.request import Token
from fly.serve.jsons import write_json
from fly.serve.requests import ChatRequest, CompletionRequest, Generation
from fly.serve.rules import Speculation
from fly.serve.tools import Call, CallFormat, CallReader

__all__ = ["Choice", "Completion", "Prepared", "Vocabulary"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """The text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_level = byte_alphabet() if "ByteLevel" in tokenizer.raw.to_str() else {}
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token: int) -> str:
        """Return the token's text. A token that is only part of a character gives replacement marks."""
        return self._look_up(token)[0]

    def bytes(self, token: int) -> list[int]:
        """Return the token's bytes. Joined, the bytes of all tokens are the text's, even if a character is split."""
        return self._look_up(token)[1]

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        if (spelling := self._known.get(token)) is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            piece = self._tokenizer.raw.id_to_token(token) or ""
            data = list(text.encode())
            if "�" in text or not text:
                if byte := _BYTE.fullmatch(piece):
                    data = [int(byte[1], 16)]
                elif all(character in self._by_level for character in piece):
                    data = [self._by_level[character] for character in piece]
            spelling = self._known[token] = text, data
        return spelling


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its completion, with the offsets of its tokens if they are listed."""

    text: str
    offsets: list[int] | None = None


@dataclass
class Choice:
    """One completion while it is generated. The lists hold what has not been sent yet."""

    index: int
    splitter: Splitter
    reader: CallReader | None = None
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)  # tool calls
    generated: int = 0  # number of tokens
    cached: int = 0  # tokens of the prompt that were in the cache
    tokens: list[tuple[Token, str, int]] = field(default_factory=list)  # token, its text, its block
    logprobs: list[dict[int, float]] = field(default_factory=list)
    blocks: int = 0
    offset: int = 0  # characters sent so far, for ``text_offset``
    finish_reason: str | None = None
    prompt: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    reason_sent: bool = False  # whether a chunk with the finish reason was sent


@dataclass
class Prepared:
    """A request, ready for the engine."""

    body: Generation
    requests: list[Request]
    prompt_tokens: int
    speculation: Speculation
    echoes: list[Echo] | None = None  # the text before each choice, if the request asks for it
    client: str = ""
    form: str = "response_format"  # the field that constrains the answer, for error messages
    calls: CallFormat | None = None  # the format of tool calls, if the answer may have any

    def reader(self) -> CallReader | None:
        """Build the reader that finds calls in one answer."""
        names = [function.name for function in self.body.usable]
        return None if self.calls is None else CallReader(self.calls, names)


class Completion:
    """Assembles the answer to one request, as a whole or in chunks. ``fingerprint`` names the server's version."""

    def __init__(self, prepared: Prepared, vocabulary: Vocabulary, fingerprint: str) -> None:
        self.body = prepared.body
        self.speculation = prepared.speculation
        self._prompt_tokens = prepared.prompt_tokens
        self.chat = isinstance(self.body, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._vocabulary = vocabulary
        self._fingerprint = fingerprint
        self._echoes = prepared.echoes
        # How many log-probabilities to list at each position of the answer and of the prompt; None for none.
        self.top, self.explains = self.body.top(), self.body.explains
        self.prompt_top = self.body.prompt_logprobs if isinstance(self.body, CompletionRequest) else None
        self.choices = [
            Choice(index, Splitter(each.thinking), prepared.reader()) for index, each in enumerate(prepared.requests)
        ]
        rows = [each.row for each in prepared.requests]
        self._prompts = [row.tokens[: row.prompt_length] for row in rows] if self.body.return_token_ids else None
        for choice in self.choices:
            choice.offset = len(self._echo(choice))
        self._drafted = self._accepted = 0
        self._histogram: Counter[int] = Counter()  # rounds with a draft, by number of accepted tokens

    def add(self, news: News) -> Choice:
        """Add the news of one step to its choice, which collects them until ``chunk`` is called. Return the choice."""
        choice = self.choices[news.index]
        # Split the text into thinking, text and tool calls.
        for token, text in news.pieces:
            self._add_parts(choice, choice.splitter.push(text))
            choice.tokens.append((token, text, choice.blocks))
        if news.pieces:
            choice.blocks += 1
            choice.generated += len(news.pieces)
        choice.logprobs += news.logprobs
        if news.over:
            self._add_parts(choice, choice.splitter.finish(news.rest))
            if choice.reader is not None:
                self._add_calls(choice, choice.reader.finish())
        # Count what speculation did.
        self._histogram.update(accepted for _, accepted in news.drafts)
        if news.output is not None:
            stats = news.output.stats
            has_calls = choice.reader is not None and choice.reader.calls
            ended = news.output.finish_reason
            choice.finish_reason = "tool_calls" if has_calls and ended == "stop" else ended
            choice.prompt, choice.prompt_logprobs = news.output.prompt_token_ids, news.output.prompt_logprobs
            choice.cached = stats.cached
            choice.generated = stats.generated
            self._drafted += stats.drafted
            self._accepted += stats.accepted
        return choice

    def _add_parts(self, choice: Choice, parts: list[tuple[Kind, str]]) -> None:
        for kind, text in parts:
            if kind == "reasoning":
                choice.reasoning += text
            elif choice.reader is None:
                choice.text += text
            else:
                self._add_calls(choice, choice.reader.push(text))

    @staticmethod
    def _add_calls(choice: Choice, pieces: list[str | Call]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                choice.text += piece
            else:
                choice.calls.append(piece)

    def entries(self, all_news: Sequence[News]) -> int:
        """Estimate the number of JSON entries in this news or, without news, in the opening."""
        prompts = 0 if self._prompts is None else sum(map(len, self._prompts))
        per_piece = 1 + (0 if self.top is None else 1 + self.top) + 3 * self.explains
        scored = sum(len(news.output.prompt_logprobs or ()) for news in all_news if news.output is not None)
        return (
            prompts
            + per_piece * sum(len(news.pieces) for news in all_news)
            + (1 + max(self.top or 0, self.prompt_top or 0)) * scored
        )

    def events(self, all_news: Sequence[News]) -> Iterator[bytes]:
        """Write news as server-sent events. The last event carries the statistics of the whole request."""
        choices = list({news.index: self.add(news) for news in all_news}.values())
        for choice in choices:
            while (chunk := self.chunk(choice)) is not None:
                last = self.ended() and choice is choices[-1] and choice.reason_sent and not self.body.with_usage
                yield self._event(chunk | self._extras() if last else chunk)
        if self.body.with_usage and self.ended():
            yield self._event(self._body([], ".chunk") | {"usage": self.usage()} | self._extras())

    def opening(self) -> Iterator[bytes]:
        """Write the first events of a stream, one for every choice: its role or the echoed prompt, and how it
        speculates."""
        for choice in self.choices:
            body = self._empty(choice)
            if self.chat:
                body["delta"] = {"role": "assistant", "content": ""}
            else:
                body["text"] = self._echo(choice)
            self._add_prompt(body, choice)
            yield self._event(self._body([body], ".chunk") | {"speculation": self.speculation.as_dict()})

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self.body.with_running_usage and "usage" not in chunk:
            chunk |= {"usage": self.usage()}
        return b"data: " + b"".join(write_json(chunk)) + b"\n\n"

    def ended(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Return token counts, including those of drafted tokens."""
        prompt_tokens, generated = self._prompt_tokens, sum(choice.generated for choice in self.choices)
        # The choices of a prompt share it, so the first to run had the fewest of its tokens from the cache.
        of_choices, n = [choice.cached for choice in self.choices], self.body.n or 1
        cached = sum(min(of_choices[first : first + n]) for first in range(0, len(of_choices), n))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.splitter.tokens for choice in self.choices),
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": self._drafted - self._accepted,
            },
        }

    def metrics(self) -> dict[str, Any]:
        """Return statistics of speculation under vLLM's names. ``acceptance_histogram[n]`` counts the rounds with n
        accepted tokens, n from 0 to K. The mean acceptance length includes the target's own token of each round."""
        steps = sum(self._histogram.values())
        longest = max(self.speculation.k, *self._histogram, 0)
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + self._accepted / steps if steps else None,
                "draft_acceptance_rate": self._accepted / self._drafted if self._drafted else None,
                "acceptance_histogram": [self._histogram[n] for n in range(longest + 1)],
                "num_spec_steps": steps,
                "num_accepted_draft_tokens": self._accepted,
                "num_draft_tokens": self._drafted,
                "num_spec_tokens": self.speculation.k,
            }
        }

    def build_whole(self) -> dict[str, Any]:
        """Build the whole answer."""
        choices = []
        for choice in self.choices:
            body = self._choice(choice)
            if self.chat:
                calls = list(map(_shown, choice.calls))
                message = {"role": "assistant", "content": choice.text or (None if calls else ""), "refusal": None}
                extra_fields = {"tool_calls": calls, "reasoning_content": choice.reasoning}
                body["message"] = message | {name: value for name, value in extra_fields.items() if value}
            else:
                body["text"] = self._echo(choice) + choice.text
                if self.prompt_top is not None:
                    scored_tokens = zip(choice.prompt, choice.prompt_logprobs or ())
                    body["prompt_logprobs"] = (self._prompt_entry(*entry) for entry in scored_tokens)
            choices.append(body)
            self._add_prompt(body, choice)
        return self._body(choices, "") | {"usage": self.usage()} | self._extras()

    def chunk(self, choice: Choice) -> dict[str, Any] | None:
        """Build a chunk of what a choice gained since its last chunk; None if there is nothing to show yet. A chunk has
        at most one tool call, as clients expect. So call this again until it returns None."""
        delta = {
            "reasoning_content": choice.reasoning,
            "content": choice.text,
            "tool_calls": [{"index": call.at, **_shown(call)} for call in choice.calls[:1]],
        }
        delta = {name: value for name, value in delta.items() if value}
        # If there are several tool calls, send the first.
        if len(choice.calls) > 1:
            choice.text = choice.reasoning = ""
            del choice.calls[0]
            return self._body([self._empty(choice) | {"delta": delta}], ".chunk")
        # Otherwise send everything that came in, if there is anything to show.
        ends = choice.finish_reason is not None and not choice.reason_sent
        lists_tokens = choice.tokens and (self.explains or self.top is not None or self._prompts is not None)
        if not (delta or lists_tokens or ends):
            return None
        choice.reason_sent = choice.finish_reason is not None
        body = self._choice(choice)
        if self.chat:
            body["delta"] = delta
        else:
            body["text"] = choice.text
        choice.text = choice.reasoning = ""
        choice.tokens = []
        choice.logprobs = []
        choice.calls = []
        return self._body([body], ".chunk")

    @staticmethod
    def _empty(choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "finish_reason": None, "logprobs": None}

    def _extras(self) -> dict[str, Any]:
        return {"speculation": self.speculation.as_dict(), "metrics": self.metrics()}

    def _add_prompt(self, body: dict[str, Any], choice: Choice) -> None:
        if self._prompts is not None:
            body["prompt_token_ids"] = iter(self._prompts[choice.index])

    def _echo(self, choice: Choice) -> str:
        return "" if self._echoes is None else self._echoes[choice.index].text

    def _body(self, choices: list[dict[str, Any]], chunk: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": f"chat.completion{chunk}" if self.chat else "text_completion",
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        """Build what both endpoints share: log-probabilities and reasons of the tokens that were not sent yet."""
        body = self._empty(choice) | {"finish_reason": choice.finish_reason}
        if self.top is not None:
            body["logprobs"] = self._chat_logprobs(choice) if self.chat else self._completion_logprobs(choice)
        if self.explains:
            body["provenance"] = (self._explained(*entry) for entry in choice.tokens)
        if self._prompts is not None:
            body["token_ids"] = (token.id for token, _, _ in choice.tokens)
        choice.offset += sum(len(text) for _, text, _ in choice.tokens)
        return body

    def _chat_logprobs(self, choice: Choice) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            words = self._vocabulary
            return {"token": words.text(token), "logprob": _finite(logprob), "bytes": words.bytes(token)}

        def content() -> Iterator[dict[str, Any]]:
            for token, likely in scored_tokens:
                top = [entry(other, value) for other, value in itertools.islice(likely.items(), self.top)]
                yield entry(token, likely[token]) | {"top_logprobs": top}

        scored_tokens = zip([token.id for token, _, _ in choice.tokens], choice.logprobs)
        return {"content": content(), "refusal": None}

    def _completion_logprobs(self, choice: Choice) -> dict[str, Any]:
        ids = [token.id for token, _, _ in choice.tokens]
        offsets = list[int]()
        offset = choice.offset
        likely: list[dict[int, float] | None] = [*choice.logprobs]
        for _, token_text, _ in choice.tokens:
            offsets.append(offset)
            offset += len(token_text)
        if self._echoes is not None and choice.prompt_logprobs is not None:
            ids, offsets = choice.prompt + ids, (self._echoes[choice.index].offsets or []) + offsets
            likely = choice.prompt_logprobs + likely
        return {
            "tokens": (self._vocabulary.text(token) for token in ids),
            "token_logprobs": (None if each is None else _finite(each[token]) for token, each in zip(ids, likely)),
            "top_logprobs": (self._named(token, each) for token, each in zip(ids, likely)) if self.top else None,
            "text_offset": iter(offsets),
        }

    def _named(self, token: int, likely: dict[int, float] | None) -> dict[str, float] | None:
        """Return log-probabilities by token text, ``token`` included. If tokens have the same text, the likeliest
        counts."""
        if likely is None:
            return None
        nats_by_text: dict[str, float] = {}
        for other, value in (*itertools.islice(likely.items(), self.top), (token, likely[token])):
            nats_by_text.setdefault(self._vocabulary.text(other), _finite(value))
        return nats_by_text

    def _prompt_entry(self, token: int, likely: dict[int, float] | None) -> dict[str, dict[str, Any]] | None:
        """Build a prompt token's entry in vLLM's form. The rank is None if the token is not among the likeliest."""
        if likely is None:
            return None
        top = [*itertools.islice(likely, self.prompt_top)]
        ranked: list[tuple[int, int | None]] = [(other, rank) for rank, other in enumerate(top, start=1)]
        return {
            str(other): {
                "logprob": _finite(likely[other]),
                "rank": rank,
                "decoded_token": self._vocabulary.text(other),
            }
            for other, rank in (ranked if token in top else [*ranked, (token, None)])
        }

    def _explained(self, token: Token, text: str, block: int) -> dict[str, Any]:
        """Explain why a token was kept. ``text`` is the text that the token completed. ``block`` is the number of its
        round, and the round that reads the prompt is 0."""
        choice = token.target_choice
        return {
            "id": token.id,
            "token": self._vocabulary.text(token.id),
            "text": text,
            "block": block,
            "reason": token.why.name.lower(),
            "clause": token.clause,
            "probability": token.prob,
            "entropy": token.entropy,
            "target_choice": None
            if choice is None
            else {"id": choice, "token": self._vocabulary.text(choice), "probability": token.choice_prob},
        }


def _finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by OpenAI's -9999."""
    return max(logprob, -9999.0)


def _shown(call: Call) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
