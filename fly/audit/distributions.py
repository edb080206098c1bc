"""The distribution that a token should be drawn from, by what the server itself reports at its place.

A server lists the log-probabilities of the likeliest tokens *before* sampling parameters act on them (most do; it is
checked). What a parameter makes of them is computed here, so each drawn token can be held against the distribution that
it should come from. Everything holds given the text before, so the product over the places of an answer is the joint
distribution of its tokens.

``H`` is the number of tokens that are listed and known by their text: the *head*. All others are the *rest*.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fly.audit.client import Answer, Place

__all__ = ["Draw", "Fields", "distance", "draws_of", "expected", "is_plain", "reported"]

Fields = Mapping[str, Any]

# Where a cut falls between two tokens as near as this, in nats or in mass, rounding may decide: the place is left out.
_NEAR_NATS, _NEAR_MASS = 0.05, 0.01
_SPECIAL = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]")
_LOOKUP = 6  # characters that a lookup searches for
_LEAST_REST = 1e-5  # less than this is lost in the rounding of a sum to 1
_SAME = 0.01  # nats: a drawn token is the listed one of its text if their log-probabilities agree so far
# A repetition penalty divides logits, which are not reported. Above 2 it should cost a repeated token one nat at least.
_LEAST_COST = 1.0


@dataclass(frozen=True)
class Draw:
    """One drawn token, ``text``, beside the distribution that it should follow after the text of its ``group``.

    ``probs_H`` of the ``tokens`` adds up to 1: it is that distribution given that the token is one of the head.
    ``drawn`` is the token's place in it, None for a token of the rest. ``rest`` is the most probability that the rest
    may have (0: none of it may come; None: not known). ``ignored_H`` is the distribution if the server ignored the
    field that is tested, ``outside`` the mass that the field forbids. ``earlier_H`` is what the place before would
    give, and ``lookup`` the token that followed the last occurrence of the text just before: what faults of
    speculation draw.
    """

    group: tuple[Any, ...]
    text: str
    tokens: tuple[str, ...]
    probs_H: np.ndarray
    drawn: int | None
    rest: float | None
    ignored_H: np.ndarray | None = None
    outside: float = 0.0
    earlier_H: np.ndarray | None = None
    lookup: int | None = None


def is_plain(token: str) -> bool:
    """Whether a token's text says which token it is: parts of characters and control tokens do not."""
    return bool(token) and "�" not in token and not _SPECIAL.fullmatch(token)


