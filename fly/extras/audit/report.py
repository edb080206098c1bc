"""The report of an audit: a verdict for each check, and one for the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from fly.extras.statistics import holm

__all__ = ["Finding", "Report", "Verdict", "found_in"]

_LARGE = 0.2  # a fault on this share of answers, tokens or probability is large


def found_in(count: int) -> float:
    """Return the share of faults that shows at least once among ``count`` draws, with probability 0.9."""
    return 1 - 0.1 ** (1 / max(count, 1))


class Verdict(Enum):
    """The verdict of a check. ``UNDECIDED``: no fault was found, but the check was too weak to find one.
    ``UNSUPPORTED``: the server refuses what the check needs."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"
    UNSUPPORTED = "not supported"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    ``seen`` says how much the check looked at. ``p`` is the p-value of the claim that the server is right (None for
    facts, which need none). ``finds`` is the smallest fault that the check would have found with probability 0.9.
    ``share`` is its size, as a share of answers, tokens or probability (None: any fault would have been found).
    ``detail`` says what is wrong or was noticed, and ``figures`` are numbers for programs.
    """

    check: str
    tests: str
    verdict: Verdict
    seen: str = ""
    p: float | None = None
    finds: str = ""
    detail: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    share: float | None = None

    @property
    def weak(self) -> bool:
        """Whether the check passed and would have missed a large fault."""
        return self.verdict is Verdict.PASS and self.share is not None and self.share > _LARGE

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value, "weak": self.weak}


@dataclass(frozen=True)
class Report:
    """All findings about a server. Their verdicts allow for the number of tests."""

    url: str
    model: str
    endpoint: str
    beside: str | None
    alpha: float
    findings: tuple[Finding, ...]
    requests: int
    seconds: float

    @classmethod
    def of(cls, findings: list[Finding], alpha: float, **about: Any) -> Report:
        """Judge the findings by Holm's rule over all p-values, so that an honest server fails any of them with a
        probability of at most ``alpha``."""
        refuted = holm({each.check: each.p for each in findings if each.p is not None}, alpha)
        judgements = [replace(each, verdict=Verdict.FAIL) if each.check in refuted else each for each in findings]
        return cls(alpha=alpha, findings=tuple(judgements), **about)

    def having(self, verdict: Verdict) -> list[Finding]:
        return [each for each in self.findings if each.verdict is verdict]

    @property
    def status(self) -> int:
        """The exit status: 0 if nothing failed, 1 if something did, 2 if nothing could be decided."""
        if self.having(Verdict.FAIL):
            return 1
        return 0 if self.having(Verdict.PASS) else 2

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report, for JSON."""
        about = {
            name: getattr(self, name) for name in ("url", "model", "endpoint", "beside", "alpha", "requests", "seconds")
        }
        counts = {verdict.value: len(self.having(verdict)) for verdict in Verdict}
        return {
            **about,
            "status": self.status,
            "verdicts": counts,
            "checks": [each.as_dict() for each in self.findings],
        }
