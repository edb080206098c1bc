"""The distribution that each token should be drawn from, according to what the server reports at its place.

A server lists the log-probabilities of the most likely tokens, in most cases *before* sampling parameters act on them
(this is checked). The effect of a parameter is computed here, so that each drawn token can be compared with the
distribution that it should come from. Each distribution is conditional on the text before, so the product over the
places of an answer is the joint distribution of its tokens.

``H`` is the number of tokens that are listed and known by their text: the *head*. All others are the *rest*.

Shape legend: H tokens of the head.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fly.extras.audit.client import Answer, Place

__all__ = ["Draw", "Fields", "expected", "is_plain", "min_variation", "read_draws", "reported"]

Fields = Mapping[str, Any]

# If a cut falls between two tokens that are this near, in nats or in mass, rounding may decide: the place is left out.
_NEAR_NATS, _NEAR_MASS = 0.05, 0.01
_SPECIAL = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]")
_LOOKUP = 6  # length of the ending that a lookup searches for, in characters
_LEAST_REST = 1e-5  # a smaller rest cannot be told from rounding
_SAME = 0.01  # nats: if the drawn token and a listed one have the same text and are this near, they are the same token
# A repetition penalty divides logits, which are not reported. A penalty of 2 or more should cost at least one nat.
_LEAST_COST = 1.0


@dataclass(frozen=True)
class Draw:
    """One drawn token, ``text``, with the distribution that it should be drawn from after the text of its ``group``.

    - ``tokens`` and ``probs_H``: this distribution, given that the token is in the head (so it adds up to 1).
    - ``drawn``: the index of the drawn token in ``tokens``; None if it is not in the head.
    - ``rest``: the largest probability that the rest may have; 0 if the fields allow none of it, None if unknown.
    - ``ignored_H``: the distribution if the server ignores the tested field; ``outside`` is the mass that the field
      forbids.
    - ``earlier_H``, ``lookup``: what faulty speculation would draw from: the distribution of the place before, or the
      token that followed the last occurrence of the preceding text.
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
    """Whether a token's text identifies it. Parts of characters and control tokens have no such text."""
    return bool(token) and "�" not in token and not _SPECIAL.fullmatch(token)


