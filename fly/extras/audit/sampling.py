"""Checks of drawn tokens: each is compared with the distribution that it should come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fly.extras.audit.context import Context, check
from fly.extras.audit.distributions import Draw, expected, min_variation, reported
from fly.extras.audit.effects import effect
from fly.extras.audit.evidence import IGNORED, Evidence, evidence, power, shares_power, smallest
from fly.extras.audit.report import Finding, Verdict
from fly.extras.statistics import compare_samples

__all__ = ["FIELDS"]

# The values that are tested. They are far from neutral, and cut within the tokens that a server lists.
FIELDS: dict[str, float] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.7,
    "min_p": 0.15,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 2.0,
}
_VARIATIONS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)
_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_ROUNDING = 0.05  # the largest total variation between reported distributions that is attributed to rounding


def _draw(
    context: Context, changes: Mapping[str, float], count: int, length: int, prompts: int, only: str | None = None
) -> tuple[list[Draw], Evidence]:
    """Draw up to ``count`` answers. Stop early if the evidence is overwhelming."""
    draws: list[Draw] = []
    outcome = evidence(draws)
    for draws in context.sample(changes, count, length, prompts):
        context.step(f"{len(draws)} tokens")
        outcome = evidence(draws, only)
        if outcome.p < context.p / 100:
            break
    return draws, outcome


def _make_finding(
    name: str, draws: Sequence[Draw], outcome: Evidence, p: float, finds: str, share: float | None
) -> Finding:
    """Make a finding about draws. Whether it fails is decided later, over the p-values of all findings."""
    detail = f"{outcome.worst}: {outcome.example}" if outcome.p <= p else ""
    verdict = Verdict.PASS if finds else Verdict.UNDECIDED
    figures = {"tokens": len(draws), "worst": outcome.worst if outcome.p <= p else None}
    finds = finds or "too few open places"
    return Finding(name, "", verdict, f"{len(draws):,} tokens", outcome.p, finds, detail, figures, share)


@check(
    "first-tokens", "Jointly, the first three tokens at temperature 1 have the probabilities that the server reports."
)
def first_tokens(context: Context) -> Finding:
    if not context.server.top:
        return _compare_with_reference(context)
    draws, outcome = _draw(context, {}, context.samples, 3, 2)
    size = smallest(_VARIATIONS, lambda size: shares_power(draws, size, context.p, outcome.bettors))
    return _make_finding("first-tokens", draws, outcome, context.p, f"total variation {size:g}" if size else "", size)


@check("later-tokens", "Every token of longer answers at temperature 1 has the probability that the server reports.")
def later_tokens(context: Context) -> Finding:
    if not context.server.top:
        return _unsupported("later-tokens")
    draws, outcome = _draw(context, {}, context.samples // 10, 24, 16)
    size = smallest(_SHARES, power(draws, lambda draw: draw.earlier_H, context.p))
    finds = f"1 misplaced token in {1 / size:,.0f}" if size else ""
    return _make_finding("later-tokens", draws, outcome, context.p, finds, size)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.1 else f"{share:.0%}"


def _unsupported(name: str) -> Finding:
    return Finding(name, "", Verdict.UNSUPPORTED, detail="the server gives no log-probabilities to test against")


def _compare_with_reference(context: Context) -> Finding:
    """Compare the first tokens with those that the reference draws, for a server without log-probabilities."""
    if context.reference is None:
        return _unsupported("first-tokens")
    fields, choices = context.fields({"max_tokens": 3}), context.choices
    if choices > 1:
        fields |= {"n": choices}
    count = max(1, context.samples // (8 * choices))
    requests = [(prompt, fields) for prompt in context.prompts[:4] for _ in range(count)]
    texts, reference_texts = (
        [answer.text for reply in server.ask_all(requests) for answer in reply.answers]
        for server in (context.server, context.reference)
    )
    strata = [at // (count * choices) for at in range(len(texts))]
    comparison = compare_samples(texts, reference_texts, strata, context.p)
    note = "the server gives no log-probabilities: beside samples of the reference"
    finds = f"total variation {comparison.finds:.2g}"
    seen = f"2 × {len(texts):,} answers"
    return Finding("first-tokens", "", Verdict.PASS, seen, comparison.p, finds, note, share=comparison.finds)


def _about_field(name: str) -> None:
    @check(name, f"{name} makes of the reported distribution what it should, at every place.")
    def run(context: Context) -> Finding:
        context.server.ask(
            "Hello", context.fields({name: FIELDS[name], "max_tokens": 1}), top=False
        )  # raises Refused if the server lacks the field
        if not context.server.top or (context.as_is and name.endswith("penalty")):
            return effect(context, name, FIELDS[name])
        return _field(context, name)


def _field(context: Context, name: str) -> Finding:
    fields = {name: FIELDS[name]}
    only = IGNORED if name == "repetition_penalty" else None  # it divides logits, which are not reported
    draws, outcome = _draw(context, fields, context.samples // 20, 12, 12, only)
    if context.as_is and (fault := _check_unchanged(context, name)):
        return Finding(name, "", Verdict.FAIL, f"{len(draws):,} tokens", None, "", fault)
    if context.as_is:
        size: float | None = 1.0
    elif name in ("top_k", "top_p", "min_p"):
        # If the field is ignored on a share s of the tokens, each token hides that with probability 1 - s · outside.
        mass = sum(draw.outside for draw in draws)
        size = 2.303 / mass if mass > 2.303 else None
    else:
        size = smallest(_SHARES, power(draws, lambda draw: draw.ignored_H, context.p, only))
    share = None if context.as_is else size  # reported probabilities that are as they should be leave no doubt
    return _make_finding(
        name, draws, outcome, context.p, f"ignored on {_percent(size)} of tokens" if size else "", share
    )


def _check_unchanged(context: Context, name: str) -> str:
    """Say how far reported probabilities are from what the field should make of them; empty if they agree. Call this
    for a server that reports the distributions it samples from."""
    plain = context.firsts({"max_tokens": 1}, 8)
    tested = context.firsts({"max_tokens": 1, name: FIELDS[name]}, 8)
    variations = []
    for (number, plain_answer), (_, tested_answer) in zip(plain, tested):
        place = plain_answer.places[0]
        prompt = context.prompts[number]
        top = context.server.top
        if (predicted := expected(place, {name: FIELDS[name]}, (), prompt, top)) is not None:
            variations.append(
                min_variation(dict(zip(predicted.tokens, predicted.probs_H)), reported(tested_answer.places[0], top))
            )
    worst = max(variations, default=0.0)
    return f"the reported probabilities are {worst:.2f} (total variation) from what they should be" * (
        worst > _ROUNDING
    )


for _name in FIELDS:
    _about_field(_name)
