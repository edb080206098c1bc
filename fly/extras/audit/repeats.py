"""Checks of repetition: the same seed must repeat an answer, and several choices must not repeat each other."""

from __future__ import annotations

import math

import numpy as np

from fly.extras.audit.client import Answer
from fly.extras.audit.context import Context, check
from fly.extras.audit.distributions import min_variation, reported
from fly.extras.audit.greedy import first_difference
from fly.extras.audit.report import Finding, Verdict, found_in
from fly.extras.statistics import binomial_tail

_LENGTH = 24
_PROMPTS = 8
_SEEDS = (11, 12)
# If rounding changes a distribution, a draw with the same random number changes with a probability of a few times their
# total variation.
_CHANGES = 4.0
_LEAST = 1e-4
_UNKNOWN = 0.02


@check("seed", "The same seed gives the same answer, alone and among other requests; another seed gives another one.")
def seed(context: Context) -> Finding:
    numbers = context.lively[:_PROMPTS]
    requests = [
        (context.prompts[number], context.fields({"seed": seed, "max_tokens": _LENGTH}))
        for number in numbers
        for seed in _SEEDS
    ]
    first, second = ([reply.answer for reply in context.server.ask_all(requests, 1)] for _ in range(2))
    together = [reply.answer for reply in context.server.ask_all(requests * 2, 32)]
    pairs = [*zip(first, second), *zip(first * 2, together)]

    # Count the pairs that differ, and estimate how many rounding alone would make differ.
    n_tokens = 0
    n_parted = 0
    rates = []
    example = ""
    for answer, repeat in pairs:
        difference = first_difference(answer, repeat)
        until = min(len(answer.places), len(repeat.places)) if difference is None else difference.at + 1
        n_tokens += max(1, until)
        rates += [_rate(a, b, context.server.top) for a, b in zip(answer.places[:until], repeat.places[:until])]
        if difference is not None:
            n_parted += 1
            example = example or f"{difference.mine!r} and {difference.theirs!r} after {difference.at} tokens"
    rate = max(_LEAST, float(np.mean(rates))) if rates else _UNKNOWN
    p = binomial_tail(n_parted, n_tokens, min(rate, 0.5))
    parted_alone = sum(first_difference(answer, repeat) is not None for answer, repeat in zip(first, second))
    figures = {"pairs": len(pairs), "parted": n_parted, "parted_alone": parted_alone, "rate_by_rounding": rate}
    seen = f"{len(pairs)} pairs"
    if all(first_difference(first[at], first[at + 1]) is None for at in range(0, len(first), 2)):
        detail = "answers are the same whatever the seed"
        return Finding("seed", "", Verdict.FAIL, seen, None, "", detail, figures)
    summary = (
        f"{n_parted} of {len(pairs)} answers part from the first with their seed, "
        f"{parted_alone} of {len(first)} alone: "
    )
    note = summary + example + (", as rounding may do" if p > context.p else "") if n_parted else ""
    critical = next(hits for hits in range(n_tokens + 1) if binomial_tail(hits, n_tokens, min(rate, 0.5)) <= context.p)
    finds = f"{critical} of {len(pairs)} answers differing"
    return Finding("seed", "", Verdict.PASS, seen, p, finds, note, figures, critical / len(pairs))


def _rate(one: object, other: object, top: int) -> float:
    return _CHANGES * min_variation(reported(one, top), reported(other, top))  # type: ignore[arg-type]


@check("n", "n choices are as many, and each is drawn by itself.")
def choices(context: Context) -> Finding:
    n_requests, log_gains = 0, np.zeros(3)
    shares = np.array([0.1, 0.3, 0.9])
    same = pairs = 0
    for number in context.lively[:12]:
        answers = context.server.ask(context.prompts[number], context.fields({"n": 4, "max_tokens": 8})).answers
        n_requests += 1
        if len(answers) != 4:
            return Finding("n", "", Verdict.FAIL, f"{n_requests} requests", detail=f"n 4 gives {len(answers)} choices")
        for choice, other_choice in ((answers[0], answers[1]), (answers[2], answers[3])):
            pairs += 1
            same += choice.text == other_choice.text
            # If the first tokens are equal with probability ``chance``, a bet that they are equal pays 1 / chance.
            equal = choice.tokens[:1] == other_choice.tokens[:1] if choice.places else choice.text == other_choice.text
            chance = _alike(choice, context.server.top)
            log_gains += np.log(1 - shares + shares * (equal / chance))
    gain = float(np.logaddexp.reduce(log_gains)) - math.log(len(shares))
    if same == pairs:
        return Finding("n", "", Verdict.FAIL, f"{n_requests} requests", detail="all choices are copies of each other")
    detail = f"{same} of {pairs} pairs of choices are the same" if same else ""
    p = min(1.0, math.exp(-gain))
    return Finding("n", "", Verdict.PASS, f"{n_requests} requests", p, "copied choices", detail, share=found_in(pairs))


def _alike(answer: Answer, top: int) -> float:
    """Return the largest possible probability that two draws have the same first token; a guess if nothing is
    reported."""
    if not answer.places:
        return 0.5
    shares = [*reported(answer.places[0], top).values()]
    rest = max(0.0, 1 - sum(shares))
    return min(1.0, sum(share**2 for share in shares) + rest * min(rest, shares[-1]))
