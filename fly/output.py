"""The result of a request, and how it is shown as data and in notebooks. Knows nothing of models."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from fly.errors import shorten
from fly.models.thinking import Kind, Splitter, Thinking
from fly.models.tokenizer import TextStream
from fly.policies import AcceptancePolicy, Bound
from fly.runner.request import Stats, Token
from fly.types import Guarantee, Why

__all__ = ["Output", "Piece", "Reader"]

# These colours work on light and dark pages: the text keeps its own colour, on a tinted background.
_STYLES = {
    Why.MATCH: ("background:rgba(40,170,80,.22)", "drafted, and the target's own choice"),
    Why.RELAXED: ("background:rgba(235,170,0,.40);text-decoration:underline", "drafted, kept only by the relaxed rule"),
    Why.CORRECTION: ("background:rgba(220,50,50,.26)", "the target's own, in place of a rejected token"),
    Why.BONUS: ("background:rgba(0,150,200,.22)", "the target's own, after a fully kept draft"),
}
_BOX = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace"


class Piece(str):
    """A piece of text with its tokens.

    Attributes:
        tokens: the tokens that completed it, each with the reason why it was kept (``fly.Token``).
        kind: ``"text"``, or ``"reasoning"`` where a model thinks before it answers a conversation.
    """

    tokens: tuple[Token, ...]
    kind: Kind

    def __new__(cls, text: str, tokens: tuple[Token, ...], kind: Kind = "text") -> Piece:
        piece = super().__new__(cls, text)
        piece.tokens, piece.kind = tokens, kind
        return piece

    def __reduce__(self) -> tuple[Any, ...]:
        return Piece, (str(self), self.tokens, self.kind)

    @property
    def why(self) -> Why:
        """The reason that gives the piece its colour: ``RELAXED`` if any token is relaxed, else the first token's."""
        return max((token.why for token in self.tokens), key=lambda why: why == Why.RELAXED, default=Why.MATCH)


class Reader:
    """Makes the pieces of an output from its tokens: the same pieces as a stream gives. Copies of an output share its
    reader. Pickling leaves the tokenizer out.

    Args:
        begin: starts a text that decodes the tokens as a stream does; None: there is no tokenizer.
        thinking: the reasoning that may begin the text.
        min_tokens: as in ``SamplingParams``.
    """

    def __init__(
        self,
        begin: Callable[[], TextStream] | None = None,
        thinking: Thinking | None = None,
        min_tokens: int = 0,
    ) -> None:
        self._begin = begin
        self._thinking = thinking
        self._min_tokens = min_tokens

    def __deepcopy__(self, memo: object) -> Reader:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, ()

    def pieces(self, output: Output) -> list[Piece]:
        """Return the text of ``output`` in the same pieces as a stream gives; empty without a tokenizer."""
        if self._begin is None:
            return []
        text = self._begin()
        splitter = Splitter(self._thinking)
        pieces = list[Piece]()
        piece_tokens: tuple[Token, ...] = ()
        for number, token in enumerate(output.provenance, start=1):
            piece_tokens += (token,)
            for kind, piece in splitter.push(text.push(token.id, stoppable=number >= self._min_tokens)):
                pieces.append(Piece(piece, piece_tokens, kind))
                piece_tokens = ()
        rest = splitter.finish(text.finish())
        for kind, piece in rest or ([("text", "")] if piece_tokens else []):
            pieces.append(Piece(piece, piece_tokens, kind))
            piece_tokens = ()
        return pieces