def reported(place: Place, count: int) -> dict[str, float]:
    """Return the most likely of the ``count`` tokens that a server lists, with their probabilities: all but the last
    fifth. A server also lists the token that it drew, and several tokens may share a text. Neither may change what is
    returned here."""
    return {token: math.exp(value) for token, value in place.top[: max(1, count - max(1, count // 5))]}


def min_variation(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the least total variation that two distributions can have, given only their most likely tokens. A token
    that only one of them lists counts as equally likely in both: the other may just not list it."""
    return 0.5 * sum(abs(share - other[token]) for token, share in one.items() if token in other)


def read_draws(
    answer: Answer, prompt: str, number: int, fields: Fields, top: int, as_is: bool = False
) -> Iterator[Draw]:
    """Yield the draws of an answer to the prompt of this ``number``, in order. Places whose distribution is unknown are
    left out.

    ``as_is``: the server reports the distributions that it samples from, so the fields have acted already.
    """
    tokens = answer.tokens
    for at, place in enumerate(answer.places):
        draw = expected(place, {} if as_is else fields, tokens[:at], prompt, top, (number, *tokens[:at]))
        if draw is not None:
            yield draw if not at else _with_faults(draw, answer.places[at - 1], prompt, tokens[:at], top)


def expected(
    place: Place, fields: Fields, history: tuple[str, ...], prompt: str, top: int, group: tuple[Any, ...] = ()
) -> Draw | None:
    """Return the draw at a place after ``history``, with the distribution that the fields should give; None if that
    distribution is unknown."""
    if not (head := reported(place, top)):
        return None
    tokens, raw_H = list(head), np.log(np.maximum(list(head.values()), 1e-300))
    if not is_plain(place.token):
        return None
    rest = max(0.0, 1.0 - float(np.exp(raw_H).sum()))
    keep_H = np.array([is_plain(token) for token in tokens])

    # The fields, in the order in which servers apply them.
    scores_H = raw_H.copy()
    penalties = [name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty") if fields.get(name)]
    if penalties:
        # Servers disagree whether penalties count the prompt's tokens, so these are left out.
        keep_H &= np.array([token not in prompt for token in tokens])
        scores_H -= _penalties(tokens, fields, Counter(history))
    if (temperature := fields.get("temperature", 1.0)) != 1.0:
        # A token of the rest is no more likely than the last one of the head, so p^(1/T) <= p · last^(1/T - 1).
        rest = rest * math.exp(float(raw_H.min()) * (1 / temperature - 1)) if temperature < 1 else math.nan
        scores_H = scores_H / temperature
    allowed_H = _allowed(scores_H, fields)
    if allowed_H is None:
        return None
    outside = float(np.exp(raw_H[keep_H & ~allowed_H]).sum())
    if not allowed_H.all():
        outside, rest = outside + rest, 0.0
    keep_H &= allowed_H

    # Condition on the tokens that are kept.
    matches = [at for at, token in enumerate(tokens) if token == place.token and abs(raw_H[at] - place.logprob) < _SAME]
    if not keep_H.any() or (matches and not keep_H[matches[0]] and allowed_H[matches[0]]):
        return None
    if penalties and not matches and place.token in prompt:
        return None
    weights_H = np.exp(scores_H[keep_H])
    mass = float(weights_H.sum())
    drawn = int(keep_H[: matches[0]].sum()) if matches and keep_H[matches[0]] else None
    shares_H, plain_H = weights_H / mass, np.exp(raw_H[keep_H])
    plain_H /= plain_H.sum()
    changed = not (np.abs(shares_H - plain_H) <= 1e-9 + 1e-5 * plain_H).all()
    return Draw(
        group,
        place.token,
        tuple(token for token, keep in zip(tokens, keep_H) if keep),
        shares_H,
        drawn,
        None if math.isnan(rest) else 0.0 if not allowed_H.all() else max(rest / (rest + mass), _LEAST_REST),
        plain_H if changed and allowed_H.all() else None,
        outside,
    )


def _penalties(tokens: list[str], fields: Fields, counts: Counter[str]) -> np.ndarray:
    """Return the amounts [H] to subtract from the log-probabilities of tokens that were generated before."""
    presence, frequency = fields.get("presence_penalty", 0.0), fields.get("frequency_penalty", 0.0)
    cost = _LEAST_COST if fields.get("repetition_penalty", 1.0) > 1 else 0.0
    return np.array([(presence + cost) * (counts[token] > 0) + frequency * counts[token] for token in tokens])


def _allowed(scores_H: np.ndarray, fields: Fields) -> np.ndarray | None:
    """Return the tokens of the head that top_k, top_p and min_p allow, bool [H]; None if a cut is uncertain."""
    size = len(scores_H)
    n_allowed = size
    if k := fields.get("top_k"):
        if size <= k or scores_H[k - 1] - scores_H[k] < _NEAR_NATS:
            return None
        n_allowed = min(n_allowed, k)
    if (p := fields.get("top_p", 1.0)) < 1:
        before_H = np.cumsum(np.exp(scores_H)) - np.exp(scores_H)  # the mass of the likelier tokens
        inside = before_H < p
        if inside.all() or np.abs(before_H[1:] - p).min() < _NEAR_MASS:
            return None
        n_allowed = min(n_allowed, int(inside.sum()))
    if m := fields.get("min_p"):
        behind_H = scores_H[0] - scores_H + math.log(m)  # positive for tokens that min_p forbids
        if behind_H[-1] <= 0 or np.abs(behind_H).min() < _NEAR_NATS:
            return None
        n_allowed = min(n_allowed, int((behind_H < 0).sum()))
    return np.arange(size) < n_allowed


def _with_faults(draw: Draw, before: Place, prompt: str, history: tuple[str, ...], top: int) -> Draw:
    """Add to a draw what faulty speculation would draw from."""
    earlier_probs = reported(before, top)
    earlier_H = np.array([earlier_probs.get(token, 0.0) for token in draw.tokens])
    context = prompt + "".join(history)
    since = context.rfind(context[-_LOOKUP:], 0, len(context) - 1)
    follows = context[since + _LOOKUP :] if since >= 0 else ""
    matches = [at for at, token in enumerate(draw.tokens) if follows.startswith(token)]
    return replace(
        draw,
        earlier_H=earlier_H / earlier_H.sum() if earlier_H.sum() > 0.05 else None,
        lookup=max(matches, key=lambda at: len(draw.tokens[at])) if matches else None,
    )
