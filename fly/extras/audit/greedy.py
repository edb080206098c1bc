"""Checks of greedy answers: by the server's own numbers, against a reference, and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fly.extras.audit.client import Answer, Place, Reply
from fly.extras.audit.context import Context, check
from fly.extras.audit.distributions import is_plain, min_variation, reported
from fly.extras.audit.report import Finding, Verdict, found_in

__all__ = ["Difference", "first_difference"]

_TIE = 0.01  # nats by which a greedy token may be behind the most likely one
_LEAST, _MOST = 0.02, 0.5  # nats: the least and the most that is attributed to rounding
_UNKNOWN = 0.25  # nats attributed to rounding if only one server reports numbers: bfloat16 at a logit of 32
_APART = 0.05  # the largest mean total variation that two servers of one model may have


@dataclass(frozen=True)
class Difference:
    """The first difference of two answers: after ``at`` tokens, the next token of each, and the number of nats by which
    the reported numbers would have to shift for the answers to agree (None if unknown)."""

    at: int
    mine: str
    theirs: str
    gap: float | None


def first_difference(mine: Answer, theirs: Answer) -> Difference | None:
    """Return the first difference of two answers; None if they are equal. Some servers list the token that ends an
    answer, and others do not: that is no difference."""
    if not (mine.places and theirs.places):
        if mine.text == theirs.text:
            return None
        at = next((at for at, pair in enumerate(zip(mine.text, theirs.text)) if pair[0] != pair[1]), 0)
        return Difference(len(mine.text[:at].split()), mine.text[at : at + 12], theirs.text[at : at + 12], None)
    pairs = enumerate(zip(mine.tokens, theirs.tokens))
    at = next(
        (at for at, (my_token, their_token) in pairs if my_token != their_token),
        min(len(mine.tokens), len(theirs.tokens)),
    )
    if mine.text == theirs.text and not any(map(is_plain, mine.tokens[at:] + theirs.tokens[at:])):
        return None
    my_token, their_token = (answer.tokens[at] if at < len(answer.tokens) else "" for answer in (mine, theirs))
    gaps = [
        _gap(mine.places[at], my_token, their_token) if my_token else None,
        _gap(theirs.places[at], their_token, my_token) if their_token else None,
    ]
    known_gaps = [gap for gap in gaps if gap is not None]
    return Difference(at, my_token, their_token, max([*known_gaps, sum(known_gaps)]) if known_gaps else None)


def _gap(place: Place, one: str, other: str) -> float | None:
    """Return by how many nats the first token is more likely than the second; None if one of them is not listed."""
    logprobs = dict(place.top) | ({place.token: place.logprob} if place.top else {})
    return logprobs[one] - logprobs[other] if one in logprobs and other in logprobs else None


def pair_places(mine: Sequence[Reply], theirs: Sequence[Reply]) -> list[tuple[Place, Place]]:
    """Return the pairs of places that follow the same text: up to and including the first difference of two answers."""
    pairs: list[tuple[Place, Place]] = []
    for my_reply, their_reply in zip(mine, theirs):
        difference = first_difference(my_reply.answer, their_reply.answer)
        until = len(my_reply.answer.places) if difference is None else difference.at + 1
        pairs += zip(my_reply.answer.places[:until], their_reply.answer.places[:until])
    return pairs


def _rounding(places: Sequence[tuple[Place, Place]]) -> float:
    """Estimate the effect of rounding, in nats. Rounding shifts the gap between the two most likely tokens from one
    server to the other; the estimate is four times the 99 % quantile of these shifts."""
    shifts = []
    for my_place, their_place in places:
        if len(my_place.top) > 1:
            (first, a), (second, b) = my_place.top[:2]
            logprobs = dict(their_place.top)
            if first in logprobs and second in logprobs and b > -10:
                shifts.append(abs((a - b) - (logprobs[first] - logprobs[second])))
    return float(np.clip(4 * np.quantile(shifts, 0.99), _LEAST, _MOST)) if shifts else _UNKNOWN


def _compare_answers(name: str, mine: Sequence[Reply], theirs: Sequence[Reply], whose: str) -> Finding:
    """Compare answers, with a tolerance for rounding."""
    pairs = [
        (at, first_difference(my_reply.answer, their_reply.answer))
        for at, (my_reply, their_reply) in enumerate(zip(mine, theirs))
    ]
    differences = [(at, difference) for at, difference in pairs if difference is not None]
    reach = _rounding(pair_places(mine, theirs))
    faults = [
        (at, difference) for at, difference in differences if difference.gap is not None and difference.gap > reach
    ]
    unknown = [difference for _, difference in differences if difference.gap is None]
    tokens = sum(reply.generated or len(reply.answer.places) for reply in mine)
    seen, finds = f"{tokens:,} tokens", f"1 other token in {max(1, tokens / 2.303):,.0f}"
    gaps = sorted(difference.gap for _, difference in differences if difference.gap is not None)
    figures = {
        "answers": len(mine),
        "different": len(differences),
        "rounding": reach,
        "faults": len(faults),
        "gaps": gaps,
    }
    if faults:
        at, difference = max(faults, key=lambda fault: fault[1].gap or 0.0)
        example = f"prompt {at + 1}, token {difference.at + 1}: {difference.mine!r}, {whose} {difference.theirs!r}"
        detail = f"{len(faults)} of {len(mine)} answers differ by more than rounding ({reach:.2g} nats); {example}, "
        return Finding(name, "", Verdict.FAIL, seen, None, finds, f"{detail}{difference.gap:.2g} nats apart", figures)
    if unknown:
        difference = unknown[0]
        detail = f"{len(unknown)} of {len(mine)} answers differ, and how near the tokens were is not reported: "
        detail += f"{difference.mine!r}, {whose} {difference.theirs!r}"
        return Finding(name, "", Verdict.UNDECIDED, seen, None, finds, detail, figures)
    detail = f"{len(differences)} of {len(mine)} answers differ, where tokens were within {reach:.2g} nats: rounding"
    return Finding(name, "", Verdict.PASS, seen, None, finds, detail if differences else "", figures, found_in(tokens))


@check("greedy", "Every greedy token is the likeliest one by the server's own log-probabilities.")
def greedy(context: Context) -> Finding:
    if not context.server.top:
        detail = "the server gives no log-probabilities"
        return Finding("greedy", "", Verdict.UNSUPPORTED, detail=detail)
    count = 0
    worst = 0.0
    example = ""
    for number, reply in enumerate(context.greedy):
        for at, place in enumerate(reply.answer.places):
            count += bool(place.top)
            if place.top and (behind := place.top[0][1] - place.logprob) > worst:
                best = place.top[0][0]
                worst, example = (
                    behind,
                    f"prompt {number + 1}, token {at + 1}: {place.token!r} where {best!r} is likelier",
                )
    finds = f"1 other token in {max(1, count / 2.303):,.0f}"
    if worst > _TIE:
        return Finding("greedy", "", Verdict.FAIL, f"{count:,} tokens", None, finds, f"{example} by {worst:.2g} nats")
    verdict = Verdict.PASS if count else Verdict.UNDECIDED
    return Finding("greedy", "", verdict, f"{count:,} tokens", None, finds, share=found_in(count))


@check("identity", "Greedy answers are those of the reference, but for rounding.")
def identity(context: Context) -> Finding:
    return _compare_answers("identity", context.greedy, context.greedy_beside, "the reference has")


@check("reference", "The reported distributions are those of the reference, but for rounding.")
def reference(context: Context) -> Finding:
    assert context.reference is not None
    if not (context.server.top and context.reference.top):
        detail = "needs log-probabilities of both servers"
        return Finding("reference", "", Verdict.UNSUPPORTED, detail=detail)
    top = min(context.server.top, context.reference.top)
    places = [pair for pair in pair_places(context.greedy, context.greedy_beside) if all(place.top for place in pair)]
    variations = [
        min_variation(reported(my_place, top), reported(their_place, top)) for my_place, their_place in places
    ]
    if not variations:
        return Finding("reference", "", Verdict.UNDECIDED, detail="no answers begin alike")
    mean, most = float(np.mean(variations)), max(variations)
    detail = f"total variation {mean:.2g} in the mean, {most:.2g} at most"
    verdict = Verdict.FAIL if mean > _APART else Verdict.PASS
    figures = {"mean": mean, "most": most}
    return Finding(
        "reference", "", verdict, f"{len(variations):,} places", None, f"mean variation {_APART}", detail, figures
    )


@check("batch", "Greedy answers are the same alone and among other requests, but for rounding.")
def batch(context: Context) -> Finding:
    replies_alone = context.greedy
    greedy = context.fields({"temperature": 0.0, "max_tokens": 48})
    requests = []
    for prompt in context.prompts[: len(replies_alone)]:
        requests += [(prompt, greedy), (prompt, context.fields({"max_tokens": 32}))]
    together = context.server.ask_all(requests, 32)[::2]
    return _compare_answers("batch", together, replies_alone, "alone")