@dataclass(frozen=True, repr=False)
class Output:
    """The result of one request. ``to_dict`` gives it as plain data for JSON; notebooks show it in colours.

    Attributes:
        prompt_token_ids: the prompt.
        text: the answer, without the end-of-sequence token and without the stop string that ended it.
        token_ids: all generated tokens, the end-of-sequence token included.
        finish_reason: ``"stop"`` (end-of-sequence, stop id, stop string) or ``"length"`` (``max_tokens`` or the model's
            context).
        logprobs: for each token the log-probabilities that ``SamplingParams.logprobs`` asked for, by id; else None.
        prompt_logprobs: if they were asked for, an entry for each prompt token; None up to the first that is scored.
        provenance: why each token was kept (``fly.Token``).
        stats: the counts of speculation (``fly.Stats``).
        policy: the policy that decided.
        guarantee: what the policy promises on this model (``Executor.promise``).
        bound: the bound of a ``BOUNDED`` policy, else None.
        others: the other completions, if ``n`` is more than 1.
        reasoning: what a model thinks before it answers a conversation; ``text`` is the answer after that (see
            ``fly.models.thinking.Splitter``).
        pieces: the text in the same pieces as a stream gives (``fly.Piece``); empty without a tokenizer.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None
    prompt_logprobs: list[dict[int, float] | None] | None
    provenance: list[Token]
    stats: Stats
    policy: AcceptancePolicy
    guarantee: Guarantee
    bound: Bound | None
    others: tuple[Output, ...] = ()
    reasoning: str = ""
    _reader: Reader = field(default_factory=Reader, compare=False)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces that a stream gives of this text. There are none without a tokenizer."""
        return self._reader.pieces(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the output as dictionaries, lists, texts and numbers, for ``json.dumps``."""
        return {
            "prompt_token_ids": list(self.prompt_token_ids),
            "text": self.text,
            "reasoning": self.reasoning,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs and [{str(i): nats for i, nats in one.items()} for one in self.logprobs],
            "prompt_logprobs": self.prompt_logprobs
            and [one and {str(i): nats for i, nats in one.items()} for one in self.prompt_logprobs],
            "policy": str(self.policy),
            "guarantee": self.guarantee.value,
            "bound": self.bound and str(self.bound),
            "provenance": [{**token._asdict(), "why": token.why.name.lower()} for token in self.provenance],
            "stats": {**asdict(self.stats), "tau": self.stats.tau, "acceptance_rate": self.stats.acceptance_rate},
            "others": [other.to_dict() for other in self.others],
        }

    def __repr__(self) -> str:
        text = shorten(self.text) if self.text or not self.token_ids else f"token_ids={shorten(self.token_ids)}"
        parts = [text, f"{len(self.token_ids)} tokens", self.finish_reason, f"{self.policy} ({self.guarantee.value})"]
        if self.stats.drafted:
            parts.append(f"tau={self.stats.tau:.2f}")
        if self.others:
            parts.append(f"{len(self.others)} others")
        return f"Output({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return the tokens as HTML, coloured by why each was kept, with a legend and the counts."""
        outputs = (self, *self.others)
        texts = [f'<div style="{_BOX};margin:.4em 0">{output._coloured()}</div>' for output in outputs]
        counts = Counter(token.why for output in outputs for token in output.provenance)
        legend = [_span(why.name.lower(), why, f"{means}: {counts[why]}") for why, (_, means) in _STYLES.items()]
        marks = [f"{mark} {counts[why]}" for why, mark in zip(_STYLES, legend) if counts[why]]
        footer = '<div style="font-size:85%;opacity:.8">'
        return f"<div>{''.join(texts)}{footer}{' · '.join([*marks, *map(html.escape, self._summary())])}</div></div>"

    def _summary(self) -> list[str]:
        parts = [self.finish_reason, f"{self.policy}: {self.guarantee.value}"]
        return [*parts, f"τ {self.stats.tau:.2f}"] if self.stats.drafted else parts

    def _coloured(self) -> str:
        if any(self.pieces):
            return "".join(_span(piece, piece.why, _reasons(piece), piece.kind) for piece in self.pieces)
        if self.text or self.reasoning:
            return html.escape(self.reasoning + self.text)
        return " ".join(_span(str(token.id), token.why, _reasons(Piece("", (token,)))) for token in self.provenance)


def _reasons(piece: Piece) -> str:
    """Return the tooltip of a piece: for each token its id, why it was kept, and the target's choice."""
    lines = []
    for token in piece.tokens:
        differs = token.target_choice not in (None, token.id)
        parts = [f"token {token.id}: {token.why.name.lower()}", token.clause or ""]
        parts += [f"target's choice {token.target_choice}" if differs else ""]
        parts += [f"probability {token.prob:.3g}" if token.prob is not None else ""]
        lines.append(", ".join(filter(None, parts)))
    return "\n".join(lines)


def _span(text: str, why: Why, title: str, kind: Kind = "text") -> str:
    style = _STYLES[why][0] + (";opacity:.6" if kind == "reasoning" else "")
    return f'<span style="{style}" title="{html.escape(title)}">{html.escape(text)}</span>'
