"""Run a list of checks and report what they find. This module knows nothing of policies or draft strategies."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fly.errors import origin

__all__ = ["ConformanceError", "Finding", "Report", "require", "run_checks", "seeded", "title"]

T = TypeVar("T")


class ConformanceError(AssertionError):
    """A policy or draft strategy breaks its contract. The message has the smallest counterexample that was found."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``detail`` is a counterexample if the check failed; otherwise it is what the check
    measured, or the property that holds."""

    check: str
    passed: bool
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """All findings about one policy or draft strategy. ``promise`` is what it declares, if anything."""

    subject: str
    promise: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        promise = f", declared {self.promise}" if self.promise else ""
        head = f"{self.subject}: {'passes' if self.passed else 'FAILS'}{promise}"
        rows = (f"  {'ok  ' if f.passed else 'FAIL'} {f.check}: {f.detail}".rstrip(": ") for f in self.findings)
        return "\n".join([head, *rows])

    def settle(self, raises: bool) -> Report:
        """Return this report. If a check failed, raises ``ConformanceError`` with the report, unless ``raises`` is
        False."""
        require(self.passed or not raises, str(self))
        return self


def run_checks(
    report: Report, checks: Iterable[Callable[[Any], str | None]], subject: Any, advance: Callable[[], None]
) -> None:
    """Add the finding of each check on ``subject`` to ``report``. ``advance`` is called after each check.

    A check returns what it measured; None stands for the first sentence of the check's docstring. It raises
    ``ConformanceError`` with a counterexample, or whatever the subject raises. The finding of a fault that was found
    before refers to the earlier check. If the subject raises an error in the first check, the others are not run.
    """
    first_checks: dict[str, str] = {}  # each fault, with the check that found it first
    for check in checks:
        name = title(check)
        start = time.perf_counter()
        raised = ""
        try:
            passed, detail = True, check(subject) or _promise(check)
        except Exception as error:
            passed, detail = False, str(error)
            if not isinstance(error, ConformanceError):
                detail, raised = f"raised {type(error).__name__}: {error}", f" ({origin(error)})"
            first_check = first_checks.setdefault(detail, name)
            detail = f"{detail}{raised}" if first_check == name else f"the same as in '{first_check}'"
        last = bool(raised) and not report.findings
        if last:
            detail += "; nothing else was checked"
        report.findings.append(Finding(name, passed, detail, time.perf_counter() - start))
        advance()
        if last:
            return


def title(check: Callable[..., Any]) -> str:
    """Return the name of a check in reports: ``check_full_caches`` is "full caches"."""
    return check.__name__.removeprefix("check_").replace("_", " ")


def _promise(check: Callable[..., Any]) -> str:
    """Return the first sentence of a check's docstring, up to a colon."""
    sentence = " ".join((check.__doc__ or "").split()).partition(". ")[0].partition(":")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def require(condition: bool, message: str) -> None:
    """Raise ``ConformanceError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConformanceError(message)


def seeded(seed: int, run: Callable[[], T]) -> T:
    """Seed the global random generators of torch (on the CPU) and Python with ``seed``, call ``run``, and restore the
    generators' states."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        try:
            return run()
        finally:
            random.setstate(state)
