"""What a list of checks found out: one report for both kits, and the one way to run checks. Knows no kit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fly.errors import origin

__all__ = ["ConformanceError", "Finding", "Report", "global_seed", "require", "run_checks", "title"]


class ConformanceError(AssertionError):
    """A policy or strategy breaks the contract; the message holds the smallest counterexample that was found."""


@dataclass(frozen=True)
class Finding:
    """What one check found: ``detail`` is a counterexample if it failed, else what was measured; ``seconds`` it took."""

    check: str
    passed: bool
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """All findings about one policy or draft strategy; ``promise`` is what it declares, if anything."""

    subject: str
    promise: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        promise = f", declared {self.promise}" if self.promise else ""
        lines = [f"{self.subject}: {'passes' if self.passed else 'FAILS'}{promise}"]
        for finding in self.findings:
            lines.append(f"  {'ok  ' if finding.passed else 'FAIL'} {finding.check}: {finding.detail}".rstrip(": "))
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raises ``ConformanceError`` with the whole report if a check failed."""
        require(self.passed, str(self))


def run_checks(
    report: Report, checks: Iterable[Callable[[Any], str]], subject: Any, advance: Callable[[], None]
) -> None:
    """Add to ``report`` what each check finds out about ``subject``; what is found twice is said once.

    A check returns what it measured, or raises: ``ConformanceError`` with a counterexample, or whatever the subject
    raises. ``advance`` is called after each.
    """
    seen: dict[str, str] = {}  # what went wrong, and the check in which it was seen first
    for check in checks:
        name, start = title(check), time.perf_counter()
        try:
            passed, detail = True, check(subject) or ""
        except Exception as error:
            passed, detail, where = False, str(error), ""
            if not isinstance(error, ConformanceError):
                detail, where = f"raised {type(error).__name__}: {error}", f" ({origin(error)})"
            first = seen.setdefault(detail, name)
            detail = f"{detail}{where}" if first == name else f"the same as in '{first}'"
        report.findings.append(Finding(name, passed, detail, time.perf_counter() - start))
        advance()


def title(check: Callable[..., Any]) -> str:
    """What a check is called in reports: ``check_full_caches`` is "full caches"."""
    return check.__name__.removeprefix("check_").replace("_", " ")


def require(condition: bool, message: str) -> None:
    """Raises ``ConformanceError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConformanceError(message)


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """The global generators of torch (on the CPU) and of Python start at ``seed``, and are afterwards as before."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
