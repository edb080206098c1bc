"""Tests whether a field has an effect, without log-probabilities: at an extreme value, answers become greedy ones."""

from __future__ import annotations

from fly.extras.audit.context import Context
from fly.extras.audit.report import Finding, Verdict
from fly.extras.statistics import binomial_tail

__all__ = ["effect"]

_EXTREME = {"temperature": 0.001, "top_k": 1, "top_p": 1e-6, "min_p": 1.0}
_LENGTH = 24
_ROUNDING = 0.1  # the share of answers that may differ from greedy ones by rounding


def effect(context: Context, name: str, value: float) -> Finding:
    """Test whether the field has an effect, by the texts of answers alone."""
    greedy = [reply.answer.text for reply in context.greedy]
    prompts = context.prompts[: len(greedy)]

    def differing(**changes: float) -> int:
        fields = context.fields({"max_tokens": _LENGTH, **changes})
        replies = context.server.ask_all([(prompt, fields) for prompt in prompts])
        pairs = zip(replies, greedy)
        return sum(not text.startswith(reply.answer.text.rstrip("�")) for reply, text in pairs)

    n, seen = len(greedy), f"{len(greedy)} answers"
    if name not in _EXTREME:
        changed = differing(temperature=0.0, **{name: value})
        detail = f"changes {changed} of {n} greedy answers; how it does cannot be seen without log-probabilities"
        if not changed:
            return Finding(name, "", Verdict.FAIL, seen, detail=f"{name} {value:g} changes no greedy answer: ignored")
        verdict = Verdict.PASS if binomial_tail(changed, n, _ROUNDING) < 0.01 else Verdict.UNDECIDED
        return Finding(name, "", verdict, seen, finds="ignored altogether", detail=detail, share=1.0)
    extreme = _EXTREME[name]
    n_extreme, n_free = differing(**{name: extreme}), differing()
    critical = next(count for count in range(n + 2) if binomial_tail(count, n, _ROUNDING) <= context.p)
    finds = "ignored altogether" if critical <= n and binomial_tail(critical, n, min(n_free / n, 0.999)) >= 0.9 else ""
    p = binomial_tail(n_extreme, n, _ROUNDING)
    detail = f"{n_extreme} of {n} answers at {name} {extreme:g} are not the greedy ones" if n_extreme else ""
    verdict, finds = (Verdict.PASS, finds) if finds else (Verdict.UNDECIDED, "too few answers")
    return Finding(name, "", verdict, seen, p, finds, detail, share=1.0)