def reported(place: Place, asked: int) -> dict[str, float]:
    """The likeliest tokens with their probabilities, where ``asked`` were asked for. The last fifth is left out: the
    drawn token is listed even if it is none of the likeliest, several may share a text, and what counts as the head
    must not depend on what was drawn."""
    return {token: math.exp(value) for token, value in place.top[: max(1, asked - max(1, asked // 5))]}


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The least total variation between two distributions of which the likeliest tokens are given, with their
    probabilities: a token that only one of them lists may be just below the other's last."""
    return 0.5 * sum(abs(share - other[token]) for token, share in one.items() if token in other)


def draws_of(answer: Answer, prompt: str, number: int, fields: Fields, top: int, as_is: bool = False) -> Iterator[Draw]:
    """The draws of an answer to the prompt of this ``number``, in order. Places that prove nothing are left out.

    ``as_is``: the server reports what it samples from, so the fields have acted already.
    """
    tokens = answer.tokens
    for at, place in enumerate(answer.places):
        draw = expected(place, {} if as_is else fields, tokens[:at], prompt, top, (number, *tokens[:at]))
        if draw is not None:
            yield draw if not at else _with_faults(draw, answer.places[at - 1], prompt, tokens[:at], top)


def expected(
    place: Place, fields: Fields, history: tuple[str, ...], prompt: str, top: int, group: tuple[Any, ...] = ()
) -> Draw | None:
    """What should be drawn at a place after ``history`` under these fields; None where that is not known."""
    head = reported(place, top)
    tokens, raw_H = list(head), np.log(np.maximum(list(head.values()), 1e-300))
    if not is_plain(place.token):
        return None
    rest = max(0.0, 1.0 - float(np.exp(raw_H).sum()))
    keep_H = np.array([is_plain(token) for token in tokens])

    # The fields, in the order in which servers apply them.
    scores_H = raw_H.copy()
    penalised = [name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty") if fields.get(name)]
    if penalised:
        # Whether tokens of the prompt count as well is not agreed between servers: these are left out.
        keep_H &= np.array([token not in prompt for token in tokens])
        scores_H -= _penalties(tokens, fields, Counter(history))
    if (temperature := fields.get("temperature", 1.0)) != 1.0:
        # Each token of the rest is at most as likely as the last of the head, so p^(1/T) <= p · last^(1/T - 1).
        rest = rest * math.exp(float(raw_H.min()) * (1 / temperature - 1)) if temperature < 1 else math.nan
        scores_H = scores_H / temperature
    allowed_H = _allowed(scores_H, fields)
    if allowed_H is None:
        return None
    outside = float(np.exp(raw_H[keep_H & ~allowed_H]).sum())
    if not allowed_H.all():
        outside, rest = outside + rest, 0.0
    keep_H &= allowed_H

    # Given that the token is none of those left out.
    same = [at for at, token in enumerate(tokens) if token == place.token and abs(raw_H[at] - place.logprob) < _SAME]
    if not keep_H.any() or (same and not keep_H[same[0]] and allowed_H[same[0]]):
        return None
    if penalised and not same and place.token in prompt:
        return None
    weights_H = np.exp(scores_H[keep_H])
    mass = float(weights_H.sum())
    drawn = int(keep_H[: same[0]].sum()) if same and keep_H[same[0]] else None
    plain_H = np.exp(raw_H[keep_H])
    changed = not np.allclose(weights_H / mass, plain_H / plain_H.sum(), atol=1e-9)
    return Draw(
        group,
        place.token,
        tuple(token for token, kept in zip(tokens, keep_H) if kept),
        weights_H / mass,
        drawn,
        None if math.isnan(rest) else 0.0 if not allowed_H.all() else max(rest / (rest + mass), _LEAST_REST),
        plain_H / plain_H.sum() if changed and allowed_H.all() else None,
        outside,
    )


def _penalties(tokens: list[str], fields: Fields, counts: Counter[str]) -> np.ndarray:
    """What is subtracted from the log-probabilities of tokens that were generated before."""
    presence, frequency = fields.get("presence_penalty", 0.0), fields.get("frequency_penalty", 0.0)
    cost = _LEAST_COST if fields.get("repetition_penalty", 1.0) > 1 else 0.0
    return np.array([(presence + cost) * (counts[token] > 0) + frequency * counts[token] for token in tokens])


def _allowed(scores_H: np.ndarray, fields: Fields) -> np.ndarray | None:
    """Which tokens of the head top_k, top_p and min_p leave; None where a cut cannot be placed for certain."""
    size = len(scores_H)
    left = size
    if k := fields.get("top_k"):
        if size <= k or scores_H[k - 1] - scores_H[k] < _NEAR_NATS:
            return None
        left = min(left, k)
    if (p := fields.get("top_p", 1.0)) < 1:
        before_H = np.cumsum(np.exp(scores_H)) - np.exp(scores_H)  # the mass of the likelier tokens
        inside = before_H < p
        if inside.all() or np.abs(before_H[1:] - p).min() < _NEAR_MASS:
            return None
        left = min(left, int(inside.sum()))
    if m := fields.get("min_p"):
        behind_H = scores_H[0] - scores_H + math.log(m)  # above 0: not as likely as min_p asks
        if behind_H[-1] <= 0 or np.abs(behind_H).min() < _NEAR_NATS:
            return None
        left = min(left, int((behind_H < 0).sum()))
    return np.arange(size) < left


def _with_faults(draw: Draw, before: Place, prompt: str, history: tuple[str, ...], top: int) -> Draw:
    """The same with what faults of speculation would draw there."""
    earlier = reported(before, top)
    earlier_H = np.array([earlier.get(token, 0.0) for token in draw.tokens])
    context = prompt + "".join(history)
    since = context.rfind(context[-_LOOKUP:], 0, len(context) - 1)
    follows = context[since + _LOOKUP :] if since >= 0 else ""
    found = [at for at, token in enumerate(draw.tokens) if follows.startswith(token)]
    return replace(
        draw,
        earlier_H=earlier_H / earlier_H.sum() if earlier_H.sum() > 0.05 else None,
        lookup=max(found, key=lambda at: len(draw.tokens[at])) if found else None,
    )
